"""Ports of this machine that are free."""

import contextlib
import random
import socket

RANGE = range(10000, 15000)  # of free_ports


def free_port(taken: int) -> int:
    """A port near the one that is taken."""
    for port in range(taken + 1, 65536):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    return 29500


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free, for processes of this machine that are about to be started.

    Not among those that Linux gives to outgoing connections, from 32768 on: such a one may be taken again by any
    program in the seconds until a process that was just started listens. Nor near MASTER_PORT and LIGHTHOUSE, which
    are 29500 and 29510 where nobody says otherwise.
    """
    while True:
        first = random.SystemRandom().randrange(
            RANGE.start, RANGE.stop - count
        )  # whatever seed this process has
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
