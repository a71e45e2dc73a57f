"""Free ports of this machine."""

import contextlib
import random
import socket

RANGE = range(10000, 15000)  # of free_ports
DEFAULT = 29500


def free_port(taken: int) -> int:
    """Return the first free port above one that is taken."""
    for port in range(taken + 1, 65536):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return DEFAULT


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row, for processes of this machine that are about to start.

    They are not among those that Linux gives to outgoing connections, from 32768 on: any program may get one of these
    before our process listens. Nor are they near the default ports of MASTER_ADDR and LIGHTHOUSE, 29500 and 29510.
    """
    while True:
        # Another one each time, whatever seed this process has.
        first = random.SystemRandom().randrange(RANGE.start, RANGE.stop - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
