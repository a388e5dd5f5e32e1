"""For all tests: no GPU, figures without a screen, and an environment without a job's variables."""

import os
import secrets
import signal

import pytest
from hypothesis import settings
from warm import share
from xdist.scheduler import LoadScopeScheduling

# Wall-clock time is no property of the code: a busy machine would fail a right test. What hangs is
# ended by the bounds of ranks.py and wires.py, and by pytest's time-out.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ["MPLBACKEND"] = "Agg"
# torch looks up the name of each address it connects to, for its messages only. Some name servers
# lose such a question, and the default is to wait for 5 seconds, twice.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# OpenMP's threads spin for a while before they sleep. Where more processes compute than there are
# cores, they take the time of those whom they wait for: a test of 5 seconds took 70 beside others.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Tests make their tensors on the CPU, where init() has to find no GPU. Tests marked gpu give their
# ranks those that are kept here. The workers of pytest-xdist inherit both from whoever starts them.
ALL_GPUS = ",".join(map(str, range(64)))  # CUDA reads up to the first that there is not
os.environ.setdefault("GPUS_FOR_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", ALL_GPUS))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("MICRODDP_")]:
    del os.environ[name]
os.environ["MICRODDP_SECRET"] = secrets.token_hex(32)  # none is made in the home of who runs them
share()  # the workers inherit it
# A shell that starts the tests in the background makes them, and what they start, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ClassesStayTogether(LoadScopeScheduling):
    """The tests of a class run on one worker, since they may share what takes long to make."""

    def _split_scope(self, nodeid: str) -> str:
        return "::".join(nodeid.split("::")[:2]) if "::Test" in nodeid else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ClassesStayTogether:
    """Any worker runs any test, so that none idles at the end."""
    return ClassesStayTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left with it at the end."""
    long = ("test_campaign", "test_pretended_devices", "test_pretended_macos")
    items.sort(key=lambda item: item.path.stem not in long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu(count)`` where there are fewer."""
    for mark in item.iter_markers("gpu"):
        from ranks import gpu_count  # which imports torch, for seconds

        (needed,) = mark.args
        if (found := gpu_count(needed)) < needed:
            pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, found {found}")
