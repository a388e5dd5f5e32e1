# %% [markdown]
"""
# Lab 04: an all-reduce that starts inside backward

After backward, every gradient should be the mean over all ranks. A gradient is final long before
backward is over, so its all-reduce can start then, and travel while backward goes on. Build a class
that does it, with hooks that autograd calls.

**Given:** `parameter.register_post_accumulate_grad_hook(function)` has autograd call
`function(parameter)` each time it has added to `parameter.grad`.
`comms.all_reduce(tensor, async_op=True)` begins to replace a tensor by its sum over all ranks, and
returns at once something with a method `wait()`. Until `wait()` returns, nobody may touch the
tensor. `comms.world_size` is the number of ranks.

**Counted:** the all-reduces: one for each gradient, of its bytes, begun before the next gradient
is ready. Backward waits for no other rank, and `finish()` for all of them. The same bits on every
rank. On two hosts with a slow link between them, more than a third of the communication must be
hidden behind backward.

`python -m microddp.labs check 04` runs it on 1, 2, 3 and 4 ranks, and on two hosts in a box.
"""

# %%
import torch
from torch import nn

import microddp


# %%
class OverlappedGradients:
    """Averages the gradients of a model over all ranks, each on its own, during backward.

    Call ``finish()`` after each backward and before the optimizer.
    """

    def __init__(self, model: nn.Module, comms: microddp.Comms) -> None:
        """Have ``self._ready`` called whenever the gradient of a parameter is ready.

        Args:
            model: the same on every rank. Its parameters may have any shape. Some may be frozen:
                they require no gradient, and autograd takes no hooks for them.
            comms: the ranks that average.
        """
        self.comms = comms
        self.works: list[microddp.comms.Pending] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.Tensor) -> None:
        """Start the all-reduce of one gradient, and return before it is complete.

        Args:
            parameter: its ``.grad`` is this rank's gradient, of the same shape.
        """
        assert parameter.grad is not None
        parameter.grad.div_(self.comms.world_size)
        self.works.append(self.comms.all_reduce(parameter.grad, async_op=True))

    def finish(self) -> None:
        """Wait until each ``.grad`` is the mean, and be ready for the next backward.

        Parameters that got no gradient in this backward are left alone.
        """
        for work in self.works:
            work.wait()
        self.works.clear()


# %% tags=["try"]
comms = microddp.init()
model = nn.Linear(2, 1).to(comms.device)
gradients = OverlappedGradients(model, comms)
x = torch.full((8, 2), comms.rank + 1.0, device=comms.device)
model(x).mean().backward()
gradients.finish()
comms.print("rank 0's own gradient is [1, 1]; the mean is", model.weight.grad)
comms.close()
