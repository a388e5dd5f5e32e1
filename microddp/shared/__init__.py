"""More all-reduces, through shared memory, over machines and unequal links; carriers by name.

With n ranks and a tensor of S bytes:

=====================  ==============  ====================  ====================================
all-reduce             rounds          bytes that are sent   good for
=====================  ==============  ====================  ====================================
shared                 no message      none                  ranks of one machine
hierarchical           2 (M-1)         2 (M-1)/M S           M machines with several ranks each
weighted               2 a column      S over a slow link    links of unequal speed
=====================  ==============  ====================  ====================================

For a hierarchy, the bytes are the sum over the ranks of a machine. All work in place, and leave
bitwise the same result on every rank, as those of :mod:`microddp.allreduce` do.
"""

from microddp.shared.carriers import ALL_REDUCES, AUTO, carrier, fastest, refused
from microddp.shared.collectives import (
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce_scatter,
)
from microddp.shared.comm_hook import AtWait, all_reduce_hook, on_thread
from microddp.shared.hierarchical import Hierarchy, hierarchical_all_reduce
from microddp.shared.memory import memory_refused
from microddp.shared.region import (
    SharedRegion,
    cached_per_comms,
    machines_of,
    region_of,
    why_not_shared,
)
from microddp.shared.scatter_gather import (
    SCATTER_GATHERS,
    CollectiveName,
    Future,
    ScatterGather,
    scatter_gather,
)
from microddp.shared.weighted import parts_by_speed, weighted_all_reduce, weighted_time
