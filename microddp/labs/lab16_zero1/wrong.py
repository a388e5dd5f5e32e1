"""Stage 1 as people really write it."""

STEP = "    sharded.optimizer.step()\n"
GATHER = "    ring_all_gather(sharded.unsharded, comms)\n"
SCATTER = '    sharded.shard.grad = ring_reduce_scatter(gradients, comms, "mean")\n'
MAKE = "make_optimizer([own])"
FORGET = "    for parameter in parameters:\n        parameter.grad = None\n"

WRONG = {
    "an optimizer that is not sharded": (
        {
            MAKE: "make_optimizer(model.parameters())",
            SCATTER: "    for p in parameters:\n        comms.all_reduce_mean(p.grad)\n",
            GATHER: "",
        },
        "give it this rank's shard alone",
    ),
    "no gather": ({GATHER: ""}, "others' shards were not brought here"),
    "a sum for a mean": ({', "mean")': ")"}, "A sum was taken for a mean"),
    "gradients all-reduced": (
        {
            SCATTER: "    comms.all_reduce_mean(gradients)\n"
            "    sharded.shard.grad = gradients.tensor_split(comms.world_size)[comms.rank]\n"
        },
        "PyTorch's own all_reduce.*half as much again",
    ),
    "gradients all-reduced around a ring": (
        {
            SCATTER: SCATTER.replace("sharded.shard.grad = ", "mean = ")
            + "    ring_all_gather(gradients, comms)\n    sharded.shard.grad = mean\n"
        },
        "a reduce-scatter brings it that",
    ),
    "this rank's own gradients": (
        {
            SCATTER: "    sharded.shard.grad = gradients.tensor_split(comms.world_size)"
            "[comms.rank].clone()\n"
        },
        "expected the model's weights",
    ),
    "gradients are kept": ({FORGET: ""}, "one step|ten steps"),
    "a copy of the shard that is not put back": (
        {"[rank])\n    return": "[rank].clone())\n    return"},
        "Nothing was updated",
    ),
    "parameters that are no views": (
        {"    vector_to_parameters(unsharded, model.parameters())\n": ""},
        "Nothing was updated",
    ),
    "the first shard on every rank": (
        {"tensor_split(n)[rank]": "tensor_split(n)[0]"},
        "expected the model's weights",
    ),
    "gathered before the step": (
        {STEP + GATHER: GATHER + STEP},
        "others' shards were not brought here",
    ),
}
