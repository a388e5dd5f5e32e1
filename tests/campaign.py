"""Faults on purpose, many and at random: ``python tests/campaign.py --faults 200``.

Each is one small training, in which something is done at a random moment. Either its ranks are
torchrun's and restart from the last checkpoint, or they are members and go on without who is lost,
on this machine or on hosts with links of their own. It prints what was done and what came of it,
and ends with status 1 unless every training ended as one without a fault does: bitwise (restarted)
or within rounding (elastic), in time, with no process left and nothing but whole checkpoints in its
folder.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from tabulate import tabulate
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import microddp
from microddp.comms import Pending
from microddp.elastic import Members, meeting, members
from microddp.hosts import Cluster, Link
from microddp.train import TrainingConfig, TrainingResult, train
from microddp.train.elastic import train_elastically

FORK = multiprocessing.get_context("fork")  # what PyTorch's import costs is paid once
LIMIT = 60.0  # seconds for a training: more is a hang
TIMEOUT = 2.0  # seconds after which a member that does not answer is lost
PATIENCE = 4.0  # likewise for a rank of torchrun's, which also waits so long for others to start
WITHIN = 1e-4  # relative, of weights: as any two numbers of ranks differ
STEPS = 20
CONFIG = TrainingConfig(data="synthetic", channels=(8, 16), hidden=32, epochs=4, batch_size=768)
DISK = 1 << 20  # bytes: some 15 checkpoints
FULL_STEPS = 5  # for which there is no room
HOSTS = 3
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000

TO_A_RANK = ("SIGKILL", "SIGSTOP", "os._exit", "exception", "out of memory")
MOMENTS = ("forward", "backward", "collective", "checkpoint", "between steps")
TWO, TORCHRUN, FULL = "SIGKILL of two", "SIGKILL of torchrun", "full disk"
MEETING, ITS_HOST = "SIGKILL of the meeting", "SIGKILL of its host"
STRANGERS = "strangers at the meeting"
CUT, CUT_SHORT, CUT_LONG = "link cut", "link cut for 0.5 s", "link cut for 6 s"
IN_BETWEEN = {
    "restart": (TWO, TORCHRUN, FULL),
    "elastic": (TWO, MEETING, ITS_HOST, STRANGERS, FULL),
    "on hosts": (CUT, CUT_SHORT, CUT_LONG),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that is done to a training.

    Attributes:
        mode: ``"restart"``, ``"elastic"``, or the latter ``"on hosts"``.
        ranks: the number of ranks.
        kind: what is done.
        moment: in what it is done.
        step: after how many steps.
        rank: to which rank; if to two, to the next one, too.
        replaced: whether a member that is gone is started again.
    """

    mode: str
    ranks: int
    kind: str
    moment: str
    step: int
    rank: int
    replaced: bool

    @property
    def victims(self) -> list[int]:
        """The ranks to which it may be done."""
        if self.kind in (MEETING, ITS_HOST) or self.moment == "checkpoint":
            return list(range(self.ranks))  # whoever has it, or writes
        return [self.rank, (self.rank + 1) % self.ranks] if self.kind == TWO else [self.rank]


def draw(count: int, *, hosts: bool, short: bool, seed: int) -> Iterator[Fault]:
    """So many faults: of all kinds in turns, at random moments, to random ranks.

    Args:
        count: how many.
        hosts: whether to cut links of hosts in a box, too.
        short: take each mode as often as another, and leave out what takes long: a stopped rank, to
            which torchrun gives half a minute.
        seed: of all that is random.
    """
    choose = random.Random(seed)
    decks = {}
    for mode, kinds in IN_BETWEEN.items():
        # Those at one moment only as often as those that may happen at five.
        deck = [(kind, "between steps") for kind in kinds] * 2
        left_out = "SIGSTOP" if mode == "restart" and short else ""
        if mode != "on hosts":
            deck += [(k, m) for k in TO_A_RANK for m in MOMENTS if k != left_out]
        choose.shuffle(deck)
        decks[mode] = itertools.cycle(deck)
    order = ["restart", "elastic"] * (1 if short else 4) + ["on hosts"] * hosts
    for mode in itertools.islice(itertools.cycle(order), count):
        kind, moment = next(decks[mode])
        ranks = HOSTS if mode == "on hosts" else choose.choice((2, 3, 4))
        rank = choose.randrange(int(mode == "on hosts"), ranks)  # the meeting is on host 0
        last = STEPS - 2 * FULL_STEPS if kind == FULL else STEPS - 2
        yield Fault(
            *(mode, ranks, kind, moment, choose.randrange(2, last)),
            rank=rank,
            replaced=choose.random() < 0.5,
        )


# ---- a rank


class Injector:
    """Does to a rank what a fault says, once in a training; ``on_step`` tells it where that is."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.fault, self.rank, self.folder, self.step = fault, rank, folder, 0
        self.meeting: Members | None = None
        self.mark = folder / f"done to {rank if fault.kind == TWO else 'one'}"
        if rank not in fault.victims or self.mark.exists():
            return
        if fault.moment == "forward":
            torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self.act())
        elif fault.moment == "backward":
            torch.nn.modules.module.register_module_forward_hook(self._in_backward)
        elif fault.moment == "collective":
            Pending.wait = self._around(Pending.wait)  # under way, and not complete
        elif fault.moment == "checkpoint":
            torch.save = self._around(torch.save)  # before the file has its name

    def _in_backward(self, _module: object, _inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.act())

    def _around(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if self.fault.moment == "collective":
                self.act()
            result = function(*arguments)
            if self.fault.moment == "checkpoint":
                self.act()
            return result

        return call

    def on_step(self, step: int, _model: object) -> None:
        """To be called after each step."""
        self.step = step
        (self.folder / f"step of {self.rank}").write_text(str(step))
        if self.fault.moment == "between steps" and self.rank in self.fault.victims:
            self.act()
        if self.fault.kind == FULL and step > self.fault.step + FULL_STEPS:
            (self.folder / "disk" / "filler").unlink(missing_ok=True)
        if self.fault.mode == "on hosts":
            time.sleep(0.1)  # so that there is something left to train when the link is back

    def act(self) -> None:
        """Do it, if it is time and was not done."""
        kind = self.fault.kind
        hosting = self.meeting is not None and self.meeting._server is not None
        if self.step < self.fault.step or self.mark.exists():
            return
        if kind in (CUT, CUT_LONG, CUT_SHORT) or (kind in (MEETING, ITS_HOST) and not hosting):
            return
        self.mark.write_text(str(self.rank))
        if kind in ("SIGKILL", TWO, ITS_HOST):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == TORCHRUN:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(LIMIT)  # until the kernel ends this process, too
        elif kind == "os._exit":
            os._exit(3)
        elif kind == "exception":
            raise KeyError("planted")
        elif kind == "out of memory":
            held = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (held + (16 << 20), resource.RLIM_INFINITY))
            torch.zeros(1 << 30)
        elif kind == FULL:
            with (
                contextlib.suppress(OSError),
                open(self.folder / "disk" / "filler", "wb", 0) as file,
            ):
                while True:
                    file.write(bytes(1 << 12))
        elif kind == MEETING:
            self.meeting._server.kill()
        elif kind == STRANGERS:
            self.silent = besiege((self.meeting.host, self.meeting.port))


def besiege(address: tuple[str, int]) -> list[socket.socket]:
    """What can be done to a meeting without its secret; and connections that stay, and say nothing.

    Of these there are more than it lets wait for a proof.
    """
    silent = [socket.create_connection(address) for _ in range(2 * meeting.UNPROVEN)]
    place = {"steps": 10**6, "address": address[0], "port": address[1], "machine": "a stranger's"}
    for message in (
        {"done": True},
        {"come": place},
        {"name": "x", "nonce": "", "proof": ""},
        [],
        {},
    ):
        for line in (json.dumps(message).encode(), os.urandom(64)):
            with socket.create_connection(address) as stranger:
                stranger.sendall(line + b"\n")
    return silent


def be_a_rank(fault: Fault, folder: Path) -> None:
    """Train as a rank of torchrun's, from the last checkpoint."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked, it has that of torchrun
    with logged(folder, rank), microddp.init(timeout=PATIENCE) as comms:
        injector = Injector(fault, rank, folder)
        config = dataclasses.replace(CONFIG, **checkpoints(folder))
        keep(train(config, comms, injector.on_step), folder, rank)


def be_a_member(fault: Fault, folder: Path, rank: int, address: str) -> int:
    """Train as a member."""
    members.PATIENCE = 10.0  # when its link is back, the job may be over, and the meeting gone
    with logged(folder, rank):
        injector = Injector(fault, rank, folder)
        os.environ["MICRODDP_TIMEOUT"] = str(TIMEOUT)
        with Members(address) as injector.meeting:
            config = dataclasses.replace(CONFIG, **checkpoints(folder))
            keep(train_elastically(config, injector.meeting, injector.on_step), folder, rank)
    return 0


def checkpoints(folder: Path) -> dict[str, Any]:
    return {"checkpoint": folder / "disk", "checkpoint_every": 2, "resume": True}


def keep(result: TrainingResult | None, folder: Path, rank: int) -> None:
    """What a rank ended with, for the judge."""
    if result is not None:
        weights = torch.cat([p.detach().flatten() for p in result.model.parameters()])
        (folder / f"end of {rank}").write_bytes(weights.numpy().tobytes())


@contextlib.contextmanager
def logged(folder: Path, rank: int) -> Iterator[None]:
    with open(folder / f"log of {rank}", "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise


# ---- a training


def restarted(fault: Fault, folder: Path) -> None:
    """Be the person who starts torchrun again when it was killed itself."""
    status: int | None = -signal.SIGKILL
    while status == -signal.SIGKILL:
        agent = FORK.Process(target=be_torchrun, args=(fault, folder))
        agent.start()
        agent.join()
        status = agent.exitcode
    if status:
        raise AssertionError(f"torchrun ended with status {status}")


def be_torchrun(fault: Fault, folder: Path) -> None:
    """torchrun's own agent and restarts, with ranks that are forked."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    config = LaunchConfig(
        *(1, 1, fault.ranks, DefaultLogsSpecs(log_dir=str(folder / "logs"))),
        run_id=secrets.token_hex(4),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        start_method="fork",
    )
    with open(folder / "log of torchrun", "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        elastic_launch(config, be_a_rank)(fault, folder)


def elastic(fault: Fault, folder: Path, cluster: Cluster | None) -> None:
    """Start the members, those that are gone again if so agreed, and cut a link if that is it."""
    host = cluster.address(0) if cluster else "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{host}:{29400 if cluster else free.getsockname()[1]}"
    processes: dict[int, Any] = {}

    def start(rank: int) -> None:
        arguments = fault, folder, rank, address
        target = on_a_host if cluster else be_a_member
        processes[rank] = FORK.Process(
            target=target, args=(*arguments, cluster)[: 4 + bool(cluster)]
        )
        processes[rank].start()

    for rank in range(fault.ranks):
        start(rank)
    replaced = not fault.replaced
    while any(
        member.is_alive() for rank, member in processes.items() if not gone(fault, folder, rank)
    ):
        if cluster and not (folder / "done to one").exists() and at_step(folder, fault):
            (folder / "done to one").write_text(str(fault.rank))
            cluster.cut(fault.rank)
            if fault.kind != CUT:
                time.sleep(0.5 if fault.kind == CUT_SHORT else 6)
                cluster.mend(fault.rank)
        lost = [rank for rank, member in processes.items() if member.exitcode]
        if lost and not replaced:
            replaced = True
            for rank in lost:
                start(rank)
        time.sleep(0.05)
    for member in processes.values():  # stopped, or cut off, for ever
        if member.is_alive():
            member.kill()
        member.join()
    if cluster:
        cluster.mend(fault.rank)


def on_a_host(fault: Fault, folder: Path, rank: int, address: str, cluster: Cluster) -> None:
    os.environ.update(cluster.environment)
    cluster.stand_in(rank, lambda: be_a_member(fault, folder, rank, address))


def at_step(folder: Path, fault: Fault) -> bool:
    file = folder / f"step of {fault.rank}"
    return file.exists() and int(file.read_text() or 0) >= fault.step


def gone(fault: Fault, folder: Path, rank: int) -> bool:
    """Whether a rank will not end by itself."""
    done = folder / "done to one"
    return fault.kind in ("SIGSTOP", CUT) and done.exists() and done.read_text() == str(rank)


def be_judged(
    fault: Fault, folder: Path, right: bytes, cluster: Cluster | None, pipe: Connection
) -> None:
    """Run a training in a process of its own, whose child all that is left of it becomes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        small_disk(folder / "disk", mounted=cluster is None)
        if fault.mode == "restart":
            restarted(fault, folder)
        else:
            elastic(fault, folder, cluster)
        judge(fault, folder, right)
        pipe.send("")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


def small_disk(folder: Path, *, mounted: bool) -> None:
    """A file system with little room, which this process and its children see."""
    folder.mkdir()
    if not mounted:
        return
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS if user == 0 else CLONE_NEWNS | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "a mount of one's own is not allowed here")
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={DISK}".encode()):
        raise OSError(ctypes.get_errno(), "a small disk cannot be had")


def judge(fault: Fault, folder: Path, right: bytes) -> None:
    """Raise unless a training ended as one without a fault."""
    deadline = time.monotonic() + 2
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)  # what has been adopted is reaped here
        time.sleep(0.02)
    assert not left, f"left running: {left}"
    assert (folder / "done to one").exists() or fault.kind == TWO, "nothing was done"
    ends = {path.name: path.read_bytes() for path in folder.glob("end of *")}
    expected = torch.frombuffer(bytearray(right), dtype=torch.float32)
    least = fault.ranks if fault.mode == "restart" else fault.ranks - 2
    assert len(ends) >= max(1, least), f"ended: {sorted(ends)}"
    assert len(set(ends.values())) == 1, "ranks differ"
    for end in ends.values():
        weights = torch.frombuffer(bytearray(end), dtype=torch.float32)
        distance = ((weights - expected).norm() / expected.norm()).item()
        assert distance <= (0 if fault.mode == "restart" else WITHIN), f"off by {distance:.1e}"
    names = sorted(path.name for path in (folder / "disk").iterdir())
    assert f"checkpoint-{STEPS}.pt" in names, f"the last checkpoint is lost: {names}"
    for name in names:
        with zipfile.ZipFile(folder / "disk" / name) as archive:  # or it is no checkpoint at all
            assert archive.testzip() is None, f"{name} is damaged"


def inflict(fault: Fault, right: bytes, cluster: Cluster | None) -> tuple[str, float]:
    """What was wrong with a training's end, or nothing, and the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = FORK.Pipe(duplex=False)
        on = cluster if fault.mode == "on hosts" else None
        process = FORK.Process(target=be_judged, args=(fault, Path(folder), right, on, theirs))
        process.start()
        theirs.close()
        try:
            said = ours.recv() if ours.poll(LIMIT) else f"hangs: more than {LIMIT:g} s"
        except EOFError:
            said = "the judge died"
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.join()
        if said:
            for log in sorted(Path(folder).glob("log of *")):
                said += f"\n--- {log.name}\n{log.read_text()[-3000:]}"
    return said, time.monotonic() - start


def right_end(ranks: int) -> bytes:
    """The weights that training without a fault ends with."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        process = FORK.Process(
            target=be_torchrun, args=(Fault("restart", ranks, "", "", STEPS + 1, 0, False), folder)
        )
        process.start()
        process.join(LIMIT)
        return (folder / "end of 0").read_bytes()


def campaign(faults: Iterable[Fault]) -> list[tuple[Fault, str, float]]:
    """Inflict faults one after another; what came of each."""
    faults = list(faults)
    outcomes = []
    rights = {ranks: right_end(ranks) for ranks in {fault.ranks for fault in faults}}
    with contextlib.ExitStack() as stack:
        cluster = None
        if any(fault.mode == "on hosts" for fault in faults):
            cluster = stack.enter_context(Cluster([Link.parse("1gbit")] * HOSTS))
        for number, fault in enumerate(faults, start=1):
            problem, seconds = inflict(fault, rights[fault.ranks], cluster)
            outcomes.append((fault, problem, seconds))
            how = f"{fault.mode}, {fault.ranks} ranks: {fault.kind}, {fault.moment}"
            where = f"after step {fault.step}, rank {fault.rank}"
            end = f"WRONG: {problem}" if problem else "right"
            print(f"{number:4} {how}, {where}: {end}, {seconds:.1f} s", flush=True)
    return outcomes


def summary(outcomes: list[tuple[Fault, str, float]]) -> str:
    """What was done, how often, and how often all was right, as a table."""
    done = Counter((fault.mode, fault.kind, fault.moment) for fault, *_ in outcomes)
    wrong = Counter((f.mode, f.kind, f.moment) for f, problem, _ in outcomes if problem)
    rows = [(*what, count, count - wrong[what]) for what, count in sorted(done.items())]
    return tabulate(rows, headers=["mode", "fault", "moment", "times", "right"])


def main() -> int:
    """Run the command line; status 1 if something was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--no-hosts", action="store_true", help="where they are not allowed")
    parser.add_argument("--short", action="store_true", help="leave out what takes long")
    options = parser.parse_args()
    os.environ.setdefault("MICRODDP_SECRET", secrets.token_hex(32))
    print(f"--seed {options.seed}", flush=True)
    outcomes = campaign(
        draw(options.faults, hosts=not options.no_hosts, short=options.short, seed=options.seed)
    )
    wrong = [outcome for outcome in outcomes if outcome[1]]
    print(f"\n{summary(outcomes)}\n\n{len(outcomes)} faults, {len(wrong)} not right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
