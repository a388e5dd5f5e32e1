"""A short campaign of faults; a long one is ``python tests/campaign.py --faults 200``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import refusal


@pytest.mark.timeout(500)  # a few jobs, one after the other
def test_training_lives_through_faults():
    command = [sys.executable, "-u", str(Path(__file__).with_name("campaign.py")), "--short"]
    # A rank is killed in a collective, the meeting is killed, and a link is cut.
    command += ["--faults", "3", "--seed", "83", *["--no-hosts"] * bool(refusal())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("3 faults, 0 not right\n")
