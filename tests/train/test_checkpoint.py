"""Checkpoints: whole or not there, the newest that can be read, and errors on every rank."""

import contextlib
import io
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from ranks import run

from microddp.train import Checkpoints
from microddp.train.checkpoint import encode_state


def state_of(number):
    return {"weights": torch.full((1000,), float(number)), "history": [{"epoch": number}]}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def save_and_load(comms, folder):
    folder = Path(folder, "new", "folder")
    checkpoints = Checkpoints(folder, comms, keep=2)
    assert checkpoints.load() is None
    for number in (7, 8, 30):
        state = state_of(number * (comms.rank == 0))  # only rank 0's counts, and only it writes
        checkpoints.save(number, state)
        state["weights"].zero_()  # training goes on, and changes what is being written
        checkpoints.finish()
        loaded = checkpoints.load()
        assert loaded["weights"].eq(number).all()
        assert loaded["history"] == [{"epoch": number}]
    assert names(folder) == ["checkpoint-30.pt", "checkpoint-8.pt"]
    assert len(checkpoints.stopped) == len(checkpoints.writing) == 3 * (comms.rank == 0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_loads_what_rank_0_saved_last(world_size, tmp_path):
    run(save_and_load, world_size, str(tmp_path))


def one_under_way(comms, folder):
    """The second waits for the first, and nobody for the second."""
    checkpoints, may_write, torch_save = (
        Checkpoints(Path(folder), comms, 2),
        threading.Event(),
        torch.save,
    )

    def save(*arguments):
        assert may_write.wait(10)
        torch_save(*arguments)

    torch.save = save
    checkpoints.save(1, state_of(1))
    assert names(folder) == []
    threading.Timer(0.3, may_write.set).start()
    checkpoints.save(2, state_of(2))
    assert checkpoints.stopped[0] < 0.2 < checkpoints.stopped[1]
    assert "checkpoint-1.pt" in names(folder)
    checkpoints.finish()
    assert names(folder) == ["checkpoint-1.pt", "checkpoint-2.pt"]


def test_training_goes_on_while_one_checkpoint_is_written(tmp_path):
    run(one_under_way, 1, str(tmp_path))


def be_killed_while_writing(comms, folder, call):
    checkpoints = Checkpoints(Path(folder), comms, 2)
    checkpoints.save(1, state_of(1))
    checkpoints.finish()
    setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    checkpoints.save(2, state_of(2))
    checkpoints.finish()


def expect(comms, folder, number):
    checkpoints = Checkpoints(Path(folder), comms, 2)
    assert checkpoints.load()["history"] == [{"epoch": number}]
    checkpoints.save(3, state_of(3))
    checkpoints.finish()
    assert names(folder) == ["checkpoint-1.pt", "checkpoint-3.pt"], "nothing half-written"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_while_writing_the_last_checkpoint_stays(call, tmp_path):
    assert run(be_killed_while_writing, 1, str(tmp_path), call, dies=[0]) == [-signal.SIGKILL]
    assert (tmp_path / "checkpoint-2.pt.part").exists(), "killed when the new one was written"
    run(expect, 1, str(tmp_path), 1)


def leave_a_damaged_one(comms, folder):
    checkpoints = Checkpoints(Path(folder), comms, keep=1)
    checkpoints.save(50, state_of(50))
    checkpoints.finish()
    Path(folder, "checkpoint-100.pt").write_bytes(b"half of it")
    assert checkpoints.load()["history"] == [{"epoch": 50}]
    for number in (60, 70):
        checkpoints = Checkpoints(Path(folder), comms, keep=1)  # as each generation has its own
        checkpoints.save(number, state_of(number))
        checkpoints.finish()
    assert names(folder) == ["checkpoint-100.pt", "checkpoint-70.pt"]
    checkpoints.save(100, state_of(100))
    checkpoints.finish()
    assert names(folder) == ["checkpoint-100.pt"]
    assert checkpoints.load()["history"] == [{"epoch": 100}]


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path):
    run(leave_a_damaged_one, 1, str(tmp_path))


def refuse(comms, folder, message):
    with pytest.raises(
        ValueError, match=rf"^rank {comms.rank}: expected a whole .* got .*{message}"
    ):
        Checkpoints(Path(folder), comms, 2).load()


def flip(data):
    place = data.index(torch.full((4,), 2.0).numpy().tobytes())
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES = [
    (lambda _: b"", "checkpoint-2.pt: "),
    (lambda _: b"text", "checkpoint-2.pt: "),
    (lambda data: data[:-100], "checkpoint-2.pt: "),
    (flip, "checkpoint-2.pt: .* is damaged"),
    (lambda _: encode_state({"path": Path("x")}), "checkpoint-2.pt: Weights only load failed"),
]
KINDS = ["empty", "text", "cut", "bit", "code"]


def fall_back(comms, folder):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        state = Checkpoints(Path(folder), comms, 2).load()
    assert state["weights"].eq(1).all()
    assert ("going back to the one before" in said.getvalue()) == (comms.rank == 0)


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=KINDS)
def test_a_broken_checkpoint_falls_back_to_the_one_before_or_is_an_error_on_every_rank(
    damage, message, tmp_path
):
    newest, before = tmp_path / "checkpoint-2.pt", tmp_path / "checkpoint-1.pt"
    newest.write_bytes(damage(encode_state(state_of(2))))
    run(refuse, 2, str(tmp_path), message)
    before.write_bytes(encode_state(state_of(1)))
    run(fall_back, 2, str(tmp_path))
    assert newest.exists(), "it is not ours to remove"


def refuse_folder(comms, folder):
    with pytest.raises(
        ValueError, match=rf"^rank {comms.rank}: expected a folder for .*, got rank 0: "
    ):
        Checkpoints(Path(folder), comms, 2)


def fill_the_disk(comms, folder):
    """A full disk costs a checkpoint and no training; if it is the last, every rank says so."""
    checkpoints, torch_save = Checkpoints(Path(folder), comms, 2), torch.save
    checkpoints.save(1, state_of(1))

    def save(state, path):
        torch_save(state, path)
        raise OSError(28, "No space left on device")

    for step in (2, 3):
        if step == 2:
            checkpoints.finish()
            torch.save = save
        with contextlib.redirect_stdout(io.StringIO()) as said:
            checkpoints.save(step, state_of(step))
    assert ("No checkpoint: [Errno 28] No space" in said.getvalue()) == (comms.rank == 0)
    message = rf"^rank {comms.rank}: expected a checkpoint in .*, got rank 0: .*No space left"
    with pytest.raises(RuntimeError, match=message):
        checkpoints.finish()
    comms.barrier()
    assert names(folder) == ["checkpoint-1.pt"], "nothing half-written"
    comms.barrier()
    torch.save = torch_save
    checkpoints.save(4, state_of(4))
    checkpoints.finish()
    assert names(folder) == ["checkpoint-1.pt", "checkpoint-4.pt"]


def leave_what_cannot_be_removed(comms, folder):
    checkpoints = Checkpoints(Path(folder), comms, keep=1)
    if comms.rank == 0:
        Path(folder, "checkpoint-9.pt.part").mkdir()
    comms.barrier()
    checkpoints.expect_none()
    if comms.rank == 0:
        Path(folder, "checkpoint-1.pt").mkdir()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        checkpoints.save(2, state_of(2))
        checkpoints.finish()
    assert ("An old checkpoint stays: [Errno" in said.getvalue()) == (comms.rank == 0)
    assert "checkpoint-2.pt" in names(folder)


def refuse_what_is_no_folder_any_more(comms, folder):
    checkpoints, folder = Checkpoints(Path(folder), comms, 2), Path(folder)
    if comms.rank == 0:
        folder.rmdir()
        folder.touch()
    comms.barrier()
    message = rf"^rank {comms.rank}: expected --resume, or a folder .* got rank 0: .*Not a dir"
    with pytest.raises(ValueError, match=message):
        checkpoints.expect_none()


def test_what_rank_0_cannot_remove_or_list_fails_on_all_ranks_or_on_none(tmp_path):
    run(leave_what_cannot_be_removed, 2, str(tmp_path / "left"))
    run(refuse_what_is_no_folder_any_more, 2, str(tmp_path / "file"))


def test_what_rank_0_cannot_write_or_read_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    run(refuse_folder, 2, str(tmp_path / "file"))
    (tmp_path / "unreadable" / "checkpoint-5.pt").mkdir(parents=True)
    run(refuse, 2, str(tmp_path / "unreadable"), "Is a directory")
    run(fill_the_disk, 2, str(tmp_path / "full"))
