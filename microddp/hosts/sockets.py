"""Speed between two hosts, measured with sockets: ``sockets.py ADDRESS NEXT BITS_PER_SECOND``.

A program of its own, run by its path on every host, so that it starts without PyTorch. It listens
and says ``ready``; when a line comes in it sends to the next host, and writes ``[bits per second,
round trip in seconds]``.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

PORT = 29000
TIME_ON_THE_WIRE = 0.02  # seconds, of the smaller of two messages
REPEAT = 3
ROUND_TRIPS = 20
PATIENCE = 20.0  # seconds for each answer


def main(own: str, following: str, bits_per_second: float) -> None:
    """Be one of the hosts: answer the one before, and send to the next when a line comes in."""
    listener = socket.create_server((own, PORT))
    print("ready", flush=True)
    answering = threading.Thread(target=_answer, args=(listener,), daemon=True)
    answering.start()
    sys.stdin.readline()
    with socket.create_connection((following, PORT), PATIENCE) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        least = min(1 << 18, round(bits_per_second / 8 * 2))  # no more than 2 seconds
        small = max(least, round(bits_per_second / 8 * TIME_ON_THE_WIRE))
        _send(line, 2 * small)  # until the connection is up to speed
        trips = [_send(line, 1) for _ in range(ROUND_TRIPS)]
        # The difference of two sizes leaves out what every message costs, and the first bytes, for
        # which the token bucket was full. The least of each, as other work can only add to it.
        times = [(_send(line, 3 * small), _send(line, small)) for _ in range(REPEAT)]
        longest, shortest = map(min, zip(*times, strict=True))
    rate = 2 * small * 8 / (longest - shortest)
    print(json.dumps([rate, statistics.median(trips)]), flush=True)
    answering.join()


def _send(line: socket.socket, nbytes: int) -> float:
    """Send so many bytes, and return the seconds until the answer is here."""
    message = memoryview(nbytes.to_bytes(8, "big") + bytes(nbytes))
    start = time.perf_counter()
    line.sendall(message)
    line.recv(1)
    return time.perf_counter() - start


def _answer(listener: socket.socket) -> None:
    line, _ = listener.accept()
    with line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(1 << 20))
        while header := line.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            while left:
                left -= line.recv_into(buffer[: min(left, len(buffer))])
            line.sendall(b"1")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
