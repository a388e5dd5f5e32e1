"""What the site adds to the theme: live pictures, the moving figure, the machine said once."""

import re
from pathlib import Path

from gallery_book import Book

from figures.step_race import draw, recorded
from microddp.figures.live import Live


def timeline():
    """Two steps as a live timeline keeps them: rank, lane, name, start and end in ns."""
    lanes, names = ["compute", "communication", "wait"], [["forward", 0], ["backward", 1], ["b", 2]]
    naive = [(0, 0, 0, 0, 10), (0, 0, 1, 10, 30), (0, 1, 2, 30, 50), (0, 1, 2, 40, 60)]
    naive += [(0, 2, 2, 30, 60), (1, 0, 0, 0, 99)]
    hooks = [(0, 0, 0, 0, 10), (0, 0, 1, 10, 30), (0, 1, 2, 20, 25), (0, 1, 2, 28, 40)]
    steps = [
        {"name": name, "spans": [(*span[:3], span[3] * 10**6, span[4] * 10**6) for span in spans]}
        for name, spans in {"naive": naive, "hooks": hooks}.items()
    ]
    return Live("timeline", "Steps", {"lanes": lanes, "names": names, "steps": steps}, "<p>no</p>")


def test_a_steps_bars_are_rank_0s_and_overlapping_messages_are_one():
    steps = recorded(f"# Title\n\n{timeline()._repr_html_()}\n")
    assert steps["naive"] == [
        ("forward", 0, 0.01),
        ("backward", 0.01, 0.03),
        ("communication", 0.03, 0.06),
        ("wait", 0.03, 0.06),
    ]
    sent = [bar for bar in steps["hooks"] if bar[0] == "communication"]
    assert sent == [("communication", 0.02, 0.025), ("communication", 0.028, 0.04)]
    assert recorded("# A page without one") == {}


def test_bars_share_one_scale_and_steps_say_how_long_they_took():
    page = draw(recorded(timeline()._repr_html_()))
    assert "naive <span>60 ms, waits 30 ms</span>" in page
    assert "hooks <span>40 ms, waits 0</span>" in page
    assert page.count('<i class="forward" style="left:0.00%;width:16.67%"></i>') == 2
    assert 'class="wait" style="left:50.00%;width:50.00%"' in page
    assert "Slowed down 75 times." in page  # 4.5 s for 60 ms


def test_a_live_picture_is_data_for_its_script_and_a_still_one():
    data = {"text": "</script><b>", "rows": [[i, [i, i]] for i in range(3000)]}
    shown = Live("ring", "A & B", data, "<p>still</p>")._repr_html_()
    assert "<figcaption>A &amp; B</figcaption>" in shown
    assert shown.count("</script>") == 1
    assert '<div class="still"><p>still</p></div>' in shown
    assert max(map(len, shown.split("\n"))) < 10_000  # what docutils takes
    assert "shown in HTML" in repr(Live("ring", "A", data, ""))


def test_only_pages_with_a_picture_load_its_script(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("figures.live", "figures.step_race", "pages.head")
    figure = '```{raw} html\n<figure class="live" data-live="ring"></figure>\n```\n'
    race = '```{raw} html\n<figure class="race"></figure>\n```\n'
    toctree = "```{toctree}\na\nb\nchapters/index\n```\n"
    book.write("docs/index.md", f"# Book\n\n{race}\n{toctree}")
    book.write("docs/a.md", f"# A\n\n{figure}")
    book.write("docs/b.md", "# B\n")
    build = book.build()
    assert build.process.returncode == 0, build.output
    loaded = {
        name: [
            file
            for file in ("live/live.js", "live/ring.js", "live/plan.js", "race.js")
            if file in (book.root / f"_site/{name}.html").read_text()
        ]
        for name in ("a", "b", "index")
    }
    assert loaded["a"] == ["live/live.js", "live/ring.js"]
    assert loaded["b"] == []
    assert loaded["index"] == ["race.js"]


def test_a_page_loads_one_style_sheet_with_all_in_their_order(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("sphinx_design", "pages.head", "pages.one_stylesheet")
    cards = ":::{card} A\nb\n:::\n"
    toctree = "```{toctree}\na\nchapters/index\n```\n"
    book.write("docs/index.md", f"# Book\n\n{cards}\n{toctree}")
    book.write("docs/a.md", "# A\n")
    build = book.build()
    assert build.process.returncode == 0, build.output
    site = book.root / "_site"
    loaded = {
        name: re.findall(r'href="(\S+\.css)\?v=\w+"', (site / f"{name}.html").read_text())
        for name in ("index", "a", "chapters/index")
    }
    assert loaded["a"] == ["_static/pygments.css", "_static/all.css"]
    assert loaded["chapters/index"] == ["../_static/pygments.css", "../_static/all.css"]
    assert [Path(name).name for name in loaded["index"]] == [
        "pygments.css",
        "sphinx-design.min.css",
        "all.css",
    ]
    whole = (site / "_static/all.css").read_text()
    parts = ("basic.css", "sg_gallery.css")
    places = [whole.index((site / "_static" / part).read_text()) for part in parts]
    assert places == sorted(places)


def test_a_page_says_once_what_it_was_measured_on(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("pages.machine_line")
    top = ":::{container} measured-on\nMeasured on gloo, 4 ranks.\nOver loopback.\n:::\n"
    outputs = [
        f".. rst-class:: sphx-glr-script-out\n\n .. code-block:: none\n\n    {text}\n"
        for text in ("gloo, 4 ranks", "gloo, 4 ranks\n    and 3", "gloo, 4 ranks and more")
    ]
    shown = "\n".join(f"```{{eval-rst}}\n{output}```\n" for output in outputs)
    book.write("docs/index.md", f"# Book\n\n{top}\n{shown}\n```{{toctree}}\nchapters/index\n```\n")
    build = book.build()
    assert build.process.returncode == 0, build.output
    page = (book.root / "_site/index.html").read_text()
    assert page.count("gloo, 4 ranks.") == 1
    assert page.count("sphx-glr-script-out") == 2
    assert "gloo, 4 ranks and more" in page
    assert "gloo, 4 ranks\nand 3" not in page
    assert "and 3" in page
