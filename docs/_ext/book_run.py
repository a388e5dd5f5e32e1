"""How the book's chapters run: on how many ranks, and what their pages say about it."""

import os
from pathlib import Path
from typing import Any

import torch
from chapter_cards import head, read_chapter

# Enough for a ring to be a ring. What the chapters time, they time on as many ranks as have a core
# or a GPU of their own, and say so.
USUAL = 4


def ranks() -> int:
    """The ranks of a chapter that does not ask for its own number.

    ``MICRODDP_NPROC`` if it is set; else one for each GPU if there are several; else four.

    Raises ``ValueError`` if ``MICRODDP_NPROC`` is not a number from 1 on.
    """
    wanted = os.environ.get("MICRODDP_NPROC")
    if wanted is not None:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ValueError(f"expected MICRODDP_NPROC to be a number from 1 on, got {wanted!r}")
        return int(wanted)
    gpus = torch.cuda.device_count()
    return gpus if gpus > 1 else USUAL


def below_title(namespace: dict[str, Any], script: Path) -> str:
    """What stands below a chapter's title, from the ``Comms`` that the chapter ran with."""
    comms = namespace["comms"]
    measured = f":::{{div}} measured-on\nMeasured on {comms.describe()}.\n:::"
    chapter = read_chapter(script)
    return f"{measured}\n\n{head(chapter, comms.world_size)}"
