"""Pictures on a page: with a size, and figures for light and dark pages, wide and narrow ones."""

import re
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from sphinx.application import Sphinx

from figures.scraper import NARROW
from microddp.figures.style import DARK, INK

FIGURE = "sphx-glr-single-img"  # sphinx-gallery's class
PHONE = "(max-width: 40em)"
VALUES = r'\s*(<script type="application/json" class="values">.*?</script>)'


def finish_pages(app: Sphinx, exception: Exception | None) -> None:
    """Give the images of every page that was written their size, and figures their variants."""
    if exception or app.builder.format != "html":
        return
    conf = app.config.sphinx_gallery_conf
    drawn = Path(app.srcdir, conf["gallery_dirs"], "images")
    for page in Path(app.outdir).rglob("*.html"):
        before = page.read_text(encoding="utf-8")
        text = show_images(before, page.parent, drawn)
        if text != before:
            page.write_text(text, encoding="utf-8")


def show_images(text: str, folder: Path, drawn: Path) -> str:
    """Give images width and height, so that nothing moves when they come, late if further down.

    A figure of the book is shown as one of two, on a light page or a dark one; on a phone, its
    narrow form, if there is one in the folder `drawn`. Those of chapters come into a frame of their
    own, with their values.
    """
    count = 0

    def shown(found: re.Match[str]) -> str:
        nonlocal count
        tag, values = found[1], found[2] or ""
        count += 1
        source = re.search(r'src="([^"#?]+)', tag)
        if source is None or "width=" in tag or not (folder / source[1]).is_file():
            return found[0]
        path = folder / source[1]
        if path.suffix == ".svg" and INK in path.read_text(encoding="utf-8"):
            image = pictures(tag, path, drawn)
        else:
            lazy = ' loading="lazy"' if count > 1 else ""
            image = f"<img {size(path)}{lazy} {tag[5:]}"
        return f'<div class="figure">{image}{values}</div>' if FIGURE in tag else image

    return re.sub(rf"(<img [^>]*>)(?:{VALUES})?", shown, text, flags=re.DOTALL)


def pictures(tag: str, path: Path, drawn: Path) -> str:
    """Return a picture for light pages and one for dark pages, and write the files.

    Lazy, both: a browser loads only the one that is shown.
    """
    narrow = path.with_stem(path.stem + NARROW)
    if (drawn / narrow.name).is_file():
        shutil.copyfile(drawn / narrow.name, narrow)
    parts = []
    for page in ("light", "dark"):
        suffix = "" if page == "light" else "-dark"
        source = ""
        for file in (narrow, path) if narrow.is_file() else (path,):
            if suffix:
                darken(file, file.with_stem(file.stem + suffix))
        if narrow.is_file():
            name = renamed(tag, f"{narrow.stem}{suffix}")
            source = f'<source media="{PHONE}" srcset="{name}" {size(narrow)}>'
        image = re.sub(r'src="[^"]*"', f'src="{renamed(tag, path.stem + suffix)}"', tag)
        parts.append(
            f'<picture class="only-{page}">{source}'
            f'<img {size(path)} loading="lazy" {image[5:]}</picture>'
        )
    return "".join(parts)


def renamed(tag: str, stem: str) -> str:
    """Return the address of an image with another stem to its name."""
    address = re.search(r'src="([^"]*)"', tag)
    assert address is not None
    return re.sub(r"[^/]+(?=\.svg)", stem, address[1])


def darken(light: Path, dark: Path) -> None:
    """Write the same picture for a dark page: the colours of text and axes are lighter ones."""
    text = light.read_text(encoding="utf-8")
    dark.write_text(re.sub("|".join(DARK), lambda found: DARK[found[0]], text), encoding="utf-8")


def size(picture: Path) -> str:
    """Return a picture's width and height in a page's pixels, of which an inch has 96.

    Raises `ValueError` for an SVG that does not begin with its size in points, as matplotlib's do.
    """
    if picture.suffix != ".svg":
        with Image.open(picture) as image:
            width, height = image.size
    else:
        head = picture.read_text(encoding="utf-8")[:1000]
        points = re.search(r'<svg[^>]* width="([\d.]+)pt" height="([\d.]+)pt"', head)
        if points is None:
            raise ValueError(f"expected {picture.name} to begin with its size in points")
        width, height = (round(float(length) / 72 * 96) for length in points.groups())
    return f'width="{width}" height="{height}"'


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler."""
    app.connect("build-finished", finish_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
