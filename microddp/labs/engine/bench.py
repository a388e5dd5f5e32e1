"""The workbench of a check: the ranks, the reader's functions, and a count of what they send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from microddp.comms import Comms, name_ranks, odd_ranks
from microddp.hang import torch_calls
from microddp.message_counter import Message, MessageCounter
from microddp.replicas import tensor_digest


class Wrong(Exception):
    """A check does not hold.

    Args:
        expected: the right result, in words.
        got: the reader's result, in words.
        mistake: the likely reason, in a sentence or two; empty if unknown.
    """

    def __init__(self, expected: str, got: str, mistake: str = "") -> None:
        super().__init__(f"expected {expected}, got {got}. {mistake}".strip())
        self.expected, self.got, self.mistake = expected, got, mistake


@dataclass(frozen=True)
class Collective:
    """A collective that PyTorch's own recorder has seen, whoever called it and however.

    Attributes:
        name: the backend's: ``"all_reduce"``. gloo's reduce-scatter is several of these.
        nbytes: size of this rank's input.
        created: time of the call, nanoseconds since 1970.
    """

    name: str
    nbytes: int
    created: int


@dataclass
class Seen:
    """A rank's messages and collectives while it was watched; filled when the block is over.

    Attributes:
        messages: from this rank to another one.
        collectives: in the order of their calls, without barriers.
    """

    messages: list[Message] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        """Payload of the messages, bytes."""
        return sum(message.nbytes for message in self.messages)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each collective's input, in order."""
        return [call.nbytes for call in self.collectives]

    @property
    def nbytes(self) -> int:
        """Bytes of all messages and of all collectives' inputs."""
        return sum(self.sizes) + self.sent_bytes


class Bench:
    """The workbench of a check, one on each rank.

    Args:
        comms: all ranks of the job.
        work: the reader's script, as a module.
        folder: a folder of the check under way, kept when its job is started again.
        die: kills this process. All processes of the job are ended then, and new ones begin the
            check again; errors that other ranks raise meanwhile count only if they are
            :class:`Wrong`. All ranks must have begun the check, so let them pass a barrier first.

    Attributes:
        doing: the next thing the check does, in words; shown with an error of the script's.
        life: how often the check under way has let a process die.
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

    def values(self, size: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
        """Return a rank's input: small whole numbers, whose sums are exact in any order of adding.

        Args:
            size: number of values.
            rank: whose input; this rank's by default.
            seed: another one for other numbers.
        """
        rank = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randint(-50, 50, (size,), generator=generator).float()

    def everyones(self, size: int, seed: int = 0) -> torch.Tensor:
        """Return :meth:`values` of all ranks, shape (ranks, size)."""
        return torch.stack([self.values(size, rank, seed) for rank in range(self.n)])

    def rounded(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a rank's input whose sum is rounded otherwise in another order of adding."""
        generator = torch.Generator().manual_seed(self.rank)
        return torch.randn(size, generator=generator, dtype=dtype).mul_(10 ** (self.rank % 3))

    def expect(self, right: bool, expected: str, got: object, mistake: str = "") -> None:
        """Expect that something holds.

        Args:
            right: whether it holds.
            expected: the right result, in words.
            got: the reader's result.
            mistake: the likely reason, if it does not hold.

        Raises:
            Wrong: it does not hold.
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
        """Expect that two tensors agree.

        Args:
            got: the reader's.
            expected: the right one.
            what: the tensor in words, with its article.
            mistakes: by the sentence that names a mistake, the tensor that it would give.
            rtol: relative tolerance.
            atol: absolute tolerance.

        Raises:
            Wrong: they do not; with the first mistake that gives ``got``.
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

    def same(self, what: str, tensor: torch.Tensor, mistake: str = "") -> None:
        """Expect that a tensor has the same bits on every rank. A collective.

        Args:
            what: the tensor in words, with its article.
            tensor: this rank's.
            mistake: the likely reason, if ranks differ.

        Raises:
            Wrong: on every rank: they do.
        """
        digests = self.comms.all_gather_data(tensor_digest(tensor))
        _, odd = odd_ranks(digests)
        alike = name_ranks(rank for rank in range(self.n) if rank not in odd)
        got = f"another one on {name_ranks(odd)} than on {alike}"
        self.expect(not odd, f"{what}, the same on every rank", got, mistake)

    @contextmanager
    def seen(self) -> Iterator[Seen]:
        """Count what this rank sends in the block, with whatever function."""
        seen, before = Seen(), {call["record_id"] for call in torch_calls() or ()}
        with MessageCounter(self.comms) as counter:
            yield seen
        seen.messages = counter.messages
        for call in torch_calls() or ():
            name = call["profiling_name"].partition(":")[2]
            if call["record_id"] not in before and not call["is_p2p"] and name != "barrier":
                nbytes = _nbytes(call["input_sizes"], call["input_dtypes"])
                seen.collectives.append(Collective(name, nbytes, call["time_created_ns"]))

    @contextmanager
    def noting(self, *sentences: str) -> Iterator[None]:
        """Add sentences to an error that the block raises."""
        try:
            yield
        except Exception as error:
            error.add_note("\n".join(sentences))
            raise

    def only_messages(self, seen: Seen, expected: str, mistake: str) -> None:
        """Expect that none of PyTorch's own collectives was called."""
        names = ", ".join(sorted({call.name for call in seen.collectives}))
        self.expect(not names, expected, f"PyTorch's own {names}", mistake)


# By dtype, as PyTorch's recorder names it.
ITEM_BYTES = {"Bool": 1, "Byte": 1, "Char": 1, "BFloat16": 2, "Half": 2, "Short": 2}
ITEM_BYTES |= {"Float": 4, "Int": 4, "ComplexFloat": 8, "Double": 8, "Long": 8, "ComplexDouble": 16}


def _nbytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    numels = [torch.Size(size).numel() for size in sizes]
    return sum(n * ITEM_BYTES[dtype] for n, dtype in zip(numels, dtypes, strict=True))


def digits(value: float, n: int, expected: str) -> list[int]:
    """Return what each of ``n`` ranks has in a sum in which rank r's unit is 100 to the power r.

    Raises:
        Wrong: with ``expected``: the sum is no number.
    """
    if not math.isfinite(value):
        raise Wrong(expected, str(value))
    return [int(value // 100.0**rank % 100) for rank in range(n)]


def _few(values: torch.Tensor) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4].tolist())
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
