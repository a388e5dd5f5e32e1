"""Sums through shared memory that people really write."""

WRITE = "    inputs[rank][:size] = tensor\n"
BARRIER = "    barrier()\n"
COPY = "    tensor.copy_(total[:size])\n"
MINE = "    mine.copy_(first)\n"
ADD_UP = """    first, *others = (block[:size].tensor_split(n)[rank] for block in inputs)
    mine = total[:size].tensor_split(n)[rank]
    mine.copy_(first)
    for other in others:
        mine += other
"""

# Which of the sums it spoils depends on who comes first.
RACE = "is late.*A barrier is missing"

WRONG = {
    "no first barrier": ({WRITE + BARRIER: WRITE}, RACE),
    "no second barrier": ({BARRIER + COPY: COPY}, RACE),
    "no barrier": ({WRITE + BARRIER: WRITE, BARRIER + COPY: COPY}, RACE),
    "the barrier before it writes": ({WRITE + BARRIER: BARRIER + WRITE}, RACE),
    "a third barrier": ({COPY: COPY + BARRIER}, "expected two barriers got 3"),
    "each adds up everything": (
        {
            ADD_UP: "    whole = torch.stack([block[:size] for block in inputs]).sum(0)\n"
            "    total[:size] = whole\n"
        },
        "one n-th: who adds up more",
    ),
    "one barrier, and each adds up everything": (
        {
            ADD_UP
            + BARRIER
            + COPY: "    tensor.copy_(torch.stack([b[:size] for b in inputs]).sum(0))\n"
        },
        RACE,
    ),
    "it adds to what is there": (
        {MINE: "    mine += first\n"},
        "still in `total`",
    ),
    "zeros before others have copied": (
        {
            WRITE: "    total[:size].tensor_split(n)[rank].zero_()\n" + WRITE,
            MINE: "    mine += first\n",
        },
        "write to `total` after a call's first barrier only",
    ),
    "parts that n does not divide": (
        {"tensor_split(n)[rank]": "view(-1)[size // n * rank : size // n * (rank + 1)]"},
        "any number of values.*nobody does this part",
    ),
    "it divides": ({COPY: COPY + "    tensor /= n\n"}, "a sum is not divided"),
    "it divides by the rank": (
        {COPY: COPY + "    tensor /= rank\n"},
        "1 from each rank in call 1 got inf",
    ),
    "not into the tensor": ({COPY: "    tensor = total[:size]\n"}, "not written into the tensor"),
    "the backend's": (
        {WRITE: "    return torch.distributed.all_reduce(tensor)\n"},
        "no barrier|PyTorch's own all_reduce",
    ),
}
