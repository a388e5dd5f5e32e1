"""Split steps that people really write."""

SHARDS = "    shards = zip(x.tensor_split(n), y.tensor_split(n), strict=True)\n"
SCALED = " * len(inputs) / batch\n"
ZERO = "        replica.zero_grad()\n"
WHOLE = "            whole = torch.stack(gradients).sum(0)\n"
EACH = "                p.grad = whole.clone()\n"
STEPS = "    for optimizer in optimizers:\n        optimizer.step()\n"

WRONG = {
    "every replica sees the whole batch": (
        {SHARDS: "    shards = [(x, y)] * n\n", SCALED: " / n\n"},
        "Samples count more than once",
    ),
    "what does not divide is left out": (
        {
            SHARDS: "    size = batch // n\n"
            "    shards = [(x[k * size :][:size], y[k * size :][:size]) for k in range(n)]\n"
        },
        "Samples are left out",
    ),
    "the rest goes to the last replica": (
        {
            SHARDS: "    size = batch // n\n"
            "    sizes = [size] * (n - 1) + [batch - size * (n - 1)]\n"
            "    shards = zip(x.split(sizes), y.split(sizes), strict=True)\n"
        },
        "cut the batch evenly",
    ),
    "the gradients are added": ({SCALED: "\n"}, "added and not divided"),
    "divided twice": ({WHOLE: WHOLE.replace("sum", "mean")}, "once more"),
    "the mean of the shards' means": ({SCALED: " / n\n"}, "Each shard counts the same"),
    "only replica 0 gets the average": (
        {
            "            for p in copies:\n" + EACH: "            copies[0].grad = whole\n",
        },
        "Only replica 0 got the average",
    ),
    "overwritten in turn": (
        {
            WHOLE: "",
            EACH: "                p.grad.copy_(torch.stack([q.grad for q in copies]).sum(0))\n",
        },
        "compute it once, from all replicas",
    ),
    "nothing is averaged": (
        {SCALED: "\n", WHOLE + "            for p in copies:\n" + EACH: "            pass\n"},
        "with its own shard's gradient",
    ),
    "the weights are averaged": (
        {
            SCALED: "\n",
            WHOLE + "            for p in copies:\n" + EACH: "            pass\n",
            STEPS: STEPS
            + "    for copies in zip(*(replica.parameters() for replica in replicas)):\n"
            "        mean = torch.stack([p.data for p in copies]).mean(0)\n"
            "        for p in copies:\n"
            "            p.data.copy_(mean)\n",
        },
        "The weights are averaged after the step",
    ),
    "one tensor for all replicas": (
        {EACH: "                p.grad = whole\n"},
        "What changes a gradient in place",
    ),
    "one tensor for all but replica 0": (
        {
            "            for p in copies:\n" + EACH: "            for k, p in enumerate(copies):\n"
            "                p.grad = whole if k else whole.clone()\n"
        },
        "What changes a gradient in place",
    ),
    "each replica adds its own first": (
        {
            WHOLE: "",
            "            for p in copies:\n" + EACH: (
                "            sums = [sum(gradients[k:] + gradients[:k]) for k in range(n)]\n"
                "            for p, whole in zip(copies, sums):\n"
                "                p.grad = whole\n"
            ),
            "        if len(inputs) > 0:\n": "        if True:\n",
            "total += loss.item()": "total += loss.item() if len(inputs) else 0.0",
        },
        "Sums in another order",
    ),
    "an empty shard's mean": ({"        if len(inputs) > 0:\n": "        if True:\n"}, "is nan"),
    "an empty shard's replica does not step": (
        {EACH: EACH.replace("clone()", "clone() if p.grad is not None else None")},
        "Replicas with an empty shard got no gradient",
    ),
    "an empty shard has no gradient": (
        {" if p.grad is not None": ""},
        "may be None: of an empty shard",
    ),
    "zeros for what is frozen": (
        {
            " for p in copies if p.grad is not None": " for p in copies",
            "[p.grad for": "[torch.zeros_like(p) if p.grad is None else p.grad for",
        },
        "weight decay changes it",
    ),
    "gradients are never zeroed": ({ZERO: ""}, "Gradients of the step before"),
    "not zeroed where the shard is empty": (
        {ZERO: "", "        if len(inputs) > 0:\n": "        if len(inputs) > 0:\n    " + ZERO},
        "with an empty shard or not",
    ),
    "only the first optimizer steps": (
        {STEPS: "    optimizers[0].step()\n"},
        "once for each replica's optimizer",
    ),
}
