"""For all tests: figures without a screen, and an environment without a job's variables."""

import os

from hypothesis import settings

# Wall-clock time is no property of the code: a busy machine would fail a right test. What hangs is
# ended by the bounds of ranks.py and wires.py, and by pytest's time-out.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ["MPLBACKEND"] = "Agg"
# torch looks up the name of each address it connects to, for its messages only. Some name servers
# lose such a question, and the default is to wait for 5 seconds, twice.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("MICRODDP_")]:
    del os.environ[name]
