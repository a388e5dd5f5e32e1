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
        optimizer: of their shards, or of the module's parameters.

    Returns:
        By the name of a parameter its ``"shape"``; ``"start"``, the place of the first value of
        this part in it, flattened; ``"parts"``, one-dimensional tensors of as many values each, by
        ``"parameter"`` and the optimizer's own names; and ``"step"`` and the like in ``"scalars"``.
    """
    state: Mapping[Any, Any] = optimizer.state if optimizer else {}
    parts: Parts = {}
    for unit in units:
        shard = unit.shard.detach()
        for i, there, here in unit.pieces():
            values, scalars = {VALUES: shard[here]}, {}
            whole = unit.shard in state
            for key, value in state.get(unit.shard if whole else unit.parameters[i], {}).items():
                if not torch.is_tensor(value) or value.dim() == 0:
                    scalars[key] = value
                else:
                    values[key] = value[here] if whole else value
            parts[unit.names[i]] = {
                "shape": tuple(unit.shapes[i]),
                "start": there.start,
                "parts": values,
                "scalars": scalars,
            }
    return parts


def whole_state(
    units: Sequence[Unit],
    comms: Comms,
    optimizer: torch.optim.Optimizer | None = None,
    dst: int = 0,
) -> Parts | None:
    """The state of all ranks together, on rank ``dst`` in main memory. A collective.

    A tensor's values are together on no other rank.

    Returns:
        As :func:`own_parts` of a rank that has everything; ``None`` on other ranks.
    """
    mine = own_parts(units, optimizer)
    said = comms.all_gather_data(
        {
            name: [
                {key: str(value.dtype) for key, value in entry["parts"].items()},
                {key: float(value) for key, value in entry["scalars"].items()},
            ]
            for name, entry in mine.items()
        }
    )
    whole: Parts = {}
    for unit in units:
        kinds: dict[str, str] = {}
        keys: dict[str, set[str]] = {}  # what there is of each parameter
        for name, shape in zip(unit.names, unit.shapes, strict=True):
            scalars: dict[str, torch.Tensor] = {}
            for theirs in said:
                of = theirs.get(name, [{}, {}])
                kinds |= of[0]
                keys.setdefault(name, set()).update(of[0])
                scalars |= {key: torch.tensor(value) for key, value in of[1].items()}
            whole[name] = {"shape": tuple(shape), "start": 0, "parts": {}, "scalars": scalars}
        for key, kind in kinds.items():
            dtype = getattr(torch, kind.removeprefix("torch."))
            part = torch.zeros(unit.part, dtype=dtype, device=comms.device)
            for i, _, here in unit.pieces():
                if key in (own := mine[unit.names[i]]["parts"]):
                    part[here] = own[key]
            everyone = comms.gather(part, dst)
            for i, values in enumerate(unit.values(everyone.cpu()) if everyone is not None else ()):
                if key in keys[unit.names[i]]:
                    whole[unit.names[i]]["parts"][key] = values.view(unit.shapes[i])
    return whole if comms.rank == dst else None


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
        optimizer: of the units' shards, or of the module's parameters; takes what it keeps.

    Raises:
        ValueError: a parameter is of another shape, or not all of its values are there.
    """
    wanted = {
        unit.names[i]: (unit, i, there, here) for unit in units for i, there, here in unit.pieces()
    }
    left = {name: there.stop - there.start for name, (_, _, there, _) in wanted.items()}
    for parts in saved:
        for name in wanted.keys() & parts.keys():
            unit, i, there, here = wanted[name]
            entry = parts[name]
            if tuple(entry["shape"]) != tuple(unit.shapes[i]):
                raise ValueError(
                    f"rank {unit.comms.rank}: expected {name} of shape {tuple(unit.shapes[i])}, "
                    f"got {tuple(entry['shape'])}"
                )
            begin = entry["start"]
            first = max(begin, there.start)
            last = min(begin + entry["parts"][VALUES].numel(), there.stop)
            if last <= first:
                continue
            left[name] -= last - first
            target = slice(here.start + first - there.start, here.start + last - there.start)
            for key, value in entry["parts"].items():
                source = value.flatten()[first - begin : last - begin]
                if key == VALUES:
                    unit.shard[target] = source.to(unit.shard)
                elif optimizer is not None:
                    _kept(optimizer, unit, i, key, here, value.dtype)[
                        first - there.start : last - there.start
                    ] = source
            if optimizer is not None and entry["scalars"]:
                _state_of(optimizer, unit, i).update(
                    {k: torch.as_tensor(v).clone() for k, v in entry["scalars"].items()}
                )
    if missing := [name for name, count in left.items() if count]:
        raise ValueError(
            f"rank {units[0].comms.rank}: expected all values of each parameter, got none, or only "
            f"some, of {', '.join(missing)}"
        )


def _state_of(optimizer: torch.optim.Optimizer, unit: Unit, i: int) -> dict[str, Any]:
    ours = any(p is unit.shard for group in optimizer.param_groups for p in group["params"])
    state: dict[str, Any] = optimizer.state[unit.shard if ours else unit.parameters[i]]
    return state


def _kept(
    optimizer: torch.optim.Optimizer,
    unit: Unit,
    i: int,
    key: str,
    here: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The part of a parameter in what the optimizer keeps, made if it is not there yet."""
    state = _state_of(optimizer, unit, i)
    one = state is optimizer.state.get(unit.shard)
    if key not in state:
        state[key] = torch.zeros_like(unit.shard if one else unit.shard[here], dtype=dtype)
    kept: torch.Tensor = state[key][here] if one else state[key]
    return kept


# ---- as PyTorch has it of a module and an optimizer that are not sharded


def to_torch(
    whole: Parts, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dictionaries that a module and an optimizer of its parameters would have.

    Args:
        whole: of :func:`whole_state`.
        module: whose names they are, with its buffers.
        optimizer: that was sharded, with one group of parameters.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    model = dict(module.state_dict())
    for name, p in module.named_parameters(remove_duplicate=False):
        if names[id(p)] in whole:
            model[name] = whole[names[id(p)]]["parts"][VALUES]
    states = {}
    for i, name in enumerate(names.values()):
        entry = whole.get(name, {"parts": {}, "scalars": {}})
        kept = {k: v for k, v in entry["parts"].items() if k != VALUES} | entry["scalars"]
        if kept:
            states[i] = kept
    (group,) = optimizer.state_dict()["param_groups"]
    return model, {"state": states, "param_groups": [{**group, "params": [*range(len(names))]}]}


def from_torch(module: nn.Module, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Parts:
    """The whole state out of the state dictionaries of a module and of an optimizer of all."""
    parts: Parts = {}
    for i, (name, _) in enumerate(module.named_parameters()):
        kept = {k: torch.as_tensor(v) for k, v in optimizer["state"].get(i, {}).items()}
        parts[name] = {
            "shape": tuple(model[name].shape),
            "start": 0,
            "parts": {VALUES: model[name], **{k: v for k, v in kept.items() if v.dim()}},
            "scalars": {k: v for k, v in kept.items() if not v.dim()},
        }
    return parts
