"""Meetings that people really write."""

PSEUDO = "        pseudo_gradient = shared - parameters_to_vector(parameters)\n"
AVERAGED = "        comms.all_reduce_mean(pseudo_gradient)\n"
VELOCITY = "        velocity.mul_(momentum).add_(pseudo_gradient)\n"
STEP = "        shared.sub_(lr * (pseudo_gradient + momentum * velocity))\n"
RESET = "        vector_to_parameters(shared.clone(), parameters)\n"
INNER = "        inner_step(model, inner, batch)\n"
MEETING = "            outer_step(parameters, shared, velocity, lr, momentum, comms)\n"

WRONG = {
    "the sign": (
        {"shared - parameters_to_vector(parameters)": "parameters_to_vector(parameters) - shared"},
        "The sign is the wrong one",
    ),
    "a sum, not the mean": (
        {"all_reduce_mean(pseudo_gradient)": "all_reduce(pseudo_gradient)"},
        "divide it by their number",
    ),
    "the last step's gradient": (
        {
            PSEUDO: "        pseudo_gradient = torch.cat([p.grad.flatten() for p in parameters])\n",
        },
        "The gradient of the last step was taken",
    ),
    "the mean of the weights as a gradient": (
        {"shared - parameters_to_vector(parameters)": "parameters_to_vector(parameters).clone()"},
        "The mean of the weights was taken as the pseudo-gradient",
    ),
    "the ranks go on from their own": (
        {RESET: ""},
        "still has this rank's own weights",
    ),
    "with autograd": (
        {"with torch.no_grad():": "if parameters:"},
        r"under torch\.no_grad",
    ),
    "the model is a view of shared": (
        {RESET: RESET.replace(".clone()", "")},
        "made the parameters views of shared",
    ),
    "plain momentum": (
        {STEP: "        shared.sub_(lr * velocity)\n"},
        "That is plain momentum",
    ),
    "a velocity that is forgotten": (
        {VELOCITY: "        velocity = momentum * velocity + pseudo_gradient\n"},
        "begins anew at each meeting: change the tensor in place",
    ),
    "a velocity on each rank": (
        {
            AVERAGED: "",
            STEP: "        step = pseudo_gradient + momentum * velocity\n"
            "        comms.all_reduce_mean(step)\n"
            "        shared.sub_(lr * step)\n",
        },
        "Each rank has a velocity of its own",
    ),
    "a meeting after each step": (
        {"        if step % every == 0:\n": "        if step:\n"},
        "Something was averaged in every step",
    ),
    "steps from 0": (
        {"start=1": "start=0"},
        "Count the steps from 1",
    ),
    "the velocity is sent, too": (
        {STEP: "        comms.all_reduce_mean(velocity)\n" + STEP},
        "are the same on every rank without being sent",
    ),
    "parameters gone through twice": (
        {MEETING: MEETING.replace("(parameters", "(model.parameters()")},
        "as if there were no meetings",
    ),
    "a new inner optimizer": (
        {
            MEETING: MEETING
            + "            inner = type(inner)(parameters, lr=inner.defaults['lr'])\n"
        },
        "lost its state at a meeting",
    ),
    "shared weights of the last step": (
        {INNER: "        shared = parameters_to_vector(parameters).detach().clone()\n" + INNER},
        "taken anew before each step",
    ),
}
