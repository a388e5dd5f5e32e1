"""Tensors that say they are on CUDA, and are computed on the CPU.

A pretended CUDA tensor is a real CPU tensor whose storage is marked, so that views, ``.data``,
gradients, and what C++ makes of it agree on where it is, and autograd and PyTorch's own DDP
run as they are. A dispatch mode sees every operation, those of C++ included: it refuses tensors
that a GPU could not bring together, and marks the results. ``Tensor.device`` and its kin read the
mark.

What is not pretended: streams (everything is done at once, so a missing wait goes unseen), a
generator of its own for each GPU, and the kernels' own limits.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
aten = torch.ops.aten
real_device = torch.Tensor.device.__get__  # before it is replaced
real_to = torch.Tensor.to
real_tensor = torch.tensor

# What may read from one device and write to another.
MOVES = {aten.copy_.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
# A CUDA tensor may be indexed by CPU tensors, the other way round is an error.
INDEXING = ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put")
# From here only C++ makes tensors without being told where, for its own use: as zeros for a
# gradient that did not come, or as the buckets of PyTorch's DDP. On a GPU they are there.
INTERNAL = ("autograd/graph.py", "nn/parallel/distributed.py", "torch/distributed/utils.py")


class Machine(threading.local):
    """What a process pretends to be on; each thread begins on the first GPU, as in CUDA.

    Attributes:
        gpus: the number of devices.
        memory: bytes of each.
        current: the index of the thread's device.
    """

    gpus, memory = 0, 0
    allocated: ClassVar[dict[int, int]] = {}
    peak: ClassVar[dict[int, int]] = {}
    current = 0


machine = Machine()


def cuda(device: Any = None) -> torch.device:
    """The full name of a CUDA device: of the current one, an index, a string or a device."""
    if device is None:
        return torch.device("cuda", machine.current)
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", machine.current if device.index is None else device.index)
        if device.index >= machine.gpus:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return device


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is, or pretends to be."""
    real: torch.device = real_device(tensor)
    if real.type != "cpu":
        return real
    return getattr(_storage(tensor), "pretended", CPU)


def place(tensor: torch.Tensor, device: torch.device) -> None:
    """Mark a tensor that was just made as one of a GPU, until its storage is freed."""
    if device.type != "cuda" or real_device(tensor).type != "cpu":
        return
    storage = _storage(tensor)
    if hasattr(storage, "pretended"):
        return
    storage.pretended = device
    size, index = storage.nbytes(), device.index
    weakref.finalize(storage, _free, index, size)
    total = machine.allocated[index] = machine.allocated.get(index, 0) + size
    machine.peak[index] = max(total, machine.peak.get(index, 0))
    if total > machine.memory:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)


def _free(index: int, size: int) -> None:
    machine.allocated[index] -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor._values() if tensor.layout is torch.sparse_coo else tensor).untyped_storage()


class PretendedDevices(TorchDispatchMode):
    """Refuses operations across devices, and marks what operations on CUDA tensors return.

    Args:
        communicate: called as ``communicate(func, args)`` before every operation of a process
            group.
    """

    communicate: Any = None
    last = CPU  # the device of the last operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each call, for what is compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            PretendedDevices.communicate(func, args)
            return func(*args, **kwargs)
        tensors = [*tensors_in(*args, *kwargs.values())]
        device = _common_device(func, args, kwargs, tensors) if tensors else CPU
        asked = None if kwargs.get("device") is None else cuda(kwargs["device"])
        if (asked == CPU or not (tensors or asked)) and is_internal():
            if not tensors:
                last = PretendedDevices.last
                device = last if last.type == "cuda" else cuda()
        elif asked is not None and func is not aten._to_copy.default:  # that is up to `_to`
            device = asked
        if asked is not None:
            kwargs = {**kwargs, "device": CPU if asked.type == "cuda" else asked}
        generator = kwargs.get("generator")
        if generator is not None:
            # Down here a generator is another Python object than the one that was passed.
            source = _Generator.all.get(generator._cdata, generator).device.type
            if source != device.type:
                raise RuntimeError(
                    f"Expected a '{device.type}' device type for generator but found '{source}'"
                )
        result = func(*args, **kwargs)
        if func not in MOVES:
            PretendedDevices.last = device
            for made in tensors_in(result):
                place(made, device)
        return result


def _common_device(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> torch.device:
    """Where an operation takes place.

    Raises:
        RuntimeError: its tensors are on different devices, and PyTorch would not bring them
            together.
    """
    if len(devices := {device_of(tensor) for tensor in tensors}) == 1:  # nearly always
        return devices.pop()
    name = func.overloadpacket.__name__
    if name.rstrip("_") in INDEXING:
        for index in args[1]:
            if index is not None and device_of(index).type == "cuda" != device_of(args[0]).type:
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    f"({device_of(args[0])})"
                )
        tensors = [args[0], *tensors_in(*args[2:])]
    in_place = name.endswith("_") and not name.endswith("__")
    written = {id(x) for x in tensors_in(kwargs.get("out"), args[0] if in_place else ())}
    found = [device_of(tensor) for tensor in tensors]
    apart = {
        device
        for device, tensor in zip(found, tensors, strict=True)
        if device != CPU or tensor.dim() or id(tensor) in written
    }
    if "meta" in {device.type for device in apart}:
        return CPU  # has rules of its own
    if len(apart) > 1 and func not in MOVES:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, apart)))}! (when calling {func})"
        )
    return min(apart, key=lambda device: device.type != "cuda", default=CPU)


def is_internal() -> bool:
    """Whether it is C++ that calls here, from the inside of PyTorch's DDP or of autograd."""
    frame: Any = sys._getframe(1)
    while (file := frame.f_code.co_filename).startswith(os.path.dirname(__file__)) or (
        "_dynamo" in file or file.endswith("_python_dispatch.py")
    ):
        frame = frame.f_back
    return file.endswith(INTERNAL)


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.origin = device_of(tensor)
        if tensor.layout is torch.sparse_coo:
            parts = (_move(part, device) for part in (tensor._indices(), tensor._values()))
            return torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False)
        return torch.empty_like(tensor, device=device).copy_(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _move(grads[0], ctx.origin), None


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _Move.apply(tensor, device)


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], torch.Tensor):
        args = (device_of(args[0]), args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    here, there = device_of(self), device_of(self) if device is None else cuda(device)
    if there.type not in ("cpu", "cuda"):
        return real_to(self, there, dtype or self.dtype)
    result = self if dtype is None else real_to(self, dtype, non_blocking)
    if here != there:
        result = _move(result, there)
    if layout is not None:
        result = real_to(result, memory_format=layout)
    return result.clone() if copy and result is self else result


def _tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
    made = real_tensor(data, **kwargs)
    return _to(made, device or "cpu").requires_grad_(requires_grad)


def _host_only(name: str) -> Any:
    real = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(self)) != CPU:
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return real(self, *args, **kwargs)

    return read


class _Generator(torch.Generator):
    """A generator of the CPU that says it is of a GPU."""

    all: ClassVar[weakref.WeakValueDictionary[int, _Generator]] = weakref.WeakValueDictionary()

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made: _Generator = super().__new__(cls, "cpu")
        made.pretended = cuda(device)
        cls.all[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return self.pretended


def install() -> None:
    """Make this process's tensors know of the pretended devices, for good."""
    patches: dict[str, Any] = {
        "device": property(device_of),
        "is_cuda": property(lambda self: device_of(self).type == "cuda"),
        "is_cpu": property(lambda self: device_of(self).type == "cpu"),
        "get_device": lambda self: -1 if device_of(self) == CPU else device_of(self).index,
        "to": _to,
        "cpu": lambda self, **_: _to(self, CPU),
        "cuda": lambda self, device=None, **_: _to(self, cuda(device)),
        "new_tensor": lambda self, data, **kw: _tensor(data, **{"device": device_of(self), **kw}),
        "numpy": _host_only("numpy"),
        "__array__": _host_only("__array__"),
    }
    for name, value in patches.items():
        setattr(torch.Tensor, name, value)
    torch.tensor, torch.Generator = _tensor, _Generator
    _keep_marks_in_copies()
    _enter_on_every_thread()


def _keep_marks_in_copies() -> None:
    """Of storages: by ``copy.deepcopy``, and by ``torch.save`` and ``torch.load``."""
    clone = torch.UntypedStorage.clone

    def marked_clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return mark(clone(self), str(getattr(self, "pretended", "cpu")))

    def mark(storage: torch.UntypedStorage, where: str) -> torch.UntypedStorage | None:
        if not where.startswith("cuda"):
            return storage if where == "cpu" else None
        with torch.no_grad():
            place(torch.empty(0, dtype=torch.uint8).set_(storage), cuda(where))
        return storage

    def tag(storage: torch.UntypedStorage) -> str | None:
        return str(storage.pretended) if hasattr(storage, "pretended") else None

    torch.UntypedStorage.clone = marked_clone
    torch.serialization.register_package(1, tag, mark)


def _enter_on_every_thread() -> None:
    """Modes are of a thread: those of a pool need one of their own."""
    run = threading.Thread.run

    def run_pretending(self: threading.Thread) -> None:
        with PretendedDevices():
            run(self)

    threading.Thread.run = run_pretending
    PretendedDevices().__enter__()
