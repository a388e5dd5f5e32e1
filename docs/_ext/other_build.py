"""A switch on each example's page: what its run said here, or in a build on another machine.

`other_build` in conf.py takes the fields of `Options`. A build with `record` writes what its
examples said to a folder; one with `there` takes such a folder in. Outputs and figures that differ
are then on the page twice, and a switch at its top shows the one or the other, without a script.
Where the script's code or the core is not the same in both builds, the page says so instead.

It takes `gallery_launcher` and `gallery_markdown`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import other_build_record
from docutils import nodes
from gallery_launcher import digest_of
from gallery_launcher_kept import Kept
from gallery_launcher_rank import import_object, write_below_title
from gallery_markdown import BELOW_TITLE, OfRun, eval_rst
from other_build_record import Record
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.transforms import SphinxTransform

HERE, THERE = "of-here", "of-there"  # classes of what the switch shows
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

    core: Sequence[str] = ()  # globs: files that have to be the same in both builds
    label: str = "builtins.str"  # import path: an example's facts -> what it ran on, in a few words
    record: str | None = None  # a folder to write
    there: str | None = None  # a folder to take in


class Both(NamedTuple):
    """What an example's run said here, and in the other build; or why that is not shown."""

    here: Kept
    there: Kept
    record: Record
    why_not: str


@cache  # the core's files do not change while a build reads its pages
def _options(env_options: tuple[tuple[str, Any], ...], confdir: str) -> tuple[Options, str]:
    options = Options(**dict(env_options))
    return options, digest_of(Path(confdir), options.core)


def options_of(app: Sphinx) -> tuple[Options, str]:
    """Return the options, and the digest of this build's core."""
    told = {k: tuple(v) if isinstance(v, list) else v for k, v in app.config.other_build.items()}
    return _options(tuple(told.items()), str(app.confdir))


def record_of(app: Sphinx) -> Record | None:
    """Return what another build recorded, if this one is to take it in."""
    there = options_of(app)[0].there
    return Record.read(Path(app.confdir, there)) if there else None


def both(env: BuildEnvironment, docname: str) -> Both | None:
    """Compare the two builds' runs of an example; none, unless it ran in both."""
    record, core = record_of(env.app), options_of(env.app)[1]
    here = Kept.read(Path(env.srcdir, f"{docname}.py.job"))
    there = record and record.example(docname)
    if record is None or here is None or there is None:
        return None
    differing = [
        f"{what} is not the same ({theirs[:7]} there, {ours[:7]} here)"
        for what, ours, theirs in (
            ("the script's code", here.code, there.code),
            ("the core", core, record.core),
        )
        if ours != theirs
    ]
    return Both(here, there, record, " and ".join(differing))


class OfBoth(OfRun):
    """What an example's run said here and there, where that is not the same."""

    def run(self) -> list[nodes.Node]:
        """Show it; below the title, with the switch."""
        kept, place = self.env.temp_data, self.arguments[0]  # of this page, while it is read
        if "other_build" not in kept:
            kept["other_build"] = both(self.env, self.env.docname)
        pair = kept["other_build"]
        if pair is None:
            return super().run()
        if place == BELOW_TITLE:
            return self.below_title(pair)
        return super().run() if pair.why_not else self.output(pair, int(place))

    def below_title(self, pair: Both) -> list[nodes.Node]:
        """The switch, and what differs of the lines below the title."""
        label = import_object(options_of(self.env.app)[0].label)
        ours, theirs = (label(run.facts) for run in (pair.here, pair.there))
        if pair.why_not:
            line = f"Outputs from {theirs} are left out: {pair.why_not}."
            return [*super().run(), nodes.paragraph("", line, classes=["measured-on"])]
        switch = SWITCH.format(here=escape(ours), there=escape(theirs))
        shown: list[nodes.Node] = [nodes.raw("", switch, format="html")]
        function = self.config.gallery_launcher.get("below_title")
        script = Path(self.env.srcdir, f"{self.env.docname}.py")
        parts = write_below_title(function, pair.there.facts, script)
        for here, there in zip_longest(pair.here.below_title, parts, fillvalue=""):
            shown += self.parse(here) if here == there else self.panels(here, there)
        return shown

    def output(self, pair: Both, number: int) -> list[nodes.Node]:
        """What a code cell wrote and drew."""
        here, there = pair.here.outputs[number], pair.there.outputs[number]
        renamed, equal = pair.record.take_figures(self.env.docname, there, Path(self.env.srcdir))
        if here == there and equal:
            return super().run()
        return self.panels(eval_rst(here), eval_rst(rename_ids(renamed)))

    def panels(self, here: str, there: str) -> list[nodes.Node]:
        """Put what is of one build only into a container of its own."""
        return [
            nodes.container("", *self.parse(markdown), classes=[name])
            for name, markdown in ((HERE, here), (THERE, there))
            if markdown
        ]


class DropEmpty(SphinxTransform):
    """Leave no label without an output: another extension may have taken it out."""

    default_priority = 790

    def apply(self, **_: Any) -> None:
        """Remove containers that hold nothing, or nothing but such containers."""
        for panel in list(self.document.findall(nodes.container)):
            of_one = {HERE, THERE} & set(panel["classes"])
            if of_one and all(isinstance(node, nodes.container) for node in panel.findall()):
                panel.parent.remove(panel)


def rename_ids(output: str) -> str:
    """Give the elements of an output's HTML ids and names that this build's output has not."""
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
        other_build_record.check_place(Path(app.confdir, options.record))


def read_again(app: Sphinx, env: BuildEnvironment, *_: set[str]) -> set[str]:
    """Have all pages read again when what is taken in has changed."""
    record = record_of(app)
    taken_in = record.digest if record else ""
    if getattr(env, "other_build", "") == taken_in:
        return set()
    env.other_build = taken_in  # type: ignore[attr-defined]
    return set(env.found_docs)


def load_script(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Add the script to pages with a switch."""
    del pagename, templatename, doctree
    if '<fieldset class="outputs-of">' in context.get("body", ""):
        app.add_js_file("other_build.js", loading_method="defer")


def record(app: Sphinx, exception: Exception | None) -> None:
    """Write what the examples said."""
    options, core = options_of(app)
    if options.record and exception is None:
        folder = Path(app.confdir, options.record)
        other_build_record.write(folder, Path(app.srcdir), app.env.found_docs, core)


def setup(app: Sphinx) -> dict[str, Any]:
    """Set up the extension."""
    app.setup_extension("gallery_launcher")
    app.setup_extension("gallery_markdown")
    app.add_config_value("other_build", {}, "", types=[dict])
    app.add_directive("of-run", OfBoth, override=True)
    app.add_transform(DropEmpty)
    app.connect("builder-inited", check, priority=300)  # before the examples run
    app.connect("env-get-outdated", read_again)
    app.connect("html-page-context", load_script, priority=400)  # before page_head sorts files out
    app.connect("build-finished", record)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
