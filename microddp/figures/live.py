"""Live pictures, with which a reader can work: a script of the page draws a run's record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import torch.distributed as dist


def json_in_html(data: object) -> str:
    """Write data as JSON for a script element, with nothing that ends the element.

    Its lines are short, because docutils drops input with lines of more than 10,000 characters.
    """
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return text.replace("],[", "],\n[").replace('},{"', '},\n{"')


class Live:
    """A picture that a script of the site draws from data, with a still one for where none runs.

    As the last value of a cell it is shown on a web page. A notebook shows the still picture, a
    terminal one line.

    Args:
        kind: name of its script: ``docs/_static/live/<kind>.js``.
        title: subject of the picture, in words.
        data: input of the script, as JSON can write it.
        still: HTML with the same content for pages without a script, and for print.
    """

    def __init__(self, kind: str, title: str, data: Mapping[str, object], still: str) -> None:
        self.kind = kind
        self.title = title
        self.data = data
        self.still = still
        self.shown = not dist.is_initialized() or dist.get_rank() == 0

    def __repr__(self) -> str:
        return f"{self.title} (a picture to work with; shown in HTML)" if self.shown else ""

    def _repr_html_(self) -> str:
        if not self.shown:
            return ""
        return "\n".join(
            [
                f'<figure class="live" data-live="{self.kind}">',
                f"<figcaption>{escape(self.title)}</figcaption>",
                f'<div class="still">{self.still}</div>',
                f'<script type="application/json">\n{json_in_html(self.data)}\n</script>',
                "</figure>",
            ]
        )


def html_table(rows: Iterable[Iterable[object]], headers: Sequence[str], caption: str = "") -> str:
    """Write a table for a still picture; the first cell of each row is its header."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headers)
    lines = [f"<caption>{escape(caption)}</caption>"] if caption else []
    lines.append(f"<tr>{head}</tr>")
    for name, *cells in rows:
        row = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(str(name))}</th>{row}</tr>')
    return '<table class="docutils">\n' + "\n".join(lines) + "\n</table>"
