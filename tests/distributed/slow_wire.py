"""One end of a wire between two network namespaces on which packets take their time; stands in for veth with netem.

Run inside a namespace as `slow_wire.py FD DELAY_MS`: makes a network card there and passes its packets to the other end
through the socket FD, `DELAY_MS` late.
"""

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def pump(peer: socket.socket, delay_s: float) -> None:
    card = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH14x", b"card", IFF_TUN | IFF_NO_PI))
    print("ready", flush=True)
    on_the_wire: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, on_the_wire[0][0] - time.monotonic()) if on_the_wire else None
        readable, _, _ = select.select([card, peer], [], [], wait_s)
        if card in readable:
            on_the_wire.append((time.monotonic() + delay_s, os.read(card, 65536)))
        if peer in readable:
            packet = peer.recv(65536)
            if not packet:
                return
            os.write(card, packet)
        while on_the_wire and on_the_wire[0][0] <= time.monotonic():
            peer.send(on_the_wire.popleft()[1])


if __name__ == "__main__":
    pump(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]) / 1000)
