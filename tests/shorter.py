"""Chapters with less to compute, for tests of whether they run and not of how long they take."""

import contextlib
import io
from pathlib import Path

from pretended.job import run_chapter

# Whose arithmetic of ranks, rows and parts three ranks try: neither a power of two nor a divisor of
# every size. The others' third rank would only take turns with the other two.
ON_THREE = ("03", "06", "07", "12")
CHAPTERS = {path.stem[:2]: path for path in Path(__file__).parents[1].glob("chapters/[0-9]*.py")}

# What takes longest, taken less often or on something smaller.
SHORTER = {
    "00": {"range(20)": "range(10)", "(0, 4, 9, 19)": "(0, 4, 9)"},
    "03": {'"layers": 24': '"layers": 2'},
    "04": {'"layers": 24': '"layers": 2'},
    "05": {
        "(64, depth=16)": "(64, depth=8)",
        "layers=24": "layers=2",
    },
    "06": {"layers=24": "layers=2"},
    "08": {
        '"layers": 24': '"layers": 2',
        "or 5)": "or 1)",
        '("2gbit", FASTEST)': '("2gbit",)',
        "(0.5, 1, 2) if": "(0.5, 2) if",
    },
    "09": {
        "STEPS = 12": "STEPS = 5",
        "(1, 2) * 3": "(1, 2)",
    },
    "10": {
        "EPOCHS, VALUES = 8": "EPOCHS, VALUES = 2",
        "ShardedBatches(digits.train, 96": "ShardedBatches(digits.train, 384",
        '"layers": 24': '"layers": 2',
    },
    "11": {
        "STEPS, LOOK = 128, 8": "STEPS, LOOK = 64, 8",
        "for seed in range(3)": "for seed in range(1)",
        '"layers": 8': '"layers": 2',
    },
    "12": {"REPORTS, quick = 50": "REPORTS, quick = 5"},
    "13": {
        '"--nproc-per-node=3"': '"--nproc-per-node=2"',
        "DRAWS, TIMES = 30 * 24 * HOUR, 40": "DRAWS, TIMES = 30 * 24 * HOUR, 4",
        # Jobs of their own, on the CPU whatever this one runs on. The book runs them, and the
        # programs to download have tests of their own.
        "events = {way: on_rank_0(run_job, way) for way in WAYS}": "events = dict.fromkeys(WAYS, ["
        '[0.0, "started", None], [0.01, "imported", None], '
        '*([at, "parts", dict.fromkeys(("join", "load", "first step"), [0.01, 0.005, 0.001])] '
        "for at in (0.015, 0.536)), "
        "*([i / 50, i, 1.0] for i in range(1, 27)), "
        '[0.53, "dead", None], [0.535, "met", [dict.fromkeys('
        '("let go", "find", "wait", "form"), 0.001), False, 3]], '
        "*([i / 50, i, 1.0] for i in range(27, 57))])",
        'json.loads(on_rank_0(said_by, "sharded_checkpoint.py"))': "{"
        '"bytes of each rank\'s file": [18_900_000] * 4, "seconds": {name: (0.1, 0.2) for name in '
        '("save", "async_save", "async_save, until written")}, '
        '"commit, by rank": [[["save", 0, 9], ["fsync", 1, 2], ["dump", 3, 4], ["fsync", 4, 5], '
        '["rename", 5, 6]]], '
        '**{f"fingerprint on {ranks} ranks": "" for ranks in (4, 2, 8)}}',
    },
    "14": {
        "range(3), (1, 4, 8, 16, 32)": "range(1), (1, 16)",
        "last=100": "last=20",
        "STEPS = 352": "STEPS = 88",
        "n).epoch, range(4)": "n).epoch, range(1)",
        # A test's process may start no others.
        '"persistent_workers": True}, (0, 2)': '"persistent_workers": True}, (0,)',
        # What rank 0 does alone is out of order, on purpose.
        "dist.all_reduce(torch.tensor(1.0), group=impatient)": "raise RuntimeError",
        # The script to download has tests of its own.
        "killed_and_resumed() if": '("", *["epoch 0: loss 1; epoch 1: loss 1; '
        'epoch 2: loss 1"] * 2) if',
        # Nor can pretended devices be compiled for.
        "from torch._dynamo.testing import CompileCounterWithBackend\n": "",
        "rows = []\nfor name, order in ORDERS.items():": "rows = [(name, 0) for name in ORDERS]\n"
        "for name, order in ():",
    },
    "15": {"LARGEST = 2**24": "LARGEST = 2**22", "range(12, 25, 3)": "range(12, 23, 5)"},
    "16": {
        "SAMPLES, ROUNDS = 512, 1024, 6": "SAMPLES, ROUNDS = 512, 8, 1",
        '"layers": 4': '"layers": 2',
        # Jobs of their own, on the CPU whatever this one runs on. The book runs them.
        "outcome() if": '("zero3: trained 3 steps", "can\'t allocate memory") if',
    },
    "17": {
        '"layers": LAYERS': '"layers": 2',
        # PyTorch finds out that pretended devices are none.
        "PYTORCH = not comms.through_host": "PYTORCH = False",
    },
    "18": {
        "(8, 1 << 16, 7.5e-3)": "(2, 1 << 16, 1e-4)",
        "(4, 1 << 17, 10e-3)": "(2, 1 << 16, 1e-4)",
    },
}


def shortened(number: str) -> str:
    """The text of a chapter, with less to compute.

    Raises:
        ValueError: the chapter has changed, and does not contain what is to be replaced.
    """
    text = CHAPTERS[number].read_text()
    for long, short in SHORTER.get(number, {}).items():
        if long not in text:
            raise ValueError(f"chapter {number}: expected {long!r} in its text")
        text = text.replace(long, short)
    return text


def what_a_rank_prints(number: str) -> str:
    """Run a shortened chapter on this rank; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_chapter(CHAPTERS[number], shortened(number))
    return output.getvalue()
