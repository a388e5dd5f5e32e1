"""The checks of a built site: `pytest tests/site --site _site --audits DIR`. They need Chromium.

Without `--audits`, those of others' tools are left out.
"""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

# Chromium's own services would ask other sites, which these checks are to notice.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# A minute each in Lighthouse: the first page, the longest chapter, which has two live pictures, the
# one with most figures, the lists of findings and of labs. Whatever else is a page is like these.
ONE_OF_EACH_KIND = (
    "index",
    "chapters/08_performance",
    "chapters/10_compression",
    "findings",
    "labs",
)


def pytest_addoption(parser):
    parser.addoption("--site", type=Path, required=True, help="folder of the built site")
    parser.addoption("--audits", type=Path, help="folder of what package.json asks for")


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name == "test_audits.py" and not config.option.audits else None


def pages_of(site):
    """All pages but the listings of source code."""
    return sorted(p for p in site.rglob("*.html") if "_modules" not in p.parts)


def pytest_generate_tests(metafunc):
    """One test for each page, each chapter, or one page of each kind."""
    site = metafunc.config.getoption("site").resolve()
    pages = pages_of(site)
    assert pages, f"no pages in {site}"
    for name, chosen in (
        ("page_path", pages),
        ("chapter", [p for p in pages if p.parent.name == "chapters" and p.stem[0].isdigit()]),
        ("kind_of_page", [site / f"{name}.html" for name in ONE_OF_EACH_KIND]),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, chosen, ids=[str(p.relative_to(site)) for p in chosen])


@pytest.fixture(scope="session")
def site(pytestconfig):
    return pytestconfig.getoption("site").resolve()


@pytest.fixture(scope="session")
def browser():
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield running
        running.close()
