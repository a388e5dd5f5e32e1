"""Stage 1 as people really write it."""

STEP = "    sharded.optimizer.step()\n"
GATHER = "    ring_all_gather(sharded.flat, comms)\n"
SCATTER = '    sharded.mine.grad = ring_reduce_scatter(gradients, comms, "mean")\n'
MAKE = "make_optimizer([mine])"
FORGET = "    for parameter in parameters:\n        parameter.grad = None\n"

# What is wrong: what is replaced in the solution, and what the check must say of it.
WRONG = {
    "an optimizer that is not sharded": (
        {
            MAKE: "make_optimizer(model.parameters())",
            SCATTER: "    for p in parameters:\n        comms.all_reduce_mean(p.grad)\n",
            GATHER: "",
        },
        "give it this rank's part alone",
    ),
    "no gather": ({GATHER: ""}, "others' parts were not brought here"),
    "a sum for a mean": ({', "mean")': ")"}, "A sum was taken for a mean"),
    "gradients all-reduced": (
        {
            SCATTER: "    comms.all_reduce_mean(gradients)\n"
            "    sharded.mine.grad = gradients.tensor_split(comms.world_size)[comms.rank]\n"
        },
        "PyTorch's own all_reduce.*half as much again",
    ),
    "gradients all-reduced around a ring": (
        {
            SCATTER: SCATTER.replace("sharded.mine.grad = ", "part = ")
            + "    ring_all_gather(gradients, comms)\n    sharded.mine.grad = part\n"
        },
        "a reduce-scatter brings it that",
    ),
    "this rank's own gradients": (
        {
            SCATTER: "    sharded.mine.grad = gradients.tensor_split(comms.world_size)"
            "[comms.rank].clone()\n"
        },
        "expected the model's weights",
    ),
    "gradients are kept": ({FORGET: ""}, "one step|ten steps"),
    "a copy of the part that is not put back": (
        {"[rank])\n    return": "[rank].clone())\n    return"},
        "Nothing was updated",
    ),
    "parameters that are no views": (
        {"    vector_to_parameters(flat, model.parameters())\n": ""},
        "Nothing was updated",
    ),
    "the first part on every rank": (
        {"tensor_split(n)[rank]": "tensor_split(n)[0]"},
        "expected the model's weights",
    ),
    "gathered before the step": (
        {STEP + GATHER: GATHER + STEP},
        "others' parts were not brought here",
    ),
}
