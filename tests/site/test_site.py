"""What every page of the built site keeps to, seen in a browser."""

import functools
import gzip
import re
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urlparse

import pytest

from builds import book_run

REPOSITORY = Path(__file__).parents[2]

CHAPTERS = sorted(path.stem for path in (REPOSITORY / "chapters").glob("[0-9]*.py"))
MOST_BYTES = 400_000  # of a page with all it loads, text compressed
COMPRESSED = {".html", ".css", ".js", ".svg"}


class Visit:
    """A page opened in a context of its own, with what it asked for and complained of."""

    def __init__(self, browser, path, until="load", **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text)
                if message.type in ("error", "warning")
                else None
            ),
        )
        self.page.goto(path.as_uri(), wait_until=until)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def test_every_chapter_has_a_page(site):
    pages = sorted(path.stem for path in (site / "chapters").glob("[0-9]*.html"))
    assert pages == CHAPTERS


# A visit takes a second of two cores: one of each kind of reader sees all that a page keeps to.
READERS = {
    "phone in the light": {
        "viewport": {"width": 360, "height": 800},
        "device_scale_factor": 2,  # which loads the larger pictures
    },
    "screen in the dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
}
# A thumbnail stands beside the title that it belongs to, the mark beside the book's name.
SEEN = """async () => {
    const images = [...document.images];
    const addresses = chosen => chosen.map(i => i.src);
    for (const i of images) { i.loading = 'eager'; await i.decode().catch(() => {}); }
    return {
        unloaded: addresses(images.filter(i => !i.naturalWidth)),
        silent: addresses(images.filter(i => !i.alt.trim())
            .filter(i => !i.closest('.sphx-glr-thumbcontainer, .sidebar-brand'))),
        unsized: addresses(images.filter(i => !i.getAttribute('width'))),
        targets: [...document.querySelectorAll('[href], [src]')]
            .map(e => e.href?.baseVal ?? e.href ?? e.src),
    };
}"""


@pytest.mark.parametrize("reader", READERS)
def test_page_is_sound(browser, page_path, site, reader):
    with Visit(browser, page_path, until="networkidle", **READERS[reader]) as visit:
        loaded = list(visit.requests)  # before all images are asked for
        needed = visit.page.evaluate("document.documentElement.scrollWidth")
        seen = visit.page.evaluate(SEEN)
        faults = {"complaints": visit.complaints, **seen}
        faults["foreign"] = [
            u for u in visit.requests if not u.startswith(("file:", "data:", "blob:"))
        ]
    faults["missing"] = [target for target in faults.pop("targets") if not leads(target, site)]
    found = {fault: where for fault, where in faults.items() if where}
    assert not found
    files = {Path(unquote(urlparse(u).path)) for u in loaded if u.startswith("file:")}
    size = sum(
        len(gzip.compress(path.read_bytes()) if path.suffix in COMPRESSED else path.read_bytes())
        for path in files
    )
    assert needed <= READERS[reader]["viewport"]["width"]
    assert size <= MOST_BYTES


def leads(target, site):
    """Whether a link into the site has a file there, and a place in it."""
    url, fragment = urldefrag(target)
    if not url.startswith("file:"):
        return True
    path = Path(unquote(urlparse(url).path))
    path = path / "index.html" if path.is_dir() else path
    anchored = path.suffix == ".html" and fragment
    inside = path.is_file() and site in path.parents
    return inside and (not anchored or unquote(fragment) in anchors(path))


@functools.cache
def anchors(page):
    return set(re.findall(r'(?:id|name)="([^"]*)"', page.read_text(encoding="utf-8")))


def test_chapter_is_complete_and_readable_without_javascript(browser, chapter):
    source = REPOSITORY / "chapters" / chapter.with_suffix(".py").name
    settings = source.read_text(encoding="utf-8")
    own = re.search(r"^# sphinx_gallery_ranks = (\d+)$", settings, re.MULTILINE)
    wish = re.search(r'^# sphinx_gallery_hosts = "(.+)"$', settings, re.MULTILINE)
    hosts = book_run.hosts(wish[1]) if wish else None
    expected = int(own[1]) if own else sum(hosts.ranks) if hosts else book_run.ranks()
    with Visit(
        browser, chapter, java_script_enabled=False, viewport={"width": 1280, "height": 800}
    ) as visit:
        article = visit.page.locator("article")
        assert article.locator("h1").is_visible()
        assert article.locator("h2", has_text="Exercises").is_visible()
        solution = article.locator("details.solution").first
        assert not solution.locator("p").first.is_visible()
        solution.locator("summary").click()
        assert solution.locator("p").first.is_visible()
        assert article.locator(".highlight a[href*='reference.html#microddp']").count() > 0
        said = article.locator(".measured-on").inner_text()
        text = article.inner_text()
        links = article.locator(".sphx-glr-download a").evaluate_all("all => all.map(a => a.href)")
    assert "Traceback (most recent call last)" not in text
    ranks = re.search(r"Measured on (gloo|nccl), (\d+) ranks? on ", said)
    assert ranks, said
    assert int(ranks[2]) == expected
    # The chapter's own first output said the same, which the page leaves out.
    described = re.split(r"\.(?:\s|$)", said.removeprefix("Measured on "))[0]
    assert text.count(described) == 1
    files = {Path(unquote(urlparse(link).path)) for link in links}
    (script,) = (path for path in files if path.suffix == ".py")
    (notebook,) = (path for path in files if path.suffix == ".ipynb")
    assert script.read_bytes() == source.read_bytes()
    assert notebook.is_file()


def test_the_ring_moves(browser, site):
    with Visit(browser, site / "chapters" / "02_all_reduce.html") as visit:
        message = visit.page.locator("figure.live[data-live=ring] .message").last
        message.scroll_into_view_if_needed()
        visit.page.get_by_role("button", name="Step back").first.click()
        before = message.get_attribute("transform")
        visit.page.get_by_role("button", name="Play", exact=True).first.click()
        visit.page.wait_for_timeout(600)
        after = message.get_attribute("transform")
        assert not visit.complaints
    assert before != after


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("no_sync", "06_ddp.html#gradient-accumulation-right-and-wrong"),
        ("bucket size", "05_bucketing.html#step-time-by-bucket-size"),
        ("deadlock", "07_sync_primitives.html#where-it-breaks-only-rank-0-enters"),
        ("hang", "13_faults.html#reading-a-hang"),
        ("sampler", "14_your_script.html#data"),
        ("mixed precision", "09_case_study.html#bf16"),
        ("FSDP", "09_case_study.html#a-model-that-does-not-fit"),
    ],
)
def test_search_leads_to_the_section(browser, site, words, section):
    with Visit(browser, site / "search.html") as visit:
        visit.page.goto((site / "search.html").as_uri() + "?q=" + quote(words))
        results = visit.page.locator("#search-results li > a")
        visit.page.locator("#search-results", has_text="found").wait_for(timeout=10_000)
        found = range(min(3, results.count()))
        first = [results.nth(place).get_attribute("href") for place in found]
        names = [results.nth(place).inner_text() for place in found]
    leads = [urlparse(address)._replace(query="").geturl().endswith(section) for address in first]
    assert any(leads), first
    assert " > " in names[leads.index(True)]  # the section's name behind the chapter's
