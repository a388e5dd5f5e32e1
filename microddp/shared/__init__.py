"""Ranks of one machine: memory that they share, and all-reduces through it.

With n ranks and a tensor of S bytes:

=====================  ==============  ====================  ====================================
all-reduce             rounds          bytes that are sent   good for
=====================  ==============  ====================  ====================================
shared                 no message      none                  ranks of one machine
hierarchical           2 (M-1)         2 (M-1)/M S           M machines with several ranks each
=====================  ==============  ====================  ====================================

Of a hierarchy the bytes are those of all ranks of a machine together. All work in place, and leave
bitwise the same result on every rank, as those of :mod:`microddp.allreduce`.
"""

from microddp.shared.carriers import (
    ALL_REDUCES,
    AUTO,
    IN_MEMORY,
    carrier,
    fastest,
    reduce_by,
    refused,
)
from microddp.shared.collectives import (
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce_scatter,
)
from microddp.shared.halves import HALVES, Future, Half, Halves, halves_of
from microddp.shared.hierarchical import Hierarchy, hierarchical_all_reduce
from microddp.shared.memory import memory_refused
from microddp.shared.room import (
    BUFFER_BYTES,
    NOWHERE,
    Room,
    by_comms,
    machines_of,
    room_of,
    why_apart,
)
