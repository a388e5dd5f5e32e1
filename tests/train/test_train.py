"""Training: one result for any ranks and schedule, resumed runs, and the command line."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from ranks import on_ranks, run

from microddp.datasets import CHARACTERS
from microddp.replicas import check_replicas
from microddp.shared import carriers
from microddp.strategies import STRATEGIES
from microddp.timing import Span
from microddp.train import Trainer, TrainingConfig, loop, mean_step, parse, train
from microddp.train import __main__ as command
from microddp.train.optimizers import OPTIMIZERS
from microddp.train.options import CHOICES
from microddp.train.task import LEVELS, SURPRISES, make_task, synthetic_tokens

SMALL = TrainingConfig(
    data="synthetic", channels=(8, 16), hidden=32, depth=2, width=16, epochs=1, batch_size=768
)
STEPS = 5  # of an epoch of those
# Relative, of losses and of the norms of gradients and weights, in fp32. On this data no ReLU's
# input is so near to zero that rounding could move it across: then it would be 1e-3.
TOLERANCE = 1e-5


def small(**options):
    return dataclasses.replace(SMALL, **options)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def trained(comms, config):
    """The last losses, gradients and weights of a run."""
    gradients = {}

    def keep(_, model):
        gradients["last"] = flat(p.grad for p in model.parameters())

    result = train(config, comms, keep)
    check_replicas(result.model, comms)
    assert all(not p._post_accumulate_grad_hooks for p in result.model.parameters())
    last = result.epochs[-1]
    return (
        (last.loss, last.test_loss),
        gradients["last"].numpy(),
        flat(result.model.parameters()).numpy(),
    )


def distances(mine, right):
    """Relative, between what two runs brought."""
    return [
        ((a - b) ** 2).sum() ** 0.5 / (b**2).sum() ** 0.5
        for a, b in zip(map(np.asarray, mine), map(np.asarray, right), strict=True)
    ]


# ---- the same result for any ranks, schedule and accumulation


def all_cases(comms):
    cases = [small(), small(schedule="naive")]
    replicated = [name for name in CHOICES["schedule"] if STRATEGIES[name].replicas]
    cases += [small(schedule=name, accumulate=2) for name in replicated]
    cases += [small(model="mlp", schedule=name, accumulate=3) for name in ("naive", "ddp")]
    others = [small(seed=1), small(lr=1.1e-3)] if comms.world_size == 1 else []
    return [trained(comms, config) for config in cases + others]


@on_ranks(1)
def test_a_users_settings_of_cudnn_are_set_aside_for_training_and_no_longer(comms):
    cudnn = torch.backends.cudnn
    seen = []

    def settings(*_):
        seen.append((cudnn.deterministic, cudnn.benchmark))

    cudnn.deterministic, cudnn.benchmark = False, True
    train(small(), comms, on_step=settings)
    settings()
    assert set(seen[:-1]) == {(True, False)}
    assert seen[-1] == (False, True)


def test_ranks_schedules_and_accumulation_change_no_more_than_rounding():
    alone, *others = (run(all_cases, n)[0] for n in (1, 2, 4))
    *alone, seed, rate = alone
    cnn, mlp = alone[0], alone[-1]
    for cases in (alone, *others):
        for case in cases[:-2]:
            assert max(distances(case, cnn)) < TOLERANCE
        for case in cases[-2:]:
            assert max(distances(case, mlp)) < TOLERANCE
    for other in (seed, rate):
        assert min(distances(other, cnn)) > 10 * TOLERANCE, "the comparison sees what matters"


@on_ranks(2)
def test_the_defaults_learn_the_digits(comms):
    result = train(TrainingConfig(epochs=5), comms)
    assert result.epochs[-1].test_accuracy > 0.95
    assert result.steps == 5 * 14


@on_ranks(2)
def test_every_model_learns_something_of_every_data_set(comms):
    for model, data in itertools.product(("mlp", "cnn", "transformer"), ("digits", "synthetic")):
        sequences = model == "transformer"
        config = small(model=model, data=data, batch_size=192, lr=1e-2)
        start, end = train(dataclasses.replace(config, lr=1e-9), comms), train(config, comms)
        start, end = start.epochs[-1], end.epochs[-1]
        assert end.loss < start.loss
        assert end.test_loss < 0.95 * start.test_loss
        assert (end.test_accuracy is None) == (data == "synthetic" and not sequences)
        assert end.test_accuracy is None or end.test_accuracy > start.test_accuracy + 0.1


def test_a_token_decides_the_next_one_but_for_surprises():
    data = synthetic_tokens(seed=3)
    before, after = data.train.tensors
    assert torch.equal(before[:, 1:], after[:, :-1])
    followers = [after[before == token].mode().values.item() for token in range(LEVELS)]
    assert sorted(followers) == list(range(LEVELS))
    as_ruled = (torch.tensor(followers)[before] == after).double().mean().item()
    assert as_ruled == pytest.approx(1 - SURPRISES * (1 - 1 / LEVELS), abs=0.005)


# ---- precision


@on_ranks(2)
def test_lower_precision_learns_about_the_same(comms):
    for schedule in ("ddp", "naive"):
        config = small(schedule=schedule, epochs=3)
        full = train(config, comms).epochs[-1]
        for precision in ("bf16", "fp16"):
            result = train(dataclasses.replace(config, precision=precision), comms)
            check_replicas(result.model, comms)
            assert all(p.dtype == torch.float32 for p in result.model.parameters())
            half = result.epochs[-1]
            assert half.loss != full.loss, "it was not computed in fp32"
            assert half.loss == pytest.approx(full.loss, rel=0.05)


@on_ranks(2)
def test_all_ranks_skip_a_step_that_overflows_on_one(comms):
    weights = {}

    def after(step, model):
        weights[step] = flat(model.parameters())
        check_replicas(model, comms)
        if step == 3 and comms.rank == 1:
            parameter = next(model.parameters())
            handle = parameter.register_hook(
                lambda grad: handle.remove() or torch.full_like(grad, torch.inf)
            )

    trainer = Trainer(small(precision="fp16"), comms, after)
    scale = trainer.scaler.get_scale()
    trainer.run()
    assert trainer.scaler.get_scale() == scale / 2
    unchanged = [a for a, b in itertools.pairwise(weights) if torch.equal(weights[a], weights[b])]
    assert unchanged == [3], "the fourth step was skipped, and no other"


# ---- checkpoints


def resumed_in_parts(comms, folder):
    ways = [{"schedule": name, "precision": "fp16"} for name in CHOICES["schedule"]]
    ways += [{"compress": name} for name in ("top-k:0.1", "random-k:0.1", "int8", "power:2")]
    ways += [{"all_reduce": name} for name in ("shared", "hierarchical")]
    ways += [{"compress": "sign", "schedule": "torch"}, {"compress": "bf16", "precision": "bf16"}]
    for number, way in enumerate(ways):
        # Small buckets: where a gradient lies decides how ranks round, and what is sent of it.
        config = small(model="mlp", bucket_cap_mb=0.005, accumulate=2, epochs=2, **way)
        whole = train(config, comms)
        resuming = dataclasses.replace(config, checkpoint=Path(folder, str(number)), resume=True)
        for epochs in (1, 2, 2):
            result = train(dataclasses.replace(resuming, epochs=epochs), comms)
        assert torch.equal(flat(whole.model.parameters()), flat(result.model.parameters())), way
        assert [e.loss for e in whole.epochs] == [e.loss for e in result.epochs]
        assert whole.steps == result.steps == 2 * STEPS


def test_a_run_in_parts_is_bitwise_the_run_as_a_whole(tmp_path):
    run(resumed_in_parts, 3, str(tmp_path), timeout=200)  # a dozen trainings


def not_begun_anew(comms, folder):
    if comms.rank == 0:
        Path(folder, "checkpoint-100.pt").touch()
    comms.barrier()
    message = r"expected --resume, .* got rank 0: checkpoint-100\.pt of another run"
    with pytest.raises(ValueError, match=message):
        train(small(checkpoint=Path(folder)), comms)


def test_checkpoints_of_another_run_are_not_mixed_with(tmp_path):
    run(not_begun_anew, 2, str(tmp_path))


def newest(folder):
    return max(Path(folder).glob("checkpoint-*.pt"), key=lambda path: int(path.stem[11:]))


def first_epoch(comms, folder):
    train(small(checkpoint=Path(folder)), comms)


def first_epoch_of_three(comms, folder):
    train(small(compress="top-k:0.1", checkpoint=Path(folder)), comms)


def second_epoch_of_two(comms, folder):
    """What three ranks had kept back is sent by two."""
    kept = torch.load(newest(folder), weights_only=True)["kept_back"]["residuals"]
    config = small(compress="top-k:0.1", epochs=2, resume=True, checkpoint=Path(folder))
    trainer = Trainer(config, comms)
    trainer._rehearse()
    names = {p: name for name, p in trainer.model.named_parameters()}
    residuals = trainer.strategy.compression.residuals
    assert residuals.keys() == names.keys()
    for parameter, residual in residuals.items():
        assert torch.equal(residual, kept[names[parameter]].mean(dim=0))
    trainer.run()
    check_replicas(trainer.model, comms)


def test_what_was_kept_back_is_sent_by_other_ranks(tmp_path):
    run(first_epoch_of_three, 3, str(tmp_path))
    run(second_epoch_of_two, 2, str(tmp_path))


def epoch_apart(comms, folder):
    train(small(average_every=2, checkpoint=Path(folder)), comms)


def resumed_by_fewer(comms, folder):
    config = small(average_every=2, epochs=2, resume=True, checkpoint=Path(folder))
    message = "expected a checkpoint of 1 ranks, .* got one of 2"
    with pytest.raises(ValueError, match=message):
        train(config, comms)


def test_ranks_that_train_by_themselves_go_on_as_many(tmp_path):
    run(epoch_apart, 2, str(tmp_path))
    run(resumed_by_fewer, 1, str(tmp_path))


def second_epoch(comms, folder):
    options = {"resume": True, "checkpoint": Path(folder)}
    resumed = trained(comms, small(epochs=2, schedule="naive", accumulate=2, **options))
    whole = trained(comms, small(epochs=2))
    assert max(distances(resumed, whole)) < TOLERANCE
    for name, value in (("seed", 1), ("batch_size", 48), ("model", "mlp"), ("channels", (8,))):
        message = (
            rf"^rank {comms.rank}: --{name.replace('_', '-')}: the state to go on from was trained "
            rf"with .*, expected the same, got .*{str(value)[:4].strip('(),')}"
        )
        with pytest.raises(ValueError, match=message):
            train(small(**options | {name: value}), comms)


def test_other_ranks_and_schedules_may_resume_and_other_seeds_may_not(tmp_path):
    run(first_epoch, 2, str(tmp_path))
    run(second_epoch, 1, str(tmp_path))


def stopped_in_an_epoch(comms, folder):
    def stop(step, _):
        if step == 2 * STEPS - 1:
            raise EOFError

    with pytest.raises(EOFError):
        train(small(epochs=2, checkpoint=Path(folder), checkpoint_every=3), comms, stop)


def by_others(comms, folder):
    if not folder:
        return trained(comms, small(epochs=2))
    return trained(comms, small(epochs=2, resume=True, checkpoint=Path(folder)))


def test_any_number_of_ranks_goes_on_from_the_midst_of_an_epoch_with_the_same_batches(tmp_path):
    def distance(ranks, folder):  # of losses and weights: 5 ranks' shares round across a ReLU
        losses, _, weights = distances(run(by_others, ranks, folder)[0], right)
        return max(losses, weights)

    right = run(by_others, 1, "")[0]
    assert distance(5, "") < TOLERANCE, "with unequal shares of a batch of 768"
    run(stopped_in_an_epoch, 3, str(tmp_path))
    assert newest(tmp_path).name == "checkpoint-6.pt", "the step that stopped it was the ninth"
    for ranks in (1, 5):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        shutil.copy(newest(tmp_path), folder)
        assert distance(ranks, str(folder)) < TOLERANCE


# What differs by rank or is kept from step to step, beside the usual.
WAYS = (
    {},
    {"checkpoint_every": 2},
    {"checkpoint_every": 1, "compress": "top-k:0.01"},
    {"checkpoint_every": 3, "compress": "power:2"},
    {"checkpoint_every": 3, "average_every": 3, "outer": "nesterov:0.7,0.9"},
    {"average_every": 4, "fragments": 2, "warm_up": 2},
)


def killed_in_a_random_step(comms, folder, way, step):
    def kill(now, _):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(small(epochs=3, checkpoint=Path(folder), **way), comms, kill)


def resumed_and_whole(comms, folder, way):
    config = small(epochs=3, **way | {"checkpoint_every": 0})
    whole = train(config, comms)
    first = []
    options = {"checkpoint": Path(folder), "resume": True} | way
    result = train(dataclasses.replace(config, **options), comms, lambda n, _: first.append(n))
    assert torch.equal(flat(whole.model.parameters()), flat(result.model.parameters()))
    assert [e.loss for e in whole.epochs] == [e.loss for e in result.epochs]
    return first[0] - 1 if first else 3 * STEPS


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "usual")
def test_killed_on_all_ranks_in_a_random_step_and_resumed_it_is_the_same_run(way, tmp_path):
    step = random.randrange(1, 3 * STEPS + 1)
    print("killed after step", step)
    codes = run(killed_in_a_random_step, 2, str(tmp_path), way, step, dies=[0, 1])
    assert codes == [-signal.SIGKILL] * 2
    after, _ = run(resumed_and_whole, 2, str(tmp_path), way)
    # One more checkpoint may have been under way, which is whole or not there.
    every = way.get("checkpoint_every", STEPS)
    assert 0 <= step - after <= 2 * every, "no more than two intervals are lost"


def with_dropout(config, comms):
    """A task whose model draws random numbers in training."""
    task = make_task(config, comms)
    return dataclasses.replace(task, model=torch.nn.Sequential(torch.nn.Dropout(), task.model))


def dropout_resumed_and_whole(comms, folder):
    loop.make_task = with_dropout
    config = small(model="mlp", epochs=3)
    whole = train(config, comms)
    config = dataclasses.replace(config, checkpoint=Path(folder), resume=True)
    for epochs in (1, 3):
        result = train(dataclasses.replace(config, epochs=epochs), comms)
    assert torch.equal(flat(whole.model.parameters()), flat(result.model.parameters()))
    results = [[(e.loss, e.test_loss) for e in run.epochs] for run in (whole, result)]
    assert results[0] == results[1]
    assert whole.model.training


def test_a_model_that_draws_random_numbers_draws_the_same_when_it_is_resumed(tmp_path):
    run(dropout_resumed_and_whole, 3, str(tmp_path))


def state_in(folder):
    state = torch.load(newest(folder), weights_only=True)
    return state["step"], flat(state["model"].values())


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "in time"
        time.sleep(0.02)


def runs(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_torchrun_restarts_a_rank_that_was_killed_and_ranks_end_with_a_torchrun_that_was(tmp_path):
    options = ["--model", "mlp", "--data", "synthetic", "--epochs", "20", "--width", "16"]
    folder, reference = tmp_path / "killed", tmp_path / "whole"
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job += ["--max-restarts=1", "-m", "microddp.train", *options]
    job += ["--resume", "--checkpoint", str(folder), "--checkpoint-every", "10"]
    steps = [0]
    for victim in ("torchrun", "rank"):
        with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as torchrun:
            ranks = []
            try:
                wait_for(lambda: list(folder.glob("*.pt")) and state_in(folder)[0] > steps[-1])
                ranks = psutil.Process(torchrun.pid).children()
                time.sleep(random.uniform(0, 0.3))
                (torchrun if victim == "torchrun" else random.choice(ranks)).kill()
                output, _ = torchrun.communicate(timeout=60)
            finally:
                torchrun.kill()
        wait_for(lambda ranks=ranks: not any(map(runs, ranks)))
        steps.append(state_in(folder)[0])
    assert f"Resuming after step {steps[1]}, from {folder}" in output.decode()
    assert torchrun.returncode == 0, output.decode()
    assert 10 <= steps[1] < steps[2] == 20 * 42
    run(main, 2, *options, "--checkpoint", str(reference), join=False)
    assert torch.equal(state_in(folder)[1], state_in(reference)[1])


# ---- debugging


def perturb_rank_1(comms):
    def perturb(step, model):
        if step == 2 and comms.rank == 1:
            with torch.no_grad():
                model.hidden.bias[3] += 1e-6

    with pytest.raises(
        RuntimeError,
        match=rf"^after step 2: rank {comms.rank}: parameter hidden\.bias .* on rank 1",
    ):
        train(small(), comms, perturb)


def test_a_rank_that_drifts_is_named_with_the_step_where_asked_for():
    run(perturb_rank_1, 2, environment={"MICRODDP_DEBUG": "1"})


def trains_while_ranks_compare(comms):
    for schedule in ("ddp", "torch", "zero1", "zero2", "owned"):
        train(small(schedule=schedule), comms)


def test_ranks_that_compare_find_the_weights_of_every_strategy_equal():
    run(trains_while_ranks_compare, 2, environment={"MICRODDP_DEBUG": "1"})


# ---- who is slow


def slow_rank(comms, planted):
    def be_slow(*_):
        if comms.rank == planted:
            time.sleep(0.1)

    config = small(batch_size=256, report=True)
    for schedule in ("ddp", "torch", "naive"):
        result = train(dataclasses.replace(config, schedule=schedule), comms, be_slow)
        assert (result.report.rank, result.report.link) == (planted, None), str(result.report)
    assert train(dataclasses.replace(config, report=False), comms).report is None
    with pytest.raises(ValueError, match=r"--report: expected at least 2 steps .* got 4096"):
        Trainer(small(batch_size=2049, report=True), comms)


@pytest.mark.parametrize("planted", [0, 2])
def test_the_report_names_the_rank_that_holds_the_others_up(planted):
    run(slow_rank, 3, planted)


# ---- the command line


def main(*arguments):
    """Run the command line on this rank: status, what it printed, and its errors."""
    status, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(arguments)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


OPTIONS = ("--channels", "8", "--hidden", "16", "--epochs", "2", "--schedule", "bucketed")


def test_the_command_line_prints_and_writes_what_it_measured(tmp_path):
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    files = ("--json", str(report), "--profile", str(trace))
    (_, out, err), (_, silence, _) = run(main, 2, *OPTIONS, *files, join=False)
    assert not silence, "rank 0 speaks"
    assert not err.strip("\r"), "no progress bar where nobody looks"
    lines = out.splitlines()
    assert lines[0].startswith("gloo, 2 ranks on ")
    # Convolution 1 x 8 x 9, norm 2 x 8, linear layers (8 x 16 + 1) x 16 and (16 + 1) x 10.
    count = 72 + 16 + (128 + 1) * 16 + 170
    assert lines[1] == f"cnn of {count:,} parameters, 9.07 KiB of gradients a step"
    assert [line.split(":")[0] for line in lines[2:4]] == ["epoch 1/2", "epoch 2/2"]
    assert lines[4].startswith("2 epochs of 14 steps")
    assert all(word in lines[5] for word in ("computing", "waiting", "overhead", "hidden"))
    written = json.loads(report.read_text())
    assert (written["parameters"], written["gradient_bytes"]) == (count, 4 * count)
    assert written["config"] | {"schedule": "bucketed", "epochs": 2} == written["config"]
    assert written["run"] == lines[0]
    for epoch, line in zip(written["epochs"], lines[2:4], strict=True):
        assert f"loss {epoch['loss']:.4f}, test loss {epoch['test_loss']:.4f}" in line
        step = epoch["step"]
        parts = step["forward"] + step["backward"] + step["exposed"] + step["optimizer"]
        assert 0 < parts <= step["total"] * 1.001
        assert 14 * step["total"] <= epoch["seconds"] * 1.001
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    named = [event["name"] for event in events]
    assert named.count("optimizer") == named.count("bucket 0") == 2 * 14


def test_a_mean_step_is_over_steps_and_ranks():
    spans = []
    for rank, start in itertools.product((0, 1), (0.0, 10.0)):
        spans.append(Span(rank, "compute", "forward", start, start + 1 + rank))
        spans.append(Span(rank, "communication", "bucket 0", start + 1, start + 4))
        spans.append(Span(rank, "wait", "wait for bucket 0", start + 3, start + 4))
    step = mean_step(spans, 2, 2)
    assert (step.forward, step.exposed, step.hidden, step.total) == (1.5, 1, 2, 14 / 2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--epochs 0", "--epochs: expected at least 1, got 0"),
        ("--epochs many", "argument --epochs: invalid int value: 'many'"),
        ("--schedule best", "argument --schedule: invalid choice: 'best'"),
        ("--channels 8 0", r"--channels: expected numbers of at least 1, got \(8, 0\)"),
        ("--bucket-cap-mb nan", "--bucket-cap-mb: expected a positive number, got nan"),
        ("--lr -1", "--lr: expected a positive number, got -1.0"),
        ("--all-reduce star", "argument --all-reduce: invalid choice: 'star'"),
        (
            "--all-reduce shared --schedule bucketed",
            "--all-reduce: expected --schedule ddp, .* got bucketed, none and 0",
        ),
        (
            "--all-reduce auto --compress int8",
            "--all-reduce: expected .*, no --compress .* got ddp, int8 and 0",
        ),
        ("--compress zip", "--compress: expected one of top-k:K, .* got 'zip'"),
        (
            "--compress int8 --schedule naive",
            "--compress: expected --schedule ddp or torch .* naive",
        ),
        (
            "--compress int8 --precision fp16",
            "--compress: expected --precision fp32 or bf16 .* fp16",
        ),
        (
            "--outer sgd --average-every 2",
            "--outer: expected mean, or nesterov:LR,MOMENTUM .* 'sgd'",
        ),
        ("--outer nesterov:inf,0.9 --average-every 2", "--outer: expected mean, or .* LR above 0"),
        ("--average-every -1", "--average-every: expected at least 0, got -1"),
        ("--average-every 2 --warm-up -1", "--warm-up: expected at least 0, got -1"),
        ("--fragments 2", "--fragments: expected --average-every with it"),
        ("--average-every 2 --compress int8", "--average-every: expected no --compress .* int8"),
        ("--average-every 2 --schedule zero3", "--average-every: expected no --schedule .* zero3"),
        ("--average-every 2 --precision fp16", "--average-every: expected .* fp32 or bf16 .* fp16"),
        ("--model mlp --depth 1", "--depth: expected at least 2 for an mlp, got 1"),
        ("--model transformer --width 130", "--width: expected a multiple of its 4 heads .* 130"),
        ("--seed -1", "--seed: expected at least 0, got -1"),
        ("--seed 2147483648", "--seed: expected at most 2147483647, got 2147483648"),
        ("--resume", "--resume: expected --checkpoint with it"),
        ("--checkpoint-every 5", "--checkpoint-every: expected --checkpoint with it"),
        ("--keep 3", "--keep: expected --checkpoint with it"),
        ("--least 2", "--least: expected --elastic with it"),
        ("--checkpoint-every -5 --checkpoint x", "--checkpoint-every: expected at least 0, got -5"),
        (
            "--checkpoint-every 5 --checkpoint x --average-every 2",
            "--checkpoint-every: expected steps .* multiples of 2 .* got 5, 0 and 1",
        ),
        ("--keep 0", "--keep: expected at least 1, got 0"),
        ("--report --average-every 2", "--report: expected no --average-every with it"),
        ("--elastic h:1 --average-every 2", "--elastic: expected no --compress and no --average"),
        ("--least 0", "--least: expected at least 1, got 0"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--data text", "--data: expected --model transformer with text, got cnn"),
    ],
)
def test_bad_options_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(options.split())


def test_help_has_a_flag_for_each_option_with_its_text_and_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    flags = re.split(r"\n  (?=--)", capsys.readouterr().out.partition("options:")[2])[1:]
    texts = [" ".join(text.split()) for text in flags]
    for option, text in zip(dataclasses.fields(TrainingConfig), texts, strict=True):
        said = text.partition(" (default")[0]
        assert re.match(rf"--{option.name.replace('_', '-')} .*[a-z]{{2}} [a-z]", said)
    assert texts[1].endswith("rounds differently (default backend)")
    assert texts[9] == (
        "--channels N [N ...] output channels of each convolution of the cnn (default 32 64 128)"
    )
    assert texts[22].startswith("--report say which rank or link")


def test_flags_set_options_of_every_type():
    flags = "--channels 8 9 --lr 2 --batch-size 4 --schedule torch --profile a --resume"
    assert parse([*flags.split(), "--checkpoint=b"]) == TrainingConfig(
        channels=(8, 9),
        lr=2.0,
        batch_size=4,
        schedule="torch",
        profile=Path("a"),
        resume=True,
        checkpoint=Path("b"),
    )


def test_a_configuration_checks_its_choices_too():
    with pytest.raises(ValueError, match=r"--data: expected one of synthetic, .*, got cifar"):
        TrainingConfig(data="cifar")
    assert parse([]) == TrainingConfig()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            "--epochs 0",
            "rank 0: expected options that can be used, got ranks 0, 1: --epochs: expected at "
            "least 1, got 0",
        ),
        (
            "--accumulate 49",
            "rank 0: --batch-size: expected at least 2 ranks x 49 accumulated parts, got 96",
        ),
        (
            "--json no/such/folder/file",
            "rank 0: expected --profile and --json that can be written, got rank 0: expected a "
            "file in a folder that exists, got no/such/folder/file",
        ),
        (
            f"--checkpoint {__file__}",
            f"rank 0: expected a folder for checkpoints: {__file__}, got rank 0: [Errno 17] File "
            f"exists: '{__file__}'",
        ),
    ],
)
def test_what_does_not_fit_is_said_once_in_a_line_and_every_rank_ends(options, complaint):
    ranks = run(main, 2, *options.split(), join=False)
    assert [status for status, *_ in ranks] == [2, 2]
    assert [err for *_, err in ranks] == [f"microddp.train: error: {complaint}\n", ""]


def main_on_two_machines(*arguments):
    carriers.machines_of = lambda _: [[0], [1]]
    return main(*arguments)


def test_an_all_reduce_that_these_ranks_cannot_use_is_a_wrong_option():
    (status, _, err), _ = run(main_on_two_machines, 2, "--all-reduce", "shared", join=False)
    assert status == 2
    assert err.startswith("microddp.train: error: rank 0: expected another all_reduce: shared")


def all_but_the_last_step(comms, folder):
    def stop(step, _):
        if step == STEPS:
            raise EOFError

    with pytest.raises(EOFError):
        train(small(checkpoint=Path(folder), checkpoint_every=STEPS - 1), comms, stop)


def the_last_step(comms, folder):
    options = {"checkpoint": Path(folder), "resume": True}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = train(small(report=True, **options), comms)
    assert result.report is None
    assert "Nothing to report: expected 2 steps or more, got 1." in said.getvalue()
    train(small(epochs=2, **options), comms)
    message = rf"^rank {comms.rank}: --epochs: expected at least the 2 .* had begun, got 1"
    with pytest.raises(ValueError, match=message):
        train(small(**options), comms)


def test_a_resumed_run_says_what_it_cannot_report_and_ends_with_a_whole_epoch(tmp_path):
    run(all_but_the_last_step, 1, str(tmp_path))
    run(the_last_step, 1, str(tmp_path))


@on_ranks(1)
def test_a_transformer_reads_text_by_characters(comms):
    result = train(small(model="transformer", data="text"), comms)
    assert result.model.tokens.num_embeddings == CHARACTERS
    assert result.epochs[-1].test_loss < math.log(CHARACTERS) - 0.1


@on_ranks(1)
def test_what_does_not_fit_the_model_or_the_data_is_refused(comms):
    with pytest.raises(ValueError, match=r"a batch size in 1\.\.4096, got 5000"):
        Trainer(small(batch_size=5000), comms)
    with pytest.raises(ValueError, match="--width: expected a multiple of its 4 heads"):
        Trainer(small(model="transformer", width=30), comms)


def without_torchvision(comms):
    sys.modules["torchvision.datasets"] = None
    with pytest.raises(
        ValueError, match=rf"rank {comms.rank}: .* got .*MNIST needs torchvision.* digits"
    ):
        train(small(data="mnist"), comms)


def test_missing_data_is_an_error_on_every_rank():
    run(without_torchvision, 2)


def test_no_weight_decays():
    for make in OPTIMIZERS.values():
        parameters = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        make(parameters, 0.1).step()
        assert all(p.eq(1).all() for p in parameters)


def test_a_schedule_of_the_learning_rate_reaches_muon():
    parameters = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = OPTIMIZERS["muon"](parameters, 0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.eq(1).all() for p in parameters)
