"""NCCL's and gloo's rules for GPUs over gloo's CPU groups, and a log of what each rank calls."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pretended.devices import PretendedDevices, cuda, device_of, is_internal, tensors_in

# The operations of a process group: their name, the place among the arguments of the tensors whose
# size all ranks must agree on, and the place of the root, if there is one.
OPERATIONS: dict[str, tuple[str, int | None, int | None]] = {
    "allreduce_": ("all_reduce", 0, None),
    "allreduce_coalesced_": ("all_reduce", 0, None),
    "broadcast_": ("broadcast", 0, 2),
    "allgather_": ("all_gather", 1, None),
    "_allgather_base_": ("all_gather", 1, None),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, None),
    "reduce_scatter_": ("reduce_scatter", 0, None),
    "_reduce_scatter_base_": ("reduce_scatter", 0, None),
    "reduce_": ("reduce", 0, 3),
    "gather_": ("gather", 1, 3),
    "scatter_": ("scatter", 0, 3),
    "alltoall_": ("all_to_all", None, None),
    "alltoall_base_": ("all_to_all", None, None),
    "barrier": ("barrier", None, None),
    "send": ("send", 0, 2),
    "recv_": ("recv", 0, 2),
}
# Source: the table of backends in PyTorch's documentation of torch.distributed. gloo's C++ can do
# more, which PyTorch's own DDP relies on: the constructor gathers the numbers of parameters.
GLOO_ON_CUDA = {"all_reduce", "broadcast"}
NCCL_LACKS = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class Call:
    """What a rank calls on a communicator.

    Attributes:
        text: of a collective what all members must agree on.
        messages: of point-to-point calls that go together, each as kind (``"send"`` or ``"recv"``),
            the peer's rank in the group, dtype and size.
        where: the lines of the program, outermost first.
    """

    text: str
    messages: tuple[tuple[str, int, str], ...] = ()
    where: str = ""

    def __str__(self) -> str:
        text = ", ".join(f"{kind} {what} ({peer})" for kind, peer, what in self.messages)
        return f"{text or self.text} at {self.where}"


Key = tuple[tuple[int, ...], int]  # a communicator: its members, and a number if there are several


@dataclass
class Log:
    """What one rank called, on each communicator in order.

    Attributes:
        backend: whose rules hold.
        gpu: this rank's machine and device, if it has one to itself.
    """

    backend: str = ""
    gpu: tuple[int, int] | None = None
    calls: dict[Key, list[Call]] = field(default_factory=dict)


class Recorder:
    """Stands between the program and its process groups."""

    def __init__(self) -> None:
        self.log = Log()
        self.groups: dict[str, tuple[str, Key]] = {}  # by name: backend and communicator
        self.world: Key = ((), 0)
        self.numbers: dict[tuple[int, ...], int] = {}
        self.batch = threading.local()

    def communicate(self, func: Any, args: Sequence[Any]) -> None:
        """Before an operation that comes through PyTorch's dispatcher."""
        name, sized, root = OPERATIONS[func.overloadpacket.__name__]
        (group,) = (
            dist.ProcessGroup.unbox(x)
            for x in args
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        )
        tensors = [*tensors_in(*args)]
        what = "" if sized is None else _size([*tensors_in(args[sized])])
        self.record(group, name, tensors, what, None if root is None else args[root])

    def record(
        self, group: dist.ProcessGroup, name: str, tensors: Any, what: str, root: int | None
    ) -> None:
        """Hold a call to its backend's rules, and write it down.

        Raises:
            RuntimeError: the backend cannot do that on the tensors' devices.
        """
        backend, key = self.groups[group.group_name]
        if name != "barrier":
            for tensor in tensors:
                self.check(backend, name, tensor)
        if name in ("send", "recv"):
            message = (name, int(root or 0), what)
            if (batch := getattr(self.batch, "messages", None)) is not None:
                batch.append((key, message))
            else:
                self.write(key, Call(name, (message,), _where()))
            return
        at_root = "" if root is None else f"root {root}"
        self.write(key, Call(" ".join(filter(None, (name, what, at_root))), (), _where()))

    def check(self, backend: str, name: str, tensor: torch.Tensor) -> None:
        device, who = device_of(tensor), f"{backend} on rank {dist.get_rank()}: {name} of"
        if backend == "gloo":
            if device.type == "cuda" and name not in GLOO_ON_CUDA and not is_internal():
                raise RuntimeError(f"{who} a tensor on {device}, which gloo cannot do")
        elif device.type != "cuda":
            raise RuntimeError(f"{who} a tensor on {device}: No backend type associated with that")
        elif self.log.gpu is not None and device.index != self.log.gpu[1]:
            raise RuntimeError(f"{who} a tensor on {device}, not on the communicator's device")
        elif tensor.dtype in NCCL_LACKS:
            raise RuntimeError(f"{who} {tensor.dtype}, which NCCL does not have")

    def write(self, key: Key, call: Call) -> None:
        self.log.calls.setdefault(key, []).append(call)

    def joined(self, members: tuple[int, ...], group: Any, backend: str) -> None:
        """A group was made of these members."""
        number = self.numbers[members] = self.numbers.get(members, -1) + 1
        key = (members, number)
        if isinstance(group, dist.ProcessGroup):
            self.groups[group.group_name] = (backend, key)
            self.log.calls.setdefault(key, [])

    # ---- what takes the place of torch.distributed's functions

    def init_process_group(
        self, real: Any, backend: str | None = None, *args: Any, **kw: Any
    ) -> None:
        device = kw.pop("device_id", None)
        backend = backend or "nccl"
        real("gloo", *args, **kw)
        group, members = dist.group.WORLD, tuple(range(dist.get_world_size()))
        self.joined(members, group, backend)
        self.world = self.groups[group.group_name][1]
        self.log.backend = backend
        if backend == "nccl":
            machine = dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE", len(members)))
            self.log.gpu = (machine, cuda(device).index)

    def new_group(
        self, real: Any, ranks: Any, timeout: Any, backend: str | None, *a: Any, **kw: Any
    ) -> Any:
        """NCCL splits the communicator of all ranks, so this is a call of them all on it."""
        backend = backend or self.groups[dist.group.WORLD.group_name][0]
        members = tuple(ranks or range(dist.get_world_size()))
        self.write(self.world, Call(f"new_group {list(members)}", (), _where()))
        group = real(ranks, timeout, "gloo", *a, **kw)
        self.joined(members, group, backend)
        return group

    def get_backend(self, group: Any = None) -> str:
        return self.groups[(group or dist.group.WORLD).group_name][0]

    def get_backend_config(self, group: Any = None) -> str:
        backend = self.get_backend(group)
        return "cuda:nccl" if backend == "nccl" else "cpu:gloo,cuda:gloo"

    def batch_isend_irecv(self, real: Any, operations: Any) -> Any:
        """Point-to-point calls that make one call of NCCL's."""
        self.batch.messages = messages = []
        try:
            return real(operations)
        finally:
            self.batch.messages = None
            for key in dict(messages):
                mine = tuple(message for theirs, message in messages if theirs == key)
                self.write(key, Call("batch", mine, _where()))

    def get_transport(self, real: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
        """A group's backend for a device, whose messages do not come through the dispatcher."""
        if self.groups[group.group_name][0] == "nccl" and torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return Transport(self, group, real(group, torch.device("cpu")))


class Transport:
    """A backend whose messages are recorded."""

    def __init__(self, recorder: Recorder, group: dist.ProcessGroup, real: Any) -> None:
        self._recorder, self._group, self._real = recorder, group, real

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        self._recorder.record(self._group, "send", tensors, _size(tensors), dst)
        return self._real.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        self._recorder.record(self._group, "recv", tensors, _size(tensors), src)
        return self._real.recv(tensors, src, tag)

    def allreduce(self, tensors: Any) -> Any:
        self._recorder.record(self._group, "all_reduce", tensors, _size(tensors), None)
        return self._real.allreduce(tensors)

    def __getattr__(self, name: str) -> Any:
        if name in ("supports_splitting", "options") or name.startswith("supports_"):
            return getattr(self._real, name)
        raise AttributeError(f"{name} of a backend is not pretended")


def _size(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} x {t.numel()}" for t in tensors)


def _where() -> str:
    """The outermost and the innermost line of the program that called."""
    frame: Any = sys._getframe(2)
    lines: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.dirname(file) == os.path.dirname(__file__):
            if lines:  # what started the program
                break
        elif "/torch/" not in file and not file.startswith("<"):
            lines.append(f"{os.path.basename(file)}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(dict.fromkeys((*lines[-1:], *lines[:1])))


def install() -> Recorder:
    """Put a recorder between this process and its groups, for good."""
    recorder = Recorder()
    PretendedDevices.communicate = staticmethod(recorder.communicate)
    for name in ("init_process_group", "batch_isend_irecv"):
        stand_in = partial(getattr(recorder, name), getattr(c10d, name))
        setattr(c10d, name, stand_in)
        setattr(dist, name, stand_in)
    c10d._new_group_with_tag = partial(recorder.new_group, c10d._new_group_with_tag)
    real = dist.ProcessGroup._get_backend
    dist.ProcessGroup._get_backend = lambda group, device: recorder.get_transport(
        real, group, device
    )
    # Where dist.all_gather_object and its kin put what they have pickled.
    c10d._get_object_coll_device = lambda group=None: (
        cuda() if recorder.get_backend(group) == "nccl" else torch.device("cpu")
    )
    for module in (c10d, dist):
        module.get_backend = recorder.get_backend
        module.get_backend_config = recorder.get_backend_config
        module.is_nccl_available = lambda: True
    return recorder
