"""The rest of ``torch.cuda`` on a pretended machine: devices, events, streams, memory."""

from __future__ import annotations

import copy
import os
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from pretended.devices import cuda, machine


def _nothing(*_: Any, **__: Any) -> None:
    """What takes a GPU time: here all is done when a call returns."""


class Event:
    """A moment of the host's clock."""

    synchronize = wait = _nothing

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.seconds: float | None = None

    def record(self, _stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.seconds is None or end.seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end.seconds - self.seconds) * 1e3


class Stream:
    """A queue that is always empty."""

    synchronize = wait_stream = wait_event = record_event = _nothing

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = cuda(device)


def set_device(device: Any) -> None:
    machine.current = cuda(device).index


@contextmanager
def on_device(device: Any) -> Any:
    before, machine.current = machine.current, cuda(device).index
    try:
        yield
    finally:
        machine.current = before


def properties(device: Any = None) -> SimpleNamespace:
    index = cuda(device).index
    # All pretended machines have one host name.
    number = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return SimpleNamespace(
        name=f"pretended GPU {index}",
        uuid=f"{number}-{index}",
        total_memory=machine.memory,
        major=8,
        minor=0,
    )


def allocated(device: Any = None) -> int:
    return machine.allocated.get(cuda(device).index, 0)


def peak(device: Any = None) -> int:
    return machine.peak.get(cuda(device).index, 0)


STUBS: dict[str, Any] = {
    "is_available": lambda: machine.gpus > 0,
    "is_initialized": lambda: True,
    "_lazy_init": _nothing,
    "device_count": lambda: machine.gpus,
    "current_device": lambda: machine.current,
    "set_device": set_device,
    "device": on_device,
    "synchronize": lambda device=None: cuda(device) and None,
    "get_device_properties": properties,
    "get_device_name": lambda device=None: properties(device).name,
    "get_device_capability": lambda *_: (8, 0),
    "is_bf16_supported": lambda *_: True,
    "Event": Event,
    "Stream": Stream,
    "stream": nullcontext,
    "current_stream": Stream,
    "default_stream": Stream,
    "memory_allocated": allocated,
    "memory_reserved": allocated,
    "max_memory_allocated": peak,
    "max_memory_reserved": peak,
    "reset_peak_memory_stats": lambda device=None: machine.peak.update(
        {cuda(device).index: allocated(device)}
    ),
    "mem_get_info": lambda device=None: (machine.memory - allocated(device), machine.memory),
    "empty_cache": _nothing,
    # One generator serves all: torch.manual_seed seeds it.
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}


def install() -> None:
    """Fill ``torch.cuda`` and what knows of it, for good."""
    for name, stub in STUBS.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    # An optimizer of torch 2.15 asks it for a stream, which a CUDA build without a driver refuses.
    torch.accelerator.current_accelerator = lambda check_available=False: None  # noqa: ARG005
    _futures_without_devices()
    _autocast_on_cpu()
    _profile_on_cpu()


def _futures_without_devices() -> None:
    """A CPU build has no streams that the callbacks of a future could wait for."""
    init = torch.futures.Future.__init__

    def future(self: torch.futures.Future[Any], *, devices: Any = None) -> None:
        if any(cuda(device).type == "cpu" for device in devices or ()):
            raise ValueError(f"Expected devices other than the CPU, got {devices}")
        init(self)

    torch.futures.Future.__init__ = future


def _autocast_on_cpu() -> None:
    """Autocast of CUDA takes the tensors as what they are."""
    init = torch.autocast.__init__

    def autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = autocast


def _profile_on_cpu() -> None:
    """Without CUDA's own tracer an operation that is made of no other one counts as a kernel."""
    init, events = _KinetoProfile.__init__, _KinetoProfile.events

    def profile(self: _KinetoProfile, *, activities: Any = None, **kwargs: Any) -> None:
        init(self, activities=set(activities or ()) - {ProfilerActivity.CUDA} or None, **kwargs)
        self.with_kernels = ProfilerActivity.CUDA in (activities or ())

    def with_kernels(self: _KinetoProfile) -> Any:
        found = events(self)
        return [*found, *map(_kernel, filter(_launches, found))] if self.with_kernels else found

    _KinetoProfile.__init__, _KinetoProfile.events = profile, with_kernels


def _launches(event: FunctionEvent) -> bool:
    if event.name.startswith("gloo:"):
        return dist.get_backend() == "nccl"
    return event.name.startswith("aten::") and not event.cpu_children


def _kernel(event: FunctionEvent) -> FunctionEvent:
    kernel = copy.copy(event)
    kernel.device_type, kernel.linked_correlation_id = DeviceType.CUDA, event.id
    kernel.cpu_parent, kernel.is_user_annotation = None, False
    if event.name.startswith("gloo:"):  # "gloo:all_reduce"
        what = event.name.removeprefix("gloo:").title().replace("_", "")
        kernel.name = f"ncclDevKernel_{what}"
    return kernel
