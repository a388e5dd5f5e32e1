"""A wrapper that makes any module data-parallel, with the meaning of PyTorch's own."""

from microddp.ddp.wrapper import DDP, DistributedDataParallel
