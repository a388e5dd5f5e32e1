"""The house that CONTRIBUTING draws, what loads no plots, and what the environment can set."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "microddp"
LINE = "---"  # in the picture: below it is the core


def floors():
    """The floors of the house that CONTRIBUTING draws, from the ground up; ``LINE`` is one."""
    house = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house")[2]
    picture = re.findall(r"^    (.+)$", house.partition("From outside")[0], re.MULTILINE)
    return [
        [LINE] if line == LINE else re.findall(r"(\w+)(?:/|\.py)", re.split(r"   +", line)[0])
        for line in reversed(picture)
    ]


FLOOR = {part: floor for floor, parts in enumerate(floors()) for part in parts}


def imports(path):
    """The parts of the package that a file imports, and whether at the top of the file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("microddp"):
            _, *inside = node.module.split(".")
            for part in inside[:1] or [alias.name for alias in node.names]:
                yield part, node in tree.body
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("microddp."):
                    yield alias.name.split(".")[1], node in tree.body


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_imports_go_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for other, at_the_top in imports(path):
        if other == part:
            continue
        assert FLOOR[other] < FLOOR[part], (part, "imports", other)
        assert other != "figures" or not at_the_top, "only when asked to plot"


def test_every_part_has_a_floor():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__init__", "__pycache__", "py"} <= set(FLOOR)


def test_the_core_imports_nothing_from_behind_the_doors():
    """As imports go down, and it is the house's lower part; here also at run time."""
    core = {part for part, floor in FLOOR.items() if floor < FLOOR[LINE]}
    assert {"comms", "allreduce", "ddp", "step", "strategies"} <= core
    code = (
        "import sys, microddp; microddp.DDP; import microddp.schedule\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('microddp.')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.split()) <= core


def test_the_core_is_read_in_an_afternoon():
    core = {part for part, floor in FLOOR.items() if floor < FLOOR[LINE]} | {"__init__"}
    lengths = [
        len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in core
    ]
    assert (sum(lengths) <= 5000, len(lengths) <= 40, max(lengths) <= 300) == (True,) * 3, lengths


def test_the_readme_has_every_part():
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2]
    assert set(FLOOR) - {LINE} <= set(re.findall(r"(\w+)(?:/|\.py)", tree))


def test_nobody_reaches_for_another_files_private_names():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("microddp"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, (path, private)


@pytest.mark.parametrize(
    "module", ["microddp", "microddp.train.__main__", "microddp.bench.__main__"]
)
def test_training_does_not_load_matplotlib(module):
    code = f"import sys, {module}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_variable_of_the_environment_is_in_the_readers_table():
    table = (ROOT / "docs/rebuild.md").read_text().partition("## Environment")[2]
    named = {
        name
        for pattern in ("microddp/**/*.py", "docs/_ext/**/*.py", "chapters/*.py", "conf.py")
        for path in ROOT.glob(pattern)
        for name in re.findall(r"MICRODDP_[A-Z_]+", path.read_text())
    }
    # Set by what starts a job on hosts in a box, for its ranks.
    assert named - {"MICRODDP_BOX", "MICRODDP_LINKS", "MICRODDP_NO_HOSTS"} == {
        *re.findall(r"`(MICRODDP_[A-Z_]+)", table)
    }
