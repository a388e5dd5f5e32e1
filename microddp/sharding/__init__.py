"""Sharding: each rank keeps a part of the state that every rank of DDP keeps whole.

With Ψ parameters in fp32 and Adam, a rank of DDP keeps 4Ψ bytes of parameters, 4Ψ of gradients and
8Ψ of moments:

=====  ==================================  =============================  ======================
stage  sharded                             bytes kept                     bytes a rank sends
=====  ==================================  =============================  ======================
1      the optimizer's moments             (4 + 4 + 8/n) Ψ                2 (n-1)/n S
2      and gradients                       (4 + 4/n + 8/n) Ψ, a bucket    2 (n-1)/n S
3      and parameters                      16/n Ψ, two blocks             3 (n-1)/n S
=====  ==================================  =============================  ======================

S is 4Ψ, and DDP sends as much as stages 1 and 2: a reduce-scatter of gradients and an all-gather of
parameters are the two halves of an all-reduce. In stage 3 parameters are all-gathered twice, before
forward and before backward, and resharded in between. In nodes of n ranks each, of which there are
m, stage 3 may be inside the nodes (HSDP): then a rank keeps 16/n Ψ, sends 3 (n-1)/n S inside its
node, and 2 (m-1)/m S/n to the other nodes.
"""

from microddp.sharding.blocks import elements
from microddp.sharding.fully_shard import fully_shard, shard_blocks
from microddp.sharding.gradients import ShardedGradients
from microddp.sharding.nodes import nodes_of
from microddp.sharding.owned import OwnedOptimizer, owners
from microddp.sharding.param_group import FlatParamGroup, ShardedParam
from microddp.sharding.reducer import ShardedReducer
from microddp.sharding.sharded_module import ShardedModule
from microddp.sharding.strategies import Hsdp, Owned, Zero1, Zero2, Zero3
