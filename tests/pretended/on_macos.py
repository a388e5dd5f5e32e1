"""What runs on the pretended macOS, many jobs to a process: ``on_macos.py "chapters 00 02"``.

Each argument is a function of this file, and what to call it with. Ranks are forked from a process
that has imported what they need under the pretence, too.
"""

import os
import shutil
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))  # as pytest has it

from ranks import free_address, run, run_module  # noqa: E402
from shorter import CHAPTERS, ON_THREE, what_a_rank_prints  # noqa: E402

from microddp.elastic import Members  # noqa: E402
from microddp.labs.__main__ import main  # noqa: E402
from microddp.labs.engine.catalogue import find  # noqa: E402
from microddp.train import TrainingConfig  # noqa: E402
from microddp.train.elastic import train_elastically  # noqa: E402


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


def members() -> None:
    """Train elastically on two members, of which one leaves without a word."""
    patience = {"MICRODDP_TIMEOUT": "2"}
    arguments = 2, free_address()
    print(*run(be_a_member, *arguments, join=False, dies=[1], environment=patience))


def be_a_member(address: str) -> str:
    """Be a member; rank 1 ends after 4 steps; how many are left at the end."""
    me = os.environ["RANK"]

    def on_step(step: int, _: object) -> None:
        while (step, me, len(members.names)) == (1, "0", 1) and not members.others_wait():
            time.sleep(0.01)  # else it may have trained to the end before the other has come
        if (step, me, len(members.names)) == (4, "1", 2):
            os._exit(0)

    config = TrainingConfig(model="mlp", width=16, data="synthetic", epochs=2, batch_size=480)
    with Members(address, least=2 if me == "1" else 1) as members:
        train_elastically(config, members, on_step)
        return f"{len(members.names)} left"


ORDERS = {each.__name__: each for each in (chapters, labs, train, members)}

if __name__ == "__main__":
    for order in sys.argv[1:]:
        name, *options = order.split()
        print(f"==== {name}", flush=True)
        ORDERS[name](*options)
    forkserver._forkserver._stop()
