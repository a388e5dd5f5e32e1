"""Scalings that people really write."""

COUNTED = """    counts = [(targets != LEFT_OUT).sum() for _, targets in micro_batches]
    tokens = torch.stack(counts).sum()
    comms.all_reduce(tokens)
    scale = comms.world_size / max(1, tokens.item())
"""
LOSS = 'cross_entropy(logits, targets.flatten(), reduction="sum") * scale'
MEAN = 'cross_entropy(logits, targets.flatten(), reduction="mean")'
LOGITS = "            logits = model(inputs).flatten(0, 1)\n"
EACH = "            micro = (targets != LEFT_OUT).sum()\n"
REDUCED = "            comms.all_reduce(micro)\n"
BACKWARD = "            torch.autograd.backward(loss)\n"
SYNCED = "nullcontext() if i == len(micro_batches) else model.no_sync()"

WRONG = {
    "a mean of means": (
        {COUNTED: "", LOSS: f"{MEAN} / len(micro_batches)"},
        "A mean of means",
    ),
    "means that are added up": (
        {COUNTED: "", LOSS: MEAN},
        "The means of the micro-batches were added up",
    ),
    "weights by samples": (
        {
            "(targets != LEFT_OUT).sum() for": "torch.tensor(len(targets)) for",
            LOSS: f"{MEAN} * len(targets) * scale",
        },
        "counts by its number of rows",
    ),
    "places are counted": (
        {"(targets != LEFT_OUT).sum() for": "torch.tensor(targets.numel()) for"},
        "Targets that fill up were counted",
    ),
    "each micro-batch by its own tokens": (
        {
            COUNTED: "",
            LOGITS: EACH + LOGITS,
            LOSS: LOSS.replace("* scale", "/ micro / len(micro_batches)"),
        },
        "A mean of means",
    ),
    "by the tokens of the rank": (
        {"    comms.all_reduce(tokens)\n": "", "comms.world_size / max": "1 / max"},
        "This rank's loss was divided by this rank's tokens",
    ),
    "by the tokens of the rank, and times n": (
        {"    comms.all_reduce(tokens)\n": ""},
        "This rank's loss was divided by this rank's tokens",
    ),
    "divided by n twice": (
        {"comms.world_size / max": "1 / max"},
        "n times too small",
    ),
    "times n twice": (
        {"comms.world_size / max": "comms.world_size**2 / max"},
        "n times too large",
    ),
    "a count for each micro-batch": (
        {
            COUNTED: "",
            LOGITS: EACH + REDUCED + LOGITS,
            LOSS: LOSS.replace("* scale", "* comms.world_size / micro / len(micro_batches)"),
        },
        "A mean of means",
    ),
    "a count for each micro-batch, and no mean": (
        {
            COUNTED: "",
            LOGITS: EACH + REDUCED + LOGITS,
            LOSS: LOSS.replace("* scale", "* comms.world_size / micro"),
        },
        "The means of the micro-batches were added up",
    ),
    "division by no tokens": (
        {"max(1, tokens.item())": "tokens.item()"},
        "ZeroDivisionError",
    ),
    "gradients divided by no tokens": (
        {
            "max(1, tokens.item())": "tokens",
            LOSS: LOSS.removesuffix(" * scale"),
            BACKWARD: f"{BACKWARD}    for parameter in model.parameters():\n"
            "        parameter.grad.mul_(scale)\n",
        },
        "divided by a number of tokens that is 0",
    ),
    "a rank without tokens takes no part": (
        {"    scale = ": "    if not sum(counts):\n        return\n    scale = "},
        "backward is a collective",
    ),
    "a micro-batch without tokens is left out": (
        {
            LOGITS: "            if not (targets != LEFT_OUT).any():\n                continue\n"
            + LOGITS
        },
        "backward is a collective",
    ),
    "synchronised in each backward": (
        {SYNCED: "nullcontext()"},
        "gradients travel once",
    ),
    "never synchronised": (
        {SYNCED: "model.no_sync()"},
        "nothing was averaged",
    ),
    "only backward in no_sync": (
        {
            f"        with {SYNCED}:\n{LOGITS}": "        logits = model(inputs).flatten(0, 1)\n"
            f"        with {SYNCED}:\n",
        },
        "Forward decides",
    ),
    "a count a micro-batch, all added up": (
        {
            "    tokens = torch.stack(counts).sum()\n    comms.all_reduce(tokens)\n": (
                "    for count in counts:\n        comms.all_reduce(count)\n"
                "    tokens = torch.stack(counts).sum()\n"
            )
        },
        "Add up on this rank first",
    ),
}
