"""What every page of the built site keeps to, seen in a browser."""

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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_loads_quietly_and_alone(browser, page_path, scheme):
    with Visit(browser, page_path, until="networkidle", color_scheme=scheme) as visit:
        foreign = [u for u in visit.requests if not u.startswith(("file:", "data:", "blob:"))]
        assert not visit.complaints
        assert not foreign


@pytest.mark.parametrize("width", [360, 1280])
def test_does_not_scroll_sideways(browser, page_path, width):
    with Visit(browser, page_path, viewport={"width": width, "height": 800}) as visit:
        needed = visit.page.evaluate("document.documentElement.scrollWidth")
        assert needed <= width


def test_links_and_images_resolve(browser, page_path, site):
    with Visit(browser, page_path) as visit:
        targets = visit.page.evaluate(
            """[...document.querySelectorAll('[href], [src]')]
                .map(e => e.href?.baseVal ?? e.href ?? e.src)"""
        )
        unloaded = visit.page.evaluate(
            """async () => {
                const images = [...document.images];
                for (const i of images) { i.loading = 'eager'; await i.decode().catch(() => {}); }
                return images.filter(i => !i.naturalWidth).map(i => i.src);
            }"""
        )
    assert not unloaded
    missing = []
    for target in filter(None, targets):
        url, fragment = urldefrag(target)
        if not url.startswith("file:"):
            continue
        path = Path(unquote(urlparse(url).path))
        path = path / "index.html" if path.is_dir() else path
        inside = path.is_file() and site in path.parents
        anchored = path.suffix == ".html" and fragment
        if not inside or (anchored and not has_anchor(path, unquote(fragment))):
            missing.append(target)
    assert not missing


def has_anchor(page, fragment):
    text = page.read_text(encoding="utf-8")
    return any(f'{key}="{fragment}"' in text for key in ("id", "name"))


def test_images_say_what_they_show(browser, page_path):
    with Visit(browser, page_path) as visit:
        # A thumbnail stands beside the title that it belongs to, the mark beside the book's name.
        silent = visit.page.evaluate(
            """[...document.images].filter(i => !i.alt.trim())
                .filter(i => !i.closest('.sphx-glr-thumbcontainer, .sidebar-brand'))
                .map(i => i.src)"""
        )
        unsized = visit.page.evaluate(
            "[...document.images].filter(i => !i.getAttribute('width')).map(i => i.src)"
        )
    assert not silent
    assert not unsized


def test_is_light_enough(browser, page_path):
    # A phone's screen is the one that loads the larger pictures.
    with Visit(browser, page_path, until="networkidle", device_scale_factor=2) as visit:
        files = {Path(unquote(urlparse(u).path)) for u in visit.requests if u.startswith("file:")}
    size = 0
    for path in files:
        data = path.read_bytes()
        size += len(gzip.compress(data) if path.suffix in COMPRESSED else data)
    assert size <= MOST_BYTES


def test_shows_the_expected_ranks(browser, chapter):
    source = (REPOSITORY / "chapters" / f"{chapter.stem}.py").read_text(encoding="utf-8")
    own = re.search(r"^# sphinx_gallery_ranks = (\d+)$", source, re.MULTILINE)
    wish = re.search(r'^# sphinx_gallery_hosts = "(.+)"$', source, re.MULTILINE)
    hosts = book_run.hosts(wish[1]) if wish else None
    expected = int(own[1]) if own else sum(hosts.ranks) if hosts else book_run.ranks()
    with Visit(browser, chapter) as visit:
        said = visit.page.locator(".measured-on").inner_text()
        text = visit.page.locator("article").inner_text()
    ranks = re.search(r"Measured on (gloo|nccl), (\d+) ranks? on ", said)
    assert ranks, said
    assert int(ranks[2]) == expected
    # The chapter's own first output said the same, which the page leaves out.
    described = re.split(r"\.(?:\s+Over loopback|$)", said.removeprefix("Measured on "))[0]
    assert text.count(described) == 1


def test_shows_no_traceback(browser, chapter):
    with Visit(browser, chapter) as visit:
        text = visit.page.locator("article").inner_text()
    assert "Traceback (most recent call last)" not in text


def test_offers_script_and_notebook(browser, chapter):
    with Visit(browser, chapter) as visit:
        links = visit.page.locator(".sphx-glr-download a").evaluate_all(
            "all => all.map(a => a.href)"
        )
    files = {Path(unquote(urlparse(link).path)) for link in links}
    (script,) = (path for path in files if path.suffix == ".py")
    (notebook,) = (path for path in files if path.suffix == ".ipynb")
    original = REPOSITORY / "chapters" / f"{chapter.stem}.py"
    assert script.read_bytes() == original.read_bytes()
    assert notebook.is_file()


def test_code_links_to_the_reference(browser, chapter):
    with Visit(browser, chapter) as visit:
        links = visit.page.locator(".highlight a[href*='reference.html#microddp']")
        assert links.count() > 0


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
        ("sampler", "14_your_script.html#what-the-sampler-has-to-be-told"),
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


def test_can_be_read_without_javascript(browser, chapter):
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
