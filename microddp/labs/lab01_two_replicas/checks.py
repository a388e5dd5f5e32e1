"""Lab 01: replicas by hand in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import mse_loss

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.training import flat

LAB = Lab(
    "lab01_two_replicas",
    "a step of replicas in one process",
    "01_manual",
    ["split_step"],
    [
        "There are three loops, one after the other: over the replicas, for the gradients of their "
        "shards; over the parameters, to combine the replicas' gradients; over the optimizers.",
        "The loss of the whole batch is the sum of the shards' mean losses, each multiplied by the "
        "shard's samples and divided by the batch's. With those factors before backward, the "
        "gradients need only be added.",
        "`zip(*(replica.parameters() for replica in replicas))` gives all copies of a parameter at "
        "a time. Compute the sum first, from all of them, and then hand a clone of it to each. "
        "Where a shard was empty or a parameter is frozen, `p.grad` is None.",
    ],
    ranks=(1,),
)
REPLICAS = (1, 2, 3, 4)
SGD = partial(torch.optim.SGD, lr=0.1)
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_turn(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Overwrite each row, one after the other, with the weighted sum of all rows."""
    parts = parts.clone()
    for k in range(len(parts)):
        parts[k] = weights @ parts
    return parts


# By mistake: from the replicas' gradients, one a row, and the weights of their average, the
# gradients that the optimizers would find.
RULES: dict[str, Rule] = {
    "The average was divided by the number of replicas once more. If each loss is weighted with "
    "its shard's part of the batch, the gradients are only added.": (
        lambda parts, weights: (weights @ parts / len(parts)).expand_as(parts)
    ),
    "The gradients were added and not divided, so each step is too long.": (
        lambda parts, _: parts.sum(0).expand_as(parts)
    ),
    "Each shard counts the same, also a smaller or an empty one: weight it by its samples.": (
        lambda parts, _: parts.mean(0).expand_as(parts)
    ),
    "Only replica 0 got the average: every replica needs it.": (
        lambda parts, weights: torch.cat([(weights @ parts)[None], parts[1:]])
    ),
    "Replica 0's gradient was overwritten with the average before replica 1's average was "
    "computed: compute it once, from all replicas, and then hand it out.": in_turn,
    "Replicas with an empty shard got no gradient: they take the step, too, with that of the whole "
    "batch.": lambda parts, weights: (weights @ parts) * (parts != 0).any(1, keepdim=True),
}
OWN = "Each replica steps with its own shard's gradient: average the gradients before the step."
AFTERWARDS = (
    "The weights are averaged after the step: average the gradients before it. For SGD both give "
    "the same weights, for Adam they do not, and the optimizers' states part in any case."
)
STALE = (
    "Gradients of the step before are in it: zero them on every replica, with an empty shard or "
    "not."
)


class Net(torch.nn.Module):
    """A model that records which samples it sees: a sample's first input is its number over 16."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(3, 4)
        self.out = torch.nn.Linear(4, 1)
        self.samples: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs."""
        self.samples += (16 * x[:, 0]).int().tolist()
        outputs: torch.Tensor = self.out(torch.tanh(self.hidden(x)))
        return outputs

    def vector(self) -> torch.Tensor:
        """Return all weights as one vector."""
        return flat(self.parameters())

    def gradient(self) -> torch.Tensor:
        """Return a copy of all gradients as one vector; zeros where there is none."""
        return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters())

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Compute the gradients of the mean loss, and return it; without samples it is nan."""
        self.zero_grad()
        loss = mse_loss(self(x), y)
        if len(x):
            loss.backward()
        return loss.item()


class Group:
    """Replicas that take steps with the reader's function, and a single model as their oracle.

    Args:
        n: number of replicas.
        kind: takes parameters to their optimizer.
        frozen: whether the last bias is.

    Attributes of the last step, for each replica:
        found: gradients that its optimizer found, a vector for each step that it took.
        held: the tensors that these were in.
        samples: numbers of the samples that it saw.
        shares: their part of the batch.
        parts: the right gradient of these samples, as a row.
        means: their mean loss; last, that of the batch.
    """

    def __init__(
        self, n: int, kind: Callable[..., torch.optim.Optimizer] = SGD, frozen: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.n = n
        self.single = Net().double()
        self.single.out.bias.requires_grad_(not frozen)
        self.replicas = [copy.deepcopy(self.single) for _ in range(n)]
        self.alone = kind(self.single.parameters())
        self.optimizers = [kind(replica.parameters()) for replica in self.replicas]
        for k, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(partial(self._note, k))
        self.whole = torch.zeros_like(self.single.vector())

    def _note(self, k: int, *_: object) -> None:
        self.found[k].append(self.replicas[k].gradient())
        self.held[k] += [p.grad for p in self.replicas[k].parameters() if p.grad is not None]

    def step(self, bench: Bench, rows: int) -> None:
        """Take a step on a batch of ``rows`` samples, the single model, too."""
        self.rows = rows
        generator = torch.Generator().manual_seed(rows)
        x, y = torch.randn(2, rows, 3, dtype=torch.float64, generator=generator)
        x[:, 0] = torch.arange(rows) / 16
        y = y[:, :1] + x[:, :1]
        self.found: list[list[torch.Tensor]] = [[] for _ in range(self.n)]
        self.held: list[list[torch.Tensor]] = [[] for _ in range(self.n)]
        for replica in self.replicas:
            replica.samples.clear()
        notes = [f"That was with {rows} samples for {self.n} replicas."]
        if rows < self.n or not self.single.out.bias.requires_grad:
            notes.append("`p.grad` may be None: of an empty shard, of a frozen parameter.")
        with bench.noting(*notes):
            self.loss = bench.work.split_step(self.replicas, self.optimizers, mse_loss, x, y)
        self.samples = [list(replica.samples) for replica in self.replicas]
        self.shares = torch.tensor([len(seen) / rows for seen in self.samples]).double()
        self.means, parts = [], []
        for seen in (*self.samples, list(range(rows))):
            self.means.append(self.single.learn(x[seen], y[seen]))
            parts.append(self.single.gradient())
        self.before, self.whole = self.whole, parts.pop()
        self.parts = torch.stack(parts)
        self.alone.step()

    def expect_shards(self, bench: Bench) -> None:
        """Expect that the replicas shared out the samples, and evenly."""
        seen = sorted(sample for samples in self.samples for sample in samples)
        largest = -(-self.rows // self.n)
        mistake = ""
        if set(seen) < set(range(self.rows)):
            mistake = "Samples are left out: `tensor_split` cuts into unequal shards, too."
        elif len(seen) > self.rows:
            mistake = "Samples count more than once: each replica takes its own shard only."
        elif max(map(len, self.samples)) > largest:
            mistake = "A step takes as long as its largest shard: cut the batch evenly."
        bench.expect(
            not mistake,
            f"{self.rows} samples shared out to {self.n} replicas, at most {largest} to each",
            " and ".join(map(str, self.samples)),
            mistake,
        )

    def expect_gradients(self, bench: Bench) -> None:
        """Expect that each optimizer stepped once, with the gradient of the whole batch."""
        steps = [len(found) for found in self.found]
        bench.expect(
            steps == [1] * self.n,
            f"one step of each of {self.n} optimizers",
            f"{steps} steps",
            "Call `optimizer.step()` once for each replica's optimizer.",
        )
        found = torch.stack([gradients[0] for gradients in self.found])
        missed = (found - self.whole).norm(dim=1) / self.whole.norm()
        k = int(missed.argmax())
        bench.expect(
            bool((missed < 1e-6).all()),
            f"replica {k} of {self.n} to step with the gradient of the whole batch, of {self.rows} "
            f"samples cut into {' + '.join(str(len(seen)) for seen in self.samples)}",
            f"one that is {missed[k]:.2g} times its length away from it",
            self._mistake(found),
        )

    def _mistake(self, found: torch.Tensor) -> str:
        """Return the sentence for the mistake that gives such gradients; empty if unknown."""
        scaled, mean = self.parts * self.shares[:, None], torch.full_like(self.shares, 1 / self.n)
        ones = torch.ones_like(mean)
        ways = ((self.parts, self.shares), (scaled, ones), (self.parts, mean))
        if found.isnan().any():
            return "An empty shard has no mean, and to divide by its samples gives nan."
        for mistake, rule in RULES.items():
            if any(torch.allclose(found, rule(*way)) for way in ways):
                return mistake
        if torch.allclose(found, self.parts) or torch.allclose(found, scaled):
            first, *others = (replica.vector() for replica in self.replicas)
            return AFTERWARDS if all(torch.allclose(first, each) for each in others) else OWN
        surplus = found - self.whole
        times = surplus @ self.before / self.before.square().sum()
        return STALE if torch.allclose(surplus, times[:, None] * self.before) else ""


def expect_step(bench: Bench, rows: int) -> None:
    """Expect that replicas share out a batch and step with its gradient."""
    for n in REPLICAS:
        group = Group(n)
        group.step(bench, rows)
        group.expect_shards(bench)
        group.expect_gradients(bench)


@LAB.check("the gradient of the batch from equal shards", read="Two replicas that stay together")
def equal(bench: Bench) -> None:
    expect_step(bench, 12)


@LAB.check("the gradient of the batch from unequal shards", read="Where it breaks: unequal shards")
def unequal(bench: Bench) -> None:
    expect_step(bench, 7)


@LAB.check("the gradient of the batch despite empty shards", read="Where it breaks: unequal shards")
def empty(bench: Bench) -> None:
    expect_step(bench, 2)


@LAB.check("the mean loss of the batch", read="Where it breaks: unequal shards")
def mean_loss(bench: Bench) -> None:
    for n in REPLICAS:
        for rows in (12, 7, 2):
            group = Group(n)
            group.step(bench, rows)
            bench.expect(
                isinstance(group.loss, float),
                "the loss as a float",
                f"a {type(group.loss).__name__}",
                "`loss.item()` is the number in a tensor.",
            )
            *means, whole = torch.tensor(group.means)
            each = torch.stack(means)
            mistakes = {
                "An empty shard's mean is nan, and so is any sum with it in it: leave it "
                "out.": torch.tensor(torch.nan),
                "That is the mean over the shards: weight each by its samples.": each.nanmean(),
                "The shards' losses were added: weight each by its part of the "
                "batch.": each.nansum(),
                "That is the last replica's part of it.": (each * group.shares)[-1].float(),
            }
            what = f"the mean loss of {rows} samples on {n} replicas"
            bench.near(torch.tensor(group.loss), whole, what, mistakes)


@LAB.check("the same bits on all replicas", read="Two replicas that stay together")
def bits(bench: Bench) -> None:
    group = Group(4)
    group.step(bench, 7)
    for k in range(1, 4):
        bench.expect(
            torch.equal(group.found[k][0], group.found[0][0]),
            "the same gradient on all replicas, bit for bit",
            f"another one on replica {k} than on replica 0",
            "Sums in another order are rounded in another way: compute the average once, "
            "and hand it out.",
        )
    places = [{gradient.data_ptr() for gradient in held} for held in group.held]
    for first, second in itertools.combinations(range(4), 2):
        bench.expect(
            places[first].isdisjoint(places[second]),
            "gradients in tensors of each replica's own",
            f"one tensor that replicas {first} and {second} share",
            "What changes a gradient in place, as clipping does, would change both: copy into each "
            "replica's own, or clone.",
        )


@LAB.check("a frozen parameter stays as it is", read="Two replicas that stay together")
def frozen(bench: Bench) -> None:
    for rows in (7, 2):
        group = Group(3, partial(SGD, weight_decay=0.5), frozen=True)
        group.step(bench, rows)
        bench.expect(
            all(torch.equal(each.out.bias, group.single.out.bias) for each in group.replicas),
            "a frozen parameter to stay as it is",
            "another value",
            "Its gradient is None: leave it so. With zeros there, weight decay changes it.",
        )
        group.expect_gradients(bench)


@LAB.check("some steps as one model takes them", read="Two replicas that stay together")
def steps(bench: Bench) -> None:
    for kind in (partial(SGD, momentum=0.9), partial(torch.optim.Adam, lr=0.05)):
        for n in REPLICAS:
            group = Group(n, kind)
            for rows in (12, 7, 2, 12):
                group.step(bench, rows)
                group.expect_gradients(bench)
                first, *others = [replica.vector() for replica in group.replicas]
                name = type(group.alone).__name__
                bench.near(first, group.single.vector(), f"the weights with {name}")
                bench.expect(
                    all(torch.equal(first, other) for other in others),
                    f"the same weights on {n} replicas with {name}, bit for bit",
                    "others",
                    "Equal gradients and equal optimizers keep them equal: let nothing else change "
                    "the weights.",
                )
