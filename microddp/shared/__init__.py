"""Memory that the ranks of one machine share, and how they meet there."""

from microddp.shared.memory import memory_refused
from microddp.shared.room import (
    BUFFER_BYTES,
    NOWHERE,
    Room,
    by_comms,
    machines_of,
    room_of,
    why_apart,
)
