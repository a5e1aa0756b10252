"""A switch that delays what it passes on, for kernels without ``netem``. Runs in the namespace of the ports.

    python benchmarks/slow_links_delay.py --seconds DELAY PORT...

It receives the frames of all ports. After the delay each frame is sent to the port behind which its addressee was seen;
broadcasts go to all other ports. Frames keep the kernel's header (``PACKET_VNET_HDR``), so large segments
pass in one piece, and neither segments nor checksums are made here.
"""

from __future__ import annotations

import argparse
import select
import socket
import time
from collections import deque

_EVERY_PROTOCOL = 0x0003  # ETH_P_ALL
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_BUFFER_BYTES = 32 << 20
_HEADER = 10
"""Bytes of the kernel's header (``struct virtio_net_hdr``)."""
_FRAME = 1 << 17


def port(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, 33, _BUFFER_BYTES)  # SO_RCVBUFFORCE
    opened.setblocking(False)
    opened.bind((name, _EVERY_PROTOCOL))
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("ports", nargs="+", metavar="PORT")
    options = parser.parse_args()
    ports = [port(name) for name in options.ports]
    behind: dict[bytes, socket.socket] = {}
    """The port by the address of a host."""
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:  # until it is killed
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select(ports, [], [], wait)[0]
        due = time.monotonic() + options.seconds
        for source in readable:
            frame = source.recv(_FRAME)
            addressee, sender = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
            behind[sender] = source
            targets = [behind[addressee]] if addressee in behind else [each for each in ports if each is not source]
            waiting += [(due, target, frame) for target in targets]
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, frame = waiting.popleft()
            try:
                target.send(frame)
            except OSError:  # the queue of the port is full: the frame is lost, as on a real switch
                pass


if __name__ == "__main__":
    main()
