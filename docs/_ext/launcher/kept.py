"""Keep an example's outputs beside its page, so that a change of its text runs nothing."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sphinx_gallery import gen_rst
from sphinx_gallery.py_source_parser import Block
from sphinx_gallery.utils import get_md5sum

# Matches an output that names a line of a script, as tracebacks and warnings do.
_NAMES_A_LINE = re.compile(r"\blines? \d|\.py[:(]\d")


@dataclass(frozen=True)
class Kept:
    """A run's outputs, and the code and conditions that they come from."""

    state: str  # the conditions: ranks or hosts, digests of what the example depends on
    code: str  # digest of the script's code cells
    lines: list[int]  # of the script, at which these cells begin
    outputs: list[str]  # of these cells, reStructuredText
    figures: int  # the number of figures that they drew
    seconds: float  # that they took
    facts: Any  # about the run, from options.facts
    below_title: list[str]  # Markdown texts, from options.below_title
    look: str = ""  # digest of what made the page of this; records of earlier builds have none

    @classmethod
    def read(cls, path: Path) -> "Kept | None":
        """Read what `write` wrote; return `None` if there is no file, or another version's."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if not isinstance(told, dict) or told.keys() | {"look"} != {
            field.name for field in fields(cls)
        }:
            return None
        return cls(**told)

    def write(self, path: Path) -> None:
        """Write it, as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def fits(self, blocks: Sequence[Block]) -> bool:
        """Return whether a run of these blocks would give the same outputs.

        The code must be the same, and on the same lines if an output names a line.
        """
        names_lines = any(map(_NAMES_A_LINE.search, self.outputs))
        code, lines = code_of(blocks)
        return code == self.code and (lines == self.lines or not names_lines)

    def show_again(self, generate: Callable[[], Any], below_title: list[str]) -> Any:
        """Call `generate`, the gallery's function for one example, with these outputs for a run."""

        def execute_script(
            blocks: list[Block],
            script_vars: dict[str, Any],
            gallery_conf: dict[str, Any],
            file_conf: dict[str, Any],
        ) -> tuple[list[str], float]:
            del gallery_conf
            target = script_vars["target_file"]
            Path(f"{target}.md5").write_text(get_md5sum(target, mode="t"))
            script_vars |= {"memory_delta": 0.0, "passing": True}
            for _ in range(self.figures):  # as a thumbnail may be counted from the last
                next(script_vars["image_path_iterator"])
            show_below_title(file_conf, below_title)
            outputs = iter(self.outputs)
            shown = [next(outputs) if block.type == "code" else "" for block in blocks]
            return shown, self.seconds

        def names_from_the_run(conf: dict[str, Any], *others: Any) -> Any:
            *_, target = others
            return gen_rst._read_cached_backrefs(conf, target)

        with (
            replaced("execute_script", execute_script),
            replaced("_get_backreferences", names_from_the_run),
        ):
            return generate()


def code_of(blocks: Sequence[Block]) -> tuple[str, list[int]]:
    """Return a digest of the code cells, and the lines on which they begin."""
    cells = [block for block in blocks if block.type == "code"]
    text = json.dumps([cell.content.strip("\n") for cell in cells])
    return hashlib.sha256(text.encode()).hexdigest(), [cell.lineno for cell in cells]


def show_below_title(file_conf: dict[str, Any], parts: list[str]) -> None:
    """Make the page show these parts, Markdown, below its title."""
    file_conf["preamble"] = "\n\n".join(parts)


@contextmanager
def replaced(name: str, function: Callable[..., Any]) -> Iterator[Any]:
    """Replace a function of the gallery for a while; gives the original."""
    before = getattr(gen_rst, name)
    setattr(gen_rst, name, function)
    try:
        yield before
    finally:
        setattr(gen_rst, name, before)
