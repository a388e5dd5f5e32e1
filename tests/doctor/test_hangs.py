"""Diagnoses of hangs: of made-up records, and of jobs that really hang."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run
from torch.nn.parallel import DistributedDataParallel
from warm import python

import microddp
from microddp.doctor.__main__ import main
from microddp.doctor.diagnosis import Rank, diagnose
from microddp.doctor.hang import report
from microddp.hang import Entry, read_record
from microddp.hang.record import SLOTS, Record
from microddp.launch import JobFailed

HERE = os.path.relpath(__file__)
SECOND = 10**9  # nanoseconds
NOW = 1000 * SECOND


# ---- the diagnosis, of made-up records


def history(*calls, group="0", ranks="", serial=0, **known):
    """A rank that made these calls, each ``"barrier()"`` or (call, place, state)."""
    entries = []
    for number, call in enumerate(calls, start=1):
        text, at, state = (call, "t.py:1", "done") if isinstance(call, str) else call
        end = 0 if state in ("begun", "waiting") else (995 + number) * SECOND
        called = serial + number - 1, group, ranks, serial + number, text, at
        entries.append(Entry(*called, (990 + number) * SECOND, state, end))
    return Rank(entries, **known)


def waiting(call, at="t.py:9"):
    return call, at, "waiting"


def ended(rank, text, at="t.py:5", when=998):
    state = "failed" if text.startswith("ended by") else "done"
    return replace(rank, calls=[*rank.calls, Entry(9, "", "", 0, text, at, when * SECOND, state)])


def of(*ranks, world_size=None):
    found = diagnose(dict(enumerate(ranks)), world_size or len(ranks), NOW)
    return found.split("\n\n")


SUM = "all_reduce(float32 (3,), op=sum)"
SUM_OF_4 = "all_reduce(float32 (4,), op=sum)"


def test_who_has_not_come_is_named_with_where_everybody_is():
    late = history("barrier()", stack=["t.py:2 in main", "t.py:30 in load"])
    headline, where = of(*[history("barrier()", waiting(SUM))] * 2, late)
    assert headline == "Rank 2 has not come to all_reduce 2 (float32 (3,), op=sum) at t.py:9."
    assert where.splitlines() == [
        "- ranks 0, 1: waiting in all_reduce 2 (float32 (3,), op=sum) at t.py:9, for 8.0 s",
        "- rank 2: in no call; through its last, barrier 1 at t.py:1, 4.0 s ago; "
        "now at t.py:30 in load",
    ]


def test_who_has_come_to_nothing_is_named():
    headline, where = of(history(waiting("barrier()")), Rank([]), Rank([]))
    assert headline == "Ranks 1, 2 have not come to barrier 1 at t.py:9."
    assert where.splitlines()[1] == "- ranks 1, 2: in no call yet"


def test_who_is_past_is_told():
    ahead = history(SUM, "broadcast(int8 (1,), src=0)", waiting("barrier()"))
    headline, where = of(ahead, history(SUM, waiting("broadcast(int8 (1,), src=0)")))
    assert headline.startswith("Rank 1 has not come to barrier 3 at t.py:9.")
    assert "- rank 1: waiting in broadcast 2 (int8 (1,), src=0) at t.py:9, for 8.0 s" in where


@pytest.mark.parametrize(
    "other", [SUM_OF_4, SUM.replace("float32", "float64"), SUM.replace("sum", "max"), "barrier()"]
)
def test_the_first_call_that_differs_is_named(other):
    usual = history("barrier()", waiting(SUM))
    headline, _ = of(usual, usual, history("barrier()", waiting(other, "t.py:7"), SUM))
    entry = Entry(0, "0", "", 2, other, "t.py:7")
    assert headline == (
        "The ranks made different calls: ranks 0, 1 all_reduce 2 (float32 (3,), op=sum) at "
        f"t.py:9; rank 2 {entry}."
    )


def test_a_call_that_was_left_out_shows_in_the_lines_of_those_after_it():
    skips = history(SUM, (SUM, "t.py:8", "done"))
    headline, _ = of(history(SUM, SUM, waiting(SUM)), skips)
    assert headline.startswith("Rank 1 has not come to all_reduce 3 ")
    assert headline.endswith(
        "The first call from different lines: rank 0 all_reduce 2 (float32 (3,), op=sum) at "
        "t.py:1; rank 1 all_reduce 2 (float32 (3,), op=sum) at t.py:8."
    )


def test_where_none_is_missing_it_says_so():
    headline, _ = of(*[history(SUM, waiting(SUM, "t.py:1"))] * 3)
    assert headline.startswith("All ranks are in the same call, all_reduce 2 (float32 (3,), op=sum")
    assert "different lines" not in headline
    headline, _ = of(*[history(waiting("barrier()"))] * 2, history("barrier()"))
    assert headline == "Rank 2: through barrier 1 at t.py:1; ranks 0, 1 not."


def test_a_rank_that_only_began_a_call_is_not_through():
    began = history((SUM, "t.py:1", "begun"), process="stopped")
    headline = of(*[history(waiting(SUM, "t.py:1"))] * 2, began)[1]
    assert headline.startswith("All ranks are in the same call, all_reduce 1")


EARLIER = """
import sys
from pathlib import Path
from microddp.hang.record import Record
for rank in range(3):
    with Record(rank, 3, Path(sys.argv[1])).begin("barrier()", collective=True):
        pass
"""


def test_an_earlier_jobs_record_is_left_out(tmp_path):
    subprocess.run([python(), "-c", EARLIER, tmp_path], check=True)
    for rank in (0, 1):  # the next job of the same command; its rank 2 never began
        Record(rank, 3, tmp_path).begin("barrier()", collective=True)
    assert "- Rank 2 left no record here" in report(tmp_path)


def test_ranks_that_are_through_the_same_are_well():
    assert of(*[history("barrier()", SUM)] * 2) == ["No rank waits for another one."]
    assert of(Rank([]), Rank([])) == ["No rank waits for another one."]


def test_who_is_gone_is_told_first_and_the_first_before_the_others():
    failed = ended(history((SUM, "t.py:9", "failed")), "ended by RuntimeError: timed out", when=999)
    cause = ended(history(process="gone"), "ended by ValueError: planted")
    killed = history("barrier()", process="gone")
    stopped = history("barrier()", process="stopped")
    fates, _, where = of(failed, killed, cause, stopped, world_size=5)
    assert fates.splitlines() == [
        "- Rank 4 left no record here: of another machine, or never started.",
        "- Rank 2 ended by ValueError: planted at t.py:5.",
        "- Rank 0 ended by RuntimeError: timed out at t.py:5.",
        "- Rank 1: gone without a word, as when they are killed.",
        "- Rank 3: stopped, as by SIGSTOP.",
    ]
    assert "; then ended by RuntimeError at t.py:5" in where
    assert (
        of(ended(cause, "left", when=999))[0] == "- Rank 0 ended by ValueError: planted at t.py:5."
    )
    assert "- rank 1: in no call; through its last, barrier 1 at t.py:1; process gone" in where


def test_a_rank_that_left_is_told():
    left = ended(history(SUM, process="gone"), "left", "t.py:20")
    headline, where = of(left, history(SUM, (SUM, "t.py:1", "failed")))
    assert headline == "Rank 0 has not come to all_reduce 2 (float32 (3,), op=sum) at t.py:1."
    assert "all_reduce 1 (float32 (3,), op=sum) at t.py:1; then left at t.py:20" in where


def test_a_group_of_some_ranks_is_compared_among_its_members():
    headline, where = of(
        history("barrier()"),
        history(waiting(SUM), group="5", ranks="1, 3"),
        history("barrier()"),
        history("barrier()"),
    )[-2:]
    assert headline.startswith("Among ranks 1, 3: Rank 3 has not come to all_reduce 1 ")
    assert "rank 0" not in where


def test_members_that_an_entry_has_no_room_for_are_compared_too():
    some = [history(SUM, (SUM, "t.py:9", "waiting"), group="5", ranks="0") for _ in range(2)]
    assert of(*some, history(SUM, group="5", ranks="0"))[0].startswith(
        "Among ranks 0: Rank 2 has not come to all_reduce 2"
    )


def test_a_group_that_its_ranks_have_closed_is_over():
    given_up = history((SUM, "t.py:1", "failed"), group="5", ranks="0-1")
    closed = Entry(7, "5", "0-1", 0, "closed", "t.py:2", 999 * SECOND, "done")
    other = Rank([replace(closed, serial=0)])
    assert of(Rank([*given_up.calls, closed]), other) == ["No rank waits for another one."]
    lane = [replace(entry, group="5 all-reduce") for entry in given_up.calls]
    assert of(Rank([*lane, closed]), other) == ["No rank waits for another one."]
    headline, where = of(given_up, other)
    assert headline.startswith("Among ranks 0-1: Rank 1 has not come to all_reduce 1 "), "one waits"
    assert "rank 1: in no call yet" in where


def test_calls_that_the_record_has_dropped_are_not_missed():
    group = history("barrier()", group="5", ranks="0-1").calls
    later = history(*[SUM] * SLOTS, serial=100).calls
    assert of(Rank([*group, *later]), Rank(later)) == ["No rank waits for another one."]
    stuck = replace(group[0], serial=200, state="waiting")
    headline, _ = of(Rank([*later, stuck]), Rank(later))
    assert headline.startswith("Among ranks 0-1: Rank 1 has not come to barrier 1 among ranks 0-1")


def test_messages_that_do_not_come_are_told():
    recv = Entry(1, "0", "", 0, "recv(int8 (1,), src=1)", "t.py:3", 997 * SECOND, "waiting")
    headline, where = of(Rank([recv]), Rank([]))
    assert headline == "Ranks wait for messages."
    assert "- rank 0: waiting in recv(int8 (1,), src=1) at t.py:3, for 3.0 s" in where
    within = history(waiting("gather(dst=0)")).calls, replace(recv, state="done")
    _, where = of(Rank([*within[0], within[1]]), Rank([]))
    assert "- rank 0: waiting in gather 1 (dst=0) at t.py:9" in where


def test_pytorchs_record_is_read_where_ours_shows_nothing():
    theirs = [history(SUM, waiting(SUM)), ended(history(SUM), "left")]
    ranks = [replace(history("barrier()"), torch_calls=rank.calls) for rank in theirs]
    intro, headline, where = of(*ranks)
    assert intro.startswith("PyTorch's own record")
    assert headline == "Rank 1 has not come to all_reduce 2 (float32 (3,), op=sum) at t.py:9."
    assert "barrier" not in where
    stuck = replace(ranks[0], calls=history("barrier()", waiting(SUM_OF_4)).calls)
    assert of(stuck, ranks[1])[0].startswith("Rank 1 has not come to all_reduce 2 (float32 (4,)")


# ---- the report, of made-up files


def test_the_records_of_an_earlier_job_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it was not to be asked"))
    monkeypatch.setenv("MASTER_PORT", "1")
    for rank in range(3):
        Record(rank, 3, tmp_path).begin("barrier()", "0", collective=True)
    monkeypatch.setenv("MASTER_PORT", "2")
    record = Record(0, 2, tmp_path)
    record.begin("barrier()", "0", collective=True)
    assert main([str(tmp_path), "--report", str(tmp_path / "report.md")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("# ")
    assert f" on 2 ranks, from their records in {tmp_path}" in told
    assert "- Rank 1 left no record here" in told
    assert f"{os.getpid()} on {socket.gethostname()}, running" in told
    assert "no answer; py-spy dump --pid" in told
    assert "rank 2" not in told.lower()
    assert (tmp_path / "report.md").read_text() in told


def test_another_machines_ranks_and_reused_process_numbers_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "far")
    Record(0, 2, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "getpid", os.getppid)  # a process, but not one with that file
    Record(1, 2, tmp_path)
    told = report(tmp_path)
    assert re.search(r" 0 +\d+ on far, elsewhere +in no call yet", told)
    assert re.search(rf" 1 +{os.getppid()} on \S+, gone +in no call yet; process gone", told)


def pytorchs(group, number, name, retired=True, p2p=False):
    """An entry as PyTorch writes it, of a tensor of 3 by 5, with its place as we add it."""
    return {
        "record_id": number,
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "is_p2p": p2p,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[3, 5]],
        "input_dtypes": ["Float"],
        "time_created_ns": 10**18,
        "retired": retired,
        "place": "t.py:3",
    }


def test_pytorchs_entries_are_read(tmp_path):
    entries = [pytorchs("0", 1, "all_gather")]
    message = pytorchs("0", 2, "send 1->2", p2p=True)
    stuck = [*entries, message, pytorchs("7", 1, "all_to_all", retired=False)]
    for rank, written in enumerate([entries, stuck, [*stuck, pytorchs("7", 2, "all_reduce")]]):
        Record(rank, 3, tmp_path)
        (tmp_path / f"rank{rank}.torch.json").write_text(json.dumps(written))
    told = report(tmp_path)
    what = "all_reduce 2 (Float (3, 5)) among ranks 1-2 at t.py:3"
    assert f"Among ranks 1-2: Rank 1 has not come to {what}." in told
    assert "- ranks 1, 2: waiting in all_to_all 1 among ranks 1-2 at t.py:3" in told
    assert "all_gather" not in told
    assert "send" not in told


def test_a_record_that_cannot_be_read_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "rank0.record").mkdir()
    assert main([str(tmp_path)]) == 2
    assert "rank0.record" in capsys.readouterr().err


def test_a_folder_without_records_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "missing"):
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err == (
            f"expected a folder with records of ranks, got {folder}\n"
        )
    (tmp_path / "rank0.record").write_text("junk")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("expected the record of a rank, got ")


# ---- jobs that hang


def lines_of(function):
    """The place of a marked line: ``{"reduces": "tests/doctor/test_hangs.py:88", ...}``."""
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    marks = {}
    for number, line in enumerate(lines[start:], start + 1):
        if line.startswith(("def ", "@")):
            break
        if mark := re.search(r"# here: (\w+)", line):
            marks[mark[1]] = f"{HERE}:{number}"
    return marks


def caught(comms, mistake):
    """Make it, for its record: its error is another test's."""
    try:
        mistake(comms)
    except RuntimeError:
        return True
    return False


def examine(tmp_path, mistake, ranks=3):
    """Return the ranks that got an error, and the diagnosis, where each makes the mistake."""
    environment = {"MICRODDP_RECORD": str(tmp_path), "MICRODDP_TIMEOUT": "2"}
    failed = run(caught, ranks, mistake, environment=environment)
    told = report(tmp_path).partition("## The diagnosis\n\n")[2]
    return failed, told, lines_of(mistake)


def only_rank_0(comms):
    loss = torch.ones(1)
    if comms.rank == 0:
        comms.all_reduce_mean(loss)  # here: mean
    else:
        time.sleep(1.5)  # no less than the time-out: to leave would break the connections


def test_a_collective_that_only_rank_0_enters(tmp_path):
    failed, told, at = examine(tmp_path, only_rank_0)
    assert failed == [True, False, False]
    what = f"all_reduce 2 (float32 (1,), op=sum) at {at['mean']}"
    assert told.startswith(f"Ranks 1, 2 have not come to {what}.")
    assert re.search(rf"- rank 0: failed in {re.escape(what)}, after \d\.\d s", told)
    assert "- ranks 1, 2: in no call; through its last, barrier 1 at" in told


def save(comms):
    if comms.rank == 0:
        torch.ones(1).sum().item()  # what it saves
        comms.barrier()  # here: barrier


def test_a_barrier_after_saving_on_rank_0(tmp_path):
    failed, told, at = examine(tmp_path, save, 2)
    assert failed == [True, False]
    assert told.startswith(f"Rank 1 has not come to barrier 2 at {at['barrier']}.")


def two_orders(comms):
    loss, threshold = torch.ones(2, 1)
    if comms.rank == 0:
        comms.broadcast(threshold)  # here: first
    comms.all_reduce(loss)  # here: sum
    if comms.rank:
        comms.broadcast(threshold)


def test_another_order(tmp_path):
    failed, told, at = examine(tmp_path, two_orders)
    assert all(failed)
    assert told.startswith(
        f"The ranks made different calls: rank 0 broadcast 2 (float32 (1,), src=0) at "
        f"{at['first']}; ranks 1, 2 all_reduce 2 (float32 (1,), op=sum) at {at['sum']}."
    )


def another_shape(comms):
    comms.broadcast(torch.ones(4 if comms.rank == 2 else 3))


def another_dtype(comms):
    comms.all_reduce(torch.ones(3, dtype=torch.int32 if comms.rank == 1 else torch.float32))


def test_another_shape_or_dtype_is_found_though_nothing_hangs(tmp_path):
    """gloo fills a longer tensor in part, and adds up bytes of another dtype, without an error."""
    failed, told, _ = examine(tmp_path / "shape", another_shape)
    assert not any(failed)
    assert "different calls: ranks 0, 1 broadcast 2 (float32 (3,), src=0) at" in told
    assert "; rank 2 broadcast 2 (float32 (4,), src=0) at" in told
    failed, told, _ = examine(tmp_path / "dtype", another_dtype)
    assert not any(failed)
    assert "; rank 1 all_reduce 2 (int32 (3,), op=sum) at" in told


def too_long(comms):
    comms.all_reduce(torch.ones(1000 if comms.rank else 3))


def test_a_message_too_long_for_its_receiver_ends_a_rank(tmp_path):
    """In gloo; it aborts the process, or is an error, as it comes."""
    environment = {"MICRODDP_RECORD": str(tmp_path), "MICRODDP_TIMEOUT": "2"}
    with pytest.raises(JobFailed, match=r"^rank . (ended by SIGABRT|raised)"):
        run(too_long, 2, environment=environment)
    assert "different calls: rank 0 all_reduce 2 (float32 (3,), op=sum) at " in (
        told := report(tmp_path)
    )
    assert "rank 1 all_reduce 2 (float32 (1000,), op=sum) at " in told


def early_continue(comms):
    for step in range(3):
        if step == 1 and comms.rank == 1:
            continue
        comms.all_reduce(torch.ones(1))  # here: loss
        comms.all_reduce(torch.ones(1))  # here: images


def test_an_early_continue_on_one_rank(tmp_path):
    """Equal calls pair all the same, so that the last one is missed."""
    failed, told, at = examine(tmp_path, early_continue)
    assert failed == [True, False, True]
    what = "(float32 (1,), op=sum)"
    assert told.startswith(f"Rank 1 has not come to all_reduce 6 {what} at {at['loss']}.")
    assert f"- ranks 0, 2: failed in all_reduce 6 {what} at {at['loss']}" in told


def skip_one(comms):
    comms.all_reduce(torch.ones(1))  # here: loss
    if comms.rank != 1:
        comms.all_reduce(torch.ones(1))  # here: skipped
    comms.all_reduce(torch.ones(1))  # here: images


def test_a_call_that_one_rank_leaves_out(tmp_path):
    _, told, at = examine(tmp_path, skip_one)
    assert told.startswith("Rank 1 has not come to all_reduce 4 (float32 (1,), op=sum)")
    assert "The first call from different lines: ranks 0, 2 all_reduce 3" in told
    assert f"at {at['skipped']}; rank 1 all_reduce 3" in told
    assert f"at {at['images']}." in told


def uneven(comms):
    for _ in range(2 if comms.rank == 2 else 3):
        comms.all_reduce(torch.ones(1))  # here: step


def test_a_rank_with_a_batch_less(tmp_path):
    failed, told, at = examine(tmp_path, uneven)
    assert failed == [True, True, False]
    what = f"(float32 (1,), op=sum) at {at['step']}"
    assert told.startswith(f"Rank 2 has not come to all_reduce 4 {what}.")
    assert f"- rank 2: in no call; through its last, all_reduce 3 {what}; then left" in told


def dies(comms):
    if comms.rank == 1:
        os._exit(3)
    caught(comms, lambda comms: comms.all_reduce(torch.ones(1)))


def test_a_rank_that_dies_without_a_word(tmp_path):
    run(dies, 3, dies=[1], environment={"MICRODDP_RECORD": str(tmp_path)})
    told = report(tmp_path)
    assert "- Rank 1: gone without a word" in told
    assert "Rank 1 has not come to all_reduce 2 (float32 (1,), op=sum) at" in told


# ---- jobs that are asked while they hang


def ask(tmp_path, function):
    """The report on a job of two ranks while rank 0 waits for rank 1."""
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    errors = []

    def job():
        try:
            run(function, 2, str(tmp_path), environment=environment, timeout=20)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=job)
    thread.start()
    try:
        told, end = "", time.monotonic() + 15
        while "has not come" not in told and time.monotonic() < end:
            time.sleep(0.05)
            told = report(tmp_path) if (tmp_path / "away").exists() else ""
        return told
    finally:
        (tmp_path / "over").touch()
        if thread.is_alive():
            os.kill(read_record(tmp_path / "rank1.record").pid, signal.SIGCONT)
        thread.join()
        assert not errors, errors


def load(folder):
    Path(folder, "away").touch()
    while not Path(folder, "over").exists():
        time.sleep(0.02)


def late(comms, folder):
    if comms.rank == 1:
        load(folder)  # here: load
    comms.all_reduce(torch.ones(1))  # here: sum


def test_a_rank_that_sleeps_is_named_with_its_place(tmp_path):
    told = ask(tmp_path, late)
    at = lines_of(late)
    what = f"all_reduce 2 (float32 (1,), op=sum) at {at['sum']}"
    assert f"Rank 1 has not come to {what}." in told
    assert f"- rank 0: waiting in {what}, for " in told
    assert re.search(rf"- rank 1: in no call; .* s ago; now at {HERE}:\d+ in load", told)
    assert re.search(rf"\n- rank 0: .*{at['sum']} in late\n- rank 1: ", told)
    assert re.search(rf"\n- rank 1: .*{at['load']} in late; {HERE}:\d+ in load$", told)


def stopped(comms, folder):
    if comms.rank == 1:
        Path(folder, "away").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    comms.all_reduce(torch.ones(1))


def test_a_rank_that_is_stopped_is_named(tmp_path):
    told = ask(tmp_path, stopped)
    assert "- Rank 1: stopped, as by SIGSTOP." in told
    assert "Rank 1 has not come to all_reduce 2" in told
    assert re.search(r"\d+ on \S+, stopped ", told)


def train(model, rank, folder):
    for step in range(3):
        if step == 2 and rank == 1:
            load(folder)
        model(torch.ones(1, 4)).sum().backward()  # here: backward


def stock_ddp(comms, folder):
    train(DistributedDataParallel(torch.nn.Linear(4, 4)), comms.rank, folder)


def test_a_hang_of_pytorchs_ddp_is_read_in_pytorchs_record(tmp_path):
    told = ask(tmp_path, stock_ddp)
    intro, headline, where, *_ = told.partition("## The diagnosis\n\n")[2].split("\n\n")
    assert intro.startswith("PyTorch's own record")
    what = rf"all_reduce \d+ \(Float \(20,\)\) at {re.escape(lines_of(train)['backward'])}"
    assert re.fullmatch(rf"Rank 1 has not come to {what}\.", headline)
    assert re.search(rf"- rank 0: waiting in {what}, for ", where)
    assert re.search(rf"- rank 1: in no call; through its last, {what}; now at .* in load", where)


def our_ddp(comms, folder):
    train(microddp.DDP(torch.nn.Linear(4, 4), comms), comms.rank, folder)


def test_a_hang_of_microddps_ddp_is_read_in_its_own(tmp_path):
    told = ask(tmp_path, our_ddp)
    at = lines_of(train)["backward"]
    assert "PyTorch's own record" not in told
    assert re.search(rf"Rank 1 has not come to .* \d+.* at {at}\.", told)
