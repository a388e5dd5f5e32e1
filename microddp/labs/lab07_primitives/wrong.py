"""Starts and ends that people really write."""

FLAT = """    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in one order on all ranks
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        comms.broadcast(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
"""
SCATTER = "    return comms.scatter(samples)\n"
COLLECT = """    sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
    comms.all_reduce(sums)
    return comms.gather(losses), (sums[0] / sums[1]).item()
"""
SUMS, MEAN = COLLECT.partition("    return")[0], "(sums[0] / sums[1]).item()\n"
PADDED = """    counts = comms.all_gather_data(len(losses))
    padded = torch.nn.functional.pad(losses, (0, max(counts) - len(losses)))
"""
BROADCAST = """    what = samples is not None and [list(samples.shape), str(samples.dtype)[6:]]
    shape, dtype = comms.all_gather_data(what)[0]
    whole = torch.empty(shape, dtype=getattr(torch, dtype)) if samples is None else samples
    comms.broadcast(whole)
"""

WRONG = {
    "the same seed everywhere": (
        {
            FLAT: "    torch.manual_seed(0)\n    for module in model.modules():\n"
            "        if hasattr(module, 'reset_parameters'):\n"
            "            module.reset_parameters()\n"
        },
        "It is a new model's",
    ),
    "no buffers": (
        {"(*model.parameters(), *model.buffers())": "model.parameters()"},
        "rank 0's buffer 1.running_mean.*Broadcast every buffer, too",
    ),
    "all models to everybody": (
        {
            "        comms.broadcast(flat)\n": "        flat = comms.all_gather(flat)[0]\n",
        },
        "An all-gather sends every rank's tensor to every other rank. Every rank needs rank 0's",
    ),
    "all dtypes in one": (
        {
            "dict.fromkeys(tensor.dtype for tensor in tensors)": "[torch.float32]",
            "if tensor.dtype == dtype": "",
        },
        "It went through float32",
    ),
    "a broadcast for each tensor": (
        {
            FLAT: "    for tensor in [*model.parameters(), *model.buffers()]:\n"
            "        comms.broadcast(tensor.detach())\n"
        },
        "Each call costs a start",
    ),
    "all samples to everybody, then a slice": (
        {SCATTER: BROADCAST + "    return whole.tensor_split(comms.world_size)[comms.rank]\n"},
        "A broadcast sends all of rank 0's tensor to every other rank. Each rank needs its own",
    ),
    "all samples to everybody": (
        {SCATTER: BROADCAST + "    return whole\n"},
        "Every rank has all samples",
    ),
    "only rank 0 scatters": (
        {SCATTER: "    if samples is None:\n        return torch.empty(0)\n" + SCATTER},
        "those that only receive call it, too",
    ),
    "blocks in another order": (
        {
            SCATTER: "    if samples is not None:\n"
            "        samples = samples.tensor_split(comms.world_size)[::-1]\n" + SCATTER
        },
        "The blocks are not in rank order",
    ),
    "every n-th sample": (
        {SCATTER: BROADCAST + "    return whole[comms.rank :: comms.world_size]\n"},
        "Those are every n-th sample",
    ),
    "parts made equal": (
        {
            SCATTER: "    if samples is not None:\n"
            "        size = -(-len(samples) // comms.world_size)\n"
            "        samples = samples[torch.arange(size * comms.world_size) % len(samples)]\n"
            + SCATTER
        },
        "doubled to make parts equal",
    ),
    "all losses to everybody": (
        {
            COLLECT: PADDED + "    rows = comms.all_gather(padded)\n"
            "    whole = torch.cat([row[:c] for row, c in zip(rows, counts, strict=True)])\n"
            "    return (whole if comms.rank == 0 else None), whole.mean().item()\n"
        },
        "An all-gather sends every rank's tensor to every other rank. Only rank 0 needs all",
    ),
    "they are returned everywhere, too": (
        {
            COLLECT: PADDED + "    rows = comms.all_gather(padded)\n"
            "    whole = torch.cat([row[:c] for row, c in zip(rows, counts, strict=True)])\n"
            "    return whole, whole.mean().item()\n"
        },
        "Only rank 0 needs them: gather",
    ),
    "a sum of losses between zeros": (
        {
            COLLECT: "    counts = comms.all_gather_data(len(losses))\n"
            "    whole = losses.new_zeros(sum(counts))\n"
            "    whole.split(counts)[comms.rank].copy_(losses)\n"
            "    comms.all_reduce(whole)\n"
            "    return (whole if comms.rank == 0 else None), whole.mean().item()\n"
        },
        "1 x all_reduce on this rank Only rank 0 needs all of them",
    ),
    "padding is left in": (
        {COLLECT: PADDED + SUMS + "    return comms.gather(padded), " + MEAN},
        "take the padding away",
    ),
    "a mean of means": (
        {
            COLLECT: "    mean = losses.mean()\n    comms.all_reduce_mean(mean)\n"
            "    return comms.gather(losses), mean.item()\n"
        },
        "That is a mean of the ranks' means",
    ),
    "a rank without losses": (
        {"losses.sum()": "losses.mean() * len(losses)"},
        "The mean of no losses is not a number",
    ),
    "only rank 0 gathers": (
        {
            COLLECT: SUMS + "    joined = comms.gather(losses) if comms.rank == 0 else None\n"
            "    return joined, " + MEAN
        },
        "waiting in .*gather",
    ),
}
