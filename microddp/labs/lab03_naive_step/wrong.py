"""Data-parallel steps that people really write."""

START = """    for tensor in [*model.parameters(), *model.buffers()]:
        comms.broadcast(tensor.detach())
"""
BACKWARD = "    loss_fn(model(x), y).backward()\n"
AVERAGE = """    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= len(x) / samples.item()
            comms.all_reduce(parameter.grad)
"""
SHARE = "            parameter.grad *= len(x) / samples.item()\n"
REDUCE = "            comms.all_reduce(parameter.grad)\n"

WRONG = {
    "no buffers": (
        {"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        "rank 0's buffer 1.running_mean.*Broadcast every buffer, too",
    ),
    "only what is saved": (
        {"[*model.parameters(), *model.buffers()]": "model.state_dict().values()"},
        "rank 0's buffer 1.not_saved.*Broadcast every buffer, too",
    ),
    "a seed and no broadcast": (
        {
            START: "    torch.manual_seed(0)\n"
            "    for module in model.modules():\n"
            "        if hasattr(module, 'reset_parameters'):\n"
            "            module.reset_parameters()\n"
        },
        "a new model's",
    ),
    "no division": ({SHARE: ""}, "a step n times as long"),
    "divided before and after": (
        {REDUCE: REDUCE + "            parameter.grad /= comms.world_size\n"},
        "divided twice",
    ),
    "the loss times the world size, then the mean": (
        {
            "loss_fn(model(x), y)": "(comms.world_size * loss_fn(model(x), y))",
            SHARE: "",
            "comms.all_reduce(parameter.grad)": "comms.all_reduce_mean(parameter.grad)",
        },
        "That is the sum of the ranks' gradients",
    ),
    "a mean of means": (
        {SHARE: "", "comms.all_reduce(parameter.grad)": "comms.all_reduce_mean(parameter.grad)"},
        "A mean of means",
    ),
    "weights, but no biases": (
        {"if parameter.grad is not None": "if parameter.grad is not None and parameter.dim() > 1"},
        "in the step of bias.*of weights and of biases",
    ),
    "averaged before backward": (
        {BACKWARD: "", AVERAGE: AVERAGE + BACKWARD},
        "Only this rank's own shard counted",
    ),
    "weights averaged": (
        {
            AVERAGE + "    optimizer.step()\n": "    optimizer.step()\n"
            "    for parameter in model.parameters():\n"
            "        parameter.data *= len(x) / samples.item()\n"
            "        comms.all_reduce(parameter.data)\n"
        },
        "the mean of weights that each rank got",
    ),
    "every parameter has a gradient": (
        {
            "        if parameter.grad is not None:\n" + SHARE + REDUCE: (SHARE + REDUCE).replace(
                "            ", "        "
            )
        },
        " in naive_step .*Its grad is None, on every rank",
    ),
    "zeros for none": (
        {
            "        if parameter.grad is not None:\n": "        if parameter.grad is None:\n"
            "            parameter.grad = torch.zeros_like(parameter)\n"
            "        if parameter.grad is not None:\n"
        },
        "A gradient of zeros is not none",
    ),
    "old gradients": (
        {"    optimizer.zero_grad()\n": ""},
        "The gradients of the step before are in it",
    ),
    "each rank adds in its own order": (
        {
            REDUCE: "            everyone = comms.all_gather(parameter.grad).roll(-comms.rank, 0)\n"
            "            parameter.grad = sum(everyone.unbind())\n"
        },
        "in an order of its own",
    ),
    "gathered, then added": (
        {REDUCE: "            parameter.grad = comms.all_gather(parameter.grad).sum(0)\n"},
        "An all-gather sends every rank's tensor.*All-reduce each gradient",
    ),
    "gradients and weights": (
        {
            "    optimizer.step()\n": "    optimizer.step()\n"
            "    for parameter in model.parameters():\n"
            "        comms.broadcast(parameter.data)\n"
        },
        "All-reduce each gradient once a step",
    ),
}
