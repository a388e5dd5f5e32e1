"""State in parts: what each of any number of ranks keeps, by the names of parameters, or the whole.

And the norm of gradients that are in parts.

A rank's state is a part of each parameter that it has something of, and of what an optimizer keeps
for that: where it begins, and the values. The whole state of one process is that of a rank that
has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from microddp.comms import Comms

Parts = dict[str, dict[str, Any]]
VALUES = "parameter"  # beside the names of what an optimizer keeps, such as "exp_avg"


@dataclass(eq=False)
class Piece:
    """Values of a parameter that follow each other, and that a rank keeps.

    Attributes:
        name: of the parameter.
        shape: of all of it.
        there: which of its values, flattened.
        values: they, in one dimension.
        updated: the tensor of these values that an optimizer was given.
    """

    name: str
    shape: torch.Size
    there: slice
    values: torch.Tensor
    updated: nn.Parameter


def own_parts(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer | None = None) -> Parts:
    """This rank's part of all parameters, and of what an optimizer keeps of them. Not copied.

    Args:
        pieces: of a module that is sharded, none of it gathered.
        optimizer: of the pieces.

    Returns:
        By the name of a parameter its ``"shape"``; ``"start"``, the place of the first value of
        this part in it, flattened; and ``"parts"``, by ``"parameter"`` and the optimizer's own
        names: one-dimensional tensors of as many values, or single ones, such as ``"step"``.
    """
    state: Mapping[Any, Any] = optimizer.state if optimizer else {}
    return {
        piece.name: {
            "shape": tuple(piece.shape),
            "start": piece.there.start,
            "parts": {VALUES: piece.values, **state.get(piece.updated, {})},
        }
        for piece in pieces
    }


def whole_state(
    pieces: Sequence[Piece],
    comms: Comms,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dictionaries that a module and its optimizer would have, were they not sharded.

    A collective. Their tensors are in main memory, on rank 0, and together on no other rank.

    Args:
        pieces: of the module.
        comms: the ranks.
        module: that is sharded.
        optimizer: of the pieces, with one group of parameters. Without one the second dictionary
            is empty.
    """
    mine = own_parts(pieces, optimizer)
    kinds: dict[str, Any] = {}  # of what there is of each parameter, also elsewhere
    for theirs in comms.all_gather_data(
        {
            name: [entry["shape"], {key: _kind(value) for key, value in entry["parts"].items()}]
            for name, entry in mine.items()
        }
    ):
        kinds |= theirs
    names = {p: name for name, p in module.named_parameters()}
    whole: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names.values()}
    for name, (shape, kept) in kinds.items():
        for key, kind in kept.items():
            if not isinstance(kind, str):
                whole[name][key] = torch.tensor(kind)
                continue
            value = torch.empty(0, dtype=getattr(torch, kind), device=comms.device)
            together = comms.gather(mine[name]["parts"].get(key, value) if name in mine else value)
            if together is not None:
                whole[name][key] = together.cpu().view(shape)
    model = module.state_dict()
    for name, p in module.named_parameters(remove_duplicate=False):
        model[name] = whole[names[p]].get(VALUES, p.detach())
    if optimizer is None:
        return model, {}
    states = [{k: v for k, v in values.items() if k != VALUES} for values in whole.values()]
    (group,) = optimizer.state_dict()["param_groups"]
    return model, {
        "state": {i: state for i, state in enumerate(states) if state},
        "param_groups": [{**group, "params": [*range(len(states))]}],
    }


def _kind(value: Any) -> str | float:
    """The dtype of values, or a single one itself."""
    several = torch.is_tensor(value) and value.dim() > 0
    return str(value.dtype).removeprefix("torch.") if several else float(value)


@torch.no_grad()
def load_parts(
    pieces: Sequence[Piece],
    comms: Comms,
    saved: Iterable[Parts],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Take this rank's part out of parts of any ranks, or of a whole state.

    Args:
        pieces: of the module; other ranks may have cut it otherwise.
        comms: the ranks.
        saved: together they have everything. They are read one after the other, so that each may
            be a file that is mapped and not read (``torch.load(..., mmap=True)``).
        optimizer: of the pieces; takes what it keeps.

    Raises:
        ValueError: a parameter is of another shape, or not all of its values are there.
    """
    left = {piece.name: len(piece.values) for piece in pieces}
    for parts in saved:
        for piece in pieces:
            if (entry := parts.get(piece.name)) is None:
                continue
            if tuple(entry["shape"]) != tuple(piece.shape):
                raise ValueError(
                    f"rank {comms.rank}: expected {piece.name} of shape {tuple(piece.shape)}, "
                    f"got {tuple(entry['shape'])}"
                )
            kept = {} if optimizer is None else optimizer.state[piece.updated]
            keys = [VALUES] if optimizer is None else entry["parts"]
            left[piece.name] -= _take(piece, entry, keys, kept)
    if missing := [name for name, count in left.items() if count]:
        raise ValueError(
            f"rank {comms.rank}: expected all values of each parameter, got none, or only "
            f"some, of {', '.join(missing)}"
        )


def _take(piece: Piece, entry: Mapping[str, Any], keys: Iterable[str], kept: Any) -> int:
    """Copy what an entry has of a piece, and of what is kept of it; how many values that is."""
    begin, here = int(entry["start"]), piece.there.start
    first: int = max(begin, here)
    last: int = min(begin + entry["parts"][VALUES].numel(), piece.there.stop)
    if last <= first:
        return 0
    for key in keys:
        value = torch.as_tensor(entry["parts"][key])
        if value.dim() == 0 and (entry["shape"] or key == "step"):
            kept[key] = value.clone()
            continue
        if key != VALUES and key not in kept:
            kept[key] = torch.zeros_like(piece.values, dtype=value.dtype)
        target = piece.values if key == VALUES else kept[key]
        target[first - here : last - here] = value.flatten()[first - begin : last - begin]
    return last - first


def from_torch(module: nn.Module, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Parts:
    """The whole state out of the state dictionaries of a module and of an optimizer of all."""
    return {
        name: {
            "shape": tuple(model[name].shape),
            "start": 0,
            "parts": {VALUES: model[name], **optimizer["state"].get(i, {})},
        }
        for i, (name, _) in enumerate(module.named_parameters())
    }


def clip_grad_norm(shards: Iterable[nn.Parameter], max_norm: float, comms: Comms) -> torch.Tensor:
    """Scale gradients that are in parts so that the norm of all together is at most ``max_norm``.

    A rank's own norm is of its part only, so the squares are added up over the ranks. A collective.

    Returns:
        The norm before, a scalar, the same on every rank.
    """
    shards = list(shards)
    mine = get_total_norm([p.grad.float() for p in shards if p.grad is not None]).to(comms.device)
    squares = mine.square()
    comms.all_reduce(squares)
    norm = squares.sqrt()
    clip_grads_with_norm_(shards, max_norm, norm)
    return norm
