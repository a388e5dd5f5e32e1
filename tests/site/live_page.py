"""A page that holds one live picture and nothing else, without a built site."""

from pathlib import Path

STATIC = Path(__file__).parents[2] / "docs" / "_static" / "live"


def write_page(folder, picture, below=""):
    """Write the page into `folder` and return its path; `below` is HTML under the picture."""
    styles = STATIC / "live.css", STATIC / f"{picture.kind}.css"
    scripts = STATIC / "live.js", STATIC / f"{picture.kind}.js"
    head = [f'<link rel="stylesheet" href="{path.as_uri()}">' for path in styles]
    head += [f'<script defer src="{path.as_uri()}"></script>' for path in scripts]
    page = folder / f"{picture.kind}.html"
    page.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Page</title>'
        '<meta name="viewport" content="width=device-width">'
        f"{''.join(head)}</head><body>{picture._repr_html_()}{below}</body></html>"
    )
    return page
