"""Arguments of PyTorch's DDP that mean nothing here, have changed there, or are not to be had."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._utils import _get_device_index

INSTEAD = {
    "init_sync": "verify_replicas=True, which compares the ranks' parameters and changes none",
    "mixed_precision": "torch.autocast, and register_comm_hook for gradients in fewer bits",
    "device_mesh": "process_group=mesh.get_group()",
    "bucket_cap_mb_list": "bucket_cap_mb, one size for all buckets but the first",
    "skip_all_reduce_unused_params": "find_unused_parameters=True",
    "batched_grad_copy": "gradient_as_bucket_view=True, the default here, which copies nothing",
    "lazy_bucket_allocation": "gradient_as_bucket_view=True, the default here: one copy, not two",
    "delay_all_reduce_named_params": "no_sync(), and an all-reduce of these gradients afterwards",
    "_ddp_params_and_buffers_to_ignore": "requires_grad_(False) for what is not to be trained",
    "param_to_hook_all_reduce": "no_sync(), and an all-reduce of the gradients afterwards",
}


def check_refused(others: Mapping[str, Any], who: str) -> None:
    """Raise for arguments that PyTorch's DDP has and this one has not, but for their defaults.

    Raises:
        TypeError: there are such, or ones that neither has; it says what to use instead.
    """
    for name, value in others.items():
        if name not in INSTEAD:
            raise TypeError(f"{who} arguments of DDP, got {name!r}")
        if not value if name == "init_sync" else value:
            raise TypeError(f"{who} no {name}: use {INSTEAD[name]}")


def check_devices(
    device_ids: Sequence[Any] | None,
    output_device: Any,
    parameters: Sequence[torch.Tensor],
    who: str,
) -> None:
    """Raise where PyTorch's DDP does. A module computes where it is, and inputs are not moved.

    Raises:
        ValueError: several devices, or any for a module on the CPU or on several.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"{who} device_ids of one device or None, got {device_ids}")
    devices = {p.device for p in parameters}
    if len(devices) > 1 or {device.type for device in devices} == {"cpu"}:
        if device_ids or output_device:
            raise ValueError(
                f"{who} no device_ids and no output_device for a module on the CPU or on several "
                f"devices, got {device_ids} and {output_device}, and parameters on "
                f"{sorted(map(str, devices))}"
            )
        return
    for device in (*(device_ids or ()), *([] if output_device is None else [output_device])):
        _get_device_index(device, optional=True)


def which_buffers(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Decide if rank 0's buffers go to all ranks at construction, and before each forward pass.

    Since PyTorch 2.13 ``forward_sync_buffers`` takes the place of ``broadcast_buffers``, and means
    the forward pass only. As there, the old name warns, and means both.
    """
    if broadcast is not None:
        warnings.warn(
            "broadcast_buffers is deprecated: use forward_sync_buffers, which still copies rank "
            "0's buffers at construction"
            + (", and which is heeded here" if forward_sync is not None else ""),
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync is not None:
        return True, forward_sync
    both = broadcast is not False
    return both, both
