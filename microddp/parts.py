"""Sharded state: which values each rank keeps, by the names of parameters, and the whole state.

Also the norm of sharded gradients.

A rank's state (``Parts``) has, for each parameter of which the rank keeps values: where these
begin, the values, and what the optimizer keeps for them. The whole state of one process is the
state of a rank that keeps everything.
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
class ParamShard:
    """Consecutive values of one parameter, which this rank keeps.

    Attributes:
        name: the parameter's name.
        shape: shape of the whole parameter.
        param_range: slice of the flattened parameter that the values are; may be empty.
        sharded_data: the values, 1-D.
        sharded_param: the tensor of these values that an optimizer is given.
    """

    name: str
    shape: torch.Size
    param_range: slice
    sharded_data: torch.Tensor
    sharded_param: nn.Parameter

    def add_gradient(self, mean: torch.Tensor) -> None:
        """Add to the gradient for the optimizer; if there is none, ``mean`` itself becomes it."""
        before = self.sharded_param.grad
        self.sharded_param.grad = mean if before is None else before + mean


def own_parts(
    shards: Sequence[ParamShard], optimizer: torch.optim.Optimizer | None = None
) -> Parts:
    """Return this rank's state of all parameters, and of what an optimizer keeps. Not copied.

    Args:
        shards: this rank's shards of a module's parameters, none of them unsharded now.
        optimizer: an optimizer of the shards.

    Returns:
        A dictionary for each parameter, by its name, with the parameter's ``"shape"``; ``"start"``,
        the index of this rank's first value in the flattened parameter; and ``"parts"``, which has,
        by ``"parameter"`` and the optimizer's own names, 1-D tensors of as many values, or single
        values such as ``"step"``.
    """
    state: Mapping[Any, Any] = optimizer.state if optimizer else {}
    return {
        shard.name: {
            "shape": tuple(shard.shape),
            "start": shard.param_range.start,
            "parts": {VALUES: shard.sharded_data, **_flat(state.get(shard.sharded_param, {}))},
        }
        for shard in shards
    }


def _flat(kept: Mapping[str, Any]) -> dict[str, Any]:
    """View what an optimizer keeps of each value in one dimension; of a whole matrix it has two."""
    return {
        key: value.flatten() if torch.is_tensor(value) and value.dim() > 1 else value
        for key, value in kept.items()
    }


def whole_state(
    shards: Sequence[ParamShard],
    comms: Comms,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gather the state dictionaries that a module and its optimizer would have without sharding.

    A collective.

    Args:
        shards: this rank's shards of the module's parameters.
        comms: the ranks.
        module: the sharded module.
        optimizer: an optimizer of the shards, with one group of parameters; default: none, and the
            second dictionary is empty.

    Returns:
        The state of the module and of the optimizer. On rank 0 all tensors are whole copies, in
        main memory; on other ranks what is sharded is missing or still this rank's shard.
    """
    mine = own_parts(shards, optimizer)
    kinds: dict[str, Any] = {}  # what any rank keeps of each parameter, and its dtype
    for theirs in comms.all_gather_data(
        {
            name: [entry["shape"], {key: _kind(value) for key, value in entry["parts"].items()}]
            for name, entry in mine.items()
        }
    ):
        kinds |= theirs
    names = {id(p): name for name, p in module.named_parameters()}
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
    model = module.state_dict(keep_vars=True)
    for name, value in model.items():
        if torch.is_tensor(value):
            together = whole.get(names.get(id(value), ""), {}).get(VALUES)
            if comms.rank > 0:
                model[name] = value.detach()
            elif together is None:
                model[name] = value.detach().to("cpu", copy=True)
            else:
                model[name] = together
    if optimizer is None:
        return model, {}
    states = [{k: v for k, v in values.items() if k != VALUES} for values in whole.values()]
    (group,) = optimizer.state_dict()["param_groups"]
    return model, {
        "state": {i: state for i, state in enumerate(states) if state},
        "param_groups": [{**group, "params": [*range(len(states))]}],
    }


def _kind(value: Any) -> str | float:
    """Name the dtype of a tensor with dimensions; of a single value, return the value itself."""
    several = torch.is_tensor(value) and value.dim() > 0
    return str(value.dtype).removeprefix("torch.") if several else float(value)


@torch.no_grad()
def load_parts(
    shards: Sequence[ParamShard],
    comms: Comms,
    saved: Iterable[Parts],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load this rank's values from the states of any number of ranks, or from a whole state.

    A collective.

    Args:
        shards: this rank's shards; the states may be of shards that were cut differently.
        comms: the ranks.
        saved: states that together have all values. They are read one after the other, so each may
            be a file that is mapped into memory (``torch.load(..., mmap=True)``).
        optimizer: an optimizer of the shards, whose state is replaced.

    Raises:
        ValueError: on every rank: a parameter has another shape, some of its values are in none of
            the states, or reading these raised on one.
    """
    expected = "all values of each parameter"
    try:
        wrong = _load_own(shards, saved, optimizer)
    except Exception as error:
        comms.fail_together(f"{type(error).__name__}: {error}", expected, ValueError)
    else:
        comms.fail_together(wrong, expected, ValueError)
    if optimizer is not None:
        _move_steps(optimizer)


def _load_own(
    shards: Sequence[ParamShard], saved: Iterable[Parts], optimizer: torch.optim.Optimizer | None
) -> str:
    """Load what the states have of this rank's shards; return what does not fit, in words."""
    found = {s.name: torch.zeros(len(s.sharded_data), dtype=torch.bool) for s in shards}
    wrong = ""
    if optimizer is not None:
        for shard in shards:
            optimizer.state.pop(shard.sharded_param, None)
    for parts in saved:
        for shard in shards:
            if (entry := parts.get(shard.name)) is None:
                continue
            if (shape := tuple(entry["shape"])) != tuple(shard.shape):
                wrong = f"{shard.name} of shape {shape}, and not {tuple(shard.shape)}"
                continue
            kept = {} if optimizer is None else optimizer.state[shard.sharded_param]
            keys = [VALUES] if optimizer is None else entry["parts"]
            found[shard.name][_take(shard, entry, keys, kept)] = True
    if not wrong and (missing := [name for name, here in found.items() if not here.all()]):
        wrong = f"none, or only some, of {', '.join(missing)}"
    return wrong


def _move_steps(optimizer: torch.optim.Optimizer) -> None:
    """Bring the numbers of steps to where fused and captured optimizers want them."""
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            for p in group["params"]:
                if "step" in (kept := optimizer.state.get(p, {})):
                    kept["step"] = kept["step"].to(p.device)


def _take(shard: ParamShard, entry: Mapping[str, Any], keys: Iterable[str], kept: Any) -> slice:
    """Copy what an entry has of a shard, and of its optimizer state; return which values."""
    begin, here = int(entry["start"]), shard.param_range.start
    first: int = max(begin, here)
    last: int = min(begin + entry["parts"][VALUES].numel(), shard.param_range.stop)
    if last <= first:
        return slice(0)
    for key in keys:
        value = torch.as_tensor(entry["parts"][key])
        if value.dim() == 0 and (entry["shape"] or key == "step"):
            kept[key] = value.clone()
            continue
        if key != VALUES and key not in kept:
            kept[key] = torch.zeros_like(shard.sharded_param, dtype=value.dtype)
        target = shard.sharded_data if key == VALUES else kept[key].view(-1)
        target[first - here : last - here] = value.flatten()[first - begin : last - begin]
    return slice(first - here, last - here)


def from_torch(module: nn.Module, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Parts:
    """Make a whole state of the state dictionaries of a module and of its optimizer."""
    # Their names may be others than the parameters': a wrapper of activation checkpoints hides its.
    kept_as = {id(value): name for name, value in module.state_dict(keep_vars=True).items()}
    return {
        name: {
            "shape": tuple(model[kept_as[id(p)]].shape),
            "start": 0,
            "parts": {VALUES: model[kept_as[id(p)]], **optimizer["state"].get(i, {})},
        }
        for i, (name, p) in enumerate(module.named_parameters())
    }


def clip_grad_norm(shards: Iterable[nn.Parameter], max_norm: float, comms: Comms) -> torch.Tensor:
    """Scale sharded gradients so that the norm of all ranks' together is at most ``max_norm``.

    A rank's own norm is of its shards only, so the squares are summed over the ranks. A collective.

    Returns:
        The norm before scaling, a float32 scalar, the same on every rank.
    """
    shards = list(shards)
    gradients = [p.grad for p in shards if p.grad is not None]
    real = [g if g.is_complex() else g.float() for g in gradients]
    mine = get_total_norm(real).float().to(comms.device)
    squares = mine.square()
    comms.all_reduce(squares)
    norm = squares.sqrt()
    clip_grads_with_norm_(shards, max_norm, norm)
    return norm
