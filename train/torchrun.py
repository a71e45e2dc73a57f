"""torchrun as the launcher uses it: without a traceback, and with as few ports as can be.

python -m train.torchrun [OPTIONS of torchrun] -m MODULE

The processes have said why they ended, and reported their exit codes.

Without --nnodes all processes are on this machine. There is nobody to meet then, so nothing
listens: torchrun's own --standalone opens two ports on all interfaces, and unpickles what anybody
writes there. The ranks find each other by a file (join in distributed/world.py), and connect to
each other on loopback.

With --nnodes, node 0 serves torchrun's store at --master-addr instead of on all addresses.
docs/ports.md lists what else listens.
"""

import argparse
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path

from torch.distributed import HashStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
    static_tcp_rendezvous,
)

from settings.addresses import is_loopback
from train.distributed.pod import in_pod
from train.distributed.signed_http import listen
from train.end_with_parent import end_with_launcher

ONE_MACHINE = "one-machine"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ALL_ADDRESSES = ("::", "0.0.0.0")  # as a socket has them
TALKATIVE = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)


class OneMachine(RendezvousHandler):
    """The rendezvous of a job that has one node: it has taken place."""

    def get_backend(self) -> str:
        return ONE_MACHINE

    def next_rendezvous(self) -> RendezvousInfo:
        # Port 0: our ranks meet by RANKS_FILE, and nothing else may open a port.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return ONE_MACHINE

    def shutdown(self) -> bool:
        return True


class Nodes(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's rendezvous of several nodes, with a store that listens at MASTER_ADDR only."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            listener = listen(self.master_addr, self.master_port)
            if listener.getsockname()[0] in ALL_ADDRESSES and not in_pod():
                sys.stderr.write(
                    f"MASTER_ADDR={self.master_addr} is a name, or no address of this machine: torchrun's "
                    "store listens on all addresses, and whoever reaches it can run code (docs/ports.md)\n"
                )
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


def start(options: argparse.Namespace, folder: Path) -> None:
    """Run torchrun to its end, with the ports of one machine or of several.

    Args:
        folder: an empty one, for the file by which the ranks of one machine find each other.
    """
    is_one_machine = options.nnodes == "1:1"
    if is_one_machine:
        rendezvous_handler_registry.register(ONE_MACHINE, lambda parameters: OneMachine())
        options.rdzv_backend = ONE_MACHINE
        options.rdzv_endpoint = "localhost:0"  # not used; without it torchrun prints a warning
        os.environ["RANKS_FILE"] = str(folder / "ranks")
        # torchrun logs it. Where the name server does not answer, asking takes many seconds.
        socket.getfqdn = lambda name="": name or socket.gethostname()
    else:
        static_tcp_rendezvous.StaticTCPRendezvous = Nodes  # type: ignore[misc]
    if is_one_machine or is_loopback(options.master_addr):
        # Also where the user has chosen an interface: that is for several machines.
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        os.environ.pop("GLOO_DEVICE_TRANSPORT", None)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        sys.stderr.write(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's wrapper of process groups crashes in this trainer. "
            "INFO is used.\n"
        )
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    # Each rank ends with this process.
    options.training_script_args[:0] = [str(os.getpid()), options.training_script]
    options.training_script = "train.end_with_parent"
    torchrun.run(options)


def has_reported() -> bool:
    """Return whether a process has said why it ended (report_exit in distributed/world.py)."""
    return os.path.exists(os.environ.get("EXIT_CODE_FILE", ""))


def main(arguments: list[str]) -> int:
    """Return 0, or 1 if a process failed or torchrun was told to stop."""
    options = torchrun.parse_args(arguments)
    end_with_launcher()
    # It warns of each signal that it passes on, and of each process that fails, in words of its own.
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="ranks.", ignore_cleanup_errors=True) as folder:
        try:
            start(options, Path(folder))
        except SignalException:
            return 1
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            end = f"with exit code {failure.exitcode}"
            if failure.exitcode < 0:
                end = f"by {failure.signal_name()}"
            if failure.exitcode < 0 or not has_reported():
                sys.stderr.write(f"rank {rank} (pid {failure.pid}) ended {end}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
