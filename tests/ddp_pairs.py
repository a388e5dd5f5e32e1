"""Our DDP beside PyTorch's: the same processes, modules and data, and every bit must be equal."""

import copy
import inspect
import warnings
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.ddp import DDP
from microddp.replicas import check_replicas
from microddp.shared import carrier

WIDTH = 16
SMALL = 0.0005  # MiB: a bucket of one or two layers here
# What turns the broadcast before forward off: PyTorch's new name for it, and the old one.
HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP).parameters
OFF = ({"broadcast_buffers": False}, {"forward_sync_buffers": False})
NO_BROADCAST = OFF if HAS_FORWARD_SYNC else OFF[:1]
VIEWS = ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": True})


class Pair:
    """A module in our DDP and a copy of it in PyTorch's, each with an optimizer of its own.

    The replicas start with the ranks' own values, which construction has to make equal.
    """

    def __init__(self, comms, make, process_group=None, all_reduce=None, **options):
        self.comms = comms
        # Both alike: gradients that stay in the bucket are divided, others multiplied by 1/n.
        options.setdefault("gradient_as_bucket_view", comms.world_size % 2 == 1)
        torch.manual_seed(comms.rank)
        module = make()
        twin = copy.deepcopy(module)
        with warnings.catch_warnings():
            if "broadcast_buffers" in options:
                warnings.filterwarnings("ignore", "broadcast_buffers is deprecated", FutureWarning)
            if process_group is None:
                by = carrier(all_reduce, comms) if all_reduce else None
                self.ours = DDP(module, comms, all_reduce=by, **options)
            else:
                self.ours = DDP(module, process_group=process_group, **options)
        with errors_from_warnings_of_ours_only():
            self.theirs = TorchDDP(twin, process_group=process_group, **options)
        self.optimizers = [sgd(self.ours), sgd(self.theirs)]

    def each(self, body, *arguments):
        """Call ``body(ddp, optimizer, *arguments)`` with ours, then with theirs."""
        with errors_from_warnings_of_ours_only():
            theirs = body(self.theirs, self.optimizers[1], *arguments)
        return body(self.ours, self.optimizers[0], *arguments), theirs

    def check(self, what=""):
        """Assert that gradients, parameters and buffers are equal, bit for bit."""
        ours, theirs = self.ours.module, self.theirs.module
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (what, name, p.grad, q.grad)
            if p.grad is not None:
                assert equal(p.grad, q.grad), (what, "gradient", name, p.grad, q.grad)
            assert equal(p, q), (what, name)
        for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            assert equal(a, b), (what, name)

    def train(self, body, steps=5, what="", alike=True):
        """Take steps with ``body(ddp, optimizer, step)``; all must be equal after each."""
        for step in range(steps):
            self.each(body, step)
            self.check((what, "step", step))
        if alike:
            check_replicas(self.ours.module, self.comms)


def equal(a, b):
    if a.is_sparse or b.is_sparse:
        same_kind = a.is_sparse and b.is_sparse
        return same_kind and torch.equal(a.coalesce().to_dense(), b.coalesce().to_dense())
    return a.stride() == b.stride() and torch.equal(a, b)


@contextmanager
def errors_from_warnings_of_ours_only():
    """PyTorch's DDP may warn of what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def data(rank, step, rows=8):
    """Inputs and targets, of another kind for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, rows, WIDTH, generator=generator).unbind()


def plain_step(comms):
    """A step that keeps the gradients' memory for ten steps, then lets go of it in each."""

    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad(set_to_none=step >= 10)
        mse_loss(ddp(x).float(), y).backward()
        optimizer.step()

    return body


def loss_of(outputs, y):
    return sum(mse_loss(output, y) for output in outputs)


def accumulating(comms, micro_batches=3):
    def body(ddp, optimizer, step):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for k in range(micro_batches):
            x, y = data(comms.rank, 10 * step + k)
            if k < micro_batches - 1:
                with ddp.no_sync():
                    (loss_of(ddp(x), y) / micro_batches).backward()
            else:
                (loss_of(ddp(x), y) / micro_batches).backward()
        optimizer.step()

    return body


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(64, WIDTH)

    def forward(self, x):
        x = self.norm(self.first(x.view(-1, 1, 4, 4)))
        return self.last(torch.relu(self.second(torch.relu(x))).flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.view(-1, 4, 4)
        return self.last(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).flatten(1))


class Tied(nn.Module):
    """Two layers with one weight, and a third that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.again = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.short = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.short(self.wide(self.single(x).double()).bfloat16()).float())


class Branches(nn.Module):
    """Two outputs; ``middle`` is left out where it is told so."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.left, self.middle, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, middle=True):
        hidden = self.norm(self.first(x))
        left = self.left(hidden)
        return left + self.middle(hidden) if middle else left, self.right(hidden)


def mlp():
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def frozen():
    module = mlp()
    for i in (0, 4):
        module[i].weight.requires_grad_(False)
    module[6].requires_grad_(False)
    return module


MODELS = {
    "mlp": mlp,
    "conv": Conv,
    "channels last": lambda: Conv().to(memory_format=torch.channels_last),
    "attention": Attention,
    "tied": Tied,
    "frozen": frozen,
    "mixed": Mixed,
}
