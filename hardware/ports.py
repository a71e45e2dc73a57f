"""Free ports of this machine."""

import contextlib
import random
import socket

RANGE = range(10000, 15000)  # of free_ports


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row, for processes that are about to start here.

    Linux gives ports from 32768 on to outgoing connections, so any program may take one of those
    before our process listens. These lie below, and away from the defaults of MASTER_ADDR and
    LIGHTHOUSE, 29500 and 29510.
    """
    chance = random.SystemRandom()  # whatever seed this process has
    while True:
        first = chance.choice(RANGE[:-count])
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("", port))
            return first
