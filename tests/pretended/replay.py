"""The ranks' calls, run again as NCCL runs them: in order on each communicator.

A communicator has one queue on each rank. A call leaves it when the other ranks have come to
theirs: a collective when all members have come to the same, messages when each has met its
counterpart. Messages keep the order too, since a group that is given its device when it is made, as
``microddp.init`` does, has one communicator for all it does. gloo pairs messages by themselves, so
there only collectives are run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pretended.communicators import Call, Key, Log


class DisorderError(AssertionError):
    """The ranks' calls do not fit together; names communicator, ranks, places and calls."""


def replay(logs: Sequence[Log]) -> None:
    """Run again what all ranks called.

    Args:
        logs: of a job that has ended, in rank order.

    Raises:
        DisorderError: NCCL would wait for ever, mix up tensors, or refuse two ranks on one GPU.
    """
    homes: dict[tuple[int, int], int] = {}
    for rank, log in enumerate(logs):
        if log.gpu is not None and homes.setdefault(log.gpu, rank) != rank:
            raise DisorderError(
                f"ranks {homes[log.gpu]} and {rank} are both on GPU {log.gpu[1]} of machine "
                f"{log.gpu[0]}: NCCL needs one for each"
            )
    problems = [
        problem
        for key in sorted({key for log in logs for key in log.calls})
        if (problem := _Communicator(key, logs).run())
    ]
    if problems:
        raise DisorderError("\n".join(problems))


class _Communicator:
    def __init__(self, key: Key, logs: Sequence[Log]) -> None:
        self.members, self.number = key
        self.calls = [
            [call for call in logs[rank].calls.get(key, []) if self._in_order(call, logs[rank])]
            for rank in self.members
        ]
        self.queues = [deque(calls) for calls in self.calls]
        self.messages = [list(queue[0].messages) if queue else [] for queue in self.queues]

    @staticmethod
    def _in_order(call: Call, log: Log) -> bool:
        return log.backend == "nccl" or not call.messages

    def run(self) -> str:
        """Until all queues are empty, or nothing moves: then what each rank is at."""
        while any(self.queues):
            if not (self._exchange() or self._collective()):
                return self._stuck()
        return ""

    def _exchange(self) -> bool:
        """Let the messages at the heads of the queues meet."""
        moved = False
        for rank, mine in enumerate(self.messages):
            for message in list(mine):
                kind, peer, what = message
                answer = ("recv" if kind == "send" else "send", rank, what)
                if answer in self.messages[peer]:
                    mine.remove(message)
                    self.messages[peer].remove(answer)
                    moved = True
        if moved:
            for rank, left in enumerate(self.messages):
                if not left and self.queues[rank] and self.queues[rank][0].messages:
                    self._pop(rank)
        return moved

    def _collective(self) -> bool:
        """Let all ranks pass a collective, if all are at the same."""
        heads = [queue[0] if queue else None for queue in self.queues]
        texts = {head.text if head and not head.messages else None for head in heads}
        if None in texts or len(texts) > 1:
            return False
        for rank in range(len(self.queues)):
            self._pop(rank)
        return True

    def _pop(self, rank: int) -> None:
        queue = self.queues[rank]
        queue.popleft()
        self.messages[rank] = list(queue[0].messages) if queue else []

    def _stuck(self) -> str:
        lines = [f"on the communicator of ranks {list(self.members)}, number {self.number}:"]
        for member, queue, calls in zip(self.members, self.queues, self.calls, strict=True):
            place = len(calls) - len(queue)
            lines.append(f"  rank {member}: {_in_words(queue, calls, place)}")
        return "\n".join(lines)


def _in_words(queue: deque[Call], calls: Sequence[Call], place: int) -> str:
    if queue:
        return f"waits in call {place + 1} of {len(calls)}, {queue[0]}"
    last = f", the last one {calls[-1]}" if calls else ""
    return f"has left after {place} calls{last}"
