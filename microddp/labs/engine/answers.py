"""The ranks' answers to a question about a job, which they must decide together (labs 08, 12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from microddp.comms import Comms
from microddp.labs.engine.bench import Bench

GATHER = "Gather the times of all, and let every rank decide by the same."


def longer(bench: Bench, seconds: Mapping[str, float], times: float) -> dict[str, float]:
    """Return this rank's seconds of each part, if the last rank works so many times as long."""
    factor = times if bench.rank == bench.n - 1 else 1.0
    return {part: factor * usual for part, usual in seconds.items()}


def answers(bench: Bench, function: Callable[[Any, Comms], object], job: object) -> list[Any]:
    """Return each rank's answer of a reader's function; what is no number or text, in words."""
    bench.comms.debug = True  # a rank that decides otherwise makes other calls: compare them
    try:
        answer = function(job, bench.comms)
        bench.comms.barrier()
    except RuntimeError as error:
        _, disagree, calls = str(error).partition("the ranks disagree: ")
        otherwise = "The ranks called something else, perhaps because they decided by different "
        mistake = f"{otherwise}numbers. {GATHER}"
        bench.expect(not disagree, "the same calls on every rank", calls, mistake)
        raise
    finally:
        bench.comms.debug = False
    plain = answer is None or isinstance(answer, int | str)
    return bench.comms.all_gather_data(answer if plain else repr(answer))


def expect_all(bench: Bench, given: Sequence[object], right: object, mistake: str) -> None:
    """Expect the right answer of every rank; ``mistake`` is of those that give the same one."""
    alike = len(set(given)) == 1
    each = "; ".join(f"{answer!r} on rank {rank}" for rank, answer in enumerate(given))
    bench.expect(
        given == [right] * bench.n,
        f"{right!r} on every rank",
        repr(given[0]) if alike else each,
        mistake if alike else f"The ranks decided by different numbers. {GATHER}",
    )
