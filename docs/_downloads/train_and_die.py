"""A training in which process 1 dies after step 26, and four ways to go on.

torchrun --nproc-per-node=3 --max-restarts=1 train_and_die.py nothing FOLDER
torchrun --nproc-per-node=3 --max-restarts=1 train_and_die.py restart FOLDER
python train_and_die.py warm FOLDER
python train_and_die.py elastic FOLDER

With nothing it begins again. A restart goes on from the last checkpoint, after step 14; the warm
one with three processes that have stood by. Elastic members, three at a time, go on without a
restart: two survivors, and one that has stood by. Each process writes what it does, and when, to a
file in FOLDER, which must exist. It needs microddp.
"""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time

BEGAN = time.time()

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import microddp  # noqa: E402
from microddp.datasets import load_digits  # noqa: E402
from microddp.elastic import Members  # noqa: E402
from microddp.train import TrainingConfig, loop, train  # noqa: E402
from microddp.train.elastic import train_elastically  # noqa: E402

WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
DEAD = FOLDER / "dead"


def on_a_core():
    """Seconds for which this thread ran, and for which it was ready to, but waited for a core."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:  # Linux has it
        return [0.0, 0.0]
    return [int(ran) / 1e9, int(waited) / 1e9]


class Diary:
    """Events of a process, in a file: when, what, and more of it."""

    def __init__(self, me):
        self.me, self.test, self.marks = me, load_digits().test.tensors, []
        self.file = (FOLDER / f"{os.getpid()}.log").open("w", buffering=1)

    def tell(self, what, more=None, at=None):
        """Write an event."""
        print(json.dumps([at or time.time(), what, more]), file=self.file)

    def mark(self, part):
        """Note that a part of what comes before the first step has ended."""
        self.marks.append((part, [time.time(), *on_a_core()]))

    def tell_parts(self):
        """Tell how long each part was, for how long it ran, and waited for a core."""
        parts = {
            part: [after - before for before, after in zip(start, end, strict=True)]
            for (_, start), (part, end) in itertools.pairwise(self.marks)
        }
        self.tell("parts", parts)
        self.marks = []

    def on_step(self, step, model):
        """Tell of a step; process 1 dies in the first that is the 26th."""
        if self.marks:
            self.mark("first step")
            self.tell_parts()
        with torch.no_grad():
            self.tell(step, cross_entropy(model(self.test[0]), self.test[1]).item())
        time.sleep(0.02)
        if (step, self.me) == (26, 1) and not DEAD.exists():
            DEAD.touch()
            self.tell("dead")
            os.kill(os.getpid(), signal.SIGKILL)


class WatchedCheckpoints(loop.Checkpoints):
    """Checkpoints that note when one was loaded."""

    def load(self):
        """Load the newest."""
        state = super().load()
        self.diary.mark("load")
        return state


class WatchedMembers(Members):
    """Members that tell of their meetings."""

    def meet(self, steps):
        """Meet, and tell in how many seconds each part of it was done."""
        generation = super().meet(steps)
        if generation:
            ranks = generation.comms.world_size
            self.diary.tell("met", [dict(generation.seconds), generation.started_server, ranks])
        return generation


def be_a_process(me, port=None):
    """Train in the way that was asked for; numbers from 3 on stand by until somebody is dead."""
    diary = Diary(me)
    torch.optim.Adam([torch.zeros(1)])  # the first optimizer of a process imports more
    diary.tell("started", at=BEGAN)
    diary.tell("imported")
    while me >= 3 and not DEAD.exists():
        time.sleep(0.01)
    options = {"model": "mlp", "width": 64, "lr": 3e-3, "epochs": 4}
    if WAY in ("restart", "warm"):
        options |= {"checkpoint": FOLDER / "kept", "resume": True}
    if WAY == "elastic":
        with WatchedMembers(f"127.0.0.1:{port}", least=3) as members:
            members.diary = diary
            train_elastically(TrainingConfig(**options), members, diary.on_step)
        return
    if WAY == "warm":  # what torchrun would set
        own = {"RANK": me % 3, "LOCAL_RANK": me % 3, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in own.items()})
    loop.Checkpoints, WatchedCheckpoints.diary = WatchedCheckpoints, diary
    diary.mark("begin")
    with microddp.init() as comms:
        diary.mark("join")
        train(TrainingConfig(**options), comms, diary.on_step)


def start_all(count):
    """Start processes without torchrun, which would end all when one dies."""
    torch.optim.Adam([torch.zeros(1)])
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [listening.getsockname()[1] for listening in (one, other)]
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    port = [ports[WAY == "warm" and me >= 3] for me in range(count)]
    processes = [context.Process(target=be_a_process, args=(me, port[me])) for me in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    end_well = range(3, 6) if WAY == "warm" else (0, 2, 3)
    sys.exit(any(processes[me].exitcode for me in end_well))


if __name__ == "__main__":
    if WAY in ("warm", "elastic"):
        start_all({"warm": 6, "elastic": 4}[WAY])
    be_a_process(int(os.environ["RANK"]))
