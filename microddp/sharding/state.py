"""State of sharded training, in parts and whole: both can be read by any number of ranks.

A rank's state is a part of each parameter that it has something of, and of what an optimizer keeps
for that: where it begins, and the values. The whole state of one process is that of a rank that
has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms
from microddp.sharding.unit import Unit

Parts = dict[str, dict[str, Any]]
VALUES = "parameter"  # beside the names of what an optimizer keeps, such as "exp_avg"


def own_parts(units: Sequence[Unit], optimizer: torch.optim.Optimizer | None = None) -> Parts:
    """This rank's part of all parameters, and of what an optimizer keeps of them. Not copied.

    Args:
        units: of a module that is sharded, none of them gathered.
        optimizer: of their parts.

    Returns:
        By the name of a parameter its ``"shape"``; ``"start"``, the place of the first value of
        this part in it, flattened; and ``"parts"``, by ``"parameter"`` and the optimizer's own
        names: one-dimensional tensors of as many values, or single ones, such as ``"step"``.
    """
    state: Mapping[Any, Any] = optimizer.state if optimizer else {}
    return {
        unit.names[i]: {
            "shape": tuple(unit.shapes[i]),
            "start": there.start,
            "parts": {VALUES: unit.shard[here], **state.get(unit.parts[i], {})},
        }
        for unit in units
        for i, there, here in unit.pieces
    }


def whole_state(
    units: Sequence[Unit], comms: Comms, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dictionaries that a module and its optimizer would have, were they not sharded.

    A collective. Their tensors are in main memory, on rank 0, and together on no other rank.

    Args:
        units: of the module.
        comms: the ranks.
        module: that is sharded.
        optimizer: of the units' parts, with one group of parameters.
    """
    mine = {name: entry["parts"] for name, entry in own_parts(units, optimizer).items()}
    kinds: dict[str, dict[str, Any]] = {}  # of what there is of each parameter, also elsewhere
    for theirs in comms.all_gather_data(
        {name: {key: _kind(value) for key, value in own.items()} for name, own in mine.items()}
    ):
        kinds |= theirs
    whole: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for p in module.parameters()}
    for unit in units:
        for name, p, shape in zip(unit.names, unit.parameters, unit.shapes, strict=True):
            for key, kind in kinds.get(name, {}).items():
                if not isinstance(kind, str):
                    whole[p][key] = torch.tensor(kind)
                    continue
                nothing = torch.empty(0, dtype=getattr(torch, kind), device=comms.device)
                together = comms.gather(mine.get(name, {}).get(key, nothing))
                if together is not None:
                    whole[p][key] = together.cpu().view(shape)
    model = module.state_dict()
    for name, p in module.named_parameters(remove_duplicate=False):
        model[name] = whole[p].get(VALUES, p.detach())
    kept = [{k: v for k, v in parts.items() if k != VALUES} for parts in whole.values()]
    (group,) = optimizer.state_dict()["param_groups"]
    return model, {
        "state": {i: state for i, state in enumerate(kept) if state},
        "param_groups": [{**group, "params": [*range(len(kept))]}],
    }


def _kind(value: Any) -> str | float:
    """The dtype of values, or a single one itself."""
    several = torch.is_tensor(value) and value.dim() > 0
    return str(value.dtype).removeprefix("torch.") if several else float(value)


@torch.no_grad()
def load_parts(
    units: Sequence[Unit],
    saved: Iterable[Parts],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Take this rank's part out of parts of any ranks, or of a whole state.

    Args:
        units: of the module; other ranks may have cut it otherwise.
        saved: together they have everything. They are read one after the other, so that each may
            be a file that is mapped and not read (``torch.load(..., mmap=True)``).
        optimizer: of the units' parts; takes what it keeps.

    Raises:
        ValueError: a parameter is of another shape, or not all of its values are there.
    """
    pieces = [
        (unit, i, there, unit.shard[here]) for unit in units for i, there, here in unit.pieces
    ]
    left = {unit.names[i]: len(mine) for unit, i, _, mine in pieces}
    for parts in saved:
        for unit, i, there, mine in pieces:
            name, shape = unit.names[i], tuple(unit.shapes[i])
            if (entry := parts.get(name)) is None:
                continue
            if tuple(entry["shape"]) != shape:
                raise ValueError(
                    f"rank {unit.comms.rank}: expected {name} of shape {shape}, "
                    f"got {tuple(entry['shape'])}"
                )
            begin = entry["start"]
            first = max(begin, there.start)
            last = min(begin + entry["parts"][VALUES].numel(), there.stop)
            if last <= first:
                continue
            left[name] -= last - first
            kept = {} if optimizer is None else optimizer.state[unit.parts[i]]
            for key in [VALUES] if optimizer is None else entry["parts"]:
                value = torch.as_tensor(entry["parts"][key])
                if value.dim() == 0 and (shape or key == "step"):
                    kept[key] = value.clone()
                    continue
                if key != VALUES and key not in kept:
                    kept[key] = torch.zeros_like(mine, dtype=value.dtype)
                target = mine if key == VALUES else kept[key]
                source = value.flatten()[first - begin : last - begin]
                target[first - there.start : last - there.start] = source
    if missing := [name for name, count in left.items() if count]:
        raise ValueError(
            f"rank {units[0].comms.rank}: expected all values of each parameter, got none, or only "
            f"some, of {', '.join(missing)}"
        )


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
