"""Joining a job, and what becomes of it when a rank dies or hangs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run
from test_machine import linux, policies
from torch.distributed.rendezvous import rendezvous

import microddp
from microddp import launch
from microddp.allreduce import ring_all_reduce
from microddp.comms import cpu_cores
from microddp.comms.environment import TORCHRUN_VARIABLES
from microddp.comms.job import form_group
from microddp.launch import is_echo

SECONDS_AFTER_DEATH = 10  # within which the others must know
TIMEOUT = 2  # seconds for a rank that hangs
SECONDS_AFTER_TIMEOUT = 5


def init_fails(error, message):
    """Whether init raises that, quickly, and leaves nothing behind."""
    start = time.monotonic()
    with pytest.raises(error, match=f"^{message}"):
        microddp.init()
    assert time.monotonic() - start < 1
    assert not dist.is_initialized()


def threads(_comms):
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("wanted", "ranks", "expected"),
    [("1", 1, 1), ("3", 1, 3), ("3", 2, 3), ("1", 2, None), ("", 1, None), ("0", 1, None)],
)
def test_threads_are_a_share_of_the_cores_or_what_the_user_says(wanted, ranks, expected):
    """torchrun says 1 where a machine has several ranks: that is not the user's word."""
    found = run(threads, ranks, environment={"OMP_NUM_THREADS": wanted})
    assert found == [expected or max(1, cpu_cores() // ranks)] * ranks


ALONE = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "expected WORLD_SIZE to be a number, got 'two'"),
        ({"RANK": ""}, "expected RANK to be a number, got ''"),
        ({"LOCAL_RANK": "0.5"}, "expected LOCAL_RANK to be a number, got '0.5'"),
        ({"MASTER_PORT": "http"}, "expected MASTER_PORT to be a number, got 'http'"),
        ({"MASTER_PORT": "65536"}, "expected a port as MASTER_PORT, got 65536"),
        ({"RANK": "1"}, "expected 0 <= RANK < WORLD_SIZE, got RANK=1, WORLD_SIZE=1"),
        ({"RANK": "-1"}, "expected 0 <= RANK < WORLD_SIZE, got RANK=-1, WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0"}, "expected 0 <= RANK < WORLD_SIZE, got RANK=0, WORLD_SIZE=0"),
        ({"LOCAL_RANK": "3"}, "expected 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE, got LOCAL_RANK=3"),
        ({"LOCAL_WORLD_SIZE": "2"}, "expected LOCAL_WORLD_SIZE <= WORLD_SIZE, got 2 and 1"),
        (
            {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GROUP_WORLD_SIZE": "2",
                "TORCHELASTIC_MAX_RESTARTS": "3",
            },
            "rank 0: expected TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node",
        ),
        ({"MICRODDP_TIMEOUT": "soon"}, "expected MICRODDP_TIMEOUT .* seconds, got 'soon'"),
        ({"MICRODDP_TIMEOUT": ""}, "expected MICRODDP_TIMEOUT .* seconds, got ''"),
        ({"MICRODDP_TIMEOUT": "0"}, "expected MICRODDP_TIMEOUT .* seconds, got '0'"),
        ({"MICRODDP_TIMEOUT": "-3"}, "expected MICRODDP_TIMEOUT .* seconds, got '-3'"),
        ({"MICRODDP_TIMEOUT": "inf"}, "expected MICRODDP_TIMEOUT .* seconds, got 'inf'"),
        ({"MICRODDP_TIMEOUT": "nan"}, "expected MICRODDP_TIMEOUT .* seconds, got 'nan'"),
        ({"MICRODDP_ROUNDS": "0"}, "expected MICRODDP_ROUNDS .* from 1 on, got '0'"),
        ({"MICRODDP_ROUNDS": "few"}, "expected MICRODDP_ROUNDS .* from 1 on, got 'few'"),
    ],
    ids=lambda value: " ".join(map("=".join, value.items())) if isinstance(value, dict) else "",
)
def test_a_wrong_environment_is_refused(variables, message):
    run(init_fails, 1, ValueError, message, join=False, environment=variables)


def init_with_a_part():
    whole = dict(os.environ)
    for missing in TORCHRUN_VARIABLES:
        del os.environ[missing]
        init_fails(ValueError, f"expected all of .*; missing: {missing}$")
        os.environ |= whole
    for name in TORCHRUN_VARIABLES:
        del os.environ[name]
    os.environ["WORLD_SIZE"] = "2"
    missing = "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    init_fails(ValueError, f"expected all of .*; missing: {missing}$")


def test_a_partial_environment_is_refused_with_what_is_missing():
    run(init_with_a_part, 1, join=False)


def init_with_argument():
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected timeout to be a positive number of seconds"):
            microddp.init(timeout=wrong)
    with microddp.init(timeout=7.5) as comms:
        assert comms.timeout == 7.5
    del os.environ["MICRODDP_TIMEOUT"]
    with microddp.init() as comms:
        assert comms.timeout == 300


def test_the_argument_counts_for_more_than_the_environment_and_both_than_the_default():
    run(init_with_argument, 1, join=False)


@on_ranks(2)
def test_a_second_init_is_refused_until_the_first_is_closed(comms):
    with pytest.raises(RuntimeError, match=f"rank {comms.rank}: .* was called before"):
        microddp.init()
    assert comms.all_gather(torch.tensor(comms.rank)).tolist() == [0, 1]
    comms.close()
    with microddp.init() as again:
        assert again.all_gather(torch.tensor(again.rank)).tolist() == [0, 1]


def join_a_group_of_others():
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    for _ in range(2):  # as when a notebook's cells are run again
        with microddp.init() as comms:
            assert comms.group is group
            assert torch.get_num_threads() == max(1, cpu_cores() // comms.world_size)
            assert comms.all_gather(torch.tensor(comms.rank)).tolist() == [0, 1]
            part = comms.subgroup([1])
        assert dist.is_initialized()  # who made it may go on with it
        assert part is None or part._group is None
    with pytest.raises(RuntimeError, match="with backend 'nccl', got one with 'gloo'"):
        microddp.init("nccl")
    dist.barrier()
    dist.destroy_process_group()
    with microddp.init() as comms:
        assert comms.group is not group
    assert not dist.is_initialized()


def test_a_group_that_somebody_else_made_is_joined_and_left_to_them():
    run(join_a_group_of_others, 2, join=False)


def join_a_group_that_is_bound():
    dist.init_process_group("gloo")
    gpu, transport = torch.device("cuda", 1), dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.group.WORLD.bound_device_id = gpu
    dist.ProcessGroup._get_backend = lambda *_: transport
    taken = []
    torch.cuda.set_device, torch.cuda.current_device = taken.append, lambda: 0
    torch.cuda.is_available, dist.get_backend_config = lambda: True, lambda *_: "cpu:gloo,cuda:nccl"
    with microddp.init() as comms:
        assert taken == [comms.device] == [gpu]


def test_of_a_group_that_is_bound_to_a_gpu_a_rank_takes_that_one():
    run(join_a_group_that_is_bound, 1, join=False)


@pytest.mark.parametrize(
    ("nccl", "backend", "error", "message"),
    [
        (True, "mpi", ValueError, r"rank 0: expected backend in \['gloo', 'nccl'\], got 'mpi'"),
        (False, "nccl", RuntimeError, r"rank 0: this torch .* without nccl; it has \['gloo'\]"),
        (True, "nccl", RuntimeError, "rank 0: NCCL needs a GPU for each rank, expected 1, got 0"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused(monkeypatch, nccl, backend, error, message):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(error, match=f"^{message}"):
        microddp.init(backend)
    assert not dist.is_initialized()


def take_gpus(seen, backend=None):
    """The backend that init chooses, and the device, on a rank that sees these GPUs."""
    chosen = {}

    def join(backend, device_id, **_):
        chosen.update(backend=backend, device=device_id)
        raise dist.DistNetworkError

    rank = int(os.environ["RANK"])
    uuids = seen[rank]
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[device.index])
    torch.cuda.set_device = lambda device: chosen.update(index=device.index)
    dist.is_nccl_available = lambda: True
    dist.init_process_group = join
    with pytest.raises(RuntimeError) as caught:
        microddp.init(backend)
    if "NCCL needs" in str(caught.value):
        return str(caught.value)
    nccl = chosen["backend"] == "nccl"
    assert chosen["device"] == (torch.device("cuda", chosen["index"]) if nccl else None)
    return chosen["backend"], chosen.get("index")


@pytest.mark.parametrize(
    ("seen", "backend", "taken"),
    [
        (["ab", "ab"], "nccl", [0, 1]),
        (["abc", "abc"], "nccl", [0, 1]),
        (["a", "b"], "nccl", [0, 0]),  # each sees its own, as under Slurm
        (["ab", "cd", "ef"], "nccl", [0, 1, 0]),
        (["xx", "xx"], "nccl", [0, 1]),  # a driver that knows no numbers
        (["a", "a"], "gloo", [0, 0]),
        (["ab", "ab", "ab"], "gloo", [0, 1, 0]),
        (["a", "b", "a"], "gloo", [0, 0, 0]),
        (["a", ""], "gloo", [0, None]),
        (["", ""], "gloo", [None, None]),
    ],
)
def test_nccl_is_chosen_on_all_ranks_if_each_has_a_gpu_of_its_own(seen, backend, taken):
    chosen = run(take_gpus, len(seen), seen, join=False)
    assert chosen == [(backend, index) for index in taken]


def test_nccl_on_shared_gpus_is_refused_on_every_rank():
    for rank, message in enumerate(run(take_gpus, 3, ["ab"] * 3, "nccl", join=False)):
        assert message.startswith(f"rank {rank}: NCCL needs a GPU for each rank, expected 3, got 2")


@on_ranks()
def test_ranks_on_a_cpu_share_its_cores_in_the_batch_class(comms):
    if comms.device.type == "cpu":
        assert torch.get_num_threads() == max(1, cpu_cores() // comms.world_size)
    expected = {"none"} if not linux else {"batch"} if comms.world_size > 1 else {"other"}
    assert policies() == expected


def meet_in_vain(timeout):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        microddp.init(timeout=timeout)
    assert not dist.is_initialized()
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_an_unreachable_master_is_an_error_in_time_that_names_it(address):
    variables = {"MASTER_ADDR": address, "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    [(seconds, message)] = run(meet_in_vain, 1, 1.0, join=False, environment=variables)
    start = f"rank 1: expected 2 ranks to meet at {address}:1 within 1 s, got: "
    assert message.startswith(start)
    assert seconds < 10


def test_a_rank_that_never_comes_is_an_error_in_time():
    [(seconds, message)] = run(meet_in_vain, 1, 0.5, join=False, environment={"WORLD_SIZE": "2"})
    assert re.match(r"rank 0: expected 2 ranks to meet at 127.0.0.1:\d+ within 0.5 s, got", message)
    assert seconds < 10


def test_plain_python_is_a_job_of_one_that_tells_how_to_get_more(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, microddp\n"
        "with microddp.init() as comms:\n"
        "    assert (comms.rank, comms.world_size) == (0, 1)\n"
        "    total = torch.ones(2)\n"
        "    comms.all_reduce(total)\n"
        "    print(total.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "microddp: one rank. For more: torchrun --nproc-per-node=4 script.py",
        "[1.0, 1.0]",
    ]
    assert done.stderr == ""


@pytest.mark.skipif(not linux, reason="threads are listed by Linux only")
def test_no_thread_of_the_backend_outlives_close_whatever_was_imported():
    script = (
        "import glob, microddp\n"
        "comms = microddp.init()\n"
        "import torch._dynamo  # as an optimizer does, when it is made\n"
        "comms.close()\n"
        "print(*{open(f).read().strip() for f in glob.glob('/proc/self/task/*/comm')}, sep='\\n')"
    )
    threads = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert "one rank" in threads
    assert "gloo" not in threads, "it would abort the process if it let go of a tensor too late"


@pytest.mark.skipif(not linux, reason="threads are listed by Linux only")
@on_ranks(2)
def test_no_thread_of_the_backend_outlives_close_after_messages(comms):
    sub = comms.subgroup(range(2))
    for group in (sub, comms):
        ring_all_reduce(torch.ones(10), group)
        group.sendrecv(torch.ones(10), 1 - group.rank, torch.ones(10), 1 - group.rank)
        if group.rank == 0:
            group.send(torch.ones(1), 1)
        else:
            group.recv(torch.ones(1), 0)
    sub.close()
    comms.close()
    threads = {path.read_text() for path in Path("/proc/self/task").glob("*/comm")}
    assert not [name for name in threads if "gloo" in name]


# ---- a rank that dies, a rank that hangs


def all_reduce(comms):
    comms.all_reduce(torch.ones(10))


def all_gather(comms):
    comms.all_gather(torch.ones(10))


def barrier(comms):
    comms.barrier()


def ring(comms):
    ring_all_reduce(torch.ones(1 << 20), comms)


def receive(comms):
    comms.recv(torch.ones(10), 1)


def exchange(comms):
    comms.sendrecv(torch.ones(10), 1, torch.ones(10), 1)


def send_much(comms):
    comms.send(torch.ones(1 << 22), 1)  # more than the sockets hold


def share_words(comms):
    comms.all_gather_data("what")


OPERATIONS = (all_reduce, all_gather, barrier, ring, receive, exchange, send_much, share_words)


def seconds_until_error(comms, operation, misbehave, *arguments):
    """On rank 1: misbehave. On the others: how long the operation takes to fail."""
    comms.barrier()
    if comms.rank == 1:
        misbehave(*arguments)
        return 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        operation(comms)
    seconds = time.monotonic() - start
    assert is_echo(caught.value)
    for noticed in arguments:
        Path(noticed).touch()
    return seconds


def leave():
    os._exit(7)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hang(noticed):
    end = time.monotonic() + TIMEOUT + SECONDS_AFTER_TIMEOUT
    while not Path(noticed).exists() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("misbehave", "code"), [(leave, 7), (be_killed, -signal.SIGKILL)])
def test_a_dead_rank_is_an_error_on_the_others_within_seconds(operation, misbehave, code):
    results = run(seconds_until_error, 3, operation, misbehave, dies=[1])
    assert results[1] == code
    assert max(results[0], results[2]) < SECONDS_AFTER_DEATH


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hanging_rank_is_an_error_on_the_others_when_the_time_is_up(operation, tmp_path):
    noticed, short = str(tmp_path / "noticed"), {"MICRODDP_TIMEOUT": str(TIMEOUT)}
    results = run(seconds_until_error, 2, operation, hang, noticed, environment=short)
    assert 0.9 * TIMEOUT < results[0] < TIMEOUT + SECONDS_AFTER_TIMEOUT


def fail_to_meet_once():
    me = int(os.environ["RANK"])
    store, *_ = next(rendezvous("env://", me, 2))
    if me == 0:
        first = dist.PrefixStore("first", store)
        with pytest.raises((RuntimeError, dist.DistError)):
            form_group(first, me, 2, me, 2, backend="gloo", timeout=1)
    second = dist.PrefixStore("second", store)
    with form_group(second, me, 2, me, 2, backend="gloo", timeout=20) as comms:
        return comms.all_gather_data(me)


def test_who_failed_to_form_a_group_forms_the_next_with_those_who_did_not():
    assert launch.run(fail_to_meet_once, 2, limit=60, environment={}) == [[0, 1]] * 2
