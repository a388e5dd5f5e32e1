"""Pictures of the ring: round by round, and beside naive and direct, to play."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from matplotlib.patches import Rectangle

from microddp.figures.drawing import Drawing, drawing, is_narrow, new_panels
from microddp.figures.live import Live, html_table
from microddp.figures.style import COLORS
from microddp.message_counter import Message
from microddp.report import human_bytes

HEADS = {
    "naive": "who sends to whom",
    "direct": "to whom ranks 0, 1, ... send",
    "ring": "which chunks ranks 0, 1, ... send to the next",
}
SIZE, RADIUS, RANK = 220, 78, 13  # of a still circle, of the ranks on it, and of a rank's own


def all_reduces(
    sent: Mapping[str, Sequence[Sequence[Message]]], elements: int, itemsize: int
) -> Live:
    """Naive, direct and ring beside each other, message by message, to play and to step through.

    The run's own number of ranks shows the recorded messages, others what the algorithms would
    send. Messages have no times: those of a round are on their way together if nothing is late.

    Args:
        sent: messages of ``MessageCounter.gather()``, for each of ``"naive"``, ``"direct"`` and
            ``"ring"``.
        elements: number of elements of the reduced tensor.
        itemsize: bytes of an element.
    """
    rounds = {name: _in_rounds(name, by_rank) for name, by_rank in sent.items()}
    data = {
        "n": len(sent["ring"]),
        "elements": elements,
        "itemsize": itemsize,
        "rounds": {
            name: [[astuple(message) for message in together] for together in each]
            for name, each in rounds.items()
        },
    }
    still = "<p>One rank sends nothing.</p>"
    if len(sent["ring"]) > 1:
        parts = [_first_round(name, each[0], len(sent[name])) for name, each in rounds.items()]
        still = "\n".join([*parts, _table_of_rounds(rounds)])
    return Live("ring", "Three all-reduces, message by message", data, still)


def _in_rounds(name: str, by_rank: Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Group the messages that are on their way together: the k-th of each rank in round k."""
    if name == "naive":  # rank 0 receives one after the other, in the order of ranks, then it sends
        return [[message] for sent in (*by_rank[1:], by_rank[0]) for message in sent]
    return [list(together) for together in zip(*by_rank, strict=True)]


def _first_round(name: str, messages: Sequence[Message], n: int) -> str:
    """Draw a circle of ranks, with an arrow for each message, as an ``<svg>`` element."""
    places = [_on_circle(rank, n) for rank in range(n)]
    parts = [
        f'<svg class="round" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" height="{SIZE}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" fill="currentColor" font-size="13" '
        f'font-family="sans-serif"><title>{name}, round 1 of {n} ranks: '
        f"{', '.join(f'{m.src} to {m.dst}' for m in messages)}</title>",
        f'<text x="{SIZE / 2:.0f}" y="16" text-anchor="middle">{name}, round 1</text>',
    ]
    for rank, (x, y) in enumerate(places):
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RANK}" fill="none" stroke="currentColor"/>'
            f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle">{rank}</text>'
        )
    parts += [_arrow(places[message.src], places[message.dst]) for message in messages]
    return "\n".join([*parts, "</svg>"])


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draw an arrow from rank to rank, a little to the right: another may come towards it."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    x, y = (x1 - x0) / length, (y1 - y0) / length

    def at(along: float, aside: float) -> str:
        return f"{x0 + along * x - aside * y:.1f} {y0 + along * y + aside * x:.1f}"

    tip = length - RANK
    return (
        f'<path d="M{at(RANK, 4)}L{at(tip, 4)}M{at(tip - 7, 8)}L{at(tip, 4)}L{at(tip - 7, 0)}" '
        f'fill="none" stroke="{COLORS[2]}" stroke-width="2"/>'
    )


def _on_circle(rank: int, n: int) -> tuple[float, float]:
    """Place a rank on the circle: the first at the top and the next to its right."""
    angle = 2 * math.pi * rank / n
    return SIZE / 2 + RADIUS * math.sin(angle), SIZE / 2 + 10 - RADIUS * math.cos(angle)


def _table_of_rounds(rounds: Mapping[str, Sequence[Sequence[Message]]]) -> str:
    """Write an HTML table with the column of ``HEADS`` for every round."""
    rows = [
        [k + 1]
        + [_in_words(name, each[k]) if k < len(each) else "done" for name, each in rounds.items()]
        for k in range(max(map(len, rounds.values())))
    ]
    headers = ["round", *(f"{name}: {HEADS[name]}" for name in rounds)]
    return html_table(rows, headers, "The messages of this run, round by round")


def _in_words(name: str, together: Sequence[Message]) -> str:
    if name == "naive":
        return " ".join(f"{message.src} to {message.dst}" for message in together)
    if name == "direct":
        return " ".join(str(message.dst) for message in together)
    return " ".join(map(str, _chunks(together)))


def _chunks(together: Sequence[Message]) -> list[int]:
    """Number the chunks of a ring's round, in which each chunk is sent once, by their places."""
    starts = sorted(message.offset for message in together)
    return [starts.index(message.offset) for message in together]


@drawing
def ring_rounds(messages: Sequence[Sequence[Message]], nbytes: int, *, title: str) -> Drawing:
    """Draw the ring's rounds from recorded messages: the chunks on each rank, and those it sends.

    A square is a chunk on a rank, with the number of ranks whose values it contains. A frame marks
    the chunks that travel in this round, to the rank below (the last rank's to the first).

    Args:
        messages: messages of each rank in order, one for each round.
        nbytes: size of the reduced tensor in bytes.
        title: finding, in words.
    """
    n = len(messages)
    rounds = len(messages[0])
    holds = [[1] * n for _ in range(n)]
    columns = min(rounds + 1, 2 if is_narrow() else 4)
    rows = -(-(rounds + 1) // columns)
    figure, panels = new_panels(rows, columns, 0.6 + 1.75 * rows)
    figure.headline(title)
    for step, axes in enumerate(panels.flat):
        axes.set_axis_off()
        if step > rounds:
            continue
        sent = [messages[rank][step] for rank in range(n)] if step < rounds else []
        chunks = _chunks(sent)
        axes.imshow(holds, cmap="Blues", vmin=0, vmax=1.6 * n)
        for rank in range(n):
            label = f"rank {rank}" if step % columns == 0 else str(rank)
            axes.text(-0.7, rank, label, ha="right", va="center", fontsize=9)
            for chunk in range(n):
                text = str(holds[rank][chunk])
                axes.text(chunk, rank, text, ha="center", va="center", fontsize=9, color="black")
        for rank, chunk in enumerate(chunks):
            corner = (chunk - 0.44, rank - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, lw=2, ec=COLORS[1]))
        axes.set_title("result" if step == rounds else f"round {step + 1}")
        before = [row.copy() for row in holds]
        for message, chunk in zip(sent, chunks, strict=True):
            arriving = before[message.src][chunk]
            mine = before[message.dst][chunk]
            holds[message.dst][chunk] = arriving if arriving == n else mine + arriving
    held = f"What each of {n} ranks holds of {human_bytes(nbytes)}"
    figure.tell(held, [f"before each of {rounds} rounds", "the result"])
    return figure
