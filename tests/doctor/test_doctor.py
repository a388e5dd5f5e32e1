"""The doctor: its facts about this machine, the findings of its checks, the end of its jobs."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from warm import python

import microddp
from microddp.comms import cpu_cores
from microddp.doctor import checks, machine
from microddp.doctor.checks import CHECKS
from microddp.doctor.job import run_job
from microddp.launch import JobFailed, JobStopped
from microddp.shared import ALL_REDUCES

FAILS = """
import microddp
comms = microddp.init()
if comms.rank == 1:
    raise ValueError(f"rank {comms.rank}: planted")
comms.barrier()
"""
HANGS = """
import os, time
from pathlib import Path
import microddp
comms = microddp.init()
Path(__file__).with_name(f"pid{comms.rank}").write_text(str(os.getpid()))
while comms.rank == 1:
    time.sleep(1)
comms.barrier()
"""
DIES = """
import os, signal
import microddp
comms = microddp.init()
if comms.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comms.barrier()
"""


def doctor(*arguments, status=0, cwd=None, **environment):
    done = subprocess.run(
        [python(), "-m", "microddp.doctor", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)  # five jobs, one after the other
def test_a_run_says_what_the_machine_has_and_that_all_is_well(tmp_path):
    report = tmp_path / "report.md"
    private = {"SECRET_OF_MINE": "secret value", "GLOO_SOCKET_IFNAME": "lo"}
    private["MICRODDP_SECRET"] = "a secret value of a job"
    printed = doctor("--only", *CHECKS, "--report", report, **private)
    text = report.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    for said in (printed, text):
        assert f"{torch.__version__}, built for" in said
        assert f"{cpu_cores()} of {os.cpu_count()} cores for this process" in said
        assert "secret value" not in said
        assert "MICRODDP_SECRET=is set" in said
        assert "GLOO_SOCKET_IFNAME=lo" in said
        assert "set GLOO_SOCKET_IFNAME" not in said, "a warning to who has set it"
        ways = "naive, direct, ring, doubling, shared, hierarchical and torch.distributed"
        assert f"exact sums by {ways}" in said
        assert "FAILED" not in said
        for size in ("64 KiB", "4 MiB", "64 MiB"):
            assert re.search(rf"all-reduce +{size} ", said)
    for name in CHECKS:
        assert f"- **{name}, gloo, 2 ranks" in text
    for name in machine.PROBES:
        assert f"- **{name}**: " in text
    assert text.count("```") % 2 == 0


def test_a_chapter_that_fails_on_one_rank_is_an_exit_status_and_that_ranks_traceback(tmp_path):
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "03_planted.py").write_text(FAILS)
    (tmp_path / "chapters" / "04_not_chosen.py").write_text(FAILS)
    options = ("--only", "chapters", "--report", tmp_path / "report.md")
    printed = doctor(*options, status=1, cwd=tmp_path)
    for said in (printed, (tmp_path / "report.md").read_text()):
        assert "FAILED, " in said
        first, then = said.index("rank 1 raised\n"), said.index("rank 0 ")
        assert first < said.index("ValueError: rank 1: planted") < then
        assert "03_planted.py" in said
        assert "04_not_chosen" not in said
        assert "1 FAILED in " in said


def test_without_chapters_it_says_so(tmp_path):
    printed = doctor("--only", "chapters", cwd=tmp_path)
    assert "**chapters**: skipped, there is no chapters/ in the current directory" in printed


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--only", "everything"), "invalid choice"),
        (("--limit", "0"), "expected a positive number, got 0"),
        (("--report", "no/such/folder/report.md"), "expected a file in a folder that exists"),
    ],
)
def test_refuses_what_it_cannot_do(options, complaint, capsys):
    from microddp.doctor.__main__ import main

    with pytest.raises(SystemExit):
        main(options)
    assert complaint in capsys.readouterr().err


def test_a_job_that_hangs_is_stopped_with_every_ranks_stack(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    start = time.monotonic()
    with pytest.raises(JobStopped) as stopped:
        run_job(str(script), 2, "", limit=20)
    assert time.monotonic() - start < 40
    text = str(stopped.value)
    assert text.startswith("stopped after its limit of 20 s")
    assert 'hangs.py", line 8 in <module>' in text[text.index("rank 1 ") :]
    assert 'hangs.py", line 9 in <module>' in text[text.index("rank 0 ") :]
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_a_rank_that_dies_without_a_word_is_named(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with pytest.raises(JobFailed, match=r"^rank 1 ended by SIGKILL, without a word"):
        run_job(str(script), 2, "", limit=100)


def test_what_goes_wrong_before_a_check_begins_is_told(monkeypatch):
    monkeypatch.setitem(CHECKS, "planted", None)  # here; the ranks know of none
    with pytest.raises(JobFailed, match=r"(?s)^rank 0 raised\n.*KeyError: 'planted'"):
        run_job("planted", 1, "gloo", limit=100)


@on_ranks(1, 3)
def test_all_checks_pass_on_any_number_of_ranks(comms):
    for check in CHECKS.values():
        assert check(comms)


def spoiled(method):
    """The method with 1 added to what it returns, or to the tensor it works on."""

    def call(*arguments, **options):
        result = method(*arguments, **options)
        for tensor in (*arguments, result):
            if isinstance(tensor, torch.Tensor):
                tensor.add_(1)
        return result

    return call


@on_ranks(2)
def test_a_wrong_primitive_is_found_by_name(comms):
    for name in (
        *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "scatter"),
        *("gather", "all_reduce_mean", "recv", "sendrecv"),
    ):
        # On all ranks, so that all leave the check in the same place.
        setattr(comms, name, spoiled(getattr(comms, name)))
        with pytest.raises((AssertionError, ValueError)) as found:
            CHECKS["primitives"](comms)
        # Of a wrong all_gather scatter complains first, since its ranks agree by means of one.
        assert name == "all_gather" or str(found.value).startswith(f"rank {comms.rank}: ")
        delattr(comms, name)
        comms.barrier()


@on_ranks(2)
def test_an_algorithm_that_leaves_the_sum_wrong_is_found_by_name(comms):
    ALL_REDUCES["ring"] = spoiled(ALL_REDUCES["ring"])  # of this process only
    with pytest.raises(AssertionError, match=f"^rank {comms.rank}: ring, torch.float32: "):
        CHECKS["allreduce"](comms)


def not_averaging(module, comms, **options):  # noqa: ARG001
    return module


def summing(module, comms, **options):
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * comms.world_size)
    return microddp.DDP(module, comms, **options)


@on_ranks(2)
def test_a_wrapper_that_does_not_average_is_found(comms):
    for wrapper, complaint in (
        (not_averaging, "differs from rank 0's, as none is more frequent"),
        (summing, "expected microddp.DDP within 1e-09 of where PyTorch's DDP went"),
    ):
        checks.DDP = wrapper  # in this process only
        with pytest.raises(RuntimeError, match=complaint):
            CHECKS["ddp"](comms)


def test_facts_that_never_come_are_named(monkeypatch):
    monkeypatch.setattr(machine, "PATIENCE", 0.5)
    ((name, text),) = machine.facts()
    assert name == "microddp"
    assert text.startswith("no answer 0.5 s after the first question; not asked: Python, torch,")


def test_a_process_that_cannot_be_killed_is_not_waited_for(tmp_path, monkeypatch):
    """As where a driver keeps it."""
    asking = tmp_path / "asking"
    asking.write_text("#!/bin/sh\nexec sleep 60\n")
    asking.chmod(0o755)
    monkeypatch.setattr(machine, "PATIENCE", 0.2)
    started = []
    with monkeypatch.context() as for_ever:
        for_ever.setattr(sys, "executable", str(asking))
        for_ever.setattr(subprocess.Popen, "kill", lambda self: started.append(self))
        start = time.monotonic()
        assert len(list(machine.facts())) == 1
        assert time.monotonic() - start < 20
    started[0].kill()
    started[0].wait()


def test_the_commit_of_a_project_that_it_is_installed_in_is_not_its_own(tmp_path, monkeypatch):
    file = tmp_path / "microddp/doctor/machine.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(machine, "__file__", str(file))

    def git(*arguments):
        me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", "-C", tmp_path, *me, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "another project's")
    assert ", commit " not in machine.PROBES["microddp"]()
    git("add", file)
    git("commit", "-m", "its own")
    assert ", commit " in machine.PROBES["microddp"]()


def test_what_nvidia_smi_says_is_passed_on_and_its_failure_too(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.write_text('#!/bin/sh\nprintf "\\033[4mGPU0\\033[0m\\n0, NVIDIA H100\\n"\n')
    program.chmod(0o755)
    assert machine.PROBES["nvidia-smi"]() == "GPU0\n0, NVIDIA H100"
    program.write_text('#!/bin/sh\necho "NVIDIA-SMI has failed"; exit 9\n')
    with pytest.raises(RuntimeError, match="nvidia-smi ended with status 9: NVIDIA-SMI has failed"):
        machine.PROBES["links"]()


def test_a_gpu_that_is_ill_does_not_hide_the_others(monkeypatch):
    def memory(index):
        if index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return 70 << 30, 80 << 30

    gpu = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 2})
    well = "NVIDIA H100, compute capability 9.0, 80 GiB, 70 GiB of it free"
    ill = "NVIDIA H100, compute capability 9.0, cannot be used: CUDA error: uncorrectable ECC"
    lines = machine.PROBES["GPUs"]().splitlines()
    assert [lines[0], lines[2]] == [f"GPU 0: {well}", f"GPU 2: {well}"]
    assert lines[1].startswith(f"GPU 1: {ill}")
    reaches = machine.PROBES["peer access"]()
    assert reaches == "GPU 0 reaches [2]\nGPU 1 reaches []\nGPU 2 reaches [0]"


def test_a_container_says_what_it_may_use(monkeypatch):
    limits = {"cpu.max": "150000 100000", "memory.max": str(2 << 30)}
    monkeypatch.setattr(machine, "_control_group", limits.__getitem__)
    assert machine.PROBES["cores"]().endswith("limited to the time of 1.5")
    assert machine.PROBES["memory"]().endswith("limited to 2 GiB")
    usage = SimpleNamespace(total=64 << 20, free=1 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    assert "warning: small" in machine.PROBES["shared memory"]()
    assert machine.PROBES["temporary files"]().endswith("1 MiB free")
