"""Conditions for sharding: elements that compute in order, dense gradients, equal ranks."""

from __future__ import annotations

from torch import nn

from microddp.buckets import check_cap, gradients_are_sparse
from microddp.comms import Comms
from microddp.replicas import check_structure


def elements(module: nn.Module) -> list[nn.Module]:
    """The elements of a module's lists, which compute one after the other; not lists in lists."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    never_called = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    every = dict.fromkeys(child for m in lists for child in m)
    return [child for child in every if not isinstance(child, never_called)]


def check_dense(model: nn.Module, comms: Comms) -> None:
    """Refuse sparse gradients, which have no fixed place in a flat tensor. A collective.

    Raises:
        ValueError: on every rank: a trained parameter of any would get one.
    """
    sparse = gradients_are_sparse(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    found = [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]
    problem = f"sparse ones of {', '.join(found)}" if found else ""
    comms.fail_together(problem, "dense gradients", ValueError)


def check_alike(
    model: nn.Module, comms: Comms, bucket_cap_mb: float | None, **options: object
) -> None:
    """Refuse ranks with different models or options, and a cap that none is. A collective.

    Args:
        model: whose parameters and buffers are compared.
        comms: the ranks.
        bucket_cap_mb: size of a bucket in MiB, or ``None``.
        options: what else is compared, by name.

    Raises:
        RuntimeError: on every rank: the ranks differ.
        ValueError: on every rank: the cap is not positive, or not finite.
    """
    check_structure(model, comms, {"bucket_cap_mb": bucket_cap_mb, **options})
    check_cap(bucket_cap_mb, comms.rank)
