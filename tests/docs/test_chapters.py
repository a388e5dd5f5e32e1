"""Every chapter runs to its end, whatever the number of ranks; its assertions are the test."""

import os
import re
import subprocess

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from ranks import run
from shorter import CHAPTERS, shortened, what_a_rank_prints
from warm import python

FOLDER = CHAPTERS["00"].parent
TORCHRUN = (python(), "-m", "torch.distributed.run", "--standalone")


def output_of(*command, **environment):
    usual = {"MICRODDP_TIMEOUT": "60", "MICRODDP_ROUNDS": "2", "PYTHON_EXEC": python()}
    done = subprocess.run(
        [*map(str, command)],
        cwd=FOLDER,
        env={**os.environ, **usual, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runs_under_torchrun(tmp_path):
    script = tmp_path / CHAPTERS["05"].name
    script.write_text(shortened("05"))
    output = output_of(*TORCHRUN, "--nproc-per-node=3", script, MICRODDP_FIGURES=str(tmp_path))
    assert "gloo, 3 ranks on " in output
    assert output.count("torch 2.") == 1, "only one rank may print"
    assert list(tmp_path.glob(f"{script.stem}-*.png")), "figures are kept where they are asked for"


# Three ranks: neither a power of two nor a divisor of every size, and more than the usual cores.
# Those that use what only Linux has; the pretended macOS has three ranks for the others.
@pytest.mark.parametrize("number", ["02", "15", "16"])
def test_runs_on_three_ranks(number, tmp_path):
    environment = {"MICRODDP_TIMEOUT": "60", "MICRODDP_FIGURES": str(tmp_path)}
    first, *others = run(
        what_a_rank_prints, 3, number, join=False, timeout=200, environment=environment
    )
    assert "gloo, 3 ranks on " in first
    assert others == ["", ""]
    assert list(tmp_path.glob(f"{CHAPTERS[number].stem}-*.png"))


def test_runs_under_plain_python():
    output = output_of(python(), CHAPTERS["02"])
    assert "microddp: one rank. For more: torchrun --nproc-per-node=4 02_all_reduce.py" in output
    assert "gloo, 1 rank on " in output


def test_a_notebook_runs_from_top_to_bottom(monkeypatch):
    monkeypatch.delenv("MPLBACKEND")  # a notebook shows figures by a back end of its own
    notebook = jupytext.read(CHAPTERS["01"])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": FOLDER}}).execute()
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "gloo, 1 rank on " in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.parametrize("number", sorted(CHAPTERS))
def test_is_written_like_a_chapter(number):
    notebook = jupytext.read(CHAPTERS[number])
    first, *_, last = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {number}. ")
    assert last.source.endswith("comms.close()")
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"^%", prose, re.MULTILINE), "MyST leaves such a line out, as a comment"
    indexed = [cell.source for cell in notebook.cells if "index" in cell.metadata]
    assert all(re.search(r"^#+ ", source, re.MULTILINE) for source in indexed), "a section's words"
    for word in ("**Predict.**", "**Measure.**", "**Explain.**", "Where it breaks", "Exercises"):
        assert word in prose, word
    exercises = re.split(r"^\d+\. ", prose.partition("## Exercises")[2], flags=re.MULTILINE)[1:]
    assert len(exercises) + ("**The lab.**" in prose) >= 3
    assert all(text.count('<details class="solution">') == 1 for text in exercises)
    imports, *code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert imports.metadata["tags"] == ["imports"], "for the page to fold"
    code = [cell.source for cell in code]
    assert any(re.search(r"^ *assert ", cell, re.MULTILINE) for cell in code)
    longest = max(len([line for line in cell.splitlines() if line.strip()]) for cell in code)
    assert longest <= 22, "a longer cell belongs into microddp, or into two"
