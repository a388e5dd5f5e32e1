"""What a check works with: the ranks, the reader's functions, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from microddp.comms import Comms, Message, MessageCounter
from microddp.hang import torch_calls
from microddp.replicas import tensor_digest


class Wrong(Exception):
    """A check does not hold.

    Args:
        expected: in words.
        got: in words.
        mistake: what is probably the reason, in a sentence or two; empty if it is not known.
    """

    def __init__(self, expected: str, got: str, mistake: str = "") -> None:
        super().__init__(f"expected {expected}, got {got}. {mistake}".strip())
        self.expected, self.got, self.mistake = expected, got, mistake


@dataclass(frozen=True)
class Collective:
    """A collective that PyTorch's own recorder has seen, whoever called it and however.

    Attributes:
        name: the backend's: ``"all_reduce"``. gloo's reduce-scatter is several of these.
        nbytes: of this rank's input.
        created: when it was called, nanoseconds since 1970.
    """

    name: str
    nbytes: int
    created: int


@dataclass
class Seen:
    """What a rank sent while it was watched; filled when the block is over.

    Attributes:
        messages: from this rank to another one.
        collectives: in the order of their calls, barriers left out.
    """

    messages: list[Message] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        """Payload of the messages, bytes."""
        return sum(message.nbytes for message in self.messages)


class Bench:
    """What a check gets, on each rank.

    Args:
        comms: all ranks of the job.
        work: the reader's script.
        folder: of the check that is run; a job that is started again finds it as it was.
        die: kills this process. All processes of the job are ended then, and the check is begun
            again by new ones; what the others raise meanwhile counts only if it is :class:`Wrong`.
            All ranks must have come to the check before, so let them meet first.

    Attributes:
        doing: what the check is about to do, in words, to be told with an error of the script's.
        life: of the check that is run: how often it has let a process die.
        claims: what must be the same on every rank, with the sentence to say if it is not. The
            process that started the ranks compares it, when all are through a check.
    """

    def __init__(self, comms: Comms, work: Any, folder: Path, die: Callable[[], NoReturn]) -> None:
        self.comms = comms
        self.work = work
        self.folder = folder
        self.die = die
        self.life = 0
        self.doing = ""
        self.rank = comms.rank
        self.n = comms.world_size
        self.claims: dict[str, tuple[str, str]] = {}

    def values(self, size: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
        """What a rank brings to a check: small whole numbers, so that any order of adding is exact.

        Args:
            size: how many.
            rank: whose; this one's by default.
            seed: another one for other numbers.
        """
        rank = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randint(-50, 50, (size,), generator=generator).float()

    def expect(self, right: bool, expected: str, got: object, mistake: str = "") -> None:
        """Go on if it is right.

        Raises:
            Wrong: it is not; for the arguments see there.
        """
        if not right:
            raise Wrong(expected, str(got), mistake)

    def near(
        self,
        got: torch.Tensor,
        expected: torch.Tensor,
        what: str,
        mistakes: Mapping[str, torch.Tensor] | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-6,
    ) -> None:
        """Go on if two tensors agree.

        Args:
            got: the reader's.
            expected: the right one.
            what: the tensor in words, with its article.
            mistakes: what some mistakes would have given, by the sentences that name them.
            rtol: relative tolerance.
            atol: absolute tolerance.

        Raises:
            Wrong: they do not; with the mistake that gives ``got``, if it is a known one.
        """
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            kind = f"{tuple(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
            raise Wrong(f"{what} of shape {tuple(expected.shape)}", kind)
        if got.dtype != expected.dtype:
            raise Wrong(f"{what} of {expected.dtype}", f"{got.dtype}")

        def agrees(other: torch.Tensor) -> bool:
            alike = got.shape == other.shape
            return alike and torch.allclose(got, other, rtol=rtol, atol=atol, equal_nan=True)

        if agrees(expected):
            return
        mistake = next((text for text, wrong in (mistakes or {}).items() if agrees(wrong)), "")
        first = int((got != expected).flatten().nonzero()[0])
        apart = (got.double() - expected.double()).abs().max().item()
        rounded = apart < 1e-6 * expected.double().abs().max().item()
        if not mistake and rounded and expected.dtype == torch.float64:
            mistake = (
                "So small a difference comes from float32: something was computed in it, such as "
                "a number divided by a tensor of integers. Use float64, or .item()."
            )
        where = f" from value {first} on" if first else ""
        raise Wrong(
            f"{what}: {_few(expected.flatten()[first:])}",
            f"{_few(got.flatten()[first:])}{where}; the largest difference is {apart:.2g}",
            mistake,
        )

    def same(self, what: str, value: object, mistake: str = "") -> None:
        """Claim that a value is the same on every rank, which is compared after the check.

        Args:
            what: it is, in words.
            value: its ``str`` is compared; of a tensor, its bits.
            mistake: the sentence to say if it differs.
        """
        if isinstance(value, torch.Tensor):
            value = tensor_digest(value)
        self.claims[what] = (str(value), mistake)

    @contextmanager
    def seen(self) -> Iterator[Seen]:
        """Count what this rank sends in the block, with whatever function."""
        seen, before = Seen(), {call["record_id"] for call in torch_calls() or ()}
        with MessageCounter(self.comms) as counter:
            yield seen
        seen.messages = counter.messages
        for call in torch_calls() or ():
            if call["record_id"] not in before and not call["is_p2p"]:
                name = call["profiling_name"].partition(":")[2]
                if name != "barrier":
                    nbytes = _nbytes(call["input_sizes"], call["input_dtypes"])
                    seen.collectives.append(Collective(name, nbytes, call["time_created_ns"]))


# By the names that PyTorch's recorder has for dtypes.
ITEM_BYTES = {
    dtype: nbytes
    for nbytes, dtypes in {
        1: ("Bool", "Byte", "Char"),
        2: ("BFloat16", "Half", "Short"),
        4: ("Float", "Int"),
        8: ("ComplexFloat", "Double", "Long"),
        16: ("ComplexDouble",),
    }.items()
    for dtype in dtypes
}


def _nbytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    numels = [torch.Size(size).numel() for size in sizes]
    return sum(n * ITEM_BYTES[dtype] for n, dtype in zip(numels, dtypes, strict=True))


def _few(values: torch.Tensor) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4].tolist())
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
