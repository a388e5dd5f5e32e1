"""The book, the labs and the commands on a pretended macOS: without what only Linux has."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book
from ranks import free_address
from shorter import ON_THREE

HERE = Path(__file__).parent / "pretended"
PRETENCE = {
    "PYTHONPATH": str(HERE / "macos"),
    "MICRODDP_ROUNDS": "1",
    "OMP_NUM_THREADS": "1",
}
# Those that ask the system for something. `python tests/pretended/on_macos.py chapters` runs all.
NUMBERS = "00", "02", "07", "08", "13", "15", "16"
PARTS = [NUMBERS[i::2] for i in range(2)]  # each begins for seconds, and some chapters take 20

pytestmark = pytest.mark.timeout(700)  # several jobs each, one after the other


@pytest.fixture
def macos(tmp_path):
    """Run Python with arguments there; what it prints, when it has ended well."""

    def run(*arguments, cwd=tmp_path, **environment):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **PRETENCE, **environment},
            capture_output=True,
            text=True,
            timeout=660,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


WHAT_IT_SEES = """
import contextlib, ctypes, os, sys
from pathlib import Path
import psutil, torch

seen = [sys.platform, os.cpu_count() > 0, Path("/proc").exists(), hasattr(os, "memfd_create")]
for look, path in ((open, "/proc/self/stat"), (os.listdir, "/sys"), (os.statvfs, "/dev/shm")):
    with contextlib.suppress(FileNotFoundError):
        seen.append(look(path))
with contextlib.suppress(AttributeError):
    seen.append(ctypes.CDLL(None).prctl)
with contextlib.suppress(ImportError):
    seen.append(__import__("pyroute2"))
print(seen, psutil.Process().memory_info().rss > 0, torch.ones(2).sum().item())
"""


def test_the_pretence(macos, tmp_path):
    """A chapter sees no Linux, and psutil and PyTorch see theirs."""
    (tmp_path / "chapters").mkdir()
    script = tmp_path / "chapters" / "00_look.py"
    script.write_text(WHAT_IT_SEES)
    assert macos(script) == "['darwin', True, False, False] True 2.0\n"


@pytest.mark.parametrize("numbers", PARTS, ids="-".join)
def test_chapters(macos, numbers):
    said = re.split("^== chapter ", macos(HERE / "on_macos.py", "chapters", *numbers), flags=re.M)
    by_number = {text[:2]: text for text in said if text}
    assert sorted(by_number) == list(numbers)
    for number, text in by_number.items():
        assert (
            f"gloo, {3 if number in ON_THREE else 2} ranks on " in text
            or "gloo, 1 rank on " in text
        ), text
        assert number in ("13", "14") or "0 figures" not in text
    # A chapter that leaves something out says so.
    for number, words in (
        ("07", "Bytes are counted for two ranks and more, on gloo, under Linux."),
        ("08", "links of known speed: none here"),
        (
            "15",
            "Left out: a rank that shares its memory with others. rank 0: memory without a name",
        ),
        ("16", "Left out: this system holds no process to a limit"),
    ):
        assert words in by_number.get(number, words).replace("\n", " ")


def test_labs(macos):
    """A usual one, and those that need what is missing: links, limits on a process, and memory."""
    said = macos(HERE / "on_macos.py", "labs", "00", "04", "08", "13", "15")
    held = re.findall(r"^(\d+) of (\d+) checks hold", said, flags=re.M)
    assert [some == of for some, of in held] == [True, False, False, True, False]
    assert said.count("Not run here: no hosts in a box") == 2
    assert said.count("Not run here: processes cannot share memory here") == 1


def test_training_goes_on_from_a_checkpoint(macos):
    options = ("--model", "mlp", "--width", "32", "--checkpoint", "c")
    said = macos(HERE / "on_macos.py", "train", *options)
    assert said.count("checkpoints; for one") == 2
    assert "2 epochs of" in said.split("checkpoints; for one")[1]


def test_doctor(macos):
    said = macos("-m", "microddp.doctor", "--only", "primitives")
    assert "none, they are Linux's" in said
    assert "FAILED" not in said


def test_members_go_on_without_one_that_is_lost(macos, tmp_path):
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    address = free_address()
    with ThreadPoolExecutor() as pool:
        members = [pool.submit(macos, script, address, me, MICRODDP_TIMEOUT="2") for me in "01"]
        said = "".join(member.result() for member in members)
    assert said.count("1 left") == 1


MEMBER = """
import os, sys, time
from microddp.elastic import Members
from microddp.train import TrainingConfig
from microddp.train.elastic import train_elastically

address, me = sys.argv[1:]

def on_step(step, _):
    while (step, me, len(members.names)) == (1, "0", 1) and not members.others_wait():
        time.sleep(0.01)  # else it may have trained to the end before the other has come
    if (step, me, len(members.names)) == (4, "1", 2):
        os._exit(0)

config = TrainingConfig(model="mlp", width=16, data="synthetic", epochs=2, batch_size=480)
with Members(address, least=2 if me == "1" else 1) as members:
    train_elastically(config, members, on_step)
    print(len(members.names), "left")
"""


def test_a_small_book_is_built(tmp_path):
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "preload": PRELOAD, "imports": None})
    book.chapter("00_sum", JOIN + "print(ranks, 'ranks,', total.tolist())")
    build = book.build("-W", **PRETENCE)
    assert build.process.returncode == 0, build.output
    assert "2 ranks, [2.0, 2.0, 2.0]" in book.page("00_sum")
