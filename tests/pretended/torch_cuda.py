"""The rest of ``torch.cuda`` on a pretended machine: devices, events, streams, memory."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from pretended.devices import cuda, machine


class Event:
    """A moment of the host's clock: on a pretended device all work is done when a call returns."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.seconds: float | None = None

    def record(self, _stream: Stream | None = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.seconds is None or end.seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end.seconds - self.seconds) * 1e3

    def synchronize(self) -> None:
        pass

    wait = synchronize

    def query(self) -> bool:
        return True


class Stream:
    """A queue that is always empty."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = cuda(device)

    def synchronize(self) -> None:
        cuda(self.device)

    def wait_stream(self, _: Stream) -> None:
        pass

    def wait_event(self, _: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


def set_device(device: Any) -> None:
    machine.current = cuda(device).index


@contextmanager
def on_device(device: Any) -> Any:
    before, machine.current = machine.current, cuda(device).index
    try:
        yield
    finally:
        machine.current = before


@contextmanager
def on_stream(_: Stream | None) -> Any:
    yield


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=f"pretended GPU {cuda(device).index}",
        total_memory=machine.memory,
        multi_processor_count=1,
        major=8,
        minor=0,
    )


def install() -> None:
    """Fill ``torch.cuda`` and what knows of it, for good."""
    stubs: dict[str, Any] = {
        "is_available": lambda: machine.gpus > 0,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: machine.gpus,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "device": on_device,
        "synchronize": lambda device=None: cuda(device) and None,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda *_: (8, 0),
        "is_bf16_supported": lambda *_: True,
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "memory_allocated": lambda device=None: machine.allocated.get(cuda(device).index, 0),
        "memory_reserved": lambda device=None: machine.allocated.get(cuda(device).index, 0),
        "max_memory_allocated": lambda device=None: machine.peak.get(cuda(device).index, 0),
        "max_memory_reserved": lambda device=None: machine.peak.get(cuda(device).index, 0),
        "reset_peak_memory_stats": lambda device=None: machine.peak.update(
            {(i := cuda(device).index): machine.allocated.get(i, 0)}
        ),
        "mem_get_info": lambda device=None: (
            machine.memory - machine.allocated.get(cuda(device).index, 0),
            machine.memory,
        ),
        "empty_cache": lambda: None,
        # One generator serves all: torch.manual_seed seeds it.
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
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
    computes = event.name.startswith("aten::") and not event.cpu_children
    return computes or event.name.startswith("gloo:")


def _kernel(event: FunctionEvent) -> FunctionEvent:
    kernel = copy.copy(event)
    kernel.device_type, kernel.linked_correlation_id = DeviceType.CUDA, event.id
    kernel.cpu_parent, kernel.is_user_annotation = None, False
    _, collective, what = event.name.partition("gloo:")
    words = what.title().replace("_", "") if collective else "elementwise"
    kernel.name = f"ncclDevKernel_{words}" if collective else words
    return kernel
