"""What an example imports of a package: on a small one, and on the book."""

import importlib.util
from pathlib import Path

import pytest

from launcher.imports import files_of

ROOT = Path(__file__).parents[2]

PACKAGE = {
    "__init__": "from p.base import one\n",
    "base": "one = 1\n",
    "named": "",
    "inside/__init__": "from p.inside.first import name\n",
    "inside/first": "import p.base\n\ndef name():\n    from p import late\n",
    "inside/second": "",
    "late": "",
    "relative/__init__": "from .one import name\n",
    "relative/one": "def name():\n    from .. import late\n",
    "program/__init__": "",
    "program/__main__": "from p.started import it\n",
    "started": "",
}
ALWAYS = {"__init__", "base"}  # what the package itself imports
INSIDE = ALWAYS | {"inside/__init__", "inside/first", "late"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import os, other.p\nfrom . import p\n", set()),
        ("import p", ALWAYS),
        ("from p.inside import name", INSIDE),
        ("def later():\n    import p.inside.second", INSIDE | {"inside/second"}),
        ("run('-m', 'p.program')", ALWAYS | {"program/__init__", "program/__main__", "started"}),
        ("import p.relative", ALWAYS | {"relative/__init__", "relative/one", "late"}),
        ('SCRIPT = """\nfrom p import named\n"""', ALWAYS | {"named"}),
        ('SCRIPT = """\n    from p import named\n"""', ALWAYS | {"named"}),
        (f"SAID = 'p.{'a' * 300}', '{'a' * 300}.py'", set()),
        ("SCRIPT = 'a sentence: from p import named'", set()),
        ('"""Text: p.named, and\n\nfrom p import named\n"""', set()),
    ],
)
def test_what_is_executed(tmp_path, script, expected):
    package = tmp_path / "p"
    for name, text in PACKAGE.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    path = tmp_path / "script.py"
    path.write_text(script)
    files = files_of(path, package, tmp_path)
    assert {str(file.relative_to(package).with_suffix("")) for file in files} == expected


def parts_of(script):
    package = ROOT / "microddp"
    files = files_of(script, package, ROOT / "docs" / "_downloads")
    return {path.relative_to(package).parts[0] for path in files if path.is_relative_to(package)}


def test_a_program_that_is_started_by_its_name_counts_with_what_it_imports(tmp_path):
    for name, text in PACKAGE.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / f"{name}.py").write_text(text)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "job.py").write_text("from p import named\n")
    (programs / "job.slurm").write_text("")
    script = tmp_path / "script.py"
    script.write_text("run('job.py')\nrun('another.py')\n")
    found = files_of(script, tmp_path / "p", programs)
    assert [path.name for path in found if path.parent == programs] == ["job.py"]
    assert tmp_path / "p" / "named.py" in found
    assert files_of(script, tmp_path / "p") == []


def test_a_word_in_the_hint_of_a_lab_runs_no_chapter():
    parts = {path.stem[:2]: parts_of(path) for path in ROOT.glob("chapters/[0-9]*.py")}
    assert "performance" not in parts["00"]
    assert {"train", "elastic", "doctor", "hang"} <= parts["13"], "in programs that it starts"
    every = set.union(*parts.values())
    assert not every & {"labs", "bench"}
    spec = importlib.util.spec_from_file_location("conf", ROOT / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    folders = {part for part in every if (ROOT / "microddp" / part).is_dir()}
    assert folders == set(conf.PARTS)


def test_data_beside_what_is_imported_counts():
    files = files_of(ROOT / "chapters" / "18_thousand.py", ROOT / "microddp")
    assert {"published.toml", "digits.csv.gz"} <= {path.name for path in files}
