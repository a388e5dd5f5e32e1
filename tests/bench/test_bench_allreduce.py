"""The benchmarks' command line: what it measures, writes and refuses."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks, run_module

from microddp.bench.__main__ import main
from microddp.bench.allreduce import check_chunks, check_sum, conclusions
from microddp.launch import JobFailed
from microddp.shared import ALL_REDUCES, shared_all_gather


def bench(*options, ranks=2):
    return run_module("microddp.bench", ranks, *options)


def refused(*arguments, complaint, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert complaint in printed.err.splitlines()[-1]
    assert not printed.out, "nothing was measured"


def test_reports_every_algorithm_against_the_backend(tmp_path):
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--size-mb", "1", "--check", "--iters", "3", "--json", report, "--plot", plot)
    printed = bench("allreduce", *options)
    assert "gloo, 2 ranks on " in printed
    assert "Every result was the exact sum." in printed
    rows = json.loads(report.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["backend", *ALL_REDUCES, "shared, no copies"]
    backend = rows[0]
    assert backend["ratio_to_backend"] is None
    for row in rows:
        assert row["nbytes"] == 2**20
        seconds = row["median_ms"] / 1e3
        assert row["algorithm_gbs"] == pytest.approx(2**20 / seconds / 1e9)
        assert row["bus_gbs"] == pytest.approx(row["algorithm_gbs"]), "2 (n-1)/n is 1 for 2 ranks"
        assert row["median_ms"] <= row["p95_ms"]
    for row in rows[1:]:
        sentence = f"{row['algorithm']}, by the time of the backend: "
        assert f"{sentence}{row['ratio_to_backend']:.2f} times for 1 MiB" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "report.json"]


@pytest.mark.parametrize(("collective", "factor"), [("broadcast", 1), ("all_gather", 1 / 2)])
def test_reports_other_collectives(tmp_path, collective, factor):
    report = tmp_path / "report.json"
    options = ("--collective", collective, "--size-mb", "0.1", "--check", "--iters", "2")
    printed = bench("allreduce", *options, "--json", report)
    assert "Every result was the exact tensor." in printed
    rows = json.loads(report.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["backend", "shared"]
    for row in rows:
        assert row["bus_gbs"] == pytest.approx(row["algorithm_gbs"] * factor)
        assert row["ratio_to_copy"] > 0


def test_sizes_that_ranks_do_not_divide_are_rounded(tmp_path):
    for collective, size, nbytes in (("all_gather", 0.0001, 96), ("all_reduce", 1e-7, 4)):
        report = tmp_path / "report.json"
        options = ("--collective", collective, "--size-mb", size, "--check", "--iters", "1")
        bench("allreduce", *options, "--algorithm", "backend", "--json", report, ranks=3)
        assert [row["nbytes"] for row in json.loads(report.read_text())["rows"]] == [nbytes]


def test_conclusions_are_means_for_small_and_for_large_tensors():
    rows = [
        {"algorithm": name, "nbytes": size << 10, "ratio_to_backend": ratio}
        for size, ratio in ((1, 3.0), (256, 3.0), (1024, 2.0), (65536, 0.5))
        for name, ratio in (("backend", None), ("ring", ratio))
    ]
    expected = "3.00 times for 1 KiB to 256 KiB, 1.00 times for 1 MiB to 64 MiB (geometric mean)."
    assert conclusions(rows) == [f"ring, by the time of the backend: {expected}"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--size-mb", "0"], "argument --size-mb: expected a positive number, got 0"),
        (["--size-mb", "much"], "argument --size-mb: invalid positive number value: 'much'"),
        (["--iters", "0"], "argument --iters: expected a positive number, got 0"),
        (["--algorithm", "star"], "argument --algorithm: invalid choice: 'star'"),
        (["--sweep", "--size-mb", "1"], "argument --size-mb: not allowed with argument --sweep"),
        (["--json", "no/such/folder/file"], "expected a file in a folder that exists"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_refuses_bad_options_in_a_line(options, complaint, capsys):
    refused("allreduce", *options, complaint=complaint, capsys=capsys)


def test_refuses_an_algorithm_that_a_collective_lacks():
    options = ("allreduce", "--collective", "broadcast", "--algorithm", "ring")
    with pytest.raises(
        JobFailed, match=r"expected all, shared or backend .* of broadcast, got ring"
    ):
        run_module("microddp.bench", 1, *options)


@on_ranks(3)
def test_the_check_of_chunks_finds_an_error_of_one_rank_on_every_rank(comms):
    tensor = torch.empty(10)
    check_chunks("right", lambda whole: shared_all_gather(whole, comms), tensor, comms)
    check_chunks("right", comms.broadcast, tensor, comms)
    message = rf"rank {comms.rank}: expected rank r's .*, got ranks 1, 2: 7 wrong"
    with pytest.raises(RuntimeError, match=message):
        check_chunks("nothing", lambda _: None, tensor, comms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_sum_that_is_checked_is_exact_on_many_ranks(dtype):
    """Played by one: each rank's contribution is taken, then handed their sum."""
    contributions, problems = [], []
    for rank in range(100):
        comms = SimpleNamespace(
            rank=rank, world_size=100, fail_together=lambda problem, _: problems.append(problem)
        )
        tensor = torch.empty(4, dtype=dtype)
        check_sum("sum", lambda mine: contributions.append(mine.clone()), tensor, comms)
    problems.clear()
    total = functools.reduce(torch.add, contributions)
    check_sum("sum", lambda mine: mine.copy_(total), tensor, comms)
    assert problems == [""]


@on_ranks(3)
def test_the_check_finds_an_error_of_one_rank_on_every_rank(comms):
    def wrong_on_rank_2(tensor):
        comms.all_reduce(tensor)
        if comms.rank == 2:
            tensor[5] += 1

    tensor = torch.empty(10)
    check_sum("right", comms.all_reduce, tensor, comms)
    message = rf"rank {comms.rank}: expected the exact sum of wrong in 10 .*, got rank 2: 1 wrong"
    with pytest.raises(RuntimeError, match=message):
        check_sum("wrong", wrong_on_rank_2, tensor, comms)
