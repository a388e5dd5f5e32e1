"""The scripts of chapter 14, to download: the same training on any number of ranks, and resumed."""

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.utils.data import DistributedSampler

from microddp.launch import JobFailed

FOLDER = Path(__file__).parents[2] / "docs/_downloads"
SCRIPT = FOLDER / "train_ddp.py"
EPOCHS = 4
LINE = re.compile(r"epoch (\d+): loss ([\d.]+), ([\d.]+)% read right")


def be_the_script(dies_at, *arguments):
    """Run the script as a rank that torchrun has started; the last rank may die before an epoch."""
    torch.set_num_threads(1)  # as torchrun has it
    set_epoch = DistributedSampler.set_epoch

    def dying(sampler, epoch):
        if epoch == dies_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        set_epoch(sampler, epoch)

    DistributedSampler.set_epoch = dying
    sys.argv = [str(SCRIPT), *map(str, arguments)]
    # A partner that has died closes its connections, and the others fail.
    fails = contextlib.suppress(RuntimeError) if dies_at is not None else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()) as said, fails:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return said.getvalue()


def train(ranks, *arguments, dies_at=None):
    """What each rank printed."""
    dies = () if dies_at is None else [ranks - 1]
    return run(be_the_script, ranks, dies_at, *arguments, join=False, dies=dies, timeout=100)


def losses(said):
    return [float(loss) for _, loss, _ in LINE.findall(said)]


@pytest.fixture(scope="class")
def whole(tmp_path_factory):
    """The runs that nobody disturbs, by their number of ranks: what was said, what was kept."""
    folder = tmp_path_factory.mktemp("whole")
    runs = {}
    for ranks in (1, 2, 4):
        kept = folder / f"{ranks}.pt"
        runs[ranks] = train(ranks, "--epochs", EPOCHS, "--checkpoint", kept), kept
    return runs


class TestTheSameTraining:
    def test_losses_do_not_depend_on_the_number_of_ranks(self, whole):
        (alone,), _ = whole[1]
        assert [int(epoch) for epoch, _, _ in LINE.findall(alone)] == list(range(EPOCHS))
        assert losses(alone)[-1] < 0.5 * losses(alone)[0]
        for ranks in (2, 4):
            (first, *others), _ = whole[ranks]
            assert losses(first) == pytest.approx(losses(alone), abs=1e-3)
            assert others == [""] * (ranks - 1)  # rank 0 speaks for all

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_a_run_that_was_killed_goes_on_to_the_same_bits(self, ranks, whole, tmp_path):
        options = ("--epochs", EPOCHS, "--checkpoint", tmp_path / "killed.pt")
        train(ranks, *options, dies_at=2)
        epoch, *_ = torch.load(tmp_path / "killed.pt")
        assert epoch == 1
        (said, *_) = train(ranks, *options)
        (undisturbed, *_), kept = whole[ranks]
        assert losses(said) == losses(undisturbed)[2:]
        assert same_bits(torch.load(tmp_path / "killed.pt"), torch.load(kept))
        assert os.listdir(tmp_path) == ["killed.pt"]

    @pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2)])
    def test_another_number_of_ranks_goes_on(self, before, after, whole, tmp_path):
        options = ("--epochs", EPOCHS, "--checkpoint", tmp_path / "killed.pt")
        train(before, *options, dies_at=2)
        (said, *_) = train(after, *options)
        assert losses(said) == pytest.approx(losses(whole[1][0][0])[2:], abs=2e-3)


def same_bits(one, other):
    """Whether two checkpoints hold the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


def test_rank_0_reads_the_checkpoint_for_all(tmp_path):
    """As where the others see another disk."""
    options = ("--epochs", 2, "--checkpoint", tmp_path / "kept.pt")
    train(2, *options)
    said, _ = run(see_nothing_but_on_rank_0, 2, tmp_path, join=False, timeout=100)
    assert LINE.findall(said)[0][0] == "2"


def see_nothing_but_on_rank_0(folder):
    if os.environ["RANK"] != "0":
        exists = os.path.exists
        os.path.exists = lambda path: exists(path) and not str(path).startswith(str(folder))
    return be_the_script(None, "--epochs", 3, "--checkpoint", folder / "kept.pt")


@pytest.mark.parametrize("options", [["--bf16"], ["--warmup", "50"]])
def test_options(options):
    (said, _) = train(2, "--epochs", 3, *options)
    assert losses(said)[-1] < 0.5 * losses(said)[0]


def test_other_settings_do_not_go_on(tmp_path):
    train(1, "--epochs", 1, "--checkpoint", tmp_path / "kept.pt")
    with pytest.raises(JobFailed, match=r"was trained with .*'lr': 0.05.* not with .*0.01"):
        train(1, "--epochs", 2, "--checkpoint", tmp_path / "kept.pt", "--lr", 0.01)


def test_compiled_it_trains_the_same(tmp_path):
    """By a backend that only traces and needs no compiler; its checkpoint fits the bare model."""
    plain, compiled = tmp_path / "plain.pt", tmp_path / "compiled.pt"
    train(2, "--epochs", 2, "--checkpoint", plain)
    pieces = run(compile_by_tracing, 2, compiled, join=False, timeout=100)
    assert min(pieces) > 0
    (_, _, [one, *_]), (_, _, [other, *_]) = torch.load(plain), torch.load(compiled)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


def compile_by_tracing(checkpoint):
    pieces, compile_model = [], torch.compile

    def backend(graph, _inputs):
        pieces.append(graph)
        return graph.forward

    torch.compile = lambda model: compile_model(model, backend=backend)
    be_the_script(None, "--epochs", 2, "--checkpoint", checkpoint, "--compile")
    return len(pieces)


def test_a_batch_that_cannot_be_shared():
    with pytest.raises(JobFailed, match="rank 2: a batch of 32 cannot be shared by 3 ranks"):
        train(3)


def command(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        **options,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_loading_processes_change_nothing():
    """Of a process that pytest forks, they could not be started."""
    said = [command(SCRIPT, "--epochs", 1, "--workers", workers).stdout for workers in (0, 1)]
    assert len(losses(said[0])) == 1
    assert said[0] == said[1]


def test_the_script_for_one_device_learns_as_much(tmp_path):
    ended = command(FOLDER / "train_single.py", "--epochs", 3, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert losses(ended.stdout)[-1] < 0.5 * losses(ended.stdout)[0]
    assert (tmp_path / "model.pt").exists()


def test_torchrun_restarts_what_was_killed(tmp_path):
    """From the command of the page, with a death in the midst: one restart is enough."""
    kills = tmp_path / "kills.py"
    kills.write_text(
        "import os, runpy, sys\n"
        "from torch.utils.data import DistributedSampler\n"
        "set_epoch = DistributedSampler.set_epoch\n"
        "def dying(sampler, epoch):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if first and epoch == 2 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    set_epoch(sampler, epoch)\n"
        "DistributedSampler.set_epoch = dying\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--epochs", EPOCHS, "--checkpoint", tmp_path / "run.pt"]
    ended = command(*torchrun, "--max-restarts=1", kills, *options)
    assert ended.returncode == 0, ended.stderr
    assert [epoch for epoch, _, _ in LINE.findall(ended.stdout)] == ["0", "1", "2", "3"]
