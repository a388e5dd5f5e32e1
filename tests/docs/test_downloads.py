"""The scripts of chapter 14, to download: the same training on any number of ranks, and resumed."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.run import get_args_parser
from torch.utils.data import DistributedSampler
from warm import python

import microddp
from microddp.launch import JobFailed

FOLDER = Path(__file__).parents[2] / "docs/_downloads"
SCRIPT = FOLDER / "train_ddp.py"
EPOCHS = 4
FORK = multiprocessing.get_context("fork")  # of a rank that has joined
LINE = re.compile(r"epoch (\d+): loss ([\d.]+), ([\d.]+)% read right")


def be_a_rank_of_it(*arguments):
    """As torchrun has it, but with microddp's digits: scikit-learn takes a second to import.

    They are the same, in the same order: the commands below, which run the script as it is, have
    the same losses.
    """
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), *map(str, arguments)]
    table = np.loadtxt(Path(microddp.__file__).with_name("digits.csv.gz"), delimiter=",")
    digits = types.SimpleNamespace(data=table[:, :-1], target=table[:, -1].astype(int))
    sys.modules["sklearn.datasets"] = types.SimpleNamespace(load_digits=lambda: digits)


def be_the_script(dies_at, *arguments):
    """Run the script as a rank that torchrun has started; the last rank may die before an epoch."""
    be_a_rank_of_it(*arguments)
    set_epoch = DistributedSampler.set_epoch

    def dying(sampler, epoch):
        if epoch == dies_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        set_epoch(sampler, epoch)

    DistributedSampler.set_epoch = dying
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Gives what was said and kept in a run that nobody disturbs, of a number of ranks."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def of(ranks):
        kept = folder / f"{ranks}.pt"
        return train(ranks, "--epochs", EPOCHS, "--checkpoint", kept), kept

    return of


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Gives what is left of a run of a number of ranks, the last of which was killed in epoch 2."""
    folder = tmp_path_factory.mktemp("killed")

    @functools.cache
    def of(ranks):
        kept = folder / f"{ranks}" / "killed.pt"
        kept.parent.mkdir()
        train(ranks, "--epochs", EPOCHS, "--checkpoint", kept, dies_at=2)
        return kept.parent

    return of


class TestTheSameTraining:
    def test_losses_do_not_depend_on_the_number_of_ranks(self, whole):
        (alone,), _ = whole(1)
        assert [int(epoch) for epoch, _, _ in LINE.findall(alone)] == list(range(EPOCHS))
        assert losses(alone)[-1] < 0.5 * losses(alone)[0]
        for ranks in (2, 4):
            (first, *others), _ = whole(ranks)
            assert losses(first) == pytest.approx(losses(alone), abs=1e-3)
            assert others == [""] * (ranks - 1)  # rank 0 speaks for all

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_a_run_that_was_killed_goes_on_to_the_same_bits(self, ranks, whole, killed, tmp_path):
        shutil.copytree(killed(ranks), tmp_path, dirs_exist_ok=True)
        assert sorted(os.listdir(tmp_path)) == ["killed.pt.0", "killed.pt.1"]
        (said, *_) = train(ranks, "--epochs", EPOCHS, "--checkpoint", tmp_path / "killed.pt")
        (undisturbed, *_), kept = whole(ranks)
        assert losses(said) == losses(undisturbed)[2:]
        assert sorted(os.listdir(tmp_path)) == ["killed.pt.2", "killed.pt.3"]
        for epoch in (2, 3):
            assert same_bits(load(tmp_path / "killed.pt", epoch), load(kept, epoch))

    @pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2)])
    def test_another_number_of_ranks_goes_on(self, before, after, whole, killed, tmp_path):
        shutil.copytree(killed(before), tmp_path, dirs_exist_ok=True)
        (said, *_) = train(after, "--epochs", EPOCHS, "--checkpoint", tmp_path / "killed.pt")
        assert losses(said) == pytest.approx(losses(whole(1)[0][0])[2:], abs=2e-3)


class TestCheckpoints:
    """Of epochs 2 and 3, by two ranks; a run that stops earlier goes on to the same bits."""

    @pytest.fixture
    def kept(self, whole, tmp_path):
        _, kept = whole(2)
        for epoch in (2, 3):
            shutil.copy(f"{kept}.{epoch}", tmp_path / f"kept.pt.{epoch}")
        return tmp_path / "kept.pt"

    @pytest.mark.parametrize("damage", ["cut off", "empty", "a bit"])
    def test_of_a_broken_newest_one_the_older_is_taken(self, damage, kept, whole):
        newest = Path(f"{kept}.{EPOCHS - 1}")
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        ends = {"cut off": len(data) // 2, "empty": 0, "a bit": len(data)}
        newest.write_bytes(data[: ends[damage]])
        (said, other) = train(2, "--epochs", EPOCHS, "--checkpoint", kept)
        assert f"kept.pt.{EPOCHS - 1} cannot be read: " in said
        assert LINE.findall(said) == LINE.findall(whole(2)[0][0])[-1:]
        assert other == ""
        assert same_bits(load(kept, EPOCHS - 1), load(whole(2)[1], EPOCHS - 1))

    def test_if_none_can_be_read_nothing_is_begun_anew(self, kept):
        for epoch in (2, 3):
            Path(f"{kept}.{epoch}").write_bytes(b"")
        with pytest.raises(JobFailed, match=r"no checkpoint .*kept\.pt\.\* can be read"):
            train(1, "--epochs", EPOCHS, "--checkpoint", kept)
        assert len(os.listdir(kept.parent)) == 2

    def test_whenever_rank_0_is_killed_a_whole_one_is_left(self, kept):
        """Before and after each call of `save` that changes the disk."""
        calls = ("open", "fsync", "replace", "fsync", "remove")
        run(die_in_saves, 1, kept, 2 * len(calls), join=False, timeout=100)
        assert sorted(os.listdir(kept.parent)) == ["kept.pt.3", "kept.pt.4"]

    def test_sigterm_ends_all_ranks_after_the_epoch(self, whole, tmp_path):
        options = ("--epochs", EPOCHS, "--checkpoint", tmp_path / "told.pt")
        (said, code), (_, other) = run(told_to_stop, 2, *options, join=False, timeout=100)
        assert losses(said) == losses(whole(2)[0][0])[:2]
        assert code == other == 128 + signal.SIGTERM
        (said, _) = train(2, *options)
        assert losses(said) == losses(whole(2)[0][0])[2:]
        assert same_bits(load(tmp_path / "told.pt", 3), load(whole(2)[1], 3))


def load(path, epoch):
    """The checkpoint of an epoch."""
    found, *rest = torch.load(f"{path}.{epoch}")
    assert found == epoch
    return rest


def die_in_saves(kept, deaths):
    """Save one more checkpoint: in processes that die, each at a moment, then in one that lives."""
    be_a_rank_of_it()
    script = runpy.run_path(str(SCRIPT))
    script["join"]()
    for number in (*range(deaths), None):
        process = FORK.Process(target=die_in_save, args=(script, kept, number))
        process.start()
        process.join()
        assert process.exitcode == (0 if number is None else -signal.SIGKILL)
        epoch, _, states = script["read"](kept)
        assert epoch >= EPOCHS - 1
        assert len(states) == 3
    dist.destroy_process_group()


def die_in_save(script, kept, number):
    """Save, and die before or after a call: number 0 is before the first."""
    steps = iter(range(100))

    def step():
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(function):
        def call(*arguments):
            step()
            result = function(*arguments)
            step()
            return result

        return call

    _, settings, states = script["read"](kept)
    parts = [types.SimpleNamespace(state_dict=lambda state=state: state) for state in states]
    script["save"].__globals__["open"] = dying(open)
    for name in ("fsync", "replace", "remove"):
        setattr(os, name, dying(getattr(os, name)))
    script["save"](kept, EPOCHS, settings, parts)


def told_to_stop(*arguments):
    """Be the script, whose last rank gets a SIGTERM in its second epoch; its exit status, too."""
    be_a_rank_of_it(*arguments)
    set_epoch = DistributedSampler.set_epoch

    def told(sampler, epoch):
        if epoch == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        set_epoch(sampler, epoch)

    DistributedSampler.set_epoch = told
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return said.getvalue(), ended.value.code


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
    (_, [one, *_]), (_, [other, *_]) = load(plain, 1), load(compiled, 1)
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
    with pytest.raises(JobFailed, match="a batch of 32 cannot be shared by 3 ranks"):
        train(3)


def command(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python()}
    return subprocess.run(
        [python(), *map(str, arguments)],
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


class TestRestarts:
    """By two torchruns with a rank each, as on two nodes."""

    @pytest.fixture
    def said(self, tmp_path):
        """The file of all that both print."""
        file = tmp_path / "said"
        file.touch()
        return file

    @pytest.fixture
    def start(self, tmp_path, said):
        """Starts torchruns that restart their ranks; they are ended with the test."""
        started = []

        def start_two(**environment):
            with socket.socket() as any_port:
                any_port.bind(("127.0.0.1", 0))
                place = f"127.0.0.1:{any_port.getsockname()[1]}"
            arguments = [
                *("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--max-restarts=1"),
                *("--nnodes=2", "--nproc-per-node=1"),
                *(f"--rdzv-endpoint={place}", "--local-addr=127.0.0.1", SCRIPT),
                *("--epochs", 100_000, "--checkpoint", tmp_path / "kept.pt"),
            ]
            for _ in range(2):
                with said.open("a") as output:
                    process = subprocess.Popen(
                        [sys.executable, *map(str, arguments)],
                        env={
                            **os.environ,
                            "OMP_NUM_THREADS": "1",
                            "PYTHON_EXEC": python(),
                            **environment,
                        },
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                started.append(process)
            return started

        yield start_two
        for process in started:
            for rank in psutil.Process(process.pid).children() if process.poll() is None else ():
                rank.kill()
            process.kill()
            process.wait()

    def test_a_rank_that_was_killed_begins_again(self, start, said, tmp_path):
        def comes_to(epoch):
            end = time.monotonic() + 200
            while max((int(file.suffix[1:]) for file in whole()), default=0) < epoch:
                assert time.monotonic() < end, [process.poll() for process in started]
                time.sleep(0.05)

        def whole():
            return [file for file in tmp_path.glob("kept.pt.*") if file.suffix != ".part"]

        started = start(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        comes_to(2)
        psutil.Process(started[-1].pid).children()[-1].kill()
        comes_to(max(int(file.suffix[1:]) for file in whole()) + 5)
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=60)
        epochs = [int(epoch) for epoch, _, _ in LINE.findall(said.read_text())]
        assert sorted(set(epochs)) == list(range(len(set(epochs))))
        assert len(epochs) - len(set(epochs)) <= 1  # one more may have been said than was kept
        assert max(epochs) == max(int(file.suffix[1:]) for file in whole())

    def test_several_torchruns_that_share_a_store_are_refused(self, start, said):
        """A torchrun gives up; before it ends it may wait minutes for the other one."""
        start()
        end = time.monotonic() + 100
        for words in ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "failed (exitcode: 1)"):
            while words not in said.read_text():
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.05)
        assert not LINE.findall(said.read_text())


class TestSlurm:
    """With programs in the place of Slurm's, which say how they were called."""

    SCRIPT = FOLDER / "train.slurm"

    @pytest.fixture
    def submit(self, tmp_path):
        """Runs the script as Slurm would; returns its status, and the calls by program."""
        for name, does in {
            "scontrol": '[ "$1" = requeue ] || printf "node7\\nnode9\\n"',
            "srun": 'echo "OMP_NUM_THREADS=$OMP_NUM_THREADS" >> "$CALLS"; exit "$STATUS"',
        }.items():
            program = tmp_path / name
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{does}\n')
            program.chmod(0o755)
        slurm = {"JOB_NODELIST": "node[7,9]", "NNODES": 2, "CPUS_PER_TASK": 64, "GPUS_ON_NODE": 8}

        def run_script(job, status=0, **more):
            calls = tmp_path / f"calls{job}"
            given = {f"SLURM_{key}": str(value) for key, value in {**slurm, **more}.items()}
            ended = subprocess.run(
                ["bash", "-u", self.SCRIPT],
                env={
                    "PATH": f"{tmp_path}:{os.environ['PATH']}",
                    **given,
                    "SLURM_JOB_ID": str(job),
                    "STATUS": str(status),
                    "CALLS": str(calls),
                },
                timeout=20,
            )
            return ended.returncode, calls.read_text().splitlines()

        return run_script

    def test_it_is_bash(self):
        assert subprocess.run(["bash", "-n", self.SCRIPT], timeout=20).returncode == 0
        read_by_slurm, _, rest = self.SCRIPT.read_text().partition("\n\n")  # to the first command
        assert "#SBATCH --requeue " in read_by_slurm
        assert "#SBATCH" not in rest

    def test_ranks_meet_on_the_first_node_at_a_port_of_the_jobs_own(self, submit):
        status, (_, srun, threads) = submit(123456)
        assert status == 0
        assert "--rdzv-endpoint=node7:13456 " in srun
        assert "--nnodes=2 --nproc-per-node=8 " in srun
        assert threads == "OMP_NUM_THREADS=8"
        assert "--rdzv-endpoint=node7:13457 " in submit(123457)[1][1]

    def test_what_it_starts_are_options_of_the_script_and_of_torchrun(self, submit):
        _, (_, srun, _) = submit(1)
        arguments = srun.partition(" torchrun ")[2].split()
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.max_restarts == 3
        assert parsed.training_script == "train_ddp.py"
        for option in parsed.training_script_args[::2]:
            assert f'"{option}"' in SCRIPT.read_text()

    @pytest.mark.parametrize(("status", "restarts", "again"), [(1, 0, True), (1, 5, False)])
    def test_what_is_not_done_goes_back_to_the_queue(self, status, restarts, again, submit):
        ended, calls = submit(7, status, RESTART_COUNT=restarts)
        assert ended == status
        assert (calls[-1] == "scontrol requeue 7") == again


# ---- the programs of chapter 13


def test_two_of_three_meet_again():
    said = command("-W", "ignore", FOLDER / "meet_again.py").stdout
    assert said.count("2 left, together again in 0.") == 2
    assert said.count("[60.0, 60.0, 60.0]") == 2
    assert said.endswith(
        "process 0 ended with 0\nprocess 1 ended with 0\nprocess 2 ended with -9\n"
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def test_the_doctor_names_the_rank_that_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("MICRODDP_RECORD", str(tmp_path))
    ended = command(*TORCHRUN, "--nproc-per-node=2", FOLDER / "raise_on_one_rank.py")
    assert ended.returncode == 1
    said = command("-m", "microddp.doctor", tmp_path).stdout
    assert "- Rank 1 ended by ValueError: a sample that cannot be read" in said


def test_the_chapters_listing_shards_the_script(whole, tmp_path):
    """Two ranks have the losses of DDP; one goes on from the parts that they wrote."""
    chapter = (FOLDER.parents[1] / "chapters/14_your_script.py").read_text(encoding="utf-8")
    (listing,) = re.findall(r"```diff\n(.*?)```", chapter, re.DOTALL)
    script = SCRIPT.read_text(encoding="utf-8")
    for hunk in re.split(r"@@.*\n", listing)[1:]:
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kinds)
            for kinds in (" -", " +")
        )
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    sharded, kept = tmp_path / "sharded.py", tmp_path / "kept.pt"
    sharded.write_text(script, encoding="utf-8")
    options = (sharded, "--checkpoint", kept, "--epochs")
    first = command("-W", "ignore", *TORCHRUN, "--nproc-per-node=2", *options, 2)
    assert first.returncode == 0, first.stderr
    rest = command("-W", "ignore", *options, EPOCHS)
    assert rest.returncode == 0, rest.stderr
    said = first.stdout + rest.stdout
    assert [int(epoch) for epoch, _, _ in LINE.findall(said)] == list(range(EPOCHS))
    assert losses(said) == pytest.approx(losses(whole(2)[0][0]), abs=1.01e-4)
    assert len(list(Path(f"{kept}.1.shards").glob("*.distcp"))) == 2


@pytest.mark.parametrize("way", ["nothing", "restart", "warm", "elastic"])
def test_each_way_goes_on_after_a_death(way, tmp_path):
    restarted = way in ("nothing", "restart")
    torchrun = (*TORCHRUN, "--nproc-per-node=3", "--max-restarts=1") if restarted else ()
    ended = command(*torchrun, FOLDER / "train_and_die.py", way, tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = [line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines()]
    told = sorted((json.loads(line) for line in lines), key=lambda each: each[0])
    died = next(at for at, what, _ in told if what == "dead")
    # The others may be about to end steps 25 and 26 when process 1 dies after its own.
    new = [what for at, what, _ in told if at > died and isinstance(what, int)]
    goes_on = next(step for step in new if step not in (25, 26))
    assert goes_on == {"nothing": 1, "restart": 15, "warm": 15, "elastic": 27}[way]
    assert new[-3:] == [56] * 3
    assert {new.count(step) for step in range(27, 57)} == {3}


def test_a_sharded_checkpoint_is_loaded_on_other_numbers_of_ranks():
    found = json.loads(command("-W", "ignore", FOLDER / "sharded_checkpoint.py").stdout)
    prints = [found[f"fingerprint on {ranks} ranks"] for ranks in (4, 2, 8)]
    assert len({*prints}) == 1
    assert len(found["bytes of each rank's file"]) == 4
