"""Sharding: what every rank of DDP keeps whole, kept in parts.

With Ψ parameters in fp32 and Adam, a rank of DDP keeps 4Ψ bytes of parameters, 4Ψ of gradients and
8Ψ of moments:

=====  ==================================  =============================  ======================
stage  what                                bytes kept                     bytes a rank sends
=====  ==================================  =============================  ======================
1      the optimizer's moments             (4 + 4 + 8/n) Ψ                2 (n-1)/n S
2      and gradients                       (4 + 4/n + 8/n) Ψ, a bucket    2 (n-1)/n S
3      and parameters                      16/n Ψ, two blocks             3 (n-1)/n S
=====  ==================================  =============================  ======================

S is 4Ψ, and DDP sends as much: a reduce-scatter of gradients and an all-gather of parameters are
the two halves of an all-reduce. In stage 3 parameters are gathered twice, before forward and before
backward, and freed in between.
"""

from microddp.sharding.fully_shard import Block, fully_shard, shard_blocks
from microddp.sharding.replicated import ShardedGradients, ShardedOptimizer
from microddp.sharding.strategies import Zero1, Zero2, Zero3
from microddp.sharding.unit import Averages
