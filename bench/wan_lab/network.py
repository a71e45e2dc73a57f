"""Sites on one machine, joined by a WAN: a network namespace each, and relay.c between them.

    with Network(sites=4, link=Link(gbit=1, one_way_ms=15)) as network:
        network.start(2, ["python", "-m", "..."])     # in site 2, whose host name resolves at all others
        network.cut(2); network.join(2)
        network.counters()

Beside the sites there is a hub, a place of its own behind a link without cap, for what belongs to none of them. All is
gone when the block ends, also by SIGTERM or Ctrl-C (stopping); what a killed lab left behind the next one removes, by
name. Only one is at work at a time. It needs root, /dev/net/tun, ip and gcc: what_is_missing says what to do.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TextIO, cast

PREFIX = "wanlab-"  # of all namespaces of a lab
LOCK = Path("/run/wanlab.lock")
TUN = Path("/dev/net/tun")
SOCKET_MOST = 128 * 2**20  # bytes that a connection may hold under way: 10 Gbit/s for 100 ms
PACKET_S = (
    0.0005  # that a packet may take of a link; more would make it a network of few, large drops
)
SMALLEST_MTU, LARGEST_MTU = 1500, 65000
QUEUE_MS = 100  # of each direction of a link, as routers at the edge of a WAN have it
HERE = Path(__file__).resolve().parent

# Run in a namespace of the network: a host name and a list of hosts of the site's own, then the command.
AS_SITE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class CannotRun(Exception):
    """This machine cannot have a lab; what is missing, and what to do, a line each."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins a site to the others, each way. gbit: 0 has no cap; one_way_ms: from one site to another."""

    gbit: float = 0
    one_way_ms: float = 0
    loss: float = 0  # of packets, 0 to 1

    @property
    def mtu(self) -> int:
        """Bytes of a packet: large ones where they are quick, since each costs the relay as much as a small one."""
        return (
            round(min(LARGEST_MTU, max(SMALLEST_MTU, self.gbit * 1e9 / 8 * PACKET_S)))
            if self.gbit
            else LARGEST_MTU
        )

    def as_given(self, separator: str) -> str:
        """As the relay wants it: egress and ingress in Mbit/s, half of the delay, since two links make a way; loss."""
        return separator.join(
            f"{value:.9g}"
            for value in (1000 * self.gbit, 1000 * self.gbit, self.one_way_ms / 2, self.loss)
        )

    def __str__(self) -> str:
        if self == Link():
            return "no WAN"
        rate = f"{self.gbit:g} Gbit/s" if self.gbit >= 1 else f"{1000 * self.gbit:.4g} Mbit/s"
        rate = rate if self.gbit else "no cap"
        return f"{rate}, {self.one_way_ms:g} ms one way" + (
            f", {100 * self.loss:g}% lost" if self.loss else ""
        )


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the relay counted of one site since the start: bytes of whole packets, packets that were dropped.

    sent_bytes: that left the site, dropped ones included. lost: by chance; cut_off: by a cut link; queue_drops and
    ingress_drops: by a full queue on the site's way out, and on its way in.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    lost: int
    cut_off: int
    queue_drops: int
    ingress_drops: int


def what_is_missing() -> list[str]:
    """What keeps this machine from having a lab, each with what to do; none is an empty list."""
    missing = []
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        missing.append(
            "it needs root, to make network namespaces: run it with sudo, or in a container that is "
            "privileged"
        )
    if not TUN.exists():
        missing.append(
            f"{TUN} is not there: modprobe tun, or for a container --device {TUN} --cap-add NET_ADMIN "
            "--cap-add SYS_ADMIN"
        )
    tools = {
        "ip": "iproute2",
        "gcc": "gcc and libc6-dev",
        "nsenter": "util-linux",
        "unshare": "util-linux",
        "hostname": "hostname",
        "mount": "mount",
    }
    missing += [
        f"the command {tool} is not there: install {package} (apt-get install {package.replace(' and', '')})"
        for tool, package in tools.items()
        if shutil.which(tool) is None
    ]
    if not missing:
        name = f"{PREFIX}try"
        done = subprocess.run(
            ["ip", "netns", "add", name], text=True, capture_output=True, check=False
        )
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        if done.returncode:
            missing.append(
                f"ip netns add fails ({done.stderr.strip()}): a container needs --privileged, or --cap-add "
                "SYS_ADMIN --cap-add NET_ADMIN and no AppArmor profile that forbids mounts"
            )
    return missing


def name_of(place: int) -> str:
    return f"{PREFIX}{place}"


def address_of(place: int) -> str:
    """Of a site, from 0; the hub has the number behind the last one's."""
    return f"10.77.0.{place + 1}"


def ip(*arguments: str, check: bool = True) -> str:
    """What `ip` says. Raises CannotRun with its complaint where it fails, unless that does not matter."""
    done = subprocess.run(["ip", *arguments], text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise CannotRun(f"ip {' '.join(arguments)} fails: {done.stderr.strip()}")
    return done.stdout


def processes_in(namespace: str) -> list[int]:
    return [int(word) for word in ip("netns", "pids", namespace, check=False).split()]


def end_all_in(namespace: str) -> None:
    """SIGKILL to all processes of a namespace, until there is none: what is killed may have started another."""
    deadline = time.monotonic() + 10
    while (pids := processes_in(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def sweep() -> list[str]:
    """Remove what an earlier lab left behind: processes and namespaces, known by their name. Returns the names."""
    left = [
        line.split()[0]
        for line in ip("netns", "list", check=False).splitlines()
        if line.startswith(PREFIX)
    ]
    for name in left:
        end_all_in(name)
        ip("netns", "del", name, check=False)
    return left


class Network:
    """N sites and a hub, as places 0 to N, until the block ends."""

    def __init__(self, sites: int, link: Link, seed: int = 1):
        self.sites, self.link, self.seed = sites, link, seed
        self.relay: subprocess.Popen[str] | None = None
        self.asking = threading.Lock()
        self.stack = contextlib.ExitStack()

    @property
    def hub(self) -> int:
        return self.sites

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as stack:
            self.lock(stack)
            sweep()
            stack.callback(sweep)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wanlab.")))
            self.hosts = folder / "hosts"
            self.hosts.write_text(
                "127.0.0.1 localhost\n"
                + "".join(
                    f"{address_of(place)} {name_of(place)}\n" for place in range(self.sites + 1)
                )
            )
            program = compile_relay(folder)
            for place in range(self.sites + 1):
                self.make_place(place)
            self.relay = stack.enter_context(self.start_relay(program))
            self.stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.close()

    @staticmethod
    def lock(stack: contextlib.ExitStack) -> None:
        """Hold the machine's one lock. Raises CannotRun where another lab is at work."""
        file = stack.enter_context(LOCK.open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun("another lab is at work on this machine; wait for its end") from None

    @staticmethod
    def make_place(place: int) -> None:
        name = name_of(place)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        values = {
            "core/somaxconn": "4096",
            "ipv4/tcp_rmem": f"4096 131072 {SOCKET_MOST}",
            "ipv4/tcp_wmem": f"4096 65536 {SOCKET_MOST}",
        }
        write = "; ".join(f"echo '{value}' >/proc/sys/net/{key}" for key, value in values.items())
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{name}", "sh", "-c", write],
            capture_output=True,
            check=False,
        )

    @contextlib.contextmanager
    def start_relay(self, program: Path) -> Iterator[subprocess.Popen[str]]:
        places = [
            f"{name_of(place)},{address_of(place)},{self.given(place).as_given(',')}"
            for place in range(self.sites + 1)
        ]
        process = subprocess.Popen(
            [
                str(program),
                "-q",
                str(QUEUE_MS),
                "-m",
                str(self.link.mtu),
                "-s",
                str(self.seed),
                *places,
            ],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            if not cast(TextIO, process.stdout).readline():
                raise CannotRun("the relay does not start, see above")
            yield process
        finally:
            process.kill()
            process.wait()

    def given(self, place: int) -> Link:
        """The hub is as far as the sites are, and nothing caps it."""
        return self.link if place < self.sites else dataclasses.replace(self.link, gbit=0, loss=0)

    def ask(self, command: str) -> dict[str, Any]:
        """What the relay answers. Raises RuntimeError where it has ended or does not know the command."""
        assert self.relay is not None and self.relay.stdin and self.relay.stdout
        with self.asking:
            try:
                self.relay.stdin.write(command + "\n")
                self.relay.stdin.flush()
            except BrokenPipeError:
                pass
            line = self.relay.stdout.readline()
        answer = (
            dict(json.loads(line)) if line else {"error": f"it ended with code {self.relay.wait()}"}
        )
        if "error" in answer:
            raise RuntimeError(f"the relay, asked for {command!r}: {answer['error']}")
        return answer

    def cut(self, site: int) -> None:
        self.ask(f"cut {site}")

    def join(self, site: int) -> None:
        self.ask(f"join {site}")

    def change(self, link: Link) -> None:
        """Give all places another link. The size of packets stays that of the first."""
        self.link = link
        for place in range(self.sites + 1):
            self.ask(f"link {place} {self.given(place).as_given(' ')}")

    def counters(self) -> list[Counters]:
        """Of each place; the hub's is the last."""
        return self.counters_and_delay()[0]

    def counters_and_delay(self) -> tuple[list[Counters], float]:
        """They, and by how many ms at most the relay delivered too late since it was asked last."""
        answer = self.ask("stats")
        names = [field.name for field in dataclasses.fields(Counters)]
        return [
            Counters(**{name: site[name] for name in names}) for site in answer["sites"]
        ], answer["latest_ms"]

    def start(
        self,
        place: int,
        command: Sequence[str],
        env: dict[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command at a place. The process is the command itself."""
        inside = [
            "nsenter",
            f"--net=/run/netns/{name_of(place)}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            AS_SITE,
            "sh",
            name_of(place),
            str(self.hosts),
            *command,
        ]
        return subprocess.Popen(inside, env=env, stdout=stdout, stderr=stderr, **popen)

    def kill(self, site: int) -> int:
        """SIGKILL to all processes of a site; returns how many there were."""
        count = len(processes_in(name_of(site)))
        end_all_in(name_of(site))
        return count

    def undelivered(self, site: int) -> int:
        """Packets that the kernel dropped since the relay did not fetch them in time: it had too little of a core."""
        said = json.loads(ip("-n", name_of(site), "-s", "-j", "link", "show", "wan0"))
        return int(said[0]["stats64"]["tx"]["dropped"])

    def congestion_control(self) -> str:
        """What TCP has in these namespaces."""
        done = subprocess.run(
            [
                "nsenter",
                f"--net=/run/netns/{name_of(0)}",
                "cat",
                "/proc/sys/net/ipv4/tcp_congestion_control",
            ],
            text=True,
            capture_output=True,
            check=True,
        )
        return done.stdout.strip()


def compile_relay(folder: Path) -> Path:
    """The relay's program, made in this folder. Raises CannotRun with gcc's complaint."""
    program = folder / "relay"
    done = subprocess.run(
        ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(HERE / "relay.c")],
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise CannotRun(
            f"gcc cannot compile bench/wan_lab/relay.c (are libc6-dev and linux-libc-dev installed?):\n"
            f"{done.stderr}"
        )
    return program


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, so that what it holds is given back."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in (int(signal.SIGTERM), int(signal.SIGHUP)):
        before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
