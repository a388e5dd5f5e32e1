"""The book, the labs and the commands on a pretended macOS: without what only Linux has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book
from shorter import ON_THREE

HERE = Path(__file__).parent / "pretended"
PRETENCE = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "macos", HERE.parents[1]))),
    "MICRODDP_ROUNDS": "1",
    "OMP_NUM_THREADS": "1",
}
# Those that ask the system for something. `python tests/pretended/on_macos.py chapters` runs all.
NUMBERS = "00", "02", "07", "08", "13", "15", "16"
ORDERS = (
    f"chapters {' '.join(NUMBERS)}",
    # A usual one, and those that need what is missing: links, limits on a process, and memory.
    "labs 00 04 08 13 15",
    "train --model mlp --width 32 --checkpoint c",
    "members",
)

pytestmark = pytest.mark.timeout(700)  # several jobs each, one after the other


def on_macos(folder, *arguments):
    """Run Python with arguments there; what it prints, when it has ended well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **PRETENCE},
        capture_output=True,
        text=True,
        timeout=660,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_the_pretence(tmp_path):
    """A chapter sees no Linux, and psutil and PyTorch see theirs."""
    (tmp_path / "chapters").mkdir()
    script = tmp_path / "chapters" / "00_look.py"
    script.write_text(WHAT_IT_SEES)
    assert on_macos(tmp_path, script) == "['darwin', True, False, False] True 2.0\n"


@pytest.fixture(scope="class")
def said_of(tmp_path_factory):
    said = on_macos(tmp_path_factory.mktemp("there"), HERE / "on_macos.py", *ORDERS)
    parts = re.split("^==== ", said, flags=re.M)
    return dict(part.split("\n", 1) for part in parts[1:])


class TestOrders:
    """In one process, which takes seconds to begin."""

    def test_chapters(self, said_of):
        parts = re.split("^== chapter ", said_of["chapters"], flags=re.M)
        by_number = {text[:2]: text for text in parts if text}
        assert list(by_number) == list(NUMBERS)
        for number, text in by_number.items():
            ranks = 3 if number in ON_THREE else 2
            assert f"gloo, {ranks} ranks on " in text or "gloo, 1 rank on " in text, text
            assert number == "13" or "0 figures" not in text
        # A chapter that leaves something out says so.
        for number, words in (
            ("07", "Bytes are counted for two ranks and more, on gloo, under Linux."),
            ("08", "links of known speed: none here"),
            (
                "15",
                "Left out: a rank that shares its memory with others. "
                "rank 0: memory without a name",
            ),
            ("16", "Left out: this system holds no process to a limit"),
        ):
            assert words in by_number[number].replace("\n", " ")

    def test_labs(self, said_of):
        held = re.findall(r"^(\d+) of (\d+) checks hold", said_of["labs"], flags=re.M)
        assert [some == of for some, of in held] == [True, False, False, True, False]
        assert said_of["labs"].count("Not run here: no hosts in a box") == 2
        assert said_of["labs"].count("Not run here: processes cannot share memory here") == 1

    def test_training_goes_on_from_a_checkpoint(self, said_of):
        assert said_of["train"].count("checkpoints; for one") == 2
        assert "2 epochs of" in said_of["train"].split("checkpoints; for one")[1]

    def test_members_go_on_without_one_that_is_lost(self, said_of):
        assert said_of["members"].count("1 left") == 1


def test_doctor(tmp_path):
    said = on_macos(tmp_path, "-m", "microddp.doctor", "--only", "primitives")
    assert "hosts in a box are Linux's network namespaces, this is darwin" in said
    assert "FAILED" not in said


def test_a_small_book_is_built(tmp_path):
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "preload": PRELOAD, "imports": None})
    book.chapter("00_sum", JOIN + "print(ranks, 'ranks,', total.tolist())")
    build = book.build("-W", **PRETENCE)
    assert build.process.returncode == 0, build.output
    assert "2 ranks, [2.0, 2.0, 2.0]" in book.page("00_sum")
