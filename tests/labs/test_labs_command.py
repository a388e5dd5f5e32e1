"""The command line of the labs, and the reader's folder."""

import ast

import pytest
from cases import replaced
from shorter import CHAPTERS

from microddp.labs.__main__ import main
from microddp.labs.engine.catalogue import LABS, find
from microddp.labs.engine.skeleton import definitions, skeleton
from microddp.labs.engine.work import Work

LAB = find("02")
FIRST = "every rank ends with the sum"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own; returns its status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return command


def test_a_lab_from_the_skeleton_to_the_end(run, tmp_path):
    script = tmp_path / "my_work/lab02_ring.py"
    status, printed = run("check", "02")
    assert status == 2
    assert "my_work/lab02_ring.py yet: python -m microddp.labs start 02" in printed
    status, printed = run("start", "2")
    assert status == 0
    assert "write ring_all_reduce. Then: python -m microddp.labs check 02" in printed
    status, printed = run("check", "02")
    assert status == 1
    assert "ring_all_reduce is not written yet" in printed
    assert 'Read: chapter 02_all_reduce, "Ring: a chunk at a time"' in printed
    assert "0 of 5 checks passed" in run("progress")[1]
    script.write_text(run("solution", "02")[1])
    status, printed = run("check", "02")
    assert status == 0
    assert "FAILED" not in printed
    assert "not run" not in printed
    assert "5 of 5 checks hold, in" in printed
    assert "5 of 5 checks passed" in run("progress")[1]
    script.write_text(script.read_text() + "\n# a thought")
    assert "5 of 5 checks passed" in run("list")[1]
    assert "; changed since" in run("list")[1]


def test_work_is_not_overwritten_without_being_told(run, tmp_path):
    script = tmp_path / "elsewhere/lab02_ring.py"
    assert run("start", "02", "--dir", "elsewhere")[0] == 0
    script.write_text("mine")
    status, printed = run("start", "02", "--dir", "elsewhere")
    assert status == 2
    assert "is there already. To begin anew, and lose what is in it: --overwrite" in printed
    assert script.read_text() == "mine"
    assert run("start", "02", "--dir", "elsewhere", "--overwrite")[0] == 0
    assert script.read_text() == skeleton(LAB.solution.read_text(), LAB.functions)


def test_a_folder_in_the_place_of_the_script_is_told(run, tmp_path):
    (tmp_path / "my_work/lab02_ring.py").mkdir(parents=True)
    status, printed = run("check", "02")
    assert status == 2
    assert "Is a directory: 'my_work/lab02_ring.py'" in printed


@pytest.mark.parametrize("text", ["{", "[]", '{"lab02_ring": 3}', '{"lab02_ring": {"passed": 1}}'])
def test_damaged_results_are_told(text, run, tmp_path):
    run("start", "02")
    (tmp_path / "my_work/progress.json").write_text(text)
    status, printed = run("list")
    assert status == 2
    assert "my_work/progress.json is damaged, delete it: " in printed


def test_the_table_says_on_how_many_ranks_what_held(run, tmp_path):
    """A ring that comes no further than the neighbour."""
    run("start", "02")
    wrong = replaced(LAB.solution.read_text(), {"range(n - 1)": "range(min(n - 1, 1))"})
    (tmp_path / "my_work/lab02_ring.py").write_text(wrong)
    status, printed = run("check", "02")
    assert status == 1
    (row,) = [line for line in printed.splitlines() if line.startswith(FIRST)]
    assert row.removeprefix(FIRST).split() == ["ok", "ok", "FAILED", "FAILED"]
    assert f"On 3 ranks, this does not hold: {FIRST}." in printed


def test_hints_come_one_by_one(run):
    first, second = run("hint", "02")[1], run("hint", "02", "2")[1]
    assert "tensor_split" in first
    assert "python -m microddp.labs hint 02 2" in first
    assert first != second
    status, printed = run("hint", "02", "9")
    assert status == 2
    assert "expected a hint from 1 to 3, got 9" in printed


def test_a_lab_that_there_is_not(run):
    status, printed = run("start", "99")
    assert status == 2
    assert "expected the number of a lab (00, 01, 02" in printed


@pytest.mark.parametrize("lab", LABS.values(), ids=LABS)
def test_a_skeleton_has_all_but_the_bodies(lab):
    solution = lab.solution.read_text()
    given = skeleton(solution, lab.functions)
    assert definitions(given).keys() == definitions(solution).keys()
    assert given.count("raise NotImplementedError") == len(lab.functions)
    assert f"labs check {lab.number}" in given
    assert '# %% tags=["try"]' in given
    for name in lab.functions:
        assert ast.get_docstring(definitions(given)[name])
        assert len(definitions(given)[name].body) == 2  # docstring and error


@pytest.mark.parametrize("lab", LABS.values(), ids=LABS)
def test_a_lab_says_where_to_read(lab):
    chapter = CHAPTERS[lab.number]
    assert chapter.stem == lab.chapter
    assert f"$ python -m microddp.labs start {lab.number}\n" in chapter.read_text()
    for check in lab.checks:
        assert f"## {check.read}\n" in chapter.read_text(), check.title


def test_work_that_was_never_checked_is_called_started(tmp_path):
    work = Work(tmp_path)
    assert work.state(LAB) == "not started"
    work.start(LAB)
    assert work.state(LAB) == "started"
