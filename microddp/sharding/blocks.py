"""What can be sharded: elements that compute one after the other, and dense gradients."""

from __future__ import annotations

from torch import nn

from microddp.buckets import gradients_are_sparse
from microddp.comms import Comms


def elements(module: nn.Module) -> list[nn.Module]:
    """The elements of a module's lists, which compute one after the other; not lists in lists."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    never_called = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    every = dict.fromkeys(child for m in lists for child in m)
    return [child for child in every if not isinstance(child, never_called)]


def check_dense(model: nn.Module, comms: Comms) -> None:
    """Refuse sparse gradients, which have no fixed place in a flat tensor.

    Raises:
        ValueError: a trained parameter would get one.
    """
    sparse = gradients_are_sparse(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if found := [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]:
        raise ValueError(
            f"rank {comms.rank}: expected dense gradients, got sparse ones of {', '.join(found)}"
        )
