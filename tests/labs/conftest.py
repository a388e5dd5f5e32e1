"""Jobs of these tests are forked from the server of the others."""

import pytest
from ranks import start_server


@pytest.fixture(scope="session", autouse=True)
def _server():
    """Not from one of their own, which a worker's later tests would have, too."""
    start_server()
