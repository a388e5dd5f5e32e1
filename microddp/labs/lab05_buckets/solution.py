# %% [markdown]
"""
# Lab 05: a bucket plan, and hooks that follow it

Each message has a price, however small it is. So gradients that are ready at about the same time
should travel together, in one message: a bucket. First plan the buckets, as PyTorch's DDP does.
Then write the hooks that fill and send them during backward.

**Given:** `parameter.register_post_accumulate_grad_hook(function)` has autograd call
`function(parameter)` each time it has added to `parameter.grad`.
`comms.all_reduce(tensor, async_op=True)` begins to replace a tensor by its sum over all ranks, and
returns at once something with a method `wait()`. `tensor.nbytes` is a tensor's size in bytes,
`comms.world_size` the number of ranks.

**Counted:** the all-reduces: as many as the plan has buckets, of their bytes, in the plan's order
on every rank, also where gradients come in another one. Each begins when its bucket and all before
it are full. Every step is like the first. The plan is compared with PyTorch's own.

`python -m microddp.labs check 05` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

import microddp


# %%
def plan_buckets(tensors: Sequence[torch.Tensor], caps: tuple[int, int]) -> list[list[int]]:
    """Deal tensors out to buckets, in the order given.

    A bucket takes one tensor after the other, until it holds as many bytes as its cap or more. Then
    it is full, and the next tensor begins a new one. No tensor is split. What is left in the end is
    a bucket, too, though it is not full. Tensors of different dtypes cannot share a message: each
    dtype fills buckets of its own, side by side, and has a first bucket of its own.

    Args:
        tensors: of any shape; in the order in which they become ready.
        caps: in bytes: that of the first bucket of a dtype, and that of all that follow it.

    Returns:
        The indices of each bucket's tensors, in the order in which the buckets are full, and in
        the end those that are not. With several dtypes any order of the buckets will do.
    """
    plan: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    filled: Counter[torch.dtype] = Counter()
    for i, tensor in enumerate(tensors):
        bucket = filling.setdefault(tensor.dtype, [])
        bucket.append(i)
        cap = caps[min(filled[tensor.dtype], 1)]
        if sum(tensors[j].nbytes for j in bucket) >= cap:
            plan.append(filling.pop(tensor.dtype))
            filled[tensor.dtype] += 1
    return plan + list(filling.values())


# %%
class BucketHooks:
    """Averages the gradients of a model over all ranks, bucket by bucket, during backward.

    Call ``finish()`` after each backward and before the optimizer.
    """

    def __init__(self, model: nn.Module, comms: microddp.Comms, caps: tuple[int, int]) -> None:
        """Plan the buckets, and have ``self._ready`` called whenever a gradient is ready.

        Backward goes through the model from its end to its beginning. So the plan is that of the
        parameters in reverse order.

        Args:
            model: the same on every rank. Those of its parameters that require a gradient get one
                in each backward.
            comms: the ranks that average.
            caps: of the plan, in bytes.
        """
        self.comms = comms
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        plan = plan_buckets(parameters, caps)
        self.buckets = [[parameters[i] for i in members] for members in plan]
        self.index: dict[torch.Tensor, int] = {}
        for index, bucket in enumerate(self.buckets):
            self.index.update(dict.fromkeys(bucket, index))
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[torch.Tensor, microddp.comms.Pending]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.Tensor) -> None:
        """Count a gradient, and start the all-reduces of the buckets that can leave now.

        A bucket leaves when all of its gradients are ready, and all buckets before it have left.

        Args:
            parameter: its ``.grad`` is this rank's gradient, of the same shape.
        """
        self.missing[self.index[parameter]] -= 1
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            bucket = self.buckets[len(self.sent)]
            gradients = [p.grad.flatten() for p in bucket if p.grad is not None]
            flat = torch.cat(gradients) / self.comms.world_size
            self.sent.append((flat, self.comms.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Wait until each ``.grad`` is the mean, and be ready for the next backward."""
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            parts = torch.split(flat, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent.clear()


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)).to(comms.device)
comms.print("the plan:", plan_buckets(list(model.parameters())[::-1], (64, 64)))
hooks = BucketHooks(model, comms, (64, 64))
x = torch.full((8, 3), comms.rank + 1.0, device=comms.device)
model(x).sum().backward()
hooks.finish()
comms.print("the mean over ranks of one of its gradients:", model[0].weight.grad)
comms.close()
