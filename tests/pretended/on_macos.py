"""What runs on the pretended macOS, many jobs to a process: ``python on_macos.py chapters 00 02``.

Ranks are forked from a process that has imported what they need under the pretence, too.
"""

import shutil
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))  # as pytest has it

from ranks import run, run_module  # noqa: E402
from shorter import CHAPTERS, ON_THREE, what_a_rank_prints  # noqa: E402

from microddp.labs.__main__ import main  # noqa: E402
from microddp.labs.engine.catalogue import find  # noqa: E402

def chapters(*numbers: str) -> None:
    """Run chapters, or all, shortened, on two ranks, some on three; what rank 0 prints."""
    for number in numbers or sorted(CHAPTERS):
        ranks = 3 if number in ON_THREE else 2
        with tempfile.TemporaryDirectory() as folder:
            environment = {"MICRODDP_TIMEOUT": "60", "MICRODDP_FIGURES": folder}
            environment["TORCHELASTIC_RUN_ID"] = Path(folder).name  # torchrun's, read by chapter 13
            first, *others = run(
                what_a_rank_prints, ranks, number, join=False, timeout=200, environment=environment
            )
            drawn = len(list(Path(folder).glob("*.png")))
        assert not any(others), "only one rank prints"
        print(f"== chapter {number}, {drawn} figures: {CHAPTERS[number].stem}\n{first}", flush=True)


def labs(*numbers: str) -> None:
    """Check the right solution of labs, as the command does."""
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            lab = find(number)
            shutil.copy(lab.solution, Path(folder, f"{lab.name}.py"))
            assert main(["check", number, "--dir", folder]) == 0


def train(*arguments: str) -> None:
    """Train for an epoch on two ranks, then go on from the checkpoint for another one."""
    for epochs in "12":
        print(run_module("microddp.train", 2, *arguments, "--resume", "--epochs", epochs))


if __name__ == "__main__":
    {"chapters": chapters, "labs": labs, "train": train}[sys.argv[1]](*sys.argv[2:])
    forkserver._forkserver._stop()
