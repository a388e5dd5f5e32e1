"""The checker says within seconds what a reader's script did, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from cases import replaced

from microddp.labs.engine.catalogue import find
from microddp.labs.engine.job import run_job
from microddp.labs.engine.lab import Stage
from microddp.labs.engine.rank import LOADING
from microddp.labs.engine.results import explain

LAB = find("02")
RIGHT = LAB.solution.read_text()
FIRST = "every rank ends with the sum"
FIRST_LINE = "    rank, n = comms.rank, comms.world_size\n"
ON_RANK_1 = f"{FIRST_LINE}    if rank == 1:\n        "


def begins_with(line):
    """The right solution, with a line more on rank 1."""
    return replaced(RIGHT, {FIRST_LINE: ON_RANK_1 + line + "\n"})


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory):
    """Start the server that forks ranks before the first test; it stays."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "lab02_ring.py").write_text(RIGHT)
    assert run_job(LAB, folder / "lab02_ring.py", Stage("", 1)).failure is None


def said(script, folder, ranks=2):
    """The title that failed, and what is said of it; nothing is left of the job's processes."""
    path = folder / "lab02_ring.py"
    path.write_text(script)
    before = set(psutil.Process().children(recursive=True))
    begun = time.monotonic()
    outcome = run_job(LAB, path, Stage("", ranks))
    assert time.monotonic() - begun < LAB.patience + 15
    server = forkserver._forkserver._forkserver_pid
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if p.pid != server and p.is_running()] == []
    if outcome.failure is None:
        return "", ""
    return outcome.failure.title, " ".join(explain(LAB, outcome).split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "raise KeyError('layer')",
            "rank 1: with 12 values: Traceback.*lab02_ring.py.* in ring_all_reduce.*KeyError",
        ),
        ("import sys; sys.exit()", r"rank 1: it called exit\(None\) A function returns instead"),
        ("import os; os._exit(3)", "rank 1: its process ended with status 3, without a word"),
        ("import os; os.kill(os.getpid(), 11)", "rank 1: its process ended by SIGSEGV"),
        ("import os; os.killpg(0, 9)", "rank 1: its process ended by SIGKILL"),
        ("comms.close()", "rank 1: .*these Comms are closed"),
        ("torch.ones(1 << 33)", "allocate memory.* A rank may take 2 GiB more"),
        ("bytearray(1 << 33)", "MemoryError.* A rank may take 2 GiB more"),
        ("open('big', 'wb').truncate(1 << 40)", "File too large"),
        ("input()", "EOF|lost|Bad file descriptor"),
    ],
)
def test_a_rank_that_ends_is_named(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    title, text = said(begins_with(line), tmp_path)
    assert title == FIRST
    assert re.search(message, text), text
    assert "rank 0:" not in text  # it waits, but not by its own fault


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (
            "while True: pass",
            r"rank 1: in no call; .*now at .*lab02_ring.py:\d+ in ring_all_reduce",
        ),
        ("import time; time.sleep(99)", "rank 1: in no call; .* in ring_all_reduce"),
        (
            "comms.recv(tensor, 0); comms.recv(tensor, 0)",
            r"rank 1: waiting in recv\(float64 \(12,\)",
        ),
    ],
)
def test_of_a_hang_each_ranks_line_is_told(line, where, tmp_path, monkeypatch):
    monkeypatch.setattr(LAB, "patience", 2.0)
    title, text = said(begins_with(line), tmp_path)
    assert title == FIRST
    assert "Nothing moved any more" in text
    assert re.search(r"rank 0: waiting in sendrecv\(.*lab02_ring.py:\d+", text), text
    assert re.search(where, text), text


@pytest.mark.parametrize(
    "exchange",
    [
        "sent = dist.isend(copy, right); dist.recv(copy.clone(), left); sent.wait()",
        "dist.recv(copy, left) if rank else dist.send(copy, 1); "
        "dist.send(copy, 0) if rank else dist.recv(copy, left)",
        "both = [dist.P2POp(dist.isend, copy, right), dist.P2POp(dist.irecv, copy.clone(), left)]; "
        "[work.wait() for work in dist.batch_isend_irecv(both)]",
    ],
)
def test_messages_of_torchs_own_are_counted(exchange, tmp_path):
    """A whole tensor more than needed."""
    more = (
        f"{FIRST_LINE}    copy, right, left = tensor.clone(), 1 - rank, 1 - rank\n    {exchange}\n"
    )
    imports = {"import microddp\n": "import microddp\nimport torch.distributed as dist\n"}
    title, text = said(replaced(RIGHT, {FIRST_LINE: more} | imports), tmp_path)
    assert title == "2(n-1)/n of the tensor in bytes"
    assert "got 8000 bytes in 3 messages" in text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("def ring_all_reduce(tensor, comms:\n", "rank 0: .*SyntaxError"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError"),
        ("def ring(tensor, comms): ...\n", "expected lab02_ring.py to define ring_all_reduce"),
        ("import os\nos._exit(0)\n", "its process ended with status 0, without a word"),
        ("import microddp\nmicroddp.init()\n", 'was called before.*Only a cell tagged "try"'),
    ],
)
def test_a_script_that_cannot_be_loaded(script, message, tmp_path):
    title, text = said(script, tmp_path, ranks=1)
    assert title == LOADING
    assert re.search(message, text), text


def test_cells_to_try_are_left_out_and_lines_keep_their_numbers(tmp_path):
    script = f'# %% tags=["try"]\nraise SystemExit\n\n\n# %%\n{begins_with("1 / 0")}'
    title, text = said(script, tmp_path)
    number = script.splitlines().index("        1 / 0") + 1
    assert title == FIRST
    assert re.search(
        rf"lab02_ring.py\", line {number}, in ring_all_reduce .*ZeroDivisionError", text
    )


def test_what_a_script_prints_is_shown_with_its_rank(tmp_path):
    chatty = "print('here', n); import os; os.system('echo there'); 1 / 0"
    _, text = said(begins_with(chatty), tmp_path)
    assert "Printed meanwhile: [rank 1] here 2 [rank 1] there" in text


@pytest.mark.parametrize(
    "line", ["while True: print('x' * 1000000)", "raise ValueError('x' * 50000000)"]
)
def test_a_script_that_says_without_end_is_stopped(line, tmp_path):
    title, text = said(begins_with(line), tmp_path)
    assert title == FIRST
    assert len(text) < 20000


def test_processes_and_threads_that_a_script_starts_end_with_it(tmp_path):
    starts = (
        "import subprocess, threading, time; subprocess.Popen(['sleep', '98765']); "
        "threading.Thread(target=time.sleep, args=(98765,)).start()"
    )
    assert said(begins_with(starts), tmp_path) == ("", "")
    time.sleep(0.2)
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if "98765" in (each.info["cmdline"] or [])
    ]


@pytest.fixture
def folders():
    """A folder for temporary files, with a short path, since it is also a socket's."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_checker_that_is_stopped(number, folders, tmp_path):
    (tmp_path / "my_work").mkdir()
    script = tmp_path / "my_work/lab02_ring.py"
    script.write_text(begins_with("open('begun', 'w').close()\n        while True: pass"))
    process = subprocess.Popen(
        [sys.executable, "-m", "microddp.labs", "check", "02"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folders)},
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < end:
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3, process.communicate()  # the server, and two ranks
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []
    if number != signal.SIGKILL:
        assert not list(folders.glob("microddp-lab-*"))
