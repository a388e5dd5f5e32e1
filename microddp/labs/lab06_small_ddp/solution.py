# %% [markdown]
"""
# Lab 06: a small DDP

Put a wrapper around a module, and leave the loop as it is on one device: when `loss.backward()`
returns, each `.grad` is the mean over the ranks. The ranks may start from different seeds, and a
forward pass may leave parameters out. Inside `no_sync()`, gradients add up on each rank. What each
of the three methods has to do stands in its docstring. Add methods and attributes as you need them.

**Given:** `comms.broadcast(tensor)` overwrites a tensor on every rank with rank 0's, in place.
`comms.all_reduce(tensor)` replaces it by its sum over the ranks. Both take contiguous tensors of
any dtype, without a graph: `parameter.detach()`. `comms.world_size` is the number of ranks.
`parameter.register_post_accumulate_grad_hook(hook)` has `hook(parameter)` called whenever a
backward has added to its `.grad`. The functions below deal parameters out to buckets, and find the
end of a backward.

**Counted:** what a backward sends: one all-reduce for each bucket, and no bytes but those of the
gradients. When a bucket is sent is up to you: as soon as it is full, or at the end of backward.
Inside `no_sync()` nothing is sent, neither by forward nor by backward. (PyTorch's wrapper still
sends buffers in the first forward there.) Gradients, parameters and buffers are compared with those
of one device and of PyTorch's `DistributedDataParallel`. All ranks must have the same bits.

`python -m microddp.labs check 06` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import microddp


# %%
def plan_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Deal parameters out: a bucket takes them until it has reached its size, in bytes."""
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in parameters:
        if sum(held.nbytes for held in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call()`` run when the backward that is under way ends. Only a hook may ask for it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


# %%
class SmallDDP(nn.Module):
    """Trains a module on many ranks, each on its own samples, with averaged gradients."""

    def __init__(self, module: nn.Module, comms: microddp.Comms, bucket_bytes: int) -> None:
        """Make the replicas equal, and have gradients averaged.

        All parameters and buffers of the module become rank 0's. From then on, a backward that
        forward has announced ends with the mean over all ranks in each ``.grad``: of all that has
        accumulated there. Where a rank has no gradient, it sends zeros, so that every rank sends
        the same buckets. A parameter that no rank used ends with zeros, or stays None. One that
        does not require a gradient is not sent, and its ``.grad`` not touched. A backward that was
        not announced sends nothing.

        Args:
            module: on every rank the same architecture. Its parameters have one dtype, and several
                layers may share one.
            comms: the ranks.
            bucket_bytes: size of a bucket, as :func:`plan_buckets` takes it.
        """
        super().__init__()
        self.module, self.comms = module, comms
        self.syncs = True  # what no_sync() switches off
        self.announced = False  # whether the next backward is to average
        for tensor in (*module.parameters(), *module.buffers()):
            comms.broadcast(tensor.detach())
        parameters = [p for p in module.parameters() if p.requires_grad]
        buckets = plan_buckets(parameters, bucket_bytes)

        def gradient_came(_parameter: torch.Tensor) -> None:
            if self.announced:
                self.announced = False
                at_end_of_backward(average)

        def average() -> None:
            for bucket in buckets:
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                flat = torch.cat([grad.flatten() for grad in grads])
                comms.all_reduce(flat)
                flat /= comms.world_size
                parts = torch.split(flat, [p.numel() for p in bucket])
                for parameter, part in zip(bucket, parts, strict=True):
                    parameter.grad = part.view_as(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(gradient_came)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and announce to the next backward whether it averages.

        Outside of :meth:`no_sync`, every buffer becomes rank 0's before the module is called, also
        if no gradient is asked for, and the next backward averages. Inside, neither happens. What
        counts is where forward runs, wherever backward does.

        Args:
            args: for the module, as are the keyword arguments.
            kwargs: for the module.

        Returns:
            What the module returns.
        """
        if self.syncs:
            for buffer in self.module.buffers():
                self.comms.broadcast(buffer)
        if torch.is_grad_enabled():
            self.announced = self.syncs
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the forward passes of the block announce no average.

        At its end all is as it was before it, also if it raised, and also inside of another one.
        """
        before = self.syncs
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = before


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(comms.rank)  # another model and other samples on each rank
model = SmallDDP(nn.Linear(8, 1), comms, bucket_bytes=1 << 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"rank {comms.rank}, step {step}: the weights add up to {weights.sum():.6f}")
comms.close()
