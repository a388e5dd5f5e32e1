"""Fewer bits instead of gradients: what ranks send, and what each keeps back for the next step.

With n ranks and a bucket of S bytes in float32:

==============  ================================  ==========================================
name            what a rank sends, in the mean    what travels
==============  ================================  ==========================================
``top-k:K``     2 K S (n-1)                       the largest values and their places
``random-k:K``  2 K S (n-1)/n                     values at places that all ranks draw alike
``int8``        (S/4 + S/256) (n-1)               8 bits a value, and a scale for each block
``sign``        (S/32 + S/1024) (n-1)             1 bit a value, and a scale for each block
``power:R``     2 R (rows + columns) 4 (n-1)/n    two thin factors of each matrix
``fp16``        S (n-1)/n                         half of the bits
``bf16``        S (n-1)/n                         the upper half of the bits
==============  ================================  ==========================================

K is a share below 1, as in ``top-k:0.01``, or a number of values of each bucket. What is sent with
its places or scales has to be gathered, which grows with n; what can be added up on the way does
not. What a rank has not sent it adds to its next gradient (error feedback).
"""

from microddp.compression.compressor import Compressor
from microddp.compression.feedback import Compression, compress_hook
from microddp.compression.power_sgd import PowerSGD
from microddp.compression.quantised import Half, Int8, Sign
from microddp.compression.sparse import RandomK, TopK
from microddp.compression.spec import NAMES, compress, compressor, hook
