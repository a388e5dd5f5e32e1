"""Sums through shared memory that people really write."""

GIVE = "    given[rank][:size] = tensor\n"
MEET = "    meet()\n"
TAKE = "    tensor.copy_(total[:size])\n"
MINE = "    mine.copy_(first)\n"
ADD_UP = """    first, *others = (block[:size].tensor_split(n)[rank] for block in given)
    mine = total[:size].tensor_split(n)[rank]
    mine.copy_(first)
    for other in others:
        mine += other
"""

# Which of the sums it spoils depends on who comes first.
RACE = "is late.*All must meet"

# What is wrong: what is replaced in the solution, and what the check must say of it.
WRONG = {
    "no first meeting": ({GIVE + MEET: GIVE}, RACE),
    "no second meeting": ({MEET + TAKE: TAKE}, RACE),
    "no meeting": ({GIVE + MEET: GIVE, MEET + TAKE: TAKE}, RACE),
    "it meets before it gives": ({GIVE + MEET: MEET + GIVE}, RACE),
    "a third meeting": ({TAKE: TAKE + MEET}, "expected two meetings got 3"),
    "each adds up everything": (
        {
            ADD_UP: "    whole = torch.stack([block[:size] for block in given]).sum(0)\n"
            "    total[:size] = whole\n"
        },
        "one n-th: who adds up more",
    ),
    "one meeting, and each adds up everything": (
        {ADD_UP + MEET + TAKE: "    tensor.copy_(torch.stack([b[:size] for b in given]).sum(0))\n"},
        RACE,
    ),
    "it adds to what is there": (
        {MINE: "    mine += first\n"},
        "still in `total`",
    ),
    "parts that n does not divide": (
        {"tensor_split(n)[rank]": "view(-1)[size // n * rank : size // n * (rank + 1)]"},
        "any number of values.*nobody does this part",
    ),
    "it divides": ({TAKE: TAKE + "    tensor /= n\n"}, "a sum is not divided"),
    "not into the tensor": ({TAKE: "    tensor = total[:size]\n"}, "not written into the tensor"),
    "the backend's": (
        {GIVE: "    return torch.distributed.all_reduce(tensor)\n"},
        "no meeting|PyTorch's own all_reduce",
    ),
}
