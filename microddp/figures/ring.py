"""Pictures of the ring: moving, as plain SVG that needs no script, and round by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import matplotlib.pyplot as plt
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from microddp.comms import Message
from microddp.figures.style import COLORS, drawing

SECONDS_A_ROUND = 1.6
WIDTH, HEIGHT, RADIUS = 640, 330, 105  # of the drawing, in its own units


class RingAnimation:
    """Every recorded message as a dot that travels from its sender to its receiver.

    The last value of a cell shows it on a web page and in a notebook; a terminal gets one line.

    Args:
        messages: each rank's messages in order, one for each round.
        nbytes: the size of the reduced tensor.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], nbytes: int) -> None:
        self.messages = messages
        self.nbytes = nbytes
        self.shown = not dist.is_initialized() or dist.get_rank() == 0

    def __repr__(self) -> str:
        if not self.shown:
            return ""
        rounds = max(map(len, self.messages), default=0)
        return f"RingAnimation({len(self.messages)} ranks, {rounds} rounds; shown in HTML)"

    def _repr_html_(self) -> str:
        return self.svg() if self.shown else ""

    def svg(self) -> str:
        """The drawing as an ``<svg>`` element that repeats for ever."""
        n = len(self.messages)
        rounds = max(map(len, self.messages), default=0)
        length = (rounds + 1) * SECONDS_A_ROUND  # one pause at the end
        places = [_on_circle(RADIUS, rank, n) for rank in range(n)]
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg" '
            'style="max-width:100%;height:auto" fill="currentColor" font-size="14" '
            f'font-family="sans-serif"><title>{escape(self._describe(n, rounds))}</title>'
        ]
        for step in range(rounds):
            what = "add what arrives" if step < n - 1 else "keep what arrives"
            parts.append(
                f'<text x="12" y="24" opacity="0">round {step + 1} of {rounds}: {what}'
                f"{_visible(step / (rounds + 1), (step + 1) / (rounds + 1), length)}</text>"
            )
        for rank, (x, y) in enumerate(places):
            # Outside, where no dot passes over it.
            beside, below = _on_circle(RADIUS + 38, rank, n)
            anchor = "middle" if abs(beside - x) < 1 else "start" if beside > x else "end"
            parts.append(
                f'<circle cx="{x:.0f}" cy="{y:.0f}" r="24" fill="none" stroke="currentColor" '
                f'stroke-width="2"/><text x="{beside:.0f}" y="{below + 5:.0f}" '
                f'text-anchor="{anchor}">rank {rank}</text>'
            )
        for sent in self.messages:
            for step, message in enumerate(sent):
                start, end = step / (rounds + 1), (step + 0.85) / (rounds + 1)
                chunk = message.offset * n // self.nbytes
                (x0, y0), (x1, y1) = places[message.src], places[message.dst]
                times = f"0;{start:.4f};{end:.4f};1"
                parts.append(
                    f'<g opacity="0" transform="translate({x0:.0f} {y0:.0f})">'
                    f'<circle r="13" fill="{COLORS[chunk % len(COLORS)]}"/>'
                    f'<text y="5" text-anchor="middle" fill="black">{chunk}</text>'
                    '<animateTransform attributeName="transform" type="translate" '
                    f'dur="{length}s" repeatCount="indefinite" keyTimes="{times}" '
                    f'values="{x0:.0f} {y0:.0f};{x0:.0f} {y0:.0f};{x1:.0f} {y1:.0f};'
                    f'{x1:.0f} {y1:.0f}"/>{_visible(start, end, length)}</g>'
                )
        # One element a line: docutils drops input with lines of more than 10,000 characters.
        return "\n".join([*parts, "</svg>"])

    def _describe(self, n: int, rounds: int) -> str:
        return (
            f"{n} ranks in a circle; in each of {rounds} rounds every rank sends one numbered "
            "chunk to its right-hand neighbour"
        )


def _on_circle(radius: float, rank: int, n: int) -> tuple[float, float]:
    """The place of a rank, the first at the top and the next to its right."""
    angle = 2 * math.pi * rank / n
    return WIDTH / 2 + radius * math.sin(angle), HEIGHT / 2 + 10 - radius * math.cos(angle)


def _visible(start: float, end: float, length: float) -> str:
    """Show the surrounding element between two fractions of the cycle."""
    return (
        f'<animate attributeName="opacity" dur="{length}s" repeatCount="indefinite" '
        f'calcMode="discrete" keyTimes="0;{start:.4f};{end:.4f}" values="0;1;0"/>'
    )


@drawing
def ring_rounds(messages: Sequence[Sequence[Message]], nbytes: int, *, title: str) -> Figure:
    """The ring, round by round, from recorded messages: what each rank holds, and what it sends.

    A square is a chunk on a rank; the number in it says how many ranks' values it contains. A frame
    marks the chunks that travel in this round, to the rank below (the last rank's to the first).

    Args:
        messages: each rank's messages in order, one for each round.
        nbytes: the size of the reduced tensor.
        title: the finding, in words.
    """
    n = len(messages)
    rounds = len(messages[0])
    holds = [[1] * n for _ in range(n)]
    columns = min(rounds + 1, 4)
    rows = -(-(rounds + 1) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(7.0, 0.6 + 1.95 * rows), layout="constrained", squeeze=False
    )
    for step, axes in enumerate(panels.flat):
        axes.set_axis_off()
        if step > rounds:
            continue
        sent = [messages[rank][step] for rank in range(n)] if step < rounds else []
        chunks = [message.offset * n // nbytes for message in sent]
        axes.imshow(holds, cmap="Blues", vmin=0, vmax=1.6 * n)
        for rank in range(n):
            label = f"rank {rank}" if step % columns == 0 else str(rank)
            axes.text(-0.7, rank, label, ha="right", va="center", fontsize=8)
            for chunk in range(n):
                text = str(holds[rank][chunk])
                axes.text(chunk, rank, text, ha="center", va="center", fontsize=9, color="black")
        for rank, chunk in enumerate(chunks):
            corner = (chunk - 0.44, rank - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, lw=2, ec=COLORS[1]))
        axes.set_title("result" if step == rounds else f"round {step + 1}", fontsize=9)
        before = [row.copy() for row in holds]
        for message, chunk in zip(sent, chunks, strict=True):
            arriving = before[message.src][chunk]
            mine = before[message.dst][chunk]
            holds[message.dst][chunk] = arriving if arriving == n else mine + arriving
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
