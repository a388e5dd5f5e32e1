"""Check all scripts of all labs, or of some: ``python tests/labs/matrix.py 02``.

Prints a table as Markdown; the status is 1 if a check says something else than it should.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

from cases import cases, verdict

from microddp.labs.engine.catalogue import LABS, find

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as conftest.py says


def main(numbers):
    wrong = 0
    print("| lab | script | must | seconds | said |\n|---|---|---|---|---|")
    for lab in [find(number) for number in numbers] or LABS.values():
        for case in cases(lab.name):
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                said = " ".join(verdict(case, Path(folder)).split())
            held = re.search(case.says, said) if case.says else not said
            wrong += not held
            seconds = time.monotonic() - begun
            must = "pass" if case.says is None else f"fail: `{case.says}`"
            row = f"| {lab.number} | {case.name} | {must} | {seconds:.1f} |"
            print(row, ("" if held else "NOT: ") + (said or "passed"), "|", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
