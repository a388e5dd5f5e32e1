"""All-reduce: ways to agree on a sum by messages between two ranks.

With n ranks and a tensor of S bytes:

=====================  ==============  ====================  ====================================
algorithm              rounds          bytes a rank sends    good for
=====================  ==============  ====================  ====================================
naive                  2 (n-1)         (n-1) S on rank 0     showing why rank 0 is the bottleneck
direct                 n-1             (n-1) S               two ranks
ring                   2 (n-1)         2 (n-1)/n S           large tensors: bytes do not grow with n
recursive doubling     log2 n          S log2 n              small tensors: fewest rounds
=====================  ==============  ====================  ====================================

:mod:`microddp.shared` has those for ranks that share memory, and for links of unequal speed.

Every function works in place, on any dtype the backend can send, and leaves bitwise the same
result on every rank, because each element is added up in one order that all ranks share.
"""

from collections.abc import Callable

import torch

from microddp.allreduce.cost import (
    CollectiveCost,
    all_reduce_cost,
    ring_cost,
)
from microddp.allreduce.reduction import flattened
from microddp.allreduce.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from microddp.allreduce.whole_tensor import (
    direct_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
)
from microddp.comms import Comms

AllReduce = Callable[[torch.Tensor, Comms, str], None]
ALGORITHMS: dict[str, AllReduce] = {
    "naive": naive_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "doubling": recursive_doubling_all_reduce,
}
