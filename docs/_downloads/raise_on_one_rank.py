"""An exception on one rank, while the others wait for it in an all-reduce.

MICRODDP_RECORD=/tmp/records torchrun --nproc-per-node=3 raise_on_one_rank.py
python -m microddp.doctor /tmp/records
"""

import torch

import microddp

comms = microddp.init()
for step in range(5):
    if comms.rank == 1 and step == 3:
        raise ValueError("a sample that cannot be read")
    comms.all_reduce(torch.ones(4))
