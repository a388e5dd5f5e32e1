"""For all tests: figures without a screen, and an environment without a job's variables."""

import os

os.environ["MPLBACKEND"] = "Agg"
# torch looks up the name of each address it connects to, for its messages only. Some name servers
# lose such a question, and the default is to wait for 5 seconds, twice.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("MICRODDP_")]:
    del os.environ[name]
