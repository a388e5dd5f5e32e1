"""Write the outputs of a build's examples to a folder, which another build can take in.

build.json              when and with what it was made; the digest of every other file
chapters/NAME.json      the outputs of an example, as `launcher.kept` writes them
chapters/images/...     its figures
"""

import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from sphinx.errors import ConfigError

from launcher.kept import Kept

MANIFEST = "build.json"
_FIGURE = re.compile(r"(?<=images/)sphx_glr_\S+?(?=\.\w)")
_OTHERS = "there_"  # put before the names of another build's figures


@dataclass(frozen=True)
class Record:
    """A folder that a build wrote."""

    folder: Path
    package: str  # digest of the package
    files: dict[str, str]  # digests, by name
    digest: str  # of all of it

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read a folder's manifest.

        Raises `ConfigError` if it has none.
        """
        try:
            text = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise ConfigError(f"expected the outputs of another build in {folder}") from error
        told = json.loads(text)
        return cls(folder, told["package"], told["files"], _digest(text))

    def example(self, docname: str) -> Kept | None:
        """Return the outputs of an example in that build, if it ran there."""
        if f"{docname}.json" not in self.files:
            return None
        self._content(f"{docname}.json")
        return Kept.read(self.folder / f"{docname}.json")

    def take_figures(self, docname: str, output: str, srcdir: Path) -> tuple[str, bool]:
        """Copy the figures of an output to the folder of the page's own figures.

        Returns the output with the copies' names, and whether all equal those of this build.
        """
        equal = True
        for stem in _FIGURE.findall(output):
            start = str(PurePosixPath(docname).parent / "images" / stem)
            for name in (name for name in self.files if name.startswith(start)):
                content, here = self._content(name), srcdir / name
                equal = equal and here.is_file() and here.read_bytes() == content
                here.with_name(_OTHERS + here.name).write_bytes(content)
        return _FIGURE.sub(rf"{_OTHERS}\g<0>", output), equal

    def _content(self, name: str) -> bytes:
        """Read a file.

        Raises `ConfigError` if it has changed since it was recorded.
        """
        content = (self.folder / name).read_bytes()
        if _digest(content) != self.files[name]:
            raise ConfigError(f"{self.folder / name} is not what {MANIFEST} says it was")
        return content


def write(folder: Path, srcdir: Path, docnames: Iterable[str], package: str) -> None:
    """Write the outputs of these pages' examples, and replace an earlier record.

    The new record is complete before it takes the earlier one's name. A build that is killed
    between the two renames leaves them as `.new` and `.old`.
    """
    new, old = (folder.with_name(f"{folder.name}.{what}") for what in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    files = {}

    def put(name: str, content: bytes) -> None:
        files[name] = _digest(content)
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(content)

    for docname in sorted(docnames):
        kept = srcdir / f"{docname}.py.job"
        run = Kept.read(kept)
        if run is None:
            continue
        put(f"{docname}.json", kept.read_bytes())
        images = PurePosixPath(docname).parent / "images"
        for stem in _FIGURE.findall("".join(run.outputs)):
            for figure in (srcdir / images).glob(f"{escape(stem)}*"):
                put(str(images / figure.name), figure.read_bytes())
    manifest = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "package": package,
        "files": files,
    }
    new.mkdir(parents=True, exist_ok=True)
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Raise `ConfigError` if a record would replace something else."""
    if folder.exists() and not (folder / MANIFEST).is_file():
        empty = folder.is_dir() and not any(folder.iterdir())
        if not empty:
            raise ConfigError(f"expected no folder, or another build's outputs, at {folder}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
