"""The still table of the form that plans a step."""

import re

from microddp import figures
from microddp.performance import step_budget


def test_the_table_has_each_number_of_devices_on_each_link():
    device = {"peak": 1e15, "utilisation": 0.4, "latency": 3e-6}
    links = {"wide": 450e9, "a & b": 1.25e9}
    form = figures.explore_plan(
        {"one": device}, links, parameters=1e9, tokens=1024, ranks=8, budget=step_budget
    )
    rows = re.findall(r'<th scope="row">(\d+)</th><td>(.+?)</td><td>(.+?)</td>', form.still)
    assert [int(n) for n, *_ in rows] == [2**k for k in range(11)]
    assert "a &amp; b" in form.still
    assert rows[0][1:] == ("1", "1")
    for n, *cells in rows[1:]:
        for cell, bandwidth in zip(cells, links.values(), strict=True):
            plan = {**device, "bandwidth": bandwidth}
            budget = step_budget(1e9, 1024, int(n), **plan)
            assert cell.startswith(f"{budget.unhidden.speedup:.3g}")
            assert cell.endswith(f"{budget.overlapped.speedup:.3g}")
    assert form.data["links"] == list(links.items())
