"""Show images with their size, and figures of the book in four forms: light, dark, wide, narrow."""

import re
import shutil
from pathlib import Path
from typing import Any

import imagesize
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from figures.scraper import NARROW
from microddp.figures.style import DARK, INK

PHONE = "(max-width: 40em)"


def visit_image(translator: HTML5Translator, node: nodes.image) -> None:
    """Write an image of the site; one that the site does not have is left to Sphinx."""
    builder, uri = translator.builder, node["uri"]
    HTML5Translator.visit_image(translator, node)
    file = Path(builder.srcdir, uri)
    if uri in builder.images and file.is_file():
        copy = Path(builder.outdir, builder.imagedir, builder.images[uri])
        translator.body.append(show(translator.body.pop(), file, copy))


def show(tag: str, file: Path, copy: Path) -> str:
    """Give an `<img>` element width and height, so that nothing moves when the image has loaded.

    A figure of the book becomes two pictures, of which a page shows one: for light pages, and for
    dark ones. Each has a narrow form for phones, if there is one beside `file`. The image is lazy,
    so that a browser loads only the form that is shown. `copy` is the place of the image in the
    site; its other forms are written beside it.
    """
    image = f'<img {size(file)} loading="lazy" {tag[5:].rstrip()}'
    if file.suffix != ".svg" or INK not in file.read_text(encoding="utf-8"):
        return image
    copy.parent.mkdir(parents=True, exist_ok=True)
    darken(file, copy.with_stem(f"{copy.stem}-dark"))
    source = ""
    narrow = file.with_stem(file.stem + NARROW)
    if narrow.is_file():
        address = re.search(r' src="([^"]*)\.svg"', tag)
        assert address is not None
        source = f'<source media="{PHONE}" srcset="{address[1]}{NARROW}.svg" {size(narrow)}>'
        shutil.copyfile(narrow, copy.with_stem(copy.stem + NARROW))
        darken(narrow, copy.with_stem(f"{copy.stem}{NARROW}-dark"))
    light = f'<picture class="only-light">{source}{image}</picture>'
    dark = re.sub(r'(src(?:set)?="[^"]*)(?=\.svg")', r"\1-dark", light)
    return light + dark.replace("only-light", "only-dark", 1)


def darken(light: Path, dark: Path) -> None:
    """Write a figure for dark pages, with lighter colours for text and axes."""
    text = light.read_text(encoding="utf-8")
    dark.write_text(re.sub("|".join(DARK), lambda found: DARK[found[0]], text), encoding="utf-8")


def size(picture: Path) -> str:
    """Return a picture's width and height in a page's pixels, of which an inch has 96."""
    width, height = map(round, imagesize.get(picture))
    return f'width="{width}" height="{height}"'


def setup(app: Sphinx) -> dict[str, Any]:
    """Replace Sphinx's visitor of images."""
    visitors = visit_image, HTML5Translator.depart_image
    app.add_node(nodes.image, override=True, html=visitors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
