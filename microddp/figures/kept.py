"""What ranks keep during a step: each way beside the others, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microddp.figures.live import Live, html_table
from microddp.figures.style import BACKWARD, FORWARD, OPTIMIZER
from microddp.report import human_bytes

# As the phases that need them most have elsewhere.
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

    What stands still is a table of the moments at which each way keeps most.

    Args:
        ways: by name, the bytes of each kind at each moment; at least one way and one moment.
        predicted: by the names of the ways, the most bytes of all kinds together.
        moments: the phase of the step, and what happens.
        kinds: what is kept, from the bottom up; at most three.
        title: what there is to see, in words.

    Raises:
        ValueError: a way does not have its bytes for each kind at each moment.
    """
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
