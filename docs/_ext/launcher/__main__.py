"""Run a program of a job: `python .../launcher MODULE ARGUMENTS` calls that module's `main`.

A program is started by the path of this folder, because what starts it on a host, such as ssh,
hands on no `sys.path`.
"""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).parent
    sys.path[0] = str(folder.parent)  # it was this folder
    module, *arguments = sys.argv[1:]
    import_module(f"{folder.name}.{module}").main(*arguments)
