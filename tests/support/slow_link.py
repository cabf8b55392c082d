"""A link that is slow and long: frames of two network cards are passed on after a delay, at a limited rate.

    port1 of h1 ---> queue, `rate` bits a second, `delay` seconds ---> veth in the bridge
                <---               likewise                      <---

Kernels may be built without netem, which would do the same. Run it in the network namespace of the cards:

    python -m tests.support.slow_link CARD CARD MBIT_PER_S DELAY_S
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time

ALL_PROTOCOLS = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 263, 15, 4
QUEUE_S = 1.0
"""A frame that would wait longer for the link is dropped, as a router drops it."""
FRAME = 1 << 17


def opened(card: str) -> socket.socket:
    """Return a socket with all frames of a card, also those that the kernel has not divided or summed yet."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    # a header before each frame says what the card still has to do with it
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.bind((card, ALL_PROTOCOLS))
    return found


def pass_on(source: socket.socket, target: socket.socket, bits_per_s: float, delay_s: float) -> None:
    """Send every frame of a card to the other one, later."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
    threading.Thread(target=_send, args=(waiting, target), daemon=True).start()
    free_at = 0.0
    while True:
        frame, address = source.recvfrom(FRAME)
        if address[2] == PACKET_OUTGOING:
            continue
        now = time.monotonic()
        if free_at - now > QUEUE_S:
            continue
        free_at = max(free_at, now) + 8 * len(frame) / bits_per_s
        waiting.put((free_at + delay_s, frame))


def _send(waiting: queue.Queue[tuple[float, bytes]], target: socket.socket) -> None:
    while True:
        due, frame = waiting.get()
        time.sleep(max(0.0, due - time.monotonic()))
        target.send(frame)


def main() -> None:
    """Pass frames on in both directions until the process is ended."""
    one, other = opened(sys.argv[1]), opened(sys.argv[2])
    limits = float(sys.argv[3]) * 1e6, float(sys.argv[4])
    threading.Thread(target=pass_on, args=(one, other, *limits), daemon=True).start()
    print("ready", flush=True)
    pass_on(other, one, *limits)


if __name__ == "__main__":
    main()
