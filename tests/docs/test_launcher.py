"""The launcher, in small books that are built for real."""

import html
import math
import os
import re
import signal
import time
from pathlib import Path
from textwrap import dedent

import pytest
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book, Build
from ranks import gpus

SECONDS_AFTER_FAULT = 15

GOOD = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""

# name: the code that follows JOIN, and what the report has to say, in this order.
FAULTS = {
    "raises": (
        """
        # sphinx_gallery_ranks = 3
        if rank == 2:
            now()
            raise ValueError("boom on 2")
        dist.all_reduce(total)
        """,
        ["Rank 2 failed first", 'raises.py", line', "ValueError: boom on 2"],
    ),
    # The others notice that the group is gone before rank 1 can report why.
    "raises_late": (
        """
        try:
            if rank == 1:
                now()
                raise ValueError("boom inside")
            dist.all_reduce(total)
        finally:
            dist.destroy_process_group()
            if rank == 0:
                open("noticed", "w").close()
            while not os.path.exists("noticed"):
                time.sleep(0.05)
            time.sleep(0.5 if rank == 1 else 0)
        """,
        ["Rank 1 failed first", "ValueError: boom inside", "Rank 0 failed, too: RuntimeError"],
    ),
    "exits": (
        """
        dist.all_reduce(total)
        if rank == 1:
            now()
            sys.exit(3)
        """,
        ["Rank 1 failed first", 'exits.py", line', "SystemExit: 3"],
    ),
    "leaves": (
        """
        if rank == 1:
            now()
            os._exit(7)
        dist.all_reduce(total)
        """,
        ["Rank 1 failed first", "exited with status 7"],
    ),
    "killed": (
        """
        if rank == 1:
            now()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        """,
        ["Rank 1 failed first", "ended by signal SIGKILL"],
    ),
    "rank_0_killed": (
        """
        if rank == 0:
            now()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        """,
        ["Rank 0 failed first", "ended by signal SIGKILL"],
    ),
    "rank_0_exits": (
        """
        if rank == 0:
            now()
            raise SystemExit("enough")
        dist.all_reduce(total)
        """,
        ["Rank 0 failed first", 'rank_0_exits.py", line', "SystemExit: enough"],
    ),
    "rank_0_raises": (
        """
        if rank == 0:
            print("last words of rank 0")
            now()
            raise KeyError("boom on 0")
        dist.all_reduce(total)
        """,
        ["Rank 0 failed first", 'rank_0_raises.py", line', "KeyError: 'boom on 0'"],
    ),
    "deadlocks": (
        """
        # sphinx_gallery_timeout = TIMEOUT
        # sphinx_gallery_ranks = 3
        if rank == 0:
            now()
            dist.all_reduce(total)
        elif rank == 1:
            dist.recv(total, 2)
        else:
            time.sleep(1000)
        """,
        [
            "stopped after its time-out, TIMEOUT s",
            "Rank 0, most recent call first",
            "in all_reduce",
            'deadlocks.py", line',
            "Rank 1, most recent call first",
            "in recv",
            'deadlocks.py", line',
            "Rank 2, most recent call first",
            'deadlocks.py", line',
        ],
    ),
    "misspelt": (
        "if rank ==:\n    pass",
        ['misspelt.py", line', "SyntaxError: invalid syntax"],
    ),
}

# The gallery runs chapters by the order of their names; after all the faults comes a good one.
CHAPTERS = {name: f"{number}_{name}" for number, name in enumerate(FAULTS)}
each_fault = pytest.mark.parametrize("name", FAULTS)


def in_order(text: str, parts: list[str]) -> bool:
    """Say whether `text` contains all parts, one after the other."""
    place = 0
    for part in parts:
        place = text.find(part, place) + 1
        if place == 0:
            return False
    return True


def report(build: Build, chapter: str) -> str:
    """Return what the build said when a chapter failed."""
    start = build.output.index(f"{chapter}.py failed after")
    return build.output[start : build.output.index("Its logs:", start)]


@pytest.fixture(scope="module")
def timeout(beginnings: tuple[float, float]) -> int:
    """Five times as many seconds as a later job takes to begin."""
    return math.ceil(5 * beginnings[1])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, timeout: int) -> tuple[Book, Build]:
    """Build a book of all faults."""
    book = Book(tmp_path_factory.mktemp("faulty") / "ä book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "timeout": 60, "preload": PRELOAD})
    for name, (code, _) in FAULTS.items():
        book.chapter(CHAPTERS[name], JOIN + dedent(code).replace("TIMEOUT", str(timeout)))
    book.chapter("then", GOOD)
    return book, book.build()


class TestFaults:
    """A fault fails the build, is explained, and harms no other chapter."""

    def test_build_fails(self, faulty: tuple[Book, Build]) -> None:
        _, build = faulty
        assert build.process.returncode != 0
        assert f"Unexpected failing examples ({len(FAULTS)})" in build.output

    def test_no_process_is_left(self, faulty: tuple[Book, Build]) -> None:
        assert faulty[1].processes_after(0) == []

    @each_fault
    def test_report(self, faulty: tuple[Book, Build], name: str, timeout: int) -> None:
        told = report(faulty[1], CHAPTERS[name])
        expected = [part.replace("TIMEOUT", str(timeout)) for part in FAULTS[name][1]]
        assert in_order(told, expected), told
        assert "runpy" not in told, "the launcher's own frames"

    @each_fault
    def test_soon(self, faulty: tuple[Book, Build], name: str, timeout: int) -> None:
        book, build = faulty
        moment = book.root / f"chapters/{CHAPTERS[name]}.moment"
        if moment.exists():
            fault = float(moment.read_text())
        else:  # the syntax error is there from the start
            fault = build.time_of(f"{CHAPTERS[name]}.py: running on")
        seconds = build.time_of(f"{CHAPTERS[name]}.py failed after") - fault
        print(f"{name}: {seconds:.1f} s after the fault")
        assert seconds < (timeout if name == "deadlocks" else 0) + SECONDS_AFTER_FAULT

    @each_fault
    def test_leaves_nothing_that_looks_done(self, faulty: tuple[Book, Build], name: str) -> None:
        generated = faulty[0].root / "docs/chapters"
        assert not list(generated.glob(f"{CHAPTERS[name]}.py.*"))
        page = (generated / f"{CHAPTERS[name]}.md").read_text()
        assert "sphx-glr-script-out" not in page

    def test_next_chapter_is_right(self, faulty: tuple[Book, Build]) -> None:
        book, build = faulty
        assert "then.py: took" in build.output
        assert "rank 0 of 2" in book.page("then")

    def test_logs_hold_every_ranks_output(self, faulty: tuple[Book, Build]) -> None:
        book, build = faulty
        assert "[rank0]:last words of rank 0" in build.output
        logs = (book.root / "gallery_logs/chapters" / CHAPTERS["rank_0_raises"]).rglob("*.log")
        assert "last words of rank 0" in "".join(log.read_text() for log in logs)


def test_timeout_when_some_ranks_have_ended(tmp_path: Path, timeout: int) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "timeout": timeout, "preload": PRELOAD})
    book.chapter("begins", GOOD)  # the first takes longer
    book.chapter("waits", "import os, time\nif os.environ['RANK'] == '0': time.sleep(1000)")
    build = book.build()
    assert build.process.returncode != 0
    expected = [
        f"time-out, {timeout} s",
        "Rank 0, most recent",
        'waits.py", line',
        "Rank 1 had ended",
    ]
    assert in_order(report(build, "waits"), expected)


def test_what_runs_again(tmp_path: Path) -> None:
    """A chapter runs if it failed, if it changed, or if what all depend on changed."""
    book = Book(tmp_path / "book")
    options = {"ranks": 2, "depends": ["core/*.py"], "package": "parts", "preload": PRELOAD}
    options["looks"] = ["look.py"]
    book.write("look.py", "one = 1")
    book.configure(*LAUNCHER, launcher=options)
    for folder in ("core", "parts"):
        (book.root / folder).mkdir()
    book.write("core/module.py", "one = 1")
    book.write("parts/used.py", "two = 2")
    imports = "def later():\n    import parts.used\n"
    book.chapter("a_good", GOOD + imports)
    book.chapter("b_fragile", "import os\nif 'FRAGILE' in os.environ: raise ValueError")

    first = book.build_in_forks(FRAGILE="yes")
    assert first.process.returncode != 0
    assert first.ran() == ["a_good.py", "b_fragile.py"]

    again = book.build_in_forks("-W")
    assert again.process.returncode == 0, again.output
    assert again.ran() == ["b_fragile.py"]

    book.write("docs/index.md", "# Other words\n\n```{toctree}\nchapters/index\n```\n")
    assert book.build_in_forks().ran() == []

    book.write("parts/unused.py", "three = 3")
    assert book.build_in_forks().ran() == []
    book.write("parts/used.py", "two = 1 + 1")
    book.chapter("b_fragile", "import os\nif 'FRAGILE' in os.environ: raise TypeError")
    assert book.build_in_forks().ran() == ["a_good.py", "b_fragile.py"]

    book.chapter("a_good", GOOD + imports + "print('changed')")
    assert book.build_in_forks().ran() == ["a_good.py"]
    assert "changed" in book.page("a_good")

    book.write("core/module.py", "one = 2")
    assert book.build_in_forks().ran() == ["a_good.py", "b_fragile.py"]

    book.configure(*LAUNCHER, launcher={**options, "ranks": 1})
    assert book.build_in_forks().ran() == ["a_good.py", "b_fragile.py"]
    assert "rank 0 of 1" in book.page("a_good")
    assert book.build_in_forks().ran() == []

    book.configure(
        *LAUNCHER, launcher={**options, "ranks": 1}, gallery={"first_notebook_cell": "# new"}
    )
    build = book.build_in_forks("-W")
    assert build.ran() == []
    assert "# new" in (book.root / "docs/chapters/a_good.ipynb").read_text()
    assert "rank 0 of 1" in book.page("a_good")
    book.write("look.py", "one = 2")
    for again in (True, False):
        build = book.build_in_forks("-W")
        assert (build.ran(), "a_good.py: only its page" in build.output) == ([], again)


def test_what_an_environment_variable_changes_runs_again(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"preload": PRELOAD, "variables": ["COLOUR"]})
    book.chapter("paints", "import os\nprint(os.environ.get('COLOUR'))")
    for colour, runs in (("red", True), ("red", False), ("blue", True)):
        build = book.build_in_forks("-W", COLOUR=colour)
        assert build.ran() == ["paints.py"] * runs, build.output
        assert colour in book.page("paints")


def test_a_change_of_words_runs_nothing_unless_an_output_names_a_line(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "preload": PRELOAD})
    named = "import sys\nprint('line', sys._getframe().f_lineno)"
    paths = [book.chapter("a_good", GOOD), book.chapter("b_names_a_line", named)]
    assert book.build_in_forks("-W").ran() == ["a_good.py", "b_names_a_line.py"]
    before = book.page("b_names_a_line")

    def rebuilt(old: str, new: str) -> list[str]:
        for path in paths:
            path.write_text(path.read_text().replace(old, new))
        build = book.build_in_forks("-W")
        assert build.process.returncode == 0, build.output
        assert "".join(new.split()[-2:]) in re.sub(r"\s", "", book.page("a_good"))
        assert "rank 0 of 2" in book.page("a_good")
        return build.ran()

    assert rebuilt("This chapter", "A chapter") == []
    assert rebuilt("A chapter is", "A chapter,\nlonger now, is") == ["b_names_a_line.py"]
    numbers = [
        int(re.findall(r"line (\d+)", page)[-1]) for page in (before, book.page(paths[1].stem))
    ]
    assert numbers[1] == numbers[0] + 1
    assert rebuilt("longer now", "longer once more") == []
    (book.root / "docs/chapters/a_good.py.md5").unlink()
    assert rebuilt("once more", "for good") == ["a_good.py"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_build(tmp_path: Path, number: signal.Signals) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 2, "preload": PRELOAD})
    book.chapter("sits", JOIN + "print('sitting', flush=True)\ndist.recv(total, 1 - rank)")
    build = book.start()
    build.wait_for("[rank1]:sitting")
    assert len(build.processes()) >= 4  # the build, torchrun and two ranks
    if number == signal.SIGTERM:  # another build in this folder would take this one's results
        other = book.build()
        assert other.process.returncode != 0
        assert "another build runs in this folder" in other.output

    # Like a terminal on Ctrl-C: to the build and all that share its group.
    os.killpg(build.process.pid, number)
    start = time.monotonic()
    assert build.finish() != 0
    assert build.processes_after(SECONDS_AFTER_FAULT) == []
    print(f"{number.name}: nothing left after {time.monotonic() - start:.1f} s")
    assert not list((book.root / "docs/chapters").glob("sits.py.*"))


def test_what_a_chapter_leaves_running_is_ended(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"preload": PRELOAD})
    book.chapter(
        "forgets",
        """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        """,
    )
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    assert build.processes_after(5) == []


def test_threads_that_python_would_end_or_wait_for_do_not_hold_a_job_up(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    launcher = {"ranks": 2, "timeout": 60, "preload": PRELOAD}
    book.configure(*LAUNCHER, launcher=launcher)
    book.chapter(
        "pools",
        """
        import os, threading, time
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor()
        pool.submit(print, "from a pool")

        def late():
            time.sleep(1)
            open(os.environ["RANK"], "w").close()

        threading.Thread(target=late).start()
        """,
    )
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    assert {path.name for path in book.root.rglob("chapters/[01]")} == {"0", "1"}


def test_two_books_at_once(tmp_path: Path) -> None:
    """Two clones do not meet; a chapter may ask for more ranks than the others have."""
    builds = []
    for clone in ("one clone", "another clone"):
        book = Book(tmp_path / clone)
        book.configure(*LAUNCHER, launcher={"ranks": 2, "preload": PRELOAD})
        book.chapter("five", "# sphinx_gallery_ranks = 5\n" + JOIN + "print('sum', total[0])")
        builds.append((book, book.start()))
    for book, build in builds:
        assert build.finish() == 0, build.output
        assert "sum tensor(5.)" in book.page("five")
        assert "sphinx_gallery_ranks" not in book.page("five")
        assert "[rank4]:sum tensor(5.)" in build.output


@pytest.mark.parametrize("imports", [None, ["once"]])
def test_each_rank_sees_what_torchrun_would_show_it(
    tmp_path: Path, imports: list[str] | None
) -> None:
    """The chapter's folder, arguments, name and input; facts come from rank 0's run."""
    book = Book(tmp_path / "book")
    book.configure(
        *LAUNCHER,
        launcher={
            "ranks": "machine.ranks",
            "imports": imports,
            "preload": PRELOAD,
            "facts": "machine.facts",
            "below_title": "machine.below",
            "depends": ["machine.py"],
        },
    )
    book.write(
        "machine.py",
        "def ranks(): return 2\n"
        "def facts(names): return names['world']\n"
        "def below(world, path): return [f'{path.name} on {world} *ranks*.']\n",
    )
    book.write("once.py", f"open({str(tmp_path / 'imports')!r}, 'a').write('.')")
    book.write("chapters/beside.py.txt", "read from the chapter's folder")
    book.chapter(
        "looks",
        """
        import multiprocessing, os, pathlib, sys, warnings
        import once
        world = os.environ["WORLD_SIZE"]
        print(pathlib.Path("beside.py.txt").read_text())
        print(__name__, pathlib.Path(sys.argv[0]).name, len(sys.argv), os.environ["MPLBACKEND"])
        print("OMP", os.environ["OMP_NUM_THREADS"], "input", sys.stdin.read() == "")
        print("sphinx", "sphinx" in sys.modules)
        print(multiprocessing.current_process().name, multiprocessing.parent_process())
        warnings.warn("look out")
        """,
    )
    book.chapter("next", "import once\nworld = 2")
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    expected = [
        "read from the chapter's folder",
        "__main__ looks.py 1 Agg",
        "OMP 1 input True",
        "MainProcess None",
        "UserWarning: look out",
    ]
    page = html.unescape(book.page("looks"))
    for line in expected:
        assert build.output.count(line) == 2  # one on each rank
        assert line in page
    assert "[rank1]:sphinx False" in build.output
    # By both ranks of both chapters, or once for the build.
    assert (tmp_path / "imports").read_text() == ("...." if imports is None else ".")
    assert "<p>looks.py on 2 <em>ranks</em>.</p>" in book.page("looks")
    assert in_order(page, ["<h1>looks", "looks.py on 2", "This chapter is called"])


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"imports": ["nowhere"], "preload": PRELOAD})
    book.chapter("good", GOOD)
    build = book.build()
    assert build.process.returncode != 0
    assert "ModuleNotFoundError: No module named 'nowhere'" in build.output
    assert build.processes_after(0) == []


@pytest.mark.gpu(1)
def test_ranks_that_are_forked_can_use_a_gpu(tmp_path: Path) -> None:
    """CUDA does not outlive a fork: what is imported before must not have begun to use it."""
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"imports": ["microddp.figures"], "preload": PRELOAD})
    book.chapter("adds", "import torch\nprint('sum', torch.ones(3, device='cuda').sum().item())")
    build = book.build("-W", **gpus(1))
    assert build.process.returncode == 0, build.output
    assert "sum 3.0" in book.page("adds")


def test_warnings_of_the_gallery_are_the_builds(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher={"preload": PRELOAD})
    book.chapter("warns", "# sphinx_gallery_thumbnail_path = 'missing.png'\nx = 1")
    build = book.build_in_forks("-W")
    assert build.process.returncode != 0
    assert "sphinx_gallery_thumbnail_path" in build.output


def test_expected_failures_do_not_fail_the_build(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(
        *LAUNCHER,
        launcher={"ranks": 2, "preload": PRELOAD},
        gallery={"expected_failing_examples": ["../chapters/fails.py"]},
    )
    book.chapter("fails", "import os\nif os.environ['RANK'] == '1': raise ValueError('as told')")
    build = book.build_in_forks("-W")
    assert build.process.returncode == 0, build.output
    assert in_order(build.output, ["As expected, fails.py failed", "ValueError: as told"])


def test_aborting_on_the_first_error(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(
        *LAUNCHER,
        launcher={"ranks": 2, "preload": PRELOAD},
        gallery={"abort_on_example_error": True},
    )
    book.chapter("a_fails", "import os\nif os.environ['RANK'] == '1': raise ValueError('stop')")
    book.chapter("b_good", GOOD)
    build = book.build()
    assert build.process.returncode != 0
    assert "ValueError: stop" in build.output
    assert build.ran() == ["a_fails.py"]


@pytest.mark.parametrize(
    ("launcher", "gallery", "complaint"),
    [
        ({"rank": 2}, {}, "unexpected keyword argument 'rank'"),
        ({"ranks": 0}, {}, "launcher['ranks'] gives 0"),
        ({"depends": ["nothing/*.py"]}, {}, "no file matches 'nothing/*.py'"),
        ({}, {"parallel": 2}, "sphinx_gallery_conf['parallel'] is not possible"),
    ],
)
def test_wrong_options(
    tmp_path: Path, launcher: dict[str, object], gallery: dict[str, object], complaint: str
) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, launcher=launcher, gallery=gallery)
    book.chapter("good", GOOD)
    build = book.build()
    assert build.process.returncode != 0
    assert complaint in build.output
    assert build.ran() == []


def test_what_conf_py_defines_cannot_be_sent(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER)
    conf = book.root / "conf.py"
    conf.write_text(conf.read_text() + "sphinx_gallery_conf['reset_argv'] = lambda *_: []\n")
    book.chapter("good", GOOD)
    build = book.build()
    assert build.process.returncode != 0
    assert "Name what conf.py defines itself by import path" in build.output


def test_wrong_settings_in_a_file(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER)
    book.chapter("good", "# sphinx_gallery_ranks = 'four'\n" + GOOD)
    build = book.build()
    assert build.process.returncode != 0
    assert "good.py: not possible: ranks 'four'" in build.output
