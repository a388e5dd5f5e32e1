"""Checkpoints: whole or not there, the same on every rank, and errors on all of them."""

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import run

from microddp.train import load_checkpoint, save_checkpoint


def state_of(number):
    return {"weights": torch.full((1000,), float(number)), "history": [{"epoch": number}]}


def save_and_load(comms, folder):
    folder = Path(folder, "new", "folder")
    assert load_checkpoint(folder, comms) is None
    for number in (1, 2):
        # Only rank 0's state counts, and only it writes.
        save_checkpoint(state_of(number * (comms.rank == 0)), folder, comms)
        assert [path.name for path in folder.iterdir()] == ["checkpoint.pt"]
        comms.barrier()
        loaded = load_checkpoint(folder, comms)
        assert loaded["weights"].eq(number).all()
        assert loaded["history"] == [{"epoch": number}]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_loads_what_rank_0_saved_last(world_size, tmp_path):
    run(save_and_load, world_size, str(tmp_path))


def be_killed_while_writing(comms, folder, call):
    save_checkpoint(state_of(1), Path(folder), comms)
    setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    save_checkpoint(state_of(2), Path(folder), comms)


def expect(comms, folder, number):
    assert load_checkpoint(Path(folder), comms)["history"] == [{"epoch": number}]
    save_checkpoint(state_of(3), Path(folder), comms)
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_while_writing_the_last_checkpoint_stays(call, tmp_path):
    assert run(be_killed_while_writing, 1, str(tmp_path), call, dies=[0]) == [-signal.SIGKILL]
    assert (tmp_path / "checkpoint.pt.part").exists(), "killed when the new one was written"
    run(expect, 1, str(tmp_path), 1)


def refuse(comms, folder, message):
    with pytest.raises(
        ValueError, match=rf"^rank {comms.rank}: expected a whole .* got .*{message}"
    ):
        load_checkpoint(Path(folder), comms)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def flip(data):
    place = data.index(torch.full((4,), 1.0).numpy().tobytes())
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: b"", "0 bytes that cannot be read"),
        (lambda _: b"text", "4 bytes that cannot be read"),
        (lambda data: data[:-100], r"\d+ bytes that cannot be read"),
        (flip, r"\d+ bytes that cannot be read: .* is damaged"),
        (lambda _: saved([1]), "got a list"),
        (lambda _: saved({"path": Path("x")}), "Weights only load failed"),
    ],
    ids=["empty", "text", "cut", "bit", "list", "code"],
)
def test_a_damaged_file_is_an_error_on_every_rank(damage, message, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(damage(saved(state_of(1))))
    run(refuse, 2, str(tmp_path), message)


def refuse_folder(comms, folder):
    with pytest.raises(
        RuntimeError, match=rf"^rank {comms.rank}: expected a checkpoint in .*, got rank 0: "
    ):
        save_checkpoint(state_of(1), Path(folder), comms)


def test_what_rank_0_cannot_write_or_read_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    run(refuse_folder, 2, str(tmp_path / "file"))
    (tmp_path / "checkpoint.pt").mkdir()
    run(refuse, 2, str(tmp_path), "Is a directory")
