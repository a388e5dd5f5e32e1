"""Members that are lost, hung, cut off or late: the others go on, and the result is the same."""

import contextlib
import dataclasses
import gc
import io
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from ranks import free_address, on_ranks, run
from test_train import distances, flat, small

from microddp.elastic import Generation, Members, members
from microddp.train import loop, train
from microddp.train.elastic import ElasticTrainer, OthersWait, train_elastically

CONFIG = small(epochs=4)  # of 5 steps
STEPS = 20
# Relative, of losses and weights. Any two numbers of ranks differ by as much, without a fault: in
# these steps rounding moves one ReLU's input across zero.
WITHIN = 1e-4
GLOO = "/pytorch/third_party/gloo/gloo"
LIMIT = {"MICRODDP_TIMEOUT": "1.5", "OMP_NUM_THREADS": "1"}


def whole(comms):
    return outcome(train(CONFIG, comms))


def outcome(result):
    losses = [(epoch.loss, epoch.test_loss) for epoch in result.epochs]
    return losses, flat(result.model.parameters()).numpy()


@pytest.fixture(scope="module")
def right():
    return run(whole, 1)[0]


def member(address, folder, least, faults):
    """Train as a member to which, by its RANK, something happens after a step."""
    me, folder = int(os.environ["RANK"]), Path(folder)

    def on_step(step, _):
        (folder / str(me)).write_text(str(step))
        for rank, when, what in faults:
            if (rank, when) == (me, step) and not (mark := folder / f"{rank} {when}").exists():
                mark.touch()
                what(folder, meeting)

    said = io.StringIO()
    with contextlib.redirect_stdout(said), Members(address, least=least) as meeting:
        result = train_elastically(CONFIG, meeting, on_step)
        return (*outcome(result), said.getvalue(), meeting.names)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for_a_while(*_):
    """Be stopped, until somebody outside continues this process."""
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def kill_the_server(_, meeting):
    if meeting._server:
        meeting._server.kill()


def fail(*_):
    raise ValueError("something of this rank's own")


def lose_the_step(*_):
    raise RuntimeError(f"[{GLOO}/transport/tcp/pair.cc:538] Connection closed by peer")


def note_bytes(folder, _):
    """Note the bytes of all tensors that this process keeps, but for those of its start."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with open(folder / "bytes", "a") as file:
        print(sum(tensor.nbytes for tensor in tensors), file=file)


def member_that_lacks_the_test(address, folder):
    """Rank 1 once has no result of an epoch's last collective, though the others have theirs."""
    mark, right = Path(folder, "once"), loop.evaluate

    def evaluate(*arguments):
        result = right(*arguments)
        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            lose_the_step()
        return result

    loop.evaluate = evaluate
    with Members(address, least=2) as meeting:
        return outcome(train_elastically(CONFIG, meeting))


def member_that_fails_in_the_last_checkpoint(address, folder):
    mark, right = Path(folder, "once"), loop.Trainer._save

    def save(trainer):
        if os.environ["RANK"] == "1" and trainer.step == STEPS and not mark.exists():
            mark.touch()
            lose_the_step()
        right(trainer)

    loop.Trainer._save = save
    config = dataclasses.replace(CONFIG, checkpoint=Path(folder, "checkpoints"))
    with Members(address, least=2) as meeting:
        train_elastically(config, meeting)


def check(results, right, lost=()):
    for rank, result in enumerate(results):
        if rank not in lost:
            assert max(distances(result[:2], right)) < WITHIN, rank
    kept = [result for rank, result in enumerate(results) if rank not in lost]
    assert all((result[1] == kept[0][1]).all() for result in kept), "bitwise the same on all"
    return kept


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1), (1, 2)], ids=str)
def test_those_who_stay_go_on_when_members_are_killed(lost, right, tmp_path):
    faults = [(rank, 7, kill) for rank in lost]
    arguments = free_address(), str(tmp_path), 1, faults
    results = run(member, 3, *arguments, join=False, dies=lost, environment=LIMIT)
    kept = check(results, right, lost)
    assert {len(names) for *_, names in kept} == {3 - len(lost)}
    assert any("state after step" in said for _, _, said, _ in kept)  # by a new rank 0


def test_members_go_on_where_only_some_have_ended_the_epoch(right, tmp_path):
    arguments = free_address(), str(tmp_path)
    check(run(member_that_lacks_the_test, 2, *arguments, join=False, environment=LIMIT), right)
    assert (tmp_path / "once").exists()


def test_a_checkpoint_is_there_though_a_member_failed_in_it(tmp_path):
    arguments = free_address(), str(tmp_path)
    function = member_that_fails_in_the_last_checkpoint
    run(function, 2, *arguments, join=False, environment=LIMIT)
    assert (tmp_path / "once").exists()
    assert (tmp_path / "checkpoints" / f"checkpoint-{STEPS}.pt").exists()


def test_nothing_of_the_generation_before_stays_in_memory(right, tmp_path):
    faults = [(0, 6, note_bytes), (1, 7, lose_the_step), (0, 9, note_bytes)]
    arguments = free_address(), str(tmp_path), 2, faults
    check(run(member, 2, *arguments, join=False, environment=LIMIT), right)
    before, after = map(int, (tmp_path / "bytes").read_text().split())
    assert after <= before


def test_a_member_that_was_stopped_is_left_behind_and_taken_in_again(right, tmp_path):
    faults = [(1, 3, stop_for_a_while), (0, 10, until_others_come), (2, 10, until_others_come)]
    results = run(
        member, 3, free_address(), str(tmp_path), 1, faults, join=False, environment=LIMIT
    )
    assert {len(names) for *_, names in check(results, right)} == {3}


def until_others_come(_, meeting):
    """Not within a collective, so that nobody's time-out runs."""
    end = time.monotonic() + 20
    while not meeting.others_wait() and len(meeting.names) < 3 and time.monotonic() < end:
        time.sleep(0.05)


def test_the_meeting_itself_may_be_killed(right, tmp_path):
    faults = [(rank, 5, kill_the_server) for rank in range(3)] + [(2, 12, kill)]
    arguments = free_address(), str(tmp_path), 1, faults
    check(run(member, 3, *arguments, join=False, dies=[2], environment=LIMIT), right, [2])


def late_member(address, folder, least, faults):
    if os.environ["RANK"] == "2":
        while not Path(folder, "0").exists():
            time.sleep(0.02)
    return member(address, folder, least, faults)


def test_who_comes_later_is_taken_in_and_gets_the_state_of_another(right, tmp_path):
    arguments = free_address(), str(tmp_path), 2, [(rank, 9, until_others_come) for rank in (0, 1)]
    results = check(run(late_member, 3, *arguments, join=False, environment=LIMIT), right)
    assert {len(names) for *_, names in results} == {3}
    assert any("3 ranks" in said for _, _, said, _ in results)  # by whoever is rank 0 then


@on_ranks(2)
def test_all_go_on_from_the_rank_that_is_furthest(comms):
    """Which is the last one here: rank 0 is new, as after a loss of all that were before it."""
    waits = SimpleNamespace(others_wait=lambda: True, name="a member")
    with contextlib.redirect_stdout(io.StringIO()):
        first = ElasticTrainer(CONFIG, Generation(1, comms, (-1, -1)), waits, None, None)
        with pytest.raises(OthersWait):
            first.run()
        state = first.state()
        generation = Generation(2, comms, (-1, state["step"]))
        assert generation.source == 1
        mine = state if comms.rank == 1 else None
        second = ElasticTrainer(CONFIG, generation, waits, mine, None)
    assert second.step == state["step"] == 1
    assert torch.equal(flat(second.model.parameters()), flat(first.model.parameters()))


def raised(address, folder, least, faults):
    try:
        return member(address, folder, least, faults)
    except ValueError as error:
        return str(error)


def test_an_error_of_its_own_ends_a_member_and_no_other(right, tmp_path):
    arguments = free_address(), str(tmp_path), 1, [(1, 6, fail)]
    first, second = run(raised, 2, *arguments, join=False, environment=LIMIT)
    assert second == "something of this rank's own"
    check([first], right)


def wrong_program(address):
    def on_step(*_):
        raise RuntimeError("the program is wrong")

    with (
        Members(address) as meeting,
        pytest.raises(RuntimeError, match="the program is wrong"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        train_elastically(CONFIG, meeting, on_step)


def test_an_error_of_the_program_ends_all():
    run(wrong_program, 2, free_address(), join=False, environment=LIMIT)


def too_few(address):
    members.PATIENCE = 1.5
    message = f"expected at least 3 members at {address} within 1.5 s"
    with Members(address, least=3) as meeting, pytest.raises(RuntimeError, match=message):
        meeting.meet(-1)
    nobody = "127.0.0.2:1"  # a port that only root may open
    if os.getuid():
        with Members(nobody) as meeting, pytest.raises(RuntimeError, match="at least 1 member"):
            meeting.meet(-1)


def test_too_few_members_are_an_error_in_time():
    run(too_few, 2, free_address(), join=False, environment=LIMIT)


@pytest.mark.parametrize("address", ["29400", "here:", "here:port", "here:70000"])
def test_an_address_that_cannot_be_is_refused(address):
    with pytest.raises(
        ValueError, match=f"expected HOST:PORT and at least 1 member, got '{address}'"
    ):
        Members(address)


def leave_nothing(address):
    with Members(address) as meeting:
        meeting.meet(-1)
        children = psutil.Process().children()
        assert len(children) == 1, "the meeting"
    assert not psutil.Process().children()


def test_the_meeting_ends_with_who_started_it():
    run(leave_nothing, 1, free_address(), join=False)
