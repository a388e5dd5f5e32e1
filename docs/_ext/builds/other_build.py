"""Show the outputs of another machine beside those of this build, with a switch on each page.

`other_build` in conf.py takes the fields of `Options`. A build with `record` writes the outputs of
its examples to a folder; a build with `there` takes such a folder in. Outputs and figures that
differ are then on the page twice, and a switch at its top shows one or the other, without a script;
a script only keeps the choice from page to page. In print both are there, labelled. If the
example's code or the package differs between the builds, the page says so instead. No example runs
because a record changed.

The extension needs `launcher` and `pages.markdown`, and `other_build.css` and `.js` in a folder of
static files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.transforms import SphinxTransform

from builds import record as records
from builds.record import Record
from launcher.digests import digest_of
from launcher.kept import Kept
from launcher.rank import import_object, write_below_title
from pages.markdown import BELOW_TITLE, OfRun, eval_rst
from pages.scripts import load_where

HERE, THERE = "of-here", "of-there"  # classes of the two containers that the switch shows
SWITCH = """\
<fieldset class="outputs-of">
<legend>Outputs from</legend>
<label><input type="radio" name="outputs-of" id="outputs-of-here" value="here" checked>
<span>here: {here}</span></label>
<label><input type="radio" name="outputs-of" id="outputs-of-there" value="there">
<span>there: {there}</span></label>
</fieldset>
"""


@dataclass(frozen=True)
class Options:
    """The options in conf.py. Paths are relative to its folder."""

    package: Sequence[str] = ()  # globs of files that have to be the same in both builds
    label: str = "builtins.str"  # import path of a function: facts -> a few words
    record: str | None = None  # folder to write
    there: str | None = None  # folder to take in


class Both(NamedTuple):
    """The outputs of an example in both builds, and why the other ones are not shown, if so."""

    here: Kept
    there: Kept
    record: Record
    why_not: str


@cache  # as the package does not change while a build reads its pages
def _options(env_options: tuple[tuple[str, Any], ...], confdir: str) -> tuple[Options, str]:
    options = Options(**dict(env_options))
    return options, digest_of(Path(confdir), options.package)


def options_of(app: Sphinx) -> tuple[Options, str]:
    """Return the options, and the digest of this build's package."""
    chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in app.config.other_build.items()}
    return _options(tuple(chosen.items()), str(app.confdir))


def record_of(app: Sphinx) -> Record | None:
    """Return the record that this build is to take in, if any."""
    there = options_of(app)[0].there
    return Record.read(Path(app.confdir, there)) if there else None


def both(env: BuildEnvironment, docname: str) -> Both | None:
    """Compare the two runs of an example; return `None` unless it ran in both builds."""
    record, package = record_of(env.app), options_of(env.app)[1]
    here = Kept.read(Path(env.srcdir, f"{docname}.py.job"))
    there = record and record.example(docname)
    if record is None or here is None or there is None:
        return None
    differing = [
        f"{what} is not the same ({theirs[:7]} there, {ours[:7]} here)"
        for what, ours, theirs in (
            ("the script's code", here.code, there.code),
            ("the package", package, record.package),
        )
        if ours != theirs
    ]
    return Both(here, there, record, " and ".join(differing))


class OfBoth(OfRun):
    """An output in both builds, where they differ."""

    def run(self) -> list[nodes.Node]:
        """Show it; below the title, show the switch."""
        kept, place = (
            self.env.temp_data,
            self.arguments[0],
        )  # temp_data lasts while the page is read
        if "other_build" not in kept:
            kept["other_build"] = both(self.env, self.env.docname)
        pair = kept["other_build"]
        if pair is None:
            return super().run()
        if place == BELOW_TITLE:
            return self.below_title(pair)
        return super().run() if pair.why_not else self.output(pair, int(place))

    def below_title(self, pair: Both) -> list[nodes.Node]:
        """Return the switch, and the lines below the title."""
        label = import_object(options_of(self.env.app)[0].label)
        ours, theirs = (label(run.facts) for run in (pair.here, pair.there))
        if pair.why_not:
            line = f"Outputs from {theirs} are left out: {pair.why_not}."
            return [*super().run(), nodes.paragraph("", line, classes=["measured-on"])]
        switch = SWITCH.format(here=escape(ours), there=escape(theirs))
        shown: list[nodes.Node] = [nodes.raw("", switch, format="html")]
        function = self.config.launcher.get("below_title")
        script = Path(self.env.srcdir, f"{self.env.docname}.py")
        parts = write_below_title(function, pair.there.facts, script)
        for here, there in zip_longest(pair.here.below_title, parts, fillvalue=""):
            shown += self.parse_text_to_nodes(here) if here == there else self.panels(here, there)
        return shown

    def output(self, pair: Both, number: int) -> list[nodes.Node]:
        """Return what a code cell wrote and drew."""
        here, there = pair.here.outputs[number], pair.there.outputs[number]
        renamed, equal = pair.record.take_figures(self.env.docname, there, Path(self.env.srcdir))
        if here == there and equal:
            return super().run()
        return self.panels(eval_rst(here), eval_rst(rename_ids(renamed)))

    def panels(self, here: str, there: str) -> list[nodes.Node]:
        """Return a container for each build's own output."""
        return [
            nodes.container("", *self.parse_text_to_nodes(markdown), classes=[name])
            for name, markdown in ((HERE, here), (THERE, there))
            if markdown
        ]


class DropEmpty(SphinxTransform):
    """Remove a label whose output another extension has removed."""

    default_priority = 790

    def apply(self, **_: Any) -> None:
        """Remove containers that hold nothing, or nothing but such containers."""
        for panel in list(self.document.findall(nodes.container)):
            of_one = {HERE, THERE} & set(panel["classes"])
            if of_one and all(isinstance(node, nodes.container) for node in panel.findall()):
                panel.parent.remove(panel)


def rename_ids(output: str) -> str:
    """Make the ids and names in an output's HTML differ from those in this build's output."""
    names = set(re.findall(r'\s(?:id|name)="([^"]+)"', output))

    def renamed(attribute: re.Match[str]) -> str:
        words = (f"{word}-there" if word in names else word for word in attribute[2].split(" "))
        return f'{attribute[1]}{" ".join(words)}"'

    output = re.sub(r'(\s(?:id|name|for|href|aria-\w+)="#?)([^"]*)"', renamed, output)
    return re.sub(
        r"url\(#([^)]*)\)",
        lambda use: f"url(#{use[1]}-there)" if use[1] in names else use[0],
        output,
    )


def check(app: Sphinx) -> None:
    """Raise `ConfigError`, before any example runs, if an option is unknown or wrong."""
    try:
        options = options_of(app)[0]
    except TypeError as error:
        raise ConfigError(f"other_build: {error}") from error
    record_of(app)
    if options.record:
        records.check_place(Path(app.confdir, options.record))


def read_again(app: Sphinx, env: BuildEnvironment, *_: set[str]) -> set[str]:
    """Have all pages read again when the record has changed, or the package beside it."""
    record = record_of(app)
    digest = f"{record.digest} {options_of(app)[1]}" if record else ""
    if getattr(env, "other_build", "") == digest:
        return set()
    env.other_build = digest  # type: ignore[attr-defined]
    return set(env.found_docs)


def write_record(app: Sphinx, exception: Exception | None) -> None:
    """Write the outputs of all examples, if the build has ended well."""
    options, package = options_of(app)
    if options.record and exception is None:
        folder = Path(app.confdir, options.record)
        records.write(folder, Path(app.srcdir), app.env.found_docs, package)


def setup(app: Sphinx) -> dict[str, Any]:
    """Set up the extension."""
    app.setup_extension("launcher")
    app.setup_extension("pages.markdown")
    app.add_config_value("other_build", {}, "", types=[dict])
    app.add_directive("of-run", OfBoth, override=True)
    app.add_transform(DropEmpty)
    app.connect("builder-inited", check, priority=300)  # before the examples run
    app.connect("env-get-outdated", read_again)
    load_where('<fieldset class="outputs-of">', "other_build.js", app)
    app.connect("build-finished", write_record)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
