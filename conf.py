"""Sphinx configuration of the book. Build it with: sphinx-build -c . docs _site"""

import atexit
import gc
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from microddp.figures.style import GREY, ROLES

sys.path.insert(0, str(Path(__file__).parent / "docs" / "_ext"))
# A full collection takes most of a second, as it goes through all of PyTorch, and a build makes
# many: 40 of its seconds. Less often, they cost a build 250 MB. At its end Python makes some more.
gc.set_threshold(100_000, 50, 50)
atexit.register(gc.freeze)

project = "microddp"
author = "The microddp authors"
copyright = author
version = release = version_of("microddp")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "launcher",
    "builds.book_run",
    "builds.other_build",
    "figures.light_and_dark",
    "figures.live",
    "figures.step_race",
    "links.first_use",
    "links.search_words",
    "links.torch_names",
    "links.used_in",
    "lists.chapter_cards",
    "lists.labs",
    "lists.running_times",
    "pages.findings",
    "pages.head",
    "pages.machine_line",
    "pages.markdown",
    "pages.mathml",
    "pages.one_stylesheet",
    "pages.printed_tables",
    "pages.read_again",
]
exclude_patterns = ["_ext", "_static", "_templates", "**/README.md"]
nitpicky = True
suppress_warnings = ["sphinx_gallery.space_in_filename"]  # a clone may lie in any folder
nitpick_ignore_regex = [
    # There is no inventory of other projects' names, because a build needs no network. PyTorch's is
    # made up from a list, of what its documentation explains.
    (r"py:.*", r"(numpy|np|matplotlib|collections|contextlib|functools)\..*"),
    (r"py:.*", r"(pathlib|argparse|typing|types)\..*"),
    (r"py:.*", r"torch\.(autograd\.profiler_util|distributed\.distributed_c10d)\..*"),
    (r"py:.*", r"torch\.(profiler\.profiler|_C\._profiler)\..*"),
    (r"py:class", r"microddp\.strategies\.Kind"),  # a type variable
    (r"py:.*", r"(Callable|Iterator|Mapping|Sequence|Path|optional|P|P\.\w+|Figure|Axes)"),
]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

# The chapters ------------------------------------------------------------------------------------

repository = os.environ.get("MICRODDP_REPOSITORY")  # where readers find the source
if repository:
    get_it = f'# What the cells below import:\n# %pip install "microddp @ git+{repository}"'
else:
    get_it = "# What the cells below import, from a clone of the repository:\n# %pip install -e ."
several_ranks = """\
# For 2 ranks instead of 1, these as well, each in a cell of its own:
# %pip install nbdistributed
# %load_ext nbdistributed
# %dist_init -n 2"""

# The folders of the package that chapters import; a change in another one leaves their outputs be.
PARTS = (
    *("allreduce", "comms", "compression", "ddp", "doctor", "elastic", "figures", "hang", "hosts"),
    *("launch", "performance", "plan", "sharding", "shared", "stage", "timing", "train"),
    "workloads",
)

sphinx_gallery_conf = {
    "examples_dirs": "../chapters",
    "gallery_dirs": "chapters",
    "filename_pattern": r"/\d\d_\w+\.py$",
    "image_scrapers": "figures.scraper.scrape",
    "download_all_examples": False,
    "remove_config_comments": True,
    "first_notebook_cell": f"{get_it}\n\n{several_ranks}",
    "show_signature": False,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "doc_module": ("microddp",),
    "nested_sections": False,
}
imports = ["microddp.figures", "torch._dynamo", "jupytext"]
launcher = {
    "ranks": "builds.book_run.ranks",
    "hosts": "builds.book_run.hosts",
    "timeout": 600,
    "log_dir": "gallery_logs",
    # What makes a chapter's outputs, and the hosts that it may run on.
    "depends": [
        *("docs/_ext/launcher/*.py", "docs/_ext/builds/book_run.py", "microddp/hosts/*.py"),
        "docs/_ext/figures/scraper.py",
        "microddp/figures/*.py",  # which it imports by names that it makes up
    ],
    # What makes a page of them.
    "looks": [f"docs/_ext/{name}.py" for name in ("lists/chapter_cards", "pages/markdown")],
    # What changes results, and is not seen in a file.
    "variables": ["MICRODDP_ROUNDS", "MICRODDP_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"],
    "package": "microddp",
    "programs": "docs/_downloads",  # jobs of their own, which chapters start
    # What ranks import takes seconds of each. Elsewhere a fork of such a process is not safe.
    "imports": imports if sys.platform == "linux" else None,
    "preload": ["pages.markdown.install"],
    "facts": "builds.book_run.facts",
    "below_title": "builds.book_run.below_title",
}

# Outputs of another machine on the same pages, taken in from a folder that its build recorded.
other_build = {
    "package": ["microddp/*.py", "microddp/plan/*.toml", *(f"microddp/{p}/*.py" for p in PARTS)],
    "label": "builds.book_run.label",
    "record": os.environ.get("MICRODDP_OUTPUTS"),
    "there": os.environ.get("MICRODDP_THERE"),
}

# The site ----------------------------------------------------------------------------------------

# The fonts are in docs/_static/fonts; until they are there, and without them, the reader's own.
FONTS = {
    "font-stack": "'Hanken Grotesk', system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif",
    "font-stack--headings": "'Space Grotesk', 'Hanken Grotesk', system-ui, sans-serif",
    "font-stack--monospace": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
}
# Parts of a step have the same colours in live figures, as var(--forward) and so on.
COLORS = {
    "grey": GREY,
    **{name: ROLES[name].color for name in ("forward", "backward", "optimizer")},
    "communication": ROLES["all-reduce"].color,
    "waiting": ROLES["exposed"].color,
    "waiting-hatch": ROLES["exposed"].hatch_color,
}
html_theme = "furo"
html_title = "microddp"
html_static_path = ["docs/_static"]
html_css_files = [
    *(f"live/{kind}.css" for kind in ("live", "buckets", "kept", "plan", "ring", "timeline")),
    *(f"{part}.css" for part in ("other_build", "output", "tables", "book", "face", "figures")),
]
templates_path = ["docs/_templates"]
html_search_scorer = "docs/_static/search_scorer.js"
html_favicon = "docs/_static/favicon.svg"
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options: dict[str, object] = {
    "light_css_variables": {
        **FONTS,
        **COLORS,
        "color-brand-primary": "#0f5f7d",
        "color-brand-content": "#0f5f7d",
        "color-brand-visited": "#5b4a8a",
        "color-foreground-primary": "#1b2227",
        "color-foreground-secondary": "#4c565d",
        "color-foreground-muted": "#59636b",
        "color-background-primary": "#fffefb",
        "color-background-secondary": "#f7f5ef",
        "color-background-border": "#e6e2d8",
        "color-code-background": "#f7f5ef",
    },
    "dark_css_variables": {
        **FONTS,
        "color-brand-primary": "#74c7e3",
        "color-brand-content": "#74c7e3",
        "color-brand-visited": "#b9a5ee",
        "color-foreground-primary": "#dfe3e6",
        "color-foreground-secondary": "#a9b2b8",
        "color-foreground-muted": "#9aa4ab",
        "color-background-primary": "#14181b",
        "color-background-secondary": "#1b2024",
        "color-background-border": "#30373c",
        "color-code-background": "#1b2024",
    },
}
if repository:  # pages can be changed there
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
        "footer_icons": [{"name": "repository", "url": repository, "html": "Repository"}],
    }
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_selector = "div:not(.sphx-glr-script-out) > .highlight > pre"  # of code, not of output
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
