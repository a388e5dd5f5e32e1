"""Every Python that tests start looks for garbage rarely: a folder for ``PYTHONPATH``.

To import PyTorch makes objects by the hundred thousand, and hardly any garbage. To look for it
took a quarter of that time, and a tenth of all that tests take. When Python ends it looks again,
for half a second; what is frozen it passes by.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
