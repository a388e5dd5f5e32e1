"""Live picture of the bytes that ranks keep during a step, moment by moment, way by way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microddp.figures.live import Live, html_table
from microddp.figures.style import BACKWARD, FORWARD, OPTIMIZER
from microddp.report import human_bytes

# The colours that the phases which need these bytes most have elsewhere.
COLORS = FORWARD.color, BACKWARD.color, OPTIMIZER.color


def explore_kept(
    ways: Mapping[str, Sequence[Sequence[int]]],
    predicted: Mapping[str, float],
    *,
    moments: Sequence[tuple[str, str]],
    kinds: Sequence[str],
    title: str,
) -> Live:
    """Bytes that a rank keeps, of several kinds, at each moment of a step.

    The still table has the moment at which each way keeps most.

    Args:
        ways: bytes of each kind at each moment, by the name of the way; at least one way and one
            moment.
        predicted: most bytes of all kinds together, by the name of the way.
        moments: phase of the step, and event, of each moment.
        kinds: names of the kinds, from the bottom up; at most three.
        title: subject of the picture, in words.

    Raises:
        ValueError: a way lacks the bytes of a kind at a moment, or there are more than three kinds.
    """
    if len(kinds) > len(COLORS):
        raise ValueError(f"expected at most {len(COLORS)} kinds of bytes, got {', '.join(kinds)}")
    for name, found in ways.items():
        shape = len(found), *{len(bytes_of) for bytes_of in found}
        if shape != (len(moments), len(kinds)):
            raise ValueError(
                f"expected {len(kinds)} numbers for each of {len(moments)} moments of {name}, got "
                f"{' by '.join(map(str, shape))}"
            )
    rows = []
    for name, found in ways.items():
        most = max(range(len(found)), key=lambda i: sum(found[i]))
        sizes = map(human_bytes, (*found[most], sum(found[most]), predicted[name]))
        rows.append((name, ": ".join(moments[most]), *sizes))
    headers = ["", "most when", *kinds, "together", "predicted"]
    data = {
        "kinds": list(zip(kinds, COLORS, strict=False)),
        "moments": moments,
        "ways": [
            {"name": name, "bytes": found, "predicted": predicted[name]}
            for name, found in ways.items()
        ],
    }
    return Live("kept", title, data, html_table(rows, headers))
