"""Data-parallel training with any schedule: ``torchrun --nproc-per-node=2 -m microddp.train``.

Any number of ranks, any schedule and any accumulation give the same result for the same batch
size, up to rounding: they add up gradients in different orders. (Not so with ``--precision fp16``,
where a rank's share decides which steps overflow and are left out, nor with ``--average-every`` and
``--compress``, which change what is learned.) In fp32 that changes a loss by
about 1e-7 of its value, and by about 1e-3 once rounding has moved the input of a ReLU across zero.
A run that is killed and resumed on as many ranks ends with bitwise the weights of an uninterrupted
run; on a GPU, if its kernels are deterministic.

With ``MICRODDP_DEBUG=1`` the ranks compare their weights after every step, where each rank holds
all of them.
"""

from microddp.train.checkpoint import Checkpoints
from microddp.train.loop import EpochResult, Trainer, TrainingResult, mean_step, train
from microddp.train.options import TrainingConfig, parse
