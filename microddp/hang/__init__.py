"""What a rank calls, recorded for ``python -m microddp.doctor DIR``, which reads hangs."""

from microddp.hang.history import History, read_record
from microddp.hang.place import locate
from microddp.hang.record import Entry, Record, current_record, start_record
from microddp.hang.witness import answer_signals, tell_of_the_end, torch_calls


def start(rank: int, world_size: int, answers: bool) -> Record:
    """Begin a record of this process; arguments and errors are those of ``comms.calls.start``."""
    record = start_record(rank, world_size, answers=answers and answer_signals())
    if answers:
        tell_of_the_end()
    return record
