"""Ranks on this machine: what is told of one that fails, and that nothing is left of any."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from ranks import run

import microddp
from microddp import launch
from microddp.launch import JobFailed, JobStopped, rank
from microddp.launch.job import Gone


@pytest.fixture(scope="module", autouse=True)
def _server():
    """What ranks are forked from is there before the first test: to start it may take a while."""
    run(pid, 1)


def misbehave_on_rank_1(comms, how):
    if comms.rank == 1:
        how(comms)
    comms.barrier()


def complain(_comms):
    planted = 17
    raise KeyError("the cause", planted)


def complain_late(comms):
    """When the other has noticed that this one is gone, and has said so."""
    comms.close()
    time.sleep(1)
    raise KeyError("the cause")


def leave(_comms):
    os._exit(7)


def leave_well(_comms):
    os._exit(0)


def crash(_comms):
    print("last words")
    os.kill(os.getpid(), signal.SIGSEGV)


def be_told_by_nccl(_comms):
    print("noise\nhost:1:1 [1] NCCL WARN Cuda failure 'out of memory'\nnoise")
    raise RuntimeError("NCCL error")


def sleep(_comms):
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "story", "parts"),
    [
        (complain, "rank 1 raised", ["in complain", "planted = 17", "KeyError: ('the cause', 17)"]),
        (complain_late, "rank 1 raised", ["KeyError: 'the cause'", "Then:\nrank 0 raised"]),
        (leave, "rank 1 ended with status 7, without a word", []),
        (leave_well, "rank 1 ended with status 0, without a word", []),
        (crash, "rank 1 ended by SIGSEGV, without a word", ["last words", "in crash"]),
        (
            be_told_by_nccl,
            "rank 1 raised",
            ["Error: NCCL error\nhost:1:1 [1] NCCL WARN Cuda failure 'out of memory'\nThen:"],
        ),
    ],
)
def test_the_cause_is_told_first(how, story, parts):
    start = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        run(misbehave_on_rank_1, 2, how)
    assert time.monotonic() - start < 50
    told = str(caught.value)
    assert told.startswith(story), told
    for part in parts:
        assert part in told
        told = told[told.index(part) :]


def test_of_a_job_that_hangs_each_ranks_line_is_told():
    with pytest.raises(JobStopped) as caught:
        # Stopped long before the others notice by themselves that rank 1 does not come.
        run(misbehave_on_rank_1, 3, sleep, timeout=15, environment={"MICRODDP_TIMEOUT": "60"})
    told = str(caught.value)
    assert told.startswith("stopped after its limit of 15 s: rank 0 did not end in time\n")
    first, second, third = (told.index(f"rank {rank} did not end in time\n") for rank in range(3))
    assert "in barrier" in told[first:second]
    assert "in sleep" in told[second:third]
    assert "in barrier" in told[third:]


def test_a_rank_that_hangs_is_told_before_those_that_notice():
    with pytest.raises(JobFailed) as caught:
        run(misbehave_on_rank_1, 2, sleep, environment={"MICRODDP_TIMEOUT": "1"})
    first, _, then = str(caught.value).partition("\nThen:\n")
    assert first.startswith("rank 1 did not end in time\n")
    assert "in sleep" in first
    assert then.startswith("rank 0 raised\n")


def exit_on_rank_1(status):
    if os.environ["RANK"] == "1":
        sys.exit(status)
    return "stayed"


def test_a_rank_that_exits_with_status_0_has_not_failed():
    """As those do that leave in ``Comms.timed()``."""
    for status in (None, 0):
        assert run(exit_on_rank_1, 2, status, join=False) == ["stayed", None]
    with pytest.raises(JobFailed, match=r"^rank 1 raised\n(?s:.*)SystemExit: 3"):
        run(exit_on_rank_1, 2, 3, join=False)


def test_a_rank_that_should_have_died_is_told():
    with pytest.raises(JobFailed, match=r"^rank 0 should have died\nThen:\nrank 1 raised\n"):
        run(misbehave_on_rank_1, 2, complain, dies=[0])
    with pytest.raises(JobFailed, match=r"^rank 1 should have died$"):
        run(pid, 2, dies=[1])


def test_what_a_rank_cannot_import_is_its_failure(tmp_path, monkeypatch):
    text = "import os\nif 'RANK' in os.environ: raise ImportError('planted')\ndef body(): ...\n"
    (tmp_path / "only_here.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(JobFailed, match=r"(?s)^rank 0 raised\n.*ImportError: planted"):
        run(only_here.body, 1, join=False)


def variable(_comms):
    return os.environ.get("SET_LATER")


def test_ranks_have_the_environment_of_now(monkeypatch):
    assert run(variable, 1) == [None]
    monkeypatch.setenv("SET_LATER", "here")
    assert run(variable, 1) == ["here"]


# ---- nothing is left


def pid(_comms):
    return os.getpid()


def write_pids_and_hang(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in (os.getpid(), subprocess.Popen(["sleep", "1000"]).pid):
        Path(folder, str(number)).touch()
    time.sleep(1000)


def pids_in(folder, count):
    """What so many processes have written."""
    end = time.monotonic() + 150
    while len(list(folder.iterdir())) < count and time.monotonic() < end:
        time.sleep(0.02)
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == count
    return pids


def test_of_a_job_that_ends_well_no_process_is_left():
    first, second = run(pid, 2)
    assert first != second
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


def test_of_a_job_that_hangs_no_process_is_left(tmp_path):
    with pytest.raises(JobStopped):
        run(write_pids_and_hang, 2, str(tmp_path), join=False, timeout=15)
    _, alive = psutil.wait_procs(running(pids_in(tmp_path, 4)), timeout=10)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_who_started_it(number, tmp_path):
    code = (
        "from microddp import launch; from test_launch import write_pids_and_hang as hang\n"
        f"launch.run(hang, 2, {str(tmp_path)!r}, limit=200, environment={{}})"
    )
    package, here = Path(microddp.__file__).parents[1], Path(__file__).parent
    path = os.pathsep.join(map(str, (package, here, here.parent)))
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stderr=-3
    )
    pids = running(pids_in(tmp_path, 4)) + psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(30) != 0
    _, alive = psutil.wait_procs(
        pids, timeout=60
    )  # the server takes PyTorch apart, which takes long
    assert alive == []


def running(pids):
    found = []
    for number in pids:
        try:
            found.append(psutil.Process(number))
        except psutil.NoSuchProcess:
            continue
    return found


def be_stopped_within_a_word():
    os.write(rank._line.fileno(), (1 << 20).to_bytes(rank.LENGTH_BYTES) + b"its beginning")
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_is_stopped_within_a_word_is_not_waited_for():
    began = time.monotonic()
    with pytest.raises(JobStopped):
        launch.run(be_stopped_within_a_word, 2, limit=2, environment={})
    assert time.monotonic() - began < 20


def load_in_processes():
    data = torch.utils.data.TensorDataset(torch.arange(4))
    return [int(x) for (x,) in torch.utils.data.DataLoader(data, num_workers=1)]


def say_much():
    return "x" * (8 << 20)


def test_a_rank_may_start_processes_and_say_much():
    assert launch.run(load_in_processes, 1, limit=60, environment={}) == [[0, 1, 2, 3]]
    assert launch.run(say_much, 2, limit=60, environment={}) == [say_much()] * 2
    assert str(Gone(-40)) == "ended by signal 40"
