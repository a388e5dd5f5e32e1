"""Three processes that train; one dies, and the others form a new group and go on.

python meet_again.py

It starts the three itself: torchrun would end the others when one dies. PyTorch alone is enough.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

WINDOW = 0.3  # seconds after which those who have come are a generation


def meet(store, generation, least=1):
    """Form the group of all who come to a generation; the place in the queue is the rank."""
    rank = store.add(f"come to {generation}", 1) - 1
    while store.add(f"come to {generation}", 0) < least:
        time.sleep(0.01)
    time.sleep(WINDOW)
    size = store.add(f"come to {generation}", 0)
    own = PrefixStore(f"generation {generation}", store)
    return ProcessGroupGloo(own, rank, size, timedelta(seconds=5))


def train(me, port):
    """Add up 60 steps of ones, each step the mean over who is there."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    weights, step, generation, group = torch.zeros(3), 0, 0, meet(store, 0, least=3)
    while step < 60:
        if me == 2 and step == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        share, began = torch.ones(3) / group.size(), time.time()
        try:
            group.allreduce([share]).wait()
        except RuntimeError:
            generation, group = generation + 1, None
            group = meet(store, generation)
            took = time.time() - began
            say(f"process {me}: {group.size()} left, together again in {took:.3f} s")
            continue  # the step again
        weights, step = weights + share, step + 1
    say(f"process {me}: {weights.tolist()}")
    os._exit(0)  # a thread of the old group may wait yet, and gloo would end in an error


def say(line):
    """Print a line in one piece."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [context.Process(target=train, args=(me, port)) for me in range(3)]
    for process in processes:
        process.start()
    store = TCPStore(
        *("127.0.0.1", port, None, True),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    for me, process in enumerate(processes):
        process.join()
        say(f"process {me} ended with {process.exitcode}")
