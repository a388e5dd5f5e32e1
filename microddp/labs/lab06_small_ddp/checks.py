"""Lab 06: a small DDP."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.labs.engine.bench import Bench, Seen
from microddp.labs.engine.lab import SEVERAL, Lab
from microddp.labs.engine.training import drawn, expect_equal_models, flat

LAB = Lab(
    "lab06_small_ddp",
    "a small DDP",
    "06_ddp",
    ["SmallDDP.__init__", "SmallDDP.forward", "SmallDDP.no_sync"],
    [
        "In the constructor: broadcast parameters and buffers, keep the parameters that require a "
        "gradient, plan their buckets, and register one hook on each parameter. "
        "`module.parameters()` names a shared one once.",
        "Two flags are enough. `no_sync()` switches the first off, and back in a `finally`. "
        "Forward copies it to the second. The first hook of a backward reads the second, takes it "
        "back, and calls `at_end_of_backward(average)`.",
        "`average` goes through the buckets: `torch.cat` of all flat gradients, with zeros where "
        "`.grad` is None, then the all-reduce, the division by `comms.world_size`, and each part "
        "back to its parameter with `view_as`.",
    ],
    patience=10.0,  # a check has many passes, which take some seconds on a busy machine
)
BUCKET_BYTES = 320
SHARED_TWICE = (
    "Two layers share this weight, and it was averaged once for each. It is one parameter: "
    "`module.parameters()` names it once."
)
Gradients = Mapping[str, torch.Tensor]


class Net(nn.Module):
    """A model with a shared weight, a frozen layer, buffers, and heads: a forward pass uses one."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.shared, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again.weight = self.shared.weight
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(heads))
        self.double()

    def forward(self, x: torch.Tensor, head: int = 0) -> Any:
        x = self.norm(self.frozen(self.first(x)))
        return self.heads[head](self.again(torch.tanh(self.shared(x))))


def samples(rank: int, batch: int) -> torch.Tensor:
    """Return a rank's samples in this batch."""
    return drawn(4, 5, seed=1000 * batch + rank, dtype=torch.float64)


def loss(model: nn.Module, rank: int, batch: int = 0, head: int = 0) -> Any:
    """Return the loss of a rank's samples in this batch."""
    return (model(samples(rank, batch), head=head) - 1).square().mean()


def gradients(net: Net) -> Gradients:
    """Return the gradients of all parameters that require one, with zeros for None."""
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def alone(rank: int, *batches: int, head: int = 0, heads: int = 1) -> Gradients:
    """Return the sum of a rank's gradients over some batches, with rank 0's model."""
    net = Net(heads=heads)
    for batch in batches:
        loss(net, rank, batch, head).backward()
    return gradients(net)


def total(each: Sequence[Gradients], scale: float = 1.0) -> Gradients:
    """Return the sum of gradients, times a number."""
    return {name: scale * torch.stack([one[name] for one in each]).sum(0) for name in each[0]}


def averaged(bench: Bench, *batches: int, heads: int = 1) -> Gradients:
    """Return the mean over the ranks of their gradients' sums over some batches."""
    return total([alone(r, *batches, heads=heads) for r in range(bench.n)], 1 / bench.n)


def wrapped(bench: Bench, heads: int = 1) -> tuple[Net, Any]:
    """Return rank 0's model, and the reader's wrapper of it."""
    net = Net(heads=heads)
    return net, bench.work.SmallDDP(net, bench.comms, BUCKET_BYTES)


def compare(
    bench: Bench, net: Net, expected: Gradients, mistakes: Mapping[str, Gradients], none: str = ""
) -> None:
    """Expect these gradients; ``none`` is the sentence for one that is missing."""
    for name, grad in gradients(net).items():
        missing = net.get_parameter(name).grad is None and expected[name].any()
        bench.expect(not missing, f"a gradient of {name}", "None", none)
        wrong = {text: given[name] for text, given in mistakes.items()}
        if name == "shared.weight":
            wrong = {SHARED_TWICE: expected[name] / bench.n, **wrong}
        bench.near(grad, expected[name], f"the gradient of {name}", wrong)


def usual_mistakes(own: Gradients, mean: Gradients, n: int) -> dict[str, Gradients]:
    """Return the gradients that the usual mistakes give, by the sentences that name them."""
    return {
        "This rank's own gradient: nothing was averaged when backward returned. Let a hook ask for "
        "the end of backward, and average there.": own,
        "That is the sum: divide by the number of ranks.": total([mean], n),
        "Divided by the number of ranks twice.": total([mean], 1 / n),
    }


def backward(bench: Bench, output: torch.Tensor) -> Seen:
    """Run a backward, and return what this rank sent in it."""
    with bench.seen() as seen:
        output.backward()
    return seen


def silent(bench: Bench, seen: Seen, when: str, mistake: str) -> None:
    """Expect that nothing was sent."""
    bench.expect(not seen.nbytes, f"{when} to send nothing", f"{seen.nbytes} bytes", mistake)


def once(bench: Bench, seen: Seen, net: Net, mistake: str) -> None:
    """Expect that all gradients were sent once, and nothing else; one rank may send nothing."""
    nbytes = sum(grad.nbytes for grad in gradients(net).values())
    if seen.nbytes == nbytes + net.shared.weight.nbytes:
        mistake = SHARED_TWICE
    what = f"{nbytes} bytes sent, those of all gradients"
    bench.expect(seen.nbytes == nbytes or bench.n == 1, what, f"{seen.nbytes} bytes", mistake)


@LAB.check("replicas start as rank 0's", read="From hooks to a wrapper")
def start(bench: Bench) -> None:
    expect_equal_models(bench, lambda net, comms: bench.work.SmallDDP(net, comms, BUCKET_BYTES))


@LAB.check("the mean is in .grad when backward returns", read="From hooks to a wrapper")
def mean(bench: Bench) -> None:
    net, model = wrapped(bench)
    expected = averaged(bench, 0)
    loss(model, bench.rank).backward()
    compare(bench, net, expected, usual_mistakes(alone(bench.rank, 0), expected, bench.n))
    touched = any(p.grad is not None for p in net.frozen.parameters())
    mistake = "Frozen parameters are not averaged: take those with requires_grad."
    bench.expect(not touched, "no gradient of frozen parameters", "one", mistake)


@LAB.check("one all-reduce for each bucket", read="One iteration, call by call", ranks=SEVERAL)
def sent(bench: Bench) -> None:
    net, model = wrapped(bench)
    seen = backward(bench, loss(model, bench.rank))
    once(bench, seen, net, "Each gradient travels once, and nothing else does.")
    sizes = seen.sizes
    most, largest = sum(sizes) // BUCKET_BYTES + 1, BUCKET_BYTES + net.shared.weight.nbytes
    mistake = "A bucket is one all-reduce of PyTorch's: messages are not counted here."
    bench.expect(bool(sizes), "an all-reduce for each bucket", "none", mistake)
    mistake = "The gradients of a bucket travel as one: put them side by side in a flat tensor."
    if len(sizes) <= most:
        mistake = "A bucket that has reached bucket_bytes takes no more parameters."
    bench.expect(
        len(sizes) <= most and max(sizes) < largest,
        f"at most {most} collectives of less than {largest} bytes, in buckets of {BUCKET_BYTES}",
        f"{len(sizes)} of up to {max(sizes)}",
        mistake,
    )


@LAB.check("forward begins with rank 0's buffers", "Buffers: whose statistics?", ranks=SEVERAL)
def buffers(bench: Bench) -> None:
    net, model = wrapped(bench)
    net.get_buffer("norm.num_batches_tracked").add_(bench.rank)
    first, own, right = Net(), copy.deepcopy(net), Net()
    loss(first, 0, 0)
    right.load_state_dict(first.state_dict())
    for reference, rank, batch in ((own, bench.rank, 0), (own, bench.rank, 1), (first, 0, 1)):
        loss(reference, rank, batch)
    loss(right, bench.rank, 1)
    for batch in (0, 1):
        loss(model, bench.rank, batch).backward()
    for name, buffer in net.named_buffers():
        mistakes = {
            "This rank's own from first to last: rank 0's have to come before each forward pass, "
            "whatever their dtype.": own.get_buffer(name),
            "Exactly rank 0's, without this rank's last batch: copy buffers before the module is "
            "called, not after.": first.get_buffer(name),
        }
        what = f"the buffer {name} after two batches"
        bench.near(buffer, right.get_buffer(name), what, mistakes)
    model.eval()
    with torch.no_grad():
        model(samples(0, 0))
    for name, buffer in net.named_buffers():
        mistake = "A forward pass without gradients begins with rank 0's buffers, too."
        what = f"the buffer {name} in an evaluation"
        bench.near(buffer, first.get_buffer(name), what, {mistake: right.get_buffer(name)})


@LAB.check("no_sync() adds up, and sends nothing", "Gradient accumulation, right and wrong")
def accumulates(bench: Bench) -> None:
    net, model = wrapped(bench)
    divided = "Divided, though nothing was averaged: inside no_sync() gradients stay as they are."
    with model.no_sync():
        for batch in (0, 1):
            with bench.seen() as seen:
                output = loss(model, bench.rank, batch)
            silent(bench, seen, "forward", "Inside no_sync() not even buffers are sent.")
            seen = backward(bench, output)
            silent(bench, seen, "backward", "no_sync() was on, and the gradients were sent.")
            own = alone(bench.rank, *range(batch + 1))
            compare(bench, net, own, {divided: total([own], 1 / bench.n)})
    seen = backward(bench, loss(model, bench.rank, 2))
    expected, last = averaged(bench, 0, 1, 2), averaged(bench, 2)
    mistakes = {
        "Only the last batch's: what had accumulated in .grad before is lost.": last,
        "Only the last batch's was averaged, and what had accumulated before is this rank's own: "
        "send what .grad holds at the end of backward.": total([own, last]),
        **usual_mistakes(alone(bench.rank, 0, 1, 2), expected, bench.n),
    }
    compare(bench, net, expected, mistakes)
    once(bench, seen, net, "The first backward after no_sync() sends the sum, once.")


@LAB.check("forward decides", "Gradient accumulation, right and wrong", ranks=SEVERAL)
def decides(bench: Bench) -> None:
    mistake = (
        "It was decided when backward ran. Decide in forward, and let backward do what the last "
        "forward has announced."
    )
    _, model = wrapped(bench)
    with model.no_sync():
        output = loss(model, bench.rank)
    seen = backward(bench, output)
    silent(bench, seen, "a backward outside of no_sync(), of a forward inside,", mistake)
    net, model = wrapped(bench)
    output = loss(model, bench.rank)
    with model.no_sync():
        seen = backward(bench, output)
    once(bench, seen, net, mistake)
    seen = backward(bench, loss(net, bench.rank))
    mistake = "An announcement holds for one backward: take it back when that begins."
    silent(bench, seen, "a backward that no forward of the wrapper has announced", mistake)
    loss(model, bench.rank)  # it is announced, and no backward comes
    with model.no_sync():
        seen = backward(bench, loss(model, bench.rank))
    forgotten = "A forward inside no_sync() takes back what an earlier one has announced."
    silent(
        bench, seen, "a forward and backward inside no_sync(), after a forward alone,", forgotten
    )
    net, model = wrapped(bench)
    _, other = wrapped(bench)
    with other.no_sync():
        output = loss(model, bench.rank)
        loss(other, bench.rank)
    seen = backward(bench, output)
    mistake = (
        "Another wrapper was in no_sync(). What is announced is one wrapper's: keep it in self."
    )
    once(bench, seen, net, mistake)


@LAB.check(
    "no_sync() leaves all as it was", "Gradient accumulation, right and wrong", ranks=SEVERAL
)
def restores(bench: Bench) -> None:
    net, model = wrapped(bench)
    with suppress(KeyError), model.no_sync():
        raise KeyError
    seen = backward(bench, loss(model, bench.rank))
    mistake = "The block raised, and averaging is still off: switch it on again in a `finally`."
    once(bench, seen, net, mistake)
    with model.no_sync():
        with model.no_sync():
            pass
        seen = backward(bench, loss(model, bench.rank))
    mistake = "The inner block switched averaging on: at its end, restore what was before it."
    silent(bench, seen, "the rest of a block, after another one inside of it,", mistake)


@LAB.check("unused parameters count as zeros", read="Parameters that get no gradient")
def unused(bench: Bench) -> None:
    n, rank = bench.n, bench.rank
    # First what no rank uses. Whatever is done, all ranks do the same, and none waits for ever.
    net, model = wrapped(bench, heads=3)
    seen = backward(bench, loss(model, rank))
    mistake = (
        "Some buckets wait for gradients that do not come. When backward ends, send them with "
        "zeros in their place."
    )
    compare(bench, net, averaged(bench, 0, heads=3), {mistake: alone(rank, 0, heads=3)})
    mistake = (
        "What has no gradient was left out. Where another rank has one, that rank would send more, "
        "and wait for ever: send zeros."
    )
    once(bench, seen, net, mistake)
    # Then what one rank uses: the first in an earlier batch, the last in the last.
    net, model = wrapped(bench, heads=3)
    heads = [(1 if r == 0 else 0, 2 if r == n - 1 else 0) for r in range(n)]
    with model.no_sync():
        loss(model, rank, 0, heads[rank][0]).backward()
    loss(model, rank, 1, heads[rank][1]).backward()
    each = [alone(r, b, head=heads[r][b], heads=3) for r in range(n) for b in (0, 1)]
    lost = (
        "What an earlier batch has left in .grad is lost. It is to be averaged, too, if the last "
        "one does not use the parameter."
    )
    none = "Another rank used it, and steps with the mean: so must this one."
    compare(bench, net, total(each, 1 / n), {lost: total(each, 0.0)}, none)


def train(net: Net, model: nn.Module, rank: int) -> None:
    """Take three steps with momentum; each rank uses one of two heads, and none the third."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step, head=rank % 2).backward()
        optimizer.step()


@LAB.check("three steps like PyTorch's, in the same bits", read="Face to face", ranks=SEVERAL)
def face_to_face(bench: Bench) -> None:
    net, model = wrapped(bench, heads=3)
    train(net, model, bench.rank)
    other = Net(heads=3)
    theirs = TorchDDP(other, process_group=bench.comms.group, find_unused_parameters=True)
    train(other, theirs, bench.rank)
    mistake = "Something of one step is left in the next: each has to begin anew."
    for name, tensor in other.state_dict().items():
        right = torch.allclose(net.state_dict()[name], tensor)
        bench.expect(right, f"{name} as PyTorch's wrapper leaves it", "another", mistake)
    mistake = "Every rank has to step with the numbers that came back from the all-reduce."
    bench.same("the bits of all parameters after three steps", flat(net.parameters()), mistake)
