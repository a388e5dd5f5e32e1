"""Link names to PyTorch's documentation, from a list, so that a build needs no network.

Sphinx reads the names and addresses of another project from its inventory, a file on that project's
site. The list beside this module replaces it. Each of its lines is an address below ``ROOT``, a
role, and the names that are explained there. ``{}`` in an address stands for the name.
``other=name`` is another name of the same object, such as one in the module that defines it.
"""

import zlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

ROOT = "https://docs.pytorch.org/docs/stable/"
LIST = Path(__file__).with_suffix(".txt")


def inventory() -> bytes:
    """Return the list as an inventory, in version 2 of Sphinx's format.

    Raises `ValueError` for a line that is not an address, a role and names.
    """
    entries = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        address, *rest = line.split()
        if len(rest) < 2 or rest[0] not in ("class", "function", "method", "attribute"):
            raise ValueError(f"expected address, role and names in {LIST.name}, got {line!r}")
        role, *names = rest
        for name in names:
            called, _, explained = name.rpartition("=")
            place = f"{address.replace('{}', explained)}#{explained}"
            entries.append(f"{called or explained} py:{role} 1 {place} -")
    head = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    return head.encode() + zlib.compress("\n".join(entries).encode() + b"\n")


def provide(app: Sphinx, config: Config) -> None:
    """Write the inventory where intersphinx finds it."""
    path = Path(app.doctreedir, "torch.inv")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(inventory())
    config.intersphinx_mapping["torch"] = (ROOT, (str(path),))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler, before intersphinx looks at its mapping."""
    app.setup_extension("sphinx.ext.intersphinx")
    app.connect("config-inited", provide, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
