"""The record of calls: its entries, that it outlives its process, and a rank's own report."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run
from torch import nn

import microddp
from microddp.comms import name_members
from microddp.comms.headers import HEADER_BYTES
from microddp.hang import Entry, read_record
from microddp.hang.call_site import call_site
from microddp.hang.entry import SLOT, SLOT_BYTES
from microddp.hang.record import SLOTS, Record, current_record, start_record
from microddp.launch import JobFailed
from microddp.shared import on_thread

HERE = os.path.relpath(__file__)


def calls(folder, rank=0):
    return read_record(Path(folder, f"rank{rank}.record")).calls


def told(entries):
    return [(entry.number, entry.call, entry.state) for entry in entries]


def line_here():
    return sys._getframe(1).f_lineno


# ---- the ring


def test_an_entry_is_the_same_after_it_was_written_and_read():
    text = b"5\ta b.py:8\tall_reduce(float32 (3,), op=sum)\t0, 2-3"
    slot = SLOT.pack(4, 10**18 + 35, 10**18 + 25, 70, 17, text)
    assert len(slot) == SLOT_BYTES
    assert Entry.read(slot) == Entry(
        *(70, "5", "0, 2-3", 17, "all_reduce(float32 (3,), op=sum)", "a b.py:8"),
        *(10**18 + 25, "failed", 10**18 + 35),
    )
    with pytest.raises(ValueError, match="slot in use, got state 0"):
        Entry.read(bytes(SLOT_BYTES))


def test_a_call_that_is_too_long_is_cut(tmp_path):
    record = Record(0, 1, tmp_path)
    record.begin("é" * SLOT_BYTES, "0")
    record.begin("next", "0")
    cut, following = calls(tmp_path)
    assert cut.call == "é" * HEADER_BYTES, "the same on all ranks, wherever they call it"
    assert (following.serial, following.call, following.state) == (1, "next", "begun")


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("all_reduce(int8 (3, 5), op=sum)", 17, "all_reduce 17 (int8 (3, 5), op=sum) at t.py:8"),
        ("barrier()", 2, "barrier 2 at t.py:8"),
        ("send(int8 (3,), dst=1)", 0, "send(int8 (3,), dst=1) at t.py:8"),
        ("all-reduce of bucket 3: 40", 9, "collective 9, all-reduce of bucket 3: 40, at t.py:8"),
    ],
)
def test_an_entry_in_words(call, number, words):
    assert str(Entry(0, "0", "", number, call, "t.py:8")) == words
    among = str(Entry(0, "7", "0, 2-3", number, call, "t.py:8"))
    assert among == words.replace(" at t.py", " among ranks 0, 2-3 at t.py")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([4], "4"), ([3, 0, 1, 2], "0-3"), ([0, 2, 3, 9, 8, 7, 11], "0, 2-3, 7-9, 11")],
)
def test_members_are_named_and_read(ranks, text):
    assert name_members(ranks) == text
    assert Entry(0, "5", text, 1, "", "").members(99) == sorted(ranks)
    assert Entry(0, "0", "", 1, "", "").members(3) == [0, 1, 2]


@pytest.mark.parametrize("every", [2, 3])  # cut behind a comma, and within a number
def test_of_too_many_members_the_last_are_left_out(tmp_path, every):
    members = list(range(0, 999, every))
    Record(0, 999, tmp_path).begin("barrier()", "5", name_members(members))
    (entry,) = calls(tmp_path)
    assert (entry.call, entry.place) == ("barrier()", f"{HERE}:{line_here() - 2}")
    found = entry.members(999)
    assert 190 < len(found) < len(members)
    assert found == members[: len(found)]


def test_the_ring_keeps_the_last_calls_and_an_old_call_spoils_no_new_one(tmp_path):
    record = Record(0, 1, tmp_path)
    first, *_ = [record.begin(f"call {i}", "0", collective=True) for i in range(SLOTS + 3)]
    with first:  # its slot is another one's by now
        pass
    assert told(calls(tmp_path)) == [(i + 1, f"call {i}", "begun") for i in range(3, SLOTS + 3)]
    assert [entry.call for entry in record.last(2)] == [f"call {SLOTS + 1}", f"call {SLOTS + 2}"]


def test_states_and_times_are_in_the_file_at_once(tmp_path):
    before = time.time_ns()
    record = Record(2, 3, tmp_path / "made", answers=True)
    call = record.begin("call")

    def now():
        return calls(tmp_path / "made", 2)[-1]

    assert (now().state, now().ended) == ("begun", 0)
    assert before < now().begun < time.time_ns()
    assert now().place == f"{HERE}:{line_here() - 7}"
    with call:
        assert now().state == "waiting"
    assert now().state == "done"
    assert now().begun <= now().ended < time.time_ns()
    error = RuntimeError("Timed out")
    with pytest.raises(RuntimeError) as raised, call:
        raise error
    assert str(raised.value) == "Timed out"
    assert now().state == "failed"
    assert raised.value.__notes__ == [f"rank 2 was in call at {now().place}; begun 0.0 s before"]
    history = read_record(tmp_path / "made" / "rank2.record")
    assert (history.rank, history.world_size, history.pid) == (2, 3, os.getpid())
    assert history.answers
    assert history.started >= before / 1e9 - 1


def test_numbers_count_the_collectives_of_a_group(tmp_path):
    record = Record(0, 1, tmp_path)
    for group, collective in (("0", True), ("5", True), ("0", False), ("0", True), ("5", True)):
        record.begin("call", group, collective=collective)
    assert [entry.number for entry in calls(tmp_path)] == [1, 1, 0, 2, 2]


def test_many_threads_have_each_their_call_in_a_slot(tmp_path):
    record = Record(0, 1, tmp_path)

    def work(name):
        for i in range(300):
            with record.begin(f"{name} {i}", "0", collective=True):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = calls(tmp_path)
    assert [entry.serial for entry in found] == list(range(1200 - SLOTS, 1200))
    assert {entry.state for entry in found} == {"done"}
    assert len({entry.number for entry in found}) == SLOTS


def test_what_is_no_record_is_refused(tmp_path):
    file = tmp_path / "rank0.record"
    right = {"rank": 0, "world_size": 1, "pid": 7, "host": "h", "started": 1.0, "job": ""}
    right |= {"script": "s", "answers": True}
    file.write_text(json.dumps(right) + "\n")
    assert read_record(file).pid == 7
    wrong = [json.dumps(right | {name: None}).encode() + b"\n" for name in right]
    for content in (b"", b"junk\n", b"[1]\n", b'{"rank": 0}\n', b"[" * 4000, *wrong):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected the record of a rank, got .*rank0.record"):
            read_record(file)


def test_a_place_is_the_users_innermost_line():
    ours = [(microddp.hang.record.__file__, 1), (torch.__file__, 2), ("<frozen runpy>", 3)]
    ours += [(threading.__file__, 4)]
    package = [(microddp.replicas.__file__, 5)]
    assert call_site([*ours, *package, ("/x/train.py", 6), ("/x/main.py", 7)]) == "/x/train.py:6"
    assert call_site([*ours, *package]) == f"{os.path.relpath(microddp.replicas.__file__)}:5"
    assert call_site(ours) == ""
    assert call_site([(os.path.abspath("train.py"), 8)]) == "train.py:8"


# ---- what ranks record


def record_all(comms, folder):
    tensor, part = torch.ones(4), torch.ones(2)
    pending = comms.all_reduce(tensor, "max", async_op=True)
    begun = told(calls(folder, comms.rank))[-1]
    pending.wait()
    comms.broadcast(tensor, 1)
    comms.all_gather(part)
    comms.reduce_scatter(tensor)
    comms.all_to_all(tensor)
    comms.barrier()
    if comms.rank:
        comms.recv(part, 0)
    else:
        comms.send(part, 1)
    comms.sendrecv(part, 1 - comms.rank, part.clone(), 1 - comms.rank)
    comms.exchanger(tensor, 1 - comms.rank, 1 - comms.rank)(part, part.clone()).wait()
    comms.gather(part)
    sub = comms.subgroup([1])
    if sub:
        sub.all_reduce_mean(part)
    numbers = [entry.number for entry in calls(folder, comms.rank)]
    last = calls(folder, comms.rank)[-1]
    comms.close()
    return begun, told(calls(folder, comms.rank)), numbers, last


def test_every_call_is_recorded_with_its_number_and_how_it_went(tmp_path):
    records = {"MICRODDP_RECORD": str(tmp_path)}
    for rank, result in enumerate(run(record_all, 2, str(tmp_path), environment=records)):
        begun, found, numbers, last = result
        assert begun == (2, "all_reduce(float32 (4,), op=max)", "begun")
        message = "recv(float32 (2,), src=0)" if rank else "send(float32 (2,), dst=1)"
        peer = f"dst={1 - rank}, src={1 - rank}"
        expected = [
            (1, "barrier()", "done"),
            (2, "all_reduce(float32 (4,), op=max)", "done"),
            (3, "broadcast(float32 (4,), src=1)", "done"),
            (4, "all_gather(float32 (2,))", "done"),
            (5, "reduce_scatter(float32 (4,), op=sum)", "done"),
            (6, "all_to_all(float32 (4,))", "done"),
            (7, "barrier()", "done"),
            (0, message, "done"),
            (0, f"sendrecv(float32 (2,), {peer})", "done"),
            (0, f"exchanger(float32 (4,), {peer})", "begun"),
            (8, "gather(dst=0)", "done"),
            (0, "send(float32 (2,), dst=0)" if rank else "recv(float32 (2,), src=1)", "done"),
            (9, "subgroup([1])", "done"),
        ]
        assert found[: len(expected)] == expected
        assert found[-1] == (0, "left", "done")
        assert ((0, "closed", "done") in found) == bool(rank), "the group of rank 1"
        assert numbers[-1] == (1 if rank else 9)
        assert HERE in last.place
        if rank:
            assert (last.ranks, last.call) == ("1", "all_reduce(float32 (2,), op=sum)")


def record_backward(comms, folder):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    ddp = microddp.DDP(model, comms, bucket_cap_mb=1e-6)
    lines = []
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
        lines.append(sys._getframe().f_lineno - 1)
    ddp(torch.ones(1, 2)).sum().backward()
    lines.append(sys._getframe().f_lineno - 1)
    entries = [e for e in calls(folder, comms.rank) if "bucket" in e.call]
    return lines, [(e.call[-4:], int(e.place.rpartition(":")[2])) for e in entries]


def test_buckets_are_recorded_at_the_line_of_their_backward(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    for lines, found in run(record_backward, 2, str(tmp_path), environment=environment):
        first, second, third = lines
        expected = [("0: 2", first)]  # before the order is known there is one
        for line in (second, third):
            expected += [("0: 1", line), ("1: 1", line)]
        assert found == expected


def record_beside(comms, folder):
    comms.barrier()
    on_thread(lambda _: comms.all_reduce(torch.ones(1)), torch.empty(0)).wait()
    comms.barrier()
    entries = calls(folder, comms.rank)[1:]
    return [(entry.number, entry.call.partition("(")[0], entry.group) for entry in entries]


def test_the_calls_of_a_lane_are_counted_by_themselves(tmp_path):
    """Which comes first, they or the program's, differs between ranks."""
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    for found in run(record_beside, 2, str(tmp_path), environment=environment):
        (_, _, group) = found[0]
        assert found == [
            (2, "barrier", group),
            (1, "all_reduce", f"{group} all-reduce"),
            (3, "barrier", group),
        ]


def record_with_debug(comms, folder):
    pending = comms.all_reduce(torch.ones(1), async_op=True)
    begun = calls(folder, comms.rank)[-1]
    assert (begun.state, begun.ended) == ("begun", 0), "the agreement is over, it is not"
    pending.wait()
    with pytest.raises(RuntimeError, match="the ranks disagree") as caught:
        comms.all_reduce(torch.ones(1 + comms.rank))
    assert not hasattr(caught.value, "__notes__"), "it names the call itself"
    return told(calls(folder, comms.rank))


def test_the_debug_switch_changes_no_number(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path), "MICRODDP_DEBUG": "1"}
    results = run(record_with_debug, 2, str(tmp_path), environment=environment)
    for found in results:
        numbers = [(number, state) for number, _, state in found]
        assert numbers == [(1, "done"), (2, "done"), (3, "failed")]


@on_ranks(2)
def test_a_wait_in_vain_says_which_it_was_and_leaves_the_error_as_it_is(comms):
    (folder,) = [current_record().folder]
    assert folder is None
    part = comms.subgroup([0, 1], timeout=1.0)
    ring = comms.subgroup([0, 1], timeout=1.0)
    comms.barrier()
    if comms.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            part.all_reduce(torch.ones(3))
        (note,) = caught.value.__notes__
        where = f"among ranks 0-1 at {HERE}:{line_here() - 2}; begun 1."
        assert note.startswith(f"rank 0 was in all_reduce 1 (float32 (3,), op=sum) {where}")
        assert "rank 0" not in str(caught.value)
        assert "Timed out" in str(caught.value)
        exchange = ring.exchanger(torch.ones(3), 1, 1)
        with pytest.raises(RuntimeError, match="Timed out") as caught:
            exchange(torch.ones(3), torch.ones(3)).wait()
        assert caught.value.__notes__[0].startswith("rank 0 was in exchanger(float32 (3,), dst=1")
    else:
        time.sleep(2.2)


def be_killed_in_a_call(comms):
    if comms.rank == 0:
        comms.recv(torch.ones(3), 1)
    time.sleep(0.3)  # until rank 0 waits
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_record_outlives_its_process(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path), "MICRODDP_TIMEOUT": "3"}
    with pytest.raises(JobFailed, match=r"^rank 1 ended by SIGKILL"):
        run(be_killed_in_a_call, 2, environment=environment)
    assert told(calls(tmp_path, 1)) == [(1, "barrier()", "done")]
    assert told(calls(tmp_path, 0))[1] == (0, "recv(float32 (3,), src=1)", "failed")


def init_twice(folder):
    for count in (1, 2):
        with microddp.init() as comms:
            for _ in range(count):
                comms.all_reduce(torch.ones(1))
            assert [entry.number for entry in calls(folder)] == [*range(1, count + 2)]


def test_a_second_job_begins_a_new_record(tmp_path):
    run(init_twice, 1, str(tmp_path), join=False, environment={"MICRODDP_RECORD": str(tmp_path)})


def join_and_call(folder):
    os.environ["MICRODDP_RECORD"] = folder
    dist.init_process_group("gloo")
    for _ in range(2):  # as when a notebook's cells are run again
        with microddp.init() as comms:
            comms.all_gather(torch.tensor(comms.rank))
            assert "all_gather" in calls(folder, comms.rank)[-1].call
            assert "all_gather" in current_record().last(1)[0].call


def test_calls_in_a_group_that_others_made_are_recorded(tmp_path):
    run(join_and_call, 2, str(tmp_path), join=False)


def init_in_vain():
    with pytest.raises(ValueError, match=r"^rank 0: expected MICRODDP_RECORD to name a folder to"):
        microddp.init()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    environment = {"MICRODDP_RECORD": str(tmp_path / "file")}
    run(init_in_vain, 1, join=False, environment=environment)


# ---- what a rank tells


def ask_one_that_waits(comms, folder):
    """Rank 1 asks rank 0 while that waits for it in C++."""
    printed = Path(folder, "printed")
    if comms.rank == 0:
        sys.stderr = printed.open("w")
        comms.all_gather_data(os.getpid())
        comms.barrier()  # rank 0 waits here
        comms.barrier()
        sys.stderr = sys.__stderr__
        return printed.read_text()
    pid, _ = comms.all_gather_data(os.getpid())
    while calls(folder)[-1].state != "waiting":
        time.sleep(0.01)
    os.kill(pid, signal.SIGUSR1)
    stack = Path(folder, "rank0.stack")
    end = time.monotonic() + 5
    while not stack.exists() and time.monotonic() < end:
        time.sleep(0.01)
    waited = calls(folder)[-1].state == "waiting"
    comms.barrier()
    time.sleep(0.2)  # it prints after it has written
    comms.barrier()
    return waited, stack.read_text(), Path(folder, "rank0.torch.json").exists()


def test_a_rank_that_waits_tells_where_it_is_when_it_is_asked(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    printed, told = run(ask_one_that_waits, 2, str(tmp_path), environment=environment)
    waited, stack, torch_told = told
    assert waited, "the answer came only when the call was over"
    assert torch_told
    first, *lines = stack.splitlines()
    assert first.startswith("process ")
    assert f": barrier 4 at {HERE}:" in lines[2]
    assert "waiting, called " in lines[2]
    assert lines[3] == "thread MainThread, its innermost call last:"
    assert "comms.barrier()  # rank 0 waits here" in stack
    assert "microddp answers" not in stack
    assert printed.splitlines() == [f"[rank 0] {line}" for line in stack.splitlines()]


def answer_without_stderr(comms, folder):
    del comms
    stack = Path(folder, "rank0.stack")
    with Path(folder, "closed").open("w") as sys.stderr:
        pass
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        end = time.monotonic() + 10
        while not stack.exists() and time.monotonic() < end:
            time.sleep(0.01)
        stack.unlink()
    sys.stderr = sys.__stderr__


def test_a_rank_whose_stderr_is_closed_answers_again(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    run(answer_without_stderr, 1, str(tmp_path), environment=environment)


def keep_own_handler():
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    asked = []
    microddp.init().close()
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.01)
    return asked, read_record(Path(os.environ["MICRODDP_RECORD"], "rank0.record")).answers


def test_a_handler_of_the_users_stays(tmp_path):
    environment = {"MICRODDP_RECORD": str(tmp_path)}
    assert run(keep_own_handler, 1, join=False, environment=environment) == [([True], False)]


SCRIPT = """
import sys, torch, microddp
sys.excepthook = lambda kind, error, trace: print("the earlier hook:", error)
comms = microddp.init()
torch.distributed.all_reduce(torch.ones(3))
def end():
    if "fail" in sys.argv:
        raise ValueError("planted\\ton two\\nlines")
    if "remove" in sys.argv:
        import os, shutil
        shutil.rmtree(os.environ["MICRODDP_RECORD"])
end()
"""


@pytest.mark.parametrize(
    ("option", "recorded"),
    [("fail", True), ("fail", False), ("succeed", True), ("remove", True)],
)
def test_how_a_rank_ends_is_recorded_with_what_pytorch_has(tmp_path, option, recorded):
    (tmp_path / "script.py").write_text(SCRIPT)
    folder = tmp_path / "made"
    records = {"MICRODDP_RECORD": str(folder)} if recorded else {}
    done = subprocess.run(
        [sys.executable, "script.py", option],
        cwd=tmp_path,
        env=os.environ | records,
        capture_output=True,
        text=True,
        timeout=60,
    )
    fails = option == "fail"
    assert (done.returncode, done.stderr) == (fails, "")
    assert ("the earlier hook: planted" in done.stdout) == fails
    assert folder.exists() == (recorded and option != "remove")
    if not folder.exists():
        return
    *_, left = entries = calls(folder)
    assert (left.call, left.place, left.is_end) == ("left", "", True)
    if fails:
        error = entries[-2]
        assert error.call == "ended by ValueError: planted on two lines"
        assert (error.place, error.state, error.is_end) == ("script.py:8", "failed", True)
    written = (folder / "rank0.torch.json").read_text()
    assert '"gloo:all_reduce"' in written
    assert '"place": "script.py:5"' in written


def call_from_a_path_that_is_no_utf8():
    record = Record(0, 1)
    record.begin("barrier()", place=os.fsdecode(b"stra\xdfe/t.py:1"))
    return record.last(1)[0].place


def test_a_path_may_be_no_utf8():
    assert call_from_a_path_that_is_no_utf8() == r"stra\udcdfe/t.py:1"


def test_the_records_folder_stays_when_the_program_changes_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MICRODDP_RECORD", "here")
    assert start_record(0, 1).folder == tmp_path / "here"
