"""How long jobs take to begin on this machine."""

import pytest
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """Seconds from a job's start to that of its chapter: of a build's first job, and of a later.

    A time-out counts from there. The first imports torch, as each prefix does: some seconds, more
    with a CUDA build, and 17 on two cores that were busy.
    """
    book = Book(tmp_path_factory.mktemp("joins") / "book")
    book.configure(*LAUNCHER, launcher={"ranks": 3, "preload": PRELOAD})
    for name in ("first", "later"):
        book.chapter(name, JOIN + "if rank == 0: now()")
    build = book.build()
    first, later = (
        float((book.root / f"chapters/{name}.moment").read_text())
        - build.time_of(f"{name}.py: running on")
        for name in ("first", "later")
    )
    return first, later
