"""Compressed gradients: ranks send fewer bits, and keep the rest for the next step.

With n ranks and a bucket of S bytes in float32:

==============  ================================  ==========================================
name            bytes a rank sends, on average    what travels
==============  ================================  ==========================================
``top-k:K``     2 K S (n-1)                       the largest values and their indices
``random-k:K``  2 K S (n-1)/n                     values at indices that all ranks draw alike
``int8``        2 (S/4 + S/1024) (n-1)/n          8 bits a value, and a scale for each block
``sign``        2 (S/32 + S/1024) (n-1)/n         1 bit a value, and a scale for each block
``power:R``     2 R (rows + columns) 4 (n-1)/n    two thin factors of each matrix
``fp16``        S (n-1)/n                         half of the bits
``bf16``        S (n-1)/n                         the upper half of the bits
==============  ================================  ==========================================

K is a fraction, as in ``top-k:0.01``, or a number of values of each bucket. Values with indices of
their own have to be all-gathered, in bytes that grow with n. Those with scales travel in two
phases: each rank is sent its part of all, adds it up, and sends the mean, rounded again, to all.
Values that can be summed on the way are all-reduced. A rank adds what it has not sent to its next
gradient (error feedback).
"""

from microddp.compression.compressor import Compressor
from microddp.compression.feedback import Compression, compress_hook
from microddp.compression.power_sgd import PowerSGD
from microddp.compression.quantised import Half, Int8, Sign
from microddp.compression.sparse import RandomK, TopK
from microddp.compression.spec import NAMES, compress, compressor, hook
