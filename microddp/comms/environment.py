"""A job's environment: torchrun's variables, and how long to wait for others."""

from __future__ import annotations

import os

from microddp.comms.collectives import DEFAULT_TIMEOUT

TORCHRUN_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TORCHRUN_VARIABLES = (*TORCHRUN_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


def patience(argument: float | None, default: float = DEFAULT_TIMEOUT) -> float:
    """Seconds to wait for other ranks: the argument, or ``MICRODDP_TIMEOUT``, or the default.

    Raises:
        ValueError: it is no positive number.
    """
    text = os.environ.get("MICRODDP_TIMEOUT", str(default))
    try:
        seconds = float(text) if argument is None else float(argument)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        source = "MICRODDP_TIMEOUT" if argument is None else "timeout"
        got = text if argument is None else argument
        raise ValueError(f"expected {source} to be a positive number of seconds, got {got!r}")
    return seconds


def torchrun_environment() -> dict[str, int]:
    """TORCHRUN_NUMBERS; those of a job of one where none is set.

    Raises:
        ValueError: variables are missing, no numbers, or contradict each other.
    """
    if not any(name in os.environ for name in TORCHRUN_NUMBERS):
        return {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"expected all of {', '.join(TORCHRUN_VARIABLES)}, as torchrun sets them; "
            f"missing: {', '.join(missing)}"
        )
    values = {}
    for name in (*TORCHRUN_NUMBERS, "MASTER_PORT"):
        try:
            values[name] = int(os.environ[name])
        except ValueError:
            raise ValueError(f"expected {name} to be a number, got {os.environ[name]!r}") from None
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if not 0 <= values[rank] < values[size]:
            raise ValueError(
                f"expected 0 <= {rank} < {size}, got {rank}={values[rank]}, {size}={values[size]}"
            )
    if values["LOCAL_WORLD_SIZE"] > values["WORLD_SIZE"]:
        raise ValueError(
            f"expected LOCAL_WORLD_SIZE <= WORLD_SIZE, got {values['LOCAL_WORLD_SIZE']} and "
            f"{values['WORLD_SIZE']}"
        )
    if not 0 <= values["MASTER_PORT"] < 2**16:
        raise ValueError(f"expected a port as MASTER_PORT, got {values['MASTER_PORT']}")
    return values


def attempt(rank: int) -> str:
    """Name this start of the job, where torchrun gives all starts the same store.

    Several torchruns have no such name in common, since each counts its own restarts (PyTorch
    135712): ranks would wait for each other in different places.

    Raises:
        ValueError: several torchruns restart ranks, and share a store.
    """
    told = os.environ.get
    if told("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "0"  # the store is as new as the start
    agents = int(told("GROUP_WORLD_SIZE", "1"))
    restarts = int(told("TORCHELASTIC_MAX_RESTARTS", "0"))
    if agents > 1 and restarts > 0:
        raise ValueError(
            f"rank {rank}: expected TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node, for "
            f"--max-restarts={restarts} with {agents} of them, got a store that all starts share"
        )
    return told("TORCHELASTIC_RESTART_COUNT", "0")
