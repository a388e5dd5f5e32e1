"""Compressors by name, as command lines take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.comms import Comms
from microddp.compression.compressor import Compressor
from microddp.compression.feedback import Compression, compress_hook
from microddp.compression.power_sgd import PowerSGD
from microddp.compression.quantised import Half, Int8, Sign
from microddp.compression.sparse import RandomK, TopK
from microddp.ddp import DDP
from microddp.step import Strategy


def share_or_number(text: str) -> float:
    """Read ``"0.01"`` as a fraction and ``"100"`` as a number, or raise ``ValueError``."""
    number = float(text) if "." in text else int(text)
    if number <= 0 or (isinstance(number, float) and number > 1):
        raise ValueError
    return number


def rank(text: str) -> int:
    """Read the number of columns of a factor, from 1 on, or raise ``ValueError``."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


# name: how its number is called, and what makes a compressor of that number's text.
WITH_NUMBER: dict[str, tuple[str, Callable[[str], Compressor]]] = {
    "top-k": ("K", lambda text: TopK(share_or_number(text))),
    "random-k": ("K", lambda text: RandomK(share_or_number(text))),
    "power": ("RANK", lambda text: PowerSGD(rank(text))),
}
COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "int8": Int8,
    "sign": Sign,
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
}
NAMES = ", ".join(
    [*(f"{name}:{number}" for name, (number, _) in WITH_NUMBER.items()), *COMPRESSORS]
)


def compressor(name: str) -> Compressor:
    """Make a compressor by its name.

    Args:
        name: ``top-k:K`` or ``random-k:K``, with K a fraction as 0.01 or a number of values of each
            bucket; ``power:RANK``; ``int8``, ``sign``, ``fp16`` or ``bf16``.

    Raises:
        ValueError: there is no compressor of that name.
    """
    kind, colon, number = name.partition(":")
    if name in COMPRESSORS:
        return COMPRESSORS[name]()
    try:
        if colon:
            return WITH_NUMBER[kind][1](number)
    except (KeyError, ValueError):
        pass
    raise ValueError(
        f"expected one of {NAMES}, with a fraction K up to 1.0 or a whole number, got {name!r}"
    )


def hook(
    name: str, comms: Comms
) -> tuple[Compression, Callable[[Compression, Any], torch.futures.Future[torch.Tensor]]]:
    """Make a communication hook that compresses with error feedback. A collective.

    Args:
        name: see :func:`compressor`.
        comms: the ranks that average; all of them call this. The hook gets a group of its own,
            since it communicates from a thread while the ranks may use ``comms``.

    Returns:
        The hook's state and the hook, the two arguments of ``register_comm_hook``.

    Raises:
        ValueError: there is no such compressor.

    Example:
        >>> ddp.register_comm_hook(*hook("top-k:0.01", comms))
    """
    made = compressor(name)
    own = comms.subgroup(range(comms.world_size))
    assert own is not None  # every rank is a member
    return Compression(made, own), compress_hook


def compress(strategy: Strategy, name: str) -> None:
    """Let a strategy compress its gradients from now on. A collective.

    Args:
        strategy: its module is microddp's or PyTorch's DDP.
        name: see :func:`compressor`.

    Raises:
        ValueError: there is no compressor of that name, or the module is no such wrapper.
    """
    if not isinstance(strategy.module, (DDP, TorchDDP)):
        raise ValueError(
            f"rank {strategy.comms.rank}: expected a wrapper to compress what it sends, got "
            f"{type(strategy).__name__}"
        )
    compression, function = hook(name, strategy.comms)
    strategy.module.register_comm_hook(compression, function)  # refused if there is one
    strategy.compression = compression
