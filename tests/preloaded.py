"""What the ranks of tests begin with: each is forked from a process that has imported this."""

import gc
from importlib import import_module

from huge_pages import collapse

# What tests, optimizers and chapters would import in every rank, for seconds each.
for name in (
    *("hypothesis", "matplotlib.pyplot", "psutil", "pytest"),
    *("torch._dynamo", "torch.profiler"),
    *(
        "microddp.doctor.checks",
        "microddp.labs.engine.rank",
        "microddp.bench",
        "microddp.figures",
        "microddp.train",
        "microddp.workloads",
    ),
):
    import_module(name)
gc.collect()
collapse()
