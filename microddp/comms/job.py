"""Joining a job: from the environment that ``torchrun`` sets up to a :class:`~microddp.Comms`."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions take the group of all ranks as default: imported later, as any optimizer does, they
# would keep the group, with its threads, alive after close().
import torch.distributed.nn
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from microddp.comms import calls
from microddp.comms.collectives import Comms
from microddp.comms.environment import attempt, patience, torchrun_environment
from microddp.comms.identity import most_rounds
from microddp.comms.machine import cpu_cores, end_with_parent, schedule_as_batch

_joined = itertools.count()
_formed: weakref.ref[dist.ProcessGroup] | None = None  # the group that was made here, if it is left


def init(backend: str | None = None, timeout: float | None = None) -> Comms:
    """Join the job that ``torchrun`` started; without torchrun, be a job of one rank.

    Where somebody else has called ``torch.distributed.init_process_group()`` in this process, as
    ``nbdistributed`` does in a notebook's workers, join that group, and leave it to them to end it.

    Ranks compute on their own GPU over NCCL where there is one for each, all on the GPUs there are
    over gloo where there are fewer, and on CPU over gloo where there is none. It does not matter
    whether a rank sees all GPUs of its machine or, as under Slurm, its own only. On CPU every rank
    gets its share of the cores as threads, or as many as ``OMP_NUM_THREADS`` says.

    Args:
        backend: ``"gloo"`` or ``"nccl"`` instead of that choice.
        timeout: seconds to wait for the other ranks, in each operation. Default:
            ``MICRODDP_TIMEOUT``, or 300. :class:`~microddp.Comms` says what happens then. A
            group that is there already keeps its own.

    Raises:
        ValueError: the environment is incomplete or contradicts itself, the time-out or
            ``MICRODDP_ROUNDS`` is not a positive number, the backend is unknown, or
            ``MICRODDP_RECORD`` names no folder that can be written to.
        RuntimeError: called a second time, the backend is not built or lacks a device, the other
            ranks could not be reached in time, or the group that is there has another backend.
    """
    seconds = patience(timeout)
    most_rounds()  # an error of the environment's is told before there is anything to close
    if dist.is_initialized():
        if _formed is not None and _formed() is dist.group.WORLD:
            raise RuntimeError(
                f"rank {dist.get_rank()}: microddp.init() was called before in this process; "
                "close the first Comms, or pass it on"
            )
        return _join_group(backend)
    environment = torchrun_environment()
    rank, world_size = environment["RANK"], environment["WORLD_SIZE"]
    local_rank, local_world_size = environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]
    if backend:
        _check_built(backend, rank)
    under_torchrun, start = "RANK" in os.environ, attempt(rank)
    store: Store = HashStore()
    try:
        if under_torchrun:
            limit = timedelta(seconds=seconds)
            store, *_ = next(rendezvous("env://", rank, world_size, timeout=limit))
        # A second job of these processes must not read the addresses of the first, nor ranks that
        # torchrun has restarted those of the dead.
        store = PrefixStore(f"microddp-{start}-{next(_joined)}", store)
        comms = form_group(
            store, rank, world_size, local_rank, local_world_size, backend=backend, timeout=seconds
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RuntimeError(
            f"rank {rank}: expected {world_size} ranks to meet at {where} within {seconds:g} s, "
            f"got: {error}"
        ) from error
    if comms.backend == "gloo":
        atexit.register(comms.end)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if not under_torchrun:
        script = getattr(sys.modules["__main__"], "__file__", None)  # not in a notebook
        name = os.path.relpath(script) if script else "script.py"
        comms.print(f"microddp: one rank. For more: torchrun --nproc-per-node=4 {name}")
    return comms


def _join_group(backend: str | None) -> Comms:
    """The ``Comms`` of the group of all ranks that somebody else has made."""
    device, group = torch.device("cpu"), dist.group.WORLD
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        # To bind a group to a device, as init_process_group can, makes it no current one.
        bound = group and group.bound_device_id
        device = bound or torch.device("cuda", torch.cuda.current_device())
    calls.start(dist.get_rank(), dist.get_world_size(), answers=True)
    comms = Comms.of_group(None, device)  # which keeps the record that it finds
    if backend not in (None, comms.backend):
        raise RuntimeError(
            f"rank {comms.rank}: expected a group with backend {backend!r}, got one with "
            f"{comms.backend!r}, which was made before"
        )
    _prepare(comms.local_world_size, device)
    if comms.backend == "gloo" and comms.world_size > 1:
        schedule_as_batch()
    return comms


def _prepare(local_world_size: int, device: torch.device) -> None:
    """Set this rank's GPU; on CPU its threads: its share of the cores, or ``OMP_NUM_THREADS``.

    Where a machine has several ranks torchrun sets that to 1 itself: then it says nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0 and (wanted != "1" or local_world_size == 1):
        torch.set_num_threads(int(wanted))
    else:
        torch.set_num_threads(max(1, cpu_cores() // local_world_size))


def form_group(
    store: Store,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    *,
    backend: str | None,
    timeout: float,
) -> Comms:
    """The group of all processes that share a store, with this process's device and threads set.

    Args:
        store: that nothing else is kept in.
        rank, world_size, local_rank, local_world_size: as torchrun's.
        backend: ``None``: NCCL if no two ranks share a GPU, else gloo.
        timeout: seconds to wait for the others, here and in each operation.

    Raises:
        ValueError: ``MICRODDP_RECORD`` names no folder that can be written to.
        RuntimeError: the others could not be reached in time, or the backend lacks a device.
    """
    global _formed
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    calls.start(rank, world_size, answers=True)
    _prepare(local_world_size, device)
    backend = _choose_backend(backend, store, rank, world_size, device)
    if backend == "gloo" and world_size > 1:
        schedule_as_batch()
    # A try before that failed has counted on: its ranks would look in other places of the store.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout),
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if backend == "nccl" else None,
    )
    assert dist.group.WORLD is not None
    _formed = weakref.ref(dist.group.WORLD)
    comms = Comms(dist.group.WORLD, device, local_rank, local_world_size, timeout)
    try:
        # A rank that left at once would break the connections that others are still making.
        comms.barrier()
    except RuntimeError:
        comms.close()
        raise
    return comms


def _check_built(backend: str, rank: int) -> None:
    known = ["gloo", "nccl"]
    if backend not in known:
        raise ValueError(f"rank {rank}: expected backend in {known}, got {backend!r}")
    built = [name for name in known if dist.is_backend_available(name)]
    if backend not in built:
        version = torch.__version__
        raise RuntimeError(
            f"rank {rank}: this torch ({version}) is built without {backend}; it has {built}"
        )


def _choose_backend(
    backend: str | None, store: Store, rank: int, world_size: int, device: torch.device
) -> str:
    """The backend, the same on every rank: NCCL, unless told otherwise, if no two share a GPU.

    How many GPUs a rank sees does not tell. So each says in the store which one it takes.
    """
    if backend == "gloo":
        return backend
    mine = ""
    if device.type == "cuda":
        # The index too, for drivers that know no number of a GPU.
        uuid = torch.cuda.get_device_properties(device).uuid
        mine = f"{socket.gethostname()} {uuid} {device.index}"
    store.set(f"gpu of {rank}", mine)
    taken = store.multi_get([f"gpu of {other}" for other in range(world_size)])
    different = len(set(taken) - {b""})
    if different == world_size:
        _check_built("nccl", rank)
        return "nccl"
    if backend == "nccl":
        raise RuntimeError(
            f"rank {rank}: NCCL needs a GPU for each rank, expected {world_size}, got {different}; "
            "use backend='gloo' to share"
        )
    return "gloo"
