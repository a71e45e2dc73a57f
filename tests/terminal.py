"""What a command shows in a terminal."""

import os
import pty
import struct
import termios
from collections.abc import Mapping
from fcntl import ioctl

from tests.running import ROOT

CTRL_C = b"\x03"


def show(
    command: list[str], environment: Mapping[str, str], columns: int, stop_at: str = ""
) -> tuple[int, str]:
    """Run a command in a terminal this wide, in the repository. Ctrl-C is typed once `stop_at` is seen.

    Returns:
        The exit code, and what was shown, with Unix line ends.
    """
    # pytest's own width would win over the terminal's
    environment = {name: value for name, value in environment.items() if name != "COLUMNS"}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execvpe(command[0], command, environment)
    shown = b""
    try:
        while more := os.read(terminal, 2**16):
            shown += more
            if stop_at and stop_at.encode() in shown:
                os.write(terminal, CTRL_C)
                stop_at = ""
    except OSError:  # as Linux says that the other end is closed
        pass
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown.decode().replace("\r\n", "\n")
