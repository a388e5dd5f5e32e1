"""The launcher's folder in a project that is not this one, set up as its README says."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "docs/_ext/launcher"
README = (LAUNCHER / "README.md").read_text()


def test_it_imports_nothing_of_the_book():
    ours = {"microddp", *(path.name for path in LAUNCHER.parent.iterdir())}
    for path in LAUNCHER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            assert ours.isdisjoint(name.split(".")[0] for name in names), path
        assert "microddp" not in path.read_text(), path


def test_it_is_tried_with_the_version_that_is_pinned():
    pinned = re.search(r'"sphinx-gallery==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"tried with {pinned}." in " ".join(README.split())


def test_it_runs_the_examples_of_another_project(tmp_path):
    """Under another name, with the README's conf.py."""
    conf = re.search(r"```python\n(import sys.*?)```", README, re.DOTALL)[1]
    assert len(conf.splitlines()) <= 10
    shutil.copytree(LAUNCHER, tmp_path / "_ext/jobs")
    files = {
        "conf.py": conf.replace('"launcher"]', '"jobs"]'),
        "index.rst": "Index\n=====\n\n.. toctree::\n\n   gallery/index\n",
        "package/module.py": "",
        "examples/GALLERY_HEADER.rst": "Gallery\n=======\n",
        "examples/plot_ranks.py": '"""\nRanks\n=====\n"""\n\nimport os\n\n'
        'print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", ".", "_site"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank3]:rank 3 of 4" in done.stdout
    assert "rank 0 of 4" in (tmp_path / "_site/gallery/plot_ranks.html").read_text()
