"""How long jobs take to begin on this machine."""

import math

import pytest
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book


@pytest.fixture(scope="module")
def timeout(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return five times as many seconds as a job takes to begin.

    A time-out counts from the start of the job, which imports torch, once for each prefix, and rank
    0 imports Sphinx: some seconds, more with a CUDA build, and 17 on two cores that were busy.
    """
    book = Book(tmp_path_factory.mktemp("joins") / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 3, "preload": PRELOAD})
    book.chapter("joins", JOIN + "if rank == 0: now()")
    build = book.build()
    begun = float((book.root / "chapters/joins.moment").read_text())
    return math.ceil(5 * (begun - build.time_of("joins.py: running on")))
