"""What others' tools say of the site: axe, html-validate and Lighthouse.

They come from npm: `npm install` in a folder DIR with a copy of package.json; `--audits DIR`.
"""

import gzip
import http.server
import json
import os
import shutil
import statistics
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
from conftest import FLAGS, pages_of
from test_site import COMPRESSED, Visit

WITHOUT_FAULT = ("accessibility", "best-practices", "seo")  # of Lighthouse's categories
LEAST_PERFORMANCE, AIM = 90, 98  # a page that reaches the aim at once is not asked again
# Lighthouse plays a phone: it takes four times as long as the machine, of which it expects this
# benchmark index (its docs/throttling.md, "Calibrating the CPU slowdown").
SLOWDOWN, EXPECTED_INDEX = 4, 1750
SERIOUS = ("serious", "critical", "moderate")


@pytest.fixture(scope="session")
def audits(pytestconfig):
    return pytestconfig.getoption("audits").resolve() / "node_modules"


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served: Lighthouse opens no files."""

    class Zipped(http.server.SimpleHTTPRequestHandler):
        """Sends text compressed, as GitHub Pages does."""

        def do_GET(self):
            path = Path(self.translate_path(self.path))
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", self.guess_type(str(path)))
            self.send_header("Cache-Control", "max-age=600")
            if path.suffix in COMPRESSED:
                data = gzip.compress(data)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    handler = partial(Zipped, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*command):
    environment = {**os.environ, "CHROME_PATH": shutil.which("chromium") or "google-chrome"}
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )


# The reference and the index have hundreds of entries, all by one template, and listings thousands
# of words in a few colours, for which axe takes minutes; and a colour that is still on its way to
# the other scheme is none of the page's.
PREPARE = """() => {
    const again = 'dl.py:nth-of-type(n + 3), section:has(dl.py) ~ section:has(dl.py) ~ section, '
        + '.genindextable li:nth-of-type(n + 4)';
    for (const entry of document.querySelectorAll(again)) entry.remove();
    const seen = {};
    for (const word of document.querySelectorAll('.highlight span[class]')) {
        // The kind of listing and what the word stands in decide what is behind it.
        const behind = [word.closest('[class*=highlight-]'), word.parentElement];
        const kind = [word, ...behind].map(each => each?.className).join(' in ');
        seen[kind] = (seen[kind] ?? 0) + 1;
        if (seen[kind] > 3) word.replaceWith(...word.childNodes);
    }
    for (const moving of document.getAnimations()) moving.cancel();
}"""


def test_axe_finds_no_barrier(browser, page_path, audits):
    barriers = []
    with Visit(browser, page_path, color_scheme="light") as visit:
        visit.page.add_script_tag(path=audits / "axe-core" / "axe.min.js")
        # What differs in the dark is colours.
        for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            visit.page.emulate_media(color_scheme=scheme)
            visit.page.evaluate(PREPARE)
            # Here, not all that it looked at: to bring that over takes minutes for a long page.
            run_axe = "async options => (await axe.run(options)).violations"
            found = visit.page.evaluate(run_axe, {**options, "resultTypes": ["violations"]})
            barriers += [
                (scheme, violation["id"], node["html"][:200], node["failureSummary"])
                for violation in found
                if violation["impact"] in SERIOUS
                for node in violation["nodes"]
            ]
    assert not barriers


def test_html_is_valid(site, audits, tmp_path):
    """Of all pages at once: html-validate takes long to begin."""
    rules, report = Path(__file__).with_name("htmlvalidate.json"), tmp_path / "report.json"
    pages = pages_of(site)
    done = run(audits / ".bin" / "html-validate", "--config", rules, "-f", f"json={report}", *pages)
    complaints = [
        (result["filePath"], message["ruleId"], message["line"], message["message"])
        for result in json.loads(report.read_text())
        for message in result["messages"]
    ]
    assert not complaints
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def slowdowns():
    """By how much Lighthouse slows this machine down, each as the report before found it.

    A phone is no slower because a test machine is slow or busy.
    """
    return [SLOWDOWN]


def test_lighthouse_is_content(kind_of_page, site, address, audits, tmp_path, slowdowns):
    url = f"{address}/{kind_of_page.relative_to(site).as_posix()}"
    scores = []
    # Its performance varies from run to run, the rest does not.
    for categories in ((*WITHOUT_FAULT, "performance"), ("performance",), ("performance",)):
        if scores and scores[0]["performance"] >= AIM:
            break
        report = tmp_path / "report.json"
        flags = f"--headless=new {' '.join(FLAGS)}"
        done = run(
            audits / ".bin" / "lighthouse",
            url,
            "--quiet",
            "--output=json",
            f"--output-path={report}",
            f"--only-categories={','.join(categories)}",
            f"--throttling.cpuSlowdownMultiplier={slowdowns[-1]:.2f}",
            f"--chrome-flags={flags}",
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(report.read_text())
        index = result["environment"]["benchmarkIndex"]
        slowdowns.append(SLOWDOWN * min(max(index / EXPECTED_INDEX, 1 / SLOWDOWN), 1))
        scores.append({n: round(c["score"] * 100) for n, c in result["categories"].items()})
        if categories[0] == WITHOUT_FAULT[0]:
            poor = [
                (name, audit["title"])
                for name, audit in result["audits"].items()
                if audit["score"] is not None and audit["score"] < 1
            ]
    performance = statistics.median(score["performance"] for score in scores)
    slowed = ", ".join(f"{slowdown:.1f}" for slowdown in slowdowns[-len(scores) - 1 : -1])
    print(f"{kind_of_page.stem}: performance {performance:.0f}, slowed down by {slowed}", scores)
    for name in WITHOUT_FAULT:
        assert scores[0][name] == 100, poor
    assert performance >= LEAST_PERFORMANCE, poor
