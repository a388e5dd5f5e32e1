"""Which errors only say that another rank is gone: words as they came, and errors made here."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from launcher.rank import _is_secondary
from microddp.launch import is_echo
from microddp.shared.region import DifferentCalls

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
ECHOES = [
    RuntimeError(f"{GLOO}/pair.cc:538] Connection closed by peer [127.0.0.1]:29001. This may"),
    RuntimeError(f"{GLOO}/pair.cc:535] Read error [127.0.0.1]:1: Connection reset by peer"),
    RuntimeError(f"{GLOO}/pair.cc:285] writev [127.0.0.1]:29001: Broken pipe"),
    RuntimeError(f"{GLOO}/unbound_buffer.cc:86] Timed out waiting 2000ms for recv operation"),
    RuntimeError(f"Gloo connectFullMesh failed with {GLOO}/pair.cc:144] no error"),
    dist.DistBackendError(f"{NCCL}remote process exited or there was a network error"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0//gpu of 1"),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
    ConnectionResetError(104, "Connection reset by peer"),
    BrokenPipeError(32, "Broken pipe"),
]
OWN = [
    ValueError("rank 1: planted"),
    KeyError("closed by peer"),
    SystemExit(3),
    MemoryError(),
    FileNotFoundError(2, "No such file or directory"),
    RuntimeError("rank 0: the ranks disagree: rank 1 calls barrier; expected all_reduce"),
    RuntimeError("rank 0: these Comms are closed"),
    DifferentCalls("rank 0: expected the same call on every rank, got rank 0: a; rank 1: b"),
    RuntimeError(f"[enforce fail at {GLOO}/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 20"),
    dist.DistBackendError(f"{NCCL}invalid usage\nncclInvalidUsage: Duplicate GPU detected"),
]
each_rule = pytest.mark.parametrize("rule", [is_echo, _is_secondary], ids=["package", "launcher"])


def raised_from(cause, *, while_handling=False, suppress=False):
    try:
        try:
            raise cause
        except BaseException as error:
            if while_handling:
                raise ValueError("a consequence")  # noqa: B904
            raise ValueError("another") from None if suppress else error
    except ValueError as error:
        return error


@each_rule
@pytest.mark.parametrize("error", ECHOES, ids=str)
def test_an_echo(rule, error):
    assert rule(error)
    assert rule(raised_from(error))
    assert rule(raised_from(error, while_handling=True))
    assert not rule(raised_from(error, suppress=True))


@each_rule
@pytest.mark.parametrize("error", OWN, ids=repr)
def test_a_failure_of_its_own(rule, error):
    assert not rule(error)
    assert not rule(raised_from(error))


def test_a_stores_own_words():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    with pytest.raises(dist.DistStoreError) as late:
        other.wait(["nobody sets it"], timedelta(milliseconds=10))
    del store
    with pytest.raises(dist.DistNetworkError) as gone:
        other.get("x")
    assert is_echo(late.value)
    assert is_echo(gone.value)


@each_rule
def test_causes_in_a_circle_have_an_end(rule):
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not rule(first)
