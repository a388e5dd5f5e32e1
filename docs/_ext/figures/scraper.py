"""Save a chapter's figures as SVG, wide and narrow, with their descriptions and values."""

from pathlib import Path
from textwrap import indent
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from microddp.figures.drawing import Drawing
from microddp.figures.live import json_in_html

NARROW = "-narrow"  # ends the name of a narrow figure's file
DIGITS = 4  # of a position, a fraction of the picture: less than a pixel


def scrape(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Save the open figures and return the reStructuredText that shows them.

    A figure of :mod:`microddp.figures` is drawn a second time, narrow, and saved beside the first.
    """
    del block
    shown = []
    # The same drawing gives the same file in every build.
    with plt.rc_context({"svg.hashsalt": "figure"}):
        for number in plt.get_fignums():
            path = Path(next(variables["image_path_iterator"])).with_suffix(".svg")
            figure = plt.figure(number)
            save(figure, path)
            path.with_stem(path.stem + NARROW).unlink(missing_ok=True)  # of an earlier figure
            place = path.relative_to(gallery["src_dir"]).as_posix()
            parts = [f".. image:: /{place}\n   :alt: {describe(figure)}"]
            parts.append("   :class: sphx-glr-single-img\n")
            if isinstance(figure, Drawing) and figure.narrow:
                narrow = figure.narrow()
                save(narrow, path.with_stem(path.stem + NARROW))
                if figure.series:
                    parts.append(as_html(values(figure, narrow)))
            shown += [".. container:: figure\n", indent("\n".join(parts), "   ")]
    plt.close("all")
    return "\n".join(shown)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG without a date."""
    figure.savefig(path, format="svg", metadata={"Date": None})


def describe(figure: Figure) -> str:
    """Return the figure's titles, the labels of its axes, and the names in it."""
    titles, scales = [figure.get_suptitle()], []
    told: list[str] = figure.told if isinstance(figure, Drawing) else []
    for axes in figure.axes:
        titles.append(axes.get_title(loc="left") or axes.get_title())
        scales.append(" against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel()))))
    # Many panels, such as rounds, differ by a number only.
    panels = titles if len(titles) < 6 else titles[:1]
    parts = [*dict.fromkeys(filter(None, panels)), *dict.fromkeys(filter(None, scales)), *told]
    return ". ".join(" ".join(part.split()).rstrip(".") for part in parts) + "."


def values(wide: Drawing, narrow: Figure) -> dict[str, Any]:
    """Return the texts of what can be pointed at, and their places in both pictures.

    The box of axes is left, top, width and height, in fractions of the picture. A place is in
    fractions of its axes, from their top left corner.
    """
    series = [
        {
            "name": one.name,
            "axes": wide.axes.index(one.axes),
            "labels": one.labels,
            "texts": one.texts,
        }
        for one in wide.series
    ]
    found: dict[str, Any] = {"series": series}
    for name, figure in (("wide", wide), ("narrow", narrow)):
        found[name] = {
            "boxes": [box_of(axes.get_position().bounds) for axes in figure.axes],
            "places": [places(one) for one in getattr(figure, "series", ())],
        }
    if found["narrow"]["places"] == found["wide"]["places"]:
        del found["narrow"]["places"]
    return found


def box_of(bounds: tuple[float, float, float, float]) -> list[float]:
    """Return left, top, width and height; top is counted from the top."""
    left, bottom, width, height = bounds
    return [round(part, DIGITS) for part in (left, 1 - bottom - height, width, height)]


def places(series: Any) -> list[list[float]]:
    """Return the places of a series' values, as fractions of its axes from the top left corner."""
    to_fractions = series.axes.transData + series.axes.transAxes.inverted()
    found = []
    for place in series.places:
        if len(place) == 2:
            x, y = to_fractions.transform(place)
            found.append([round(float(x), DIGITS), round(1 - float(y), DIGITS)])
            continue
        left, right, bottom, top = place
        corners = to_fractions.transform([(left, bottom), (right, top)])
        (left, bottom), (right, top) = ((float(x), 1 - float(y)) for x, y in corners)
        found.append([round(part, DIGITS) for part in (left, top, right, bottom)])
    return found


def as_html(data: dict[str, Any]) -> str:
    """Return a script element with the data, in reStructuredText."""
    text = json_in_html(data)
    lines = ['<script type="application/json" class="values">', *text.split("\n"), "</script>"]
    return "\n".join([".. raw:: html\n", *(f"   {line}" for line in lines), ""])
