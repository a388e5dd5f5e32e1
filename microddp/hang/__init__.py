"""The calls of each rank, recorded for ``python -m microddp.doctor DIR``, which reads hangs."""

from microddp.hang.call_site import Origin, locate
from microddp.hang.entry import Entry
from microddp.hang.flight_recorder import read_flight_records, torch_calls
from microddp.hang.history import History, read_record
from microddp.hang.record import Record, begin_lane, current_record, machine, start_record
from microddp.hang.self_report import answer_signals, tell_of_the_end


def start(rank: int, world_size: int, answers: bool) -> Record:
    """Begin a record of this process; arguments and errors are those of ``comms.calls.start``."""
    record = start_record(rank, world_size, answers=answers and answer_signals())
    if answers:
        tell_of_the_end()
    return record
