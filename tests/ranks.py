"""Jobs of real processes: a function run on every rank of a group, bounded in time."""

import contextlib
import functools
import io
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import microddp
from microddp import launch

WORLD_SIZES = (1, 2, 3, 4, 5)


def on_ranks(*world_sizes: int, **options: Any) -> Callable[..., Any]:
    """Make a function of ``comms`` a test that runs on every rank, once for each world size.

    Options are those of :func:`run`. Without world sizes: 1 to 5.
    """

    def decorate(body: Callable[[microddp.Comms], object]) -> Callable[[int], None]:
        @pytest.mark.parametrize("world_size", world_sizes or WORLD_SIZES)
        def test(world_size: int) -> None:
            run(test, world_size, **options)

        names = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(test, body, assigned=names, updated=())
        del test.__wrapped__  # pytest would ask for its arguments
        test.body = body  # what the ranks run, once they have found the test by its name
        return test

    return decorate


def run(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    join: bool = True,
    dies: Sequence[int] = (),
    timeout: float = 120.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """The results of ``function(comms, *arguments)`` on every rank of a fresh job, in rank order.

    With ``join=False`` the ranks have not called ``microddp.init()``, and ``function`` gets no
    ``comms``. For the rest see :func:`microddp.launch.run`.
    """
    start_server()
    return launch.run(
        *(_be_a_rank, world_size, join, function, *arguments),
        limit=timeout,
        environment={"MICRODDP_TIMEOUT": "30", **(environment or {})},
        dies=dies,
        values=True,  # since pytest rewrites no assertions over there
    )


def _be_a_rank(join: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    warnings.simplefilter("error")
    torch.manual_seed(0)  # the state that a rank inherits differs from run to run
    body = getattr(function, "body", function)
    if not join:
        return body(*arguments)
    _wait_until_all_started()
    comms = microddp.init()
    result = body(comms, *arguments)
    comms.close()
    return result


def run_module(name: str, ranks: int, *arguments: object, timeout: float = 120.0) -> str:
    """What rank 0 prints of ``torchrun -m name arguments``, with ranks that are forked."""
    return run(be_the_module, ranks, name, *map(str, arguments), join=False, timeout=timeout)[0]


def be_the_module(name: str, *arguments: str) -> str:
    """What a rank prints as ``torchrun -m name arguments`` would have it run."""
    torch.set_num_threads(1)  # as torchrun has it
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_module(name, run_name="__main__")
    return said.getvalue()


def _wait_until_all_started() -> None:
    """A test with a short time-out measures that, not how long a busy machine takes to start."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if store.add("started", 1) == int(os.environ["WORLD_SIZE"]):
        store.set("all started", "")
    store.wait(["all started"])


@functools.cache
def start_server() -> None:
    """Start what ranks are forked from, with this folder to import from, as it is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        launch.start_server("preloaded")


def free_address() -> str:
    """An address of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def gpus(count: int) -> dict[str, str]:
    """The ``environment`` of a job that sees so many of the GPUs that conftest.py hides."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(os.environ["GPUS_FOR_TESTS"].split(",")[:count])}


@functools.cache
def gpu_count(most: int) -> int:
    """How many GPUs a rank finds that may see so many."""
    return run(torch.cuda.device_count, 1, join=False, environment=gpus(most))[0]
