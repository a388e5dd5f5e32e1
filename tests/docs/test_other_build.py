"""Outputs of two builds on one page, in small books that are built for real."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from gallery_book import LAUNCHER, PRELOAD, Book, Build

from builds.other_build import rename_ids

CHAPTER = '''# %% [markdown]
"""
# Measured

PROSE
"""

# %%
import os

machine = os.environ["MACHINE"]
print("two and two are", 2 + 2)

# %%
print("this machine is", machine)

# %%
print("again, it is", machine)

# %%
if machine == "big":
    print("only a big machine gets here")

# %%
import matplotlib.pyplot as plt

_ = plt.plot([0, 1], color={"big": "red", "small": "blue"}[machine])


# %%
class Drawn:
    def _repr_html_(self):
        return f'<div><a id="mark" href="#mark">drawn by {machine}</a></div>'


Drawn()
'''
MACHINE = """
def facts(names): return {"machine": names["machine"]}
def below(facts, path): return [f"Ran on {facts['machine']}.", f"It is {path.name}."]
def label(facts): return facts["machine"] + " & co"
"""
OTHER = """
import os

other_build = {
    "package": ["package/*.py"],
    "label": "machine.label",
    "record": os.environ.get("RECORD"),
    "there": os.environ.get("THERE"),
}
"""

# As an extension may, of what the page says elsewhere.
TAKES_OUT = """
from docutils import nodes
from sphinx.transforms import SphinxTransform

class TakeOut(SphinxTransform):
    default_priority = 700

    def apply(self):
        for output in list(self.document.findall(nodes.literal_block)):
            if output.astext().startswith("again, it is"):
                output.parent.remove(output)

def setup(app):
    app.add_transform(TakeOut)
"""


def book(root: Path) -> Book:
    """A book of one chapter that says on which machine it ran."""
    made = Book(root)
    launcher = {"facts": "machine.facts", "below_title": "machine.below", "preload": PRELOAD}
    made.configure(
        *(*LAUNCHER, "builds.other_build", "takes_out"),
        launcher={**launcher, "depends": ["package/*.py"]},
    )
    conf = made.root / "conf.py"
    conf.write_text(conf.read_text() + OTHER)
    made.write("machine.py", MACHINE)
    made.write("takes_out.py", TAKES_OUT)
    (made.root / "package").mkdir()
    made.write("package/module.py", "one = 1")
    made.write("chapters/measured.py", CHAPTER)
    return made


def panels(page: str, name: str) -> str:
    """What the switch shows of one build, without tags."""
    found = re.findall(rf'<div class="{name} docutils container">(.*?)\n</div>\n', page, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", "", html.unescape(" ".join(found))).split())


def why(page: str) -> list[str]:
    """Why the page leaves the other build's outputs out."""
    return re.findall(r"are left out: ([^<]*)\.", html.unescape(page))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Book, Path]:
    """A book built on the big machine, and the folder of its record."""
    made = book(tmp_path_factory.mktemp("there") / "book")
    made.chapter("alone", "machine = 'there'")
    folder = made.root.parent / "record"
    assert made.build_in_forks("-W", MACHINE="big").process.returncode == 0
    # As another extension might: a variant of a figure, beside it.
    images = made.root / "docs/chapters/images"
    shutil.copy(images / "sphx_glr_measured_001.png", images / "sphx_glr_measured_001-narrow.png")
    build = made.build_in_forks("-W", RECORD=str(folder))
    assert build.process.returncode == 0, build.output
    assert build.ran() == []
    return made, folder


@pytest.fixture(scope="module")
def here(there: tuple[Book, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Book, Build]:
    """The same chapter, in other words, built on a small machine, with the record taken in."""
    made = book(tmp_path_factory.mktemp("here") / "book")
    made.write("chapters/measured.py", CHAPTER.replace("PROSE", "Other\n\nwords."))
    build = made.build_in_forks("-W", MACHINE="small", THERE=str(there[1]))
    assert build.process.returncode == 0, build.output
    return made, build


class TestBoth:
    """One page for two builds."""

    def test_the_switch_says_what_each_build_ran_on(self, here: tuple[Book, Build]) -> None:
        page = here[0].page("measured")
        assert re.findall("<span>(.*)</span></label>", page) == [
            "here: small &amp; co",
            "there: big &amp; co",
        ]
        assert page.index("<h1>") < page.index('<fieldset class="outputs-of">')
        assert "other_build.js" in page
        assert "outputs-of" not in here[0].page("index")
        assert "other_build.js" not in here[0].page("index")

    def test_shows_what_differs_of_each_and_the_rest_once(self, here: tuple[Book, Build]) -> None:
        page = here[0].page("measured")
        ours, theirs = panels(page, "of-here"), panels(page, "of-there")
        assert ours.startswith("Ran on small.")
        assert theirs.startswith("Ran on big.")
        assert "this machine is small" in ours
        assert not re.search(r'<div class="of-\w+ docutils container">\s*</div>', page)
        assert "this machine is big" in theirs
        assert "drawn by small" in ours
        assert "drawn by big" in theirs
        assert "only a big machine gets here" in theirs
        assert page.count("only a big machine gets here") == 2  # the code, too
        for once in ("two and two are 4", "It is measured.py."):
            assert once not in ours + theirs
            assert page.count(once) == 1

    def test_no_id_is_there_twice(self, here: tuple[Book, Build]) -> None:
        ids = re.findall(r'\sid="([^"]*)"', here[0].page("measured"))
        assert sorted(ids) == sorted(set(ids))
        assert 'id="mark-there" href="#mark-there"' in here[0].page("measured")

    def test_figures_come_along_with_their_variants(
        self, there: tuple[Book, Path], here: tuple[Book, Build]
    ) -> None:
        images = "docs/chapters/images"
        for name in ("sphx_glr_measured_001.png", "sphx_glr_measured_001-narrow.png"):
            theirs = (there[0].root / images / name).read_bytes()
            assert (here[0].root / images / f"there_{name}").read_bytes() == theirs
            assert (here[0].root / images / "sphx_glr_measured_001.png").read_bytes() != theirs
        assert "_images/there_sphx_glr_measured_001.png" in here[0].page("measured")


def test_what_changes_and_what_does_not(there: tuple[Book, Path], tmp_path: Path) -> None:
    """Words, the record and whether it is taken in need no run; code and package have to agree."""
    made, folder = book(tmp_path / "book"), tmp_path / "record"
    shutil.copytree(there[1], folder)
    assert made.build_in_forks("-W", MACHINE="small", THERE=str(folder)).ran() == ["measured.py"]

    def rebuilt(**environment: str) -> str:
        build = made.build_in_forks("-W", MACHINE="small", **environment)
        assert build.process.returncode == 0, build.output
        assert build.ran() == []
        return made.page("measured")

    assert "outputs-of" not in rebuilt()
    text = CHAPTER.replace("PROSE", "New words.\n\n## And a section\n")
    made.write("chapters/measured.py", text.replace("# Measured", "# Still measured"))
    page = rebuilt(THERE=str(folder))
    assert "<h1>Still measured" in page
    assert "And a section" in page
    assert "this machine is big" in panels(page, "of-there")
    for copy in ("measured.py", "measured.ipynb"):
        assert "New words." in (made.root / "docs/chapters" / copy).read_text()

    # A new record, of a build that the first one's page says nothing of.
    other = there[0]
    manifest = json.loads((folder / "build.json").read_text())
    assert manifest["torch"]
    assert {Path(name).name for name in manifest["files"]} >= {"measured.json", "alone.json"}
    (other.root / "docs/chapters/measured.py.md5").unlink()
    build = other.build_in_forks("-W", MACHINE="small", RECORD=str(folder))
    assert build.ran() == ["measured.py"]
    assert not list(tmp_path.glob("record.*"))
    page = rebuilt(THERE=str(folder))
    assert "this machine is" not in panels(page, "of-there") + panels(page, "of-here")

    # The package, and then the code, are not the same any more.
    made.write("package/module.py", "one = 2")
    assert made.build_in_forks("-W", MACHINE="small", THERE=str(folder)).ran() == ["measured.py"]
    said = why(rebuilt(THERE=str(folder)))[0]
    assert re.fullmatch(r"the package is not the same \(\w{7} there, \w{7} here\)", said)
    made.write("package/module.py", "one = 1")
    made.write("chapters/measured.py", text.replace("2 + 2", "3 + 1"))
    build = made.build_in_forks("-W", MACHINE="small", THERE=str(folder))
    assert build.ran() == ["measured.py"]
    page = made.page("measured")
    assert re.fullmatch(
        r"the script.s code is not the same \(\w{7} there, \w{7} here\)", why(page)[0]
    )
    assert "Outputs from small &amp; co are" in page
    assert "of-there" not in page

    # Chapters that ran in one build only.
    made.write("chapters/measured.py", CHAPTER)
    (made.root / "chapters/measured.py").rename(made.root / "chapters/renamed.py")
    build = made.build_in_forks("-W", MACHINE="small", THERE=str(folder))
    assert build.process.returncode == 0, build.output
    assert "outputs-of" not in made.page("renamed")


def test_wrong_folders(there: tuple[Book, Path], tmp_path: Path) -> None:
    """They are refused before a chapter runs, and what somebody wrote into a record, too."""
    made = book(tmp_path / "book")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("precious")
    for environment, complaint in (
        ({"THERE": str(full)}, "expected the outputs of another build in"),
        ({"RECORD": str(full)}, "expected no folder, or another build's outputs, at"),
    ):
        build = made.build_in_forks(MACHINE="small", **environment)
        assert build.process.returncode != 0
        assert complaint in build.output
        assert build.ran() == []
    assert (full / "thesis.txt").read_text() == "precious"

    typed = tmp_path / "typed"
    shutil.copytree(there[1], typed)
    outputs = typed / "chapters/measured.json"
    outputs.write_text(outputs.read_text().replace("two are 4", "two are 5"))
    build = made.build_in_forks(MACHINE="small", THERE=str(typed))
    assert build.process.returncode != 0
    assert "measured.json is not what build.json says it was" in build.output


def test_only_an_outputs_own_names_are_changed() -> None:
    text = (
        '<svg id="a" aria-labelledby="b title"><title id="title"></title></svg><use href="#a">'
        '<p fill="url(#a) url(#c)"><input name="n" id="i"><label for="i"><a href="#other">'
    )
    assert rename_ids(text) == (
        '<svg id="a-there" aria-labelledby="b title-there"><title id="title-there"></title></svg>'
        '<use href="#a-there"><p fill="url(#a-there) url(#c)"><input name="n-there" id="i-there">'
        '<label for="i-there"><a href="#other">'
    )
