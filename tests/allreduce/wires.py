"""Ranks as threads of one process, over the most unhelpful network that the rules allow.

Nothing moves before the receiver waits. Then the message is read, with a complaint if its tensor
has changed since it was sent. An algorithm that writes to a tensor under way, or uses what it has
not waited for, fails here every time.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch

from microddp.comms.pending import Exchange, Pending, started
from microddp.comms.point_to_point import Scratch

SECONDS = 5.0  # for a message that never comes


class ThreadComms(Scratch):
    """The part of ``Comms`` that all-reduce algorithms use."""

    def __init__(self, rank: int, links: dict[tuple[int, int], "SimpleQueue[Any]"], n: int) -> None:
        self.rank = rank
        self.world_size = n
        self.links = links
        self.sent: list[tuple[int, int]] = []  # receiver and bytes of every message

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Pending:
        self._check(tensor, dst)
        self.sent.append((dst, tensor.nbytes))
        taken = Event()
        self.links[self.rank, dst].put((tensor, tensor.clone(), taken))

        def leave() -> None:
            assert taken.wait(SECONDS), "a message that nobody received"

        return started(Pending(leave), async_op)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Pending:
        self._check(tensor, src)

        def receive() -> None:
            now, sent, taken = self.links[src, self.rank].get(timeout=SECONDS)
            assert torch.equal(now, sent), "written to while it was being sent"
            tensor.copy_(now)
            taken.set()

        return started(Pending(receive), async_op)

    def sendrecv(self, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
        self.exchanger(incoming, dst, src)(outgoing, incoming).wait()

    def exchanger(
        self, tensor: torch.Tensor, dst: int, src: int
    ) -> Callable[[torch.Tensor, torch.Tensor], Exchange]:
        self._check(tensor, dst)
        self._check(tensor, src)

        def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> Exchange:
            sending = self.send(outgoing, dst, async_op=True)
            return Exchange(self.recv(incoming, src, async_op=True).wait, sending.wait)

        return exchange

    def _check(self, tensor: torch.Tensor, peer: int) -> None:
        assert tensor.is_contiguous()
        assert 0 <= peer < self.world_size
        assert peer != self.rank


def run_threads(n: int, function: Callable[[ThreadComms], Any]) -> tuple[list[Any], list[Any]]:
    """Run ``function`` on n ranks at once. Returns their results and what each one sent."""
    links: dict[tuple[int, int], SimpleQueue[Any]] = {
        (src, dst): SimpleQueue() for src in range(n) for dst in range(n)
    }
    ranks = [ThreadComms(rank, links, n) for rank in range(n)]
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def be(comms: ThreadComms) -> None:
        try:
            results[comms.rank] = function(comms)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=be, args=(comms,), daemon=True) for comms in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:  # a deadlock is an error after SECONDS
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert all(link.empty() for link in links.values()), "a message was never received"
    return results, [comms.sent for comms in ranks]
