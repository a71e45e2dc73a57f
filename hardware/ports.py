"""Free ports of this machine."""

import contextlib
import random
import socket

RANGE = range(10000, 15000)  # of free_ports


def free_port(taken: int) -> int:
    """Return a free port other than `taken`: the next one, or the first from 1024 on.

    Raises:
        OSError: there is none.
    """
    candidates = [*range(taken + 1, 65536), *range(1024, taken)]
    for port in candidates:
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return port
    raise OSError("All TCP ports of this machine from 1024 to 65535 are taken.")


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
