"""What the all-reduces of chapter 02 send, by their rules."""

from microddp.message_counter import Message


def ring_messages(n, size, itemsize=4):
    """The messages of a ring over n ranks, by rank."""
    starts = [0]
    for k in range(n):
        starts.append(starts[-1] + size // n + (k < size % n))
    by_rank = []
    for rank in range(n):
        chunks = [(rank - 1 - s) % n for s in range(n - 1)] + [(rank - s) % n for s in range(n - 1)]
        sizes = [(starts[k + 1] - starts[k]) * itemsize for k in chunks]
        offsets = [starts[k] * itemsize for k in chunks]
        dst = (rank + 1) % n
        by_rank.append([Message(rank, dst, *both) for both in zip(sizes, offsets, strict=True)])
    return by_rank


def all_messages(n, size, itemsize=4):
    """By algorithm and rank."""
    whole = size * itemsize
    others = range(1, n)
    to_zero = [[Message(rank, 0, whole, 0)] for rank in others]
    return {
        "naive": [[Message(0, rank, whole, 0) for rank in others], *to_zero],
        "direct": [[Message(r, (r + k) % n, whole, 0) for k in others] for r in range(n)],
        "ring": ring_messages(n, size, itemsize),
    }
