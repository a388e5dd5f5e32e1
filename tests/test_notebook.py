"""A chapter's notebook and a lab's on several ranks: the workers of nbdistributed."""

import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from shorter import shortened

from microddp.labs.engine.catalogue import find

RANKS = 2


def workers_of(client):
    """The processes that hold the notebook's ranks."""
    kernel = psutil.Process(client.km.provisioner.pid)
    return [p for p in kernel.children() if "nbdistributed" in " ".join(p.cmdline())]


def wait_until_connected(client):
    """%dist_init does not: a cell that is sent before is lost."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        connected = [
            # To each other, to the store, to the notebook.
            len([c for c in worker.net_connections() if c.status == psutil.CONN_ESTABLISHED]) >= 3
            for worker in workers_of(client)
        ]
        if len(connected) == RANKS and all(connected):
            return
        time.sleep(0.2)
    raise TimeoutError(f"expected {RANKS} connected workers, got {connected}")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Runs cells on several ranks, and returns what they printed."""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook()
    client = NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}})
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)  # nbdistributed starts "python"
        client.create_kernel_manager()
        client.start_new_kernel()
    client.start_new_kernel_client()

    def run(*sources):
        printed = []
        for source in sources:
            book.cells.append(nbformat.v4.new_code_cell(source))
            cell = client.execute_cell(book.cells[-1], len(book.cells) - 1)
            printed += [output.text for output in cell.outputs if "text" in output]
        return "".join(printed)

    try:
        run("%load_ext nbdistributed", f"%dist_init -n {RANKS}")
        wait_until_connected(client)
        yield run
    finally:
        run("%dist_shutdown")
        client._cleanup_kernel()


def code(text):
    cells = jupytext.reads(text, fmt="py:percent").cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def test_a_chapter_runs_on_several_ranks(notebook):
    printed = notebook(*code(shortened("03")))
    assert "Error" not in printed
    assert f"gloo, {RANKS} ranks on" in printed
    assert "M/C" in printed


def test_a_lab_runs_on_several_ranks(notebook):
    printed = notebook(*code(Path(find("02").solution).read_text()))
    assert "Error" not in printed
    assert "tensor([ 1.,  3.,  5.,  7.,  9., 11.])" in printed
    assert printed.count("tensor(") == 1  # comms.print, on rank 0
