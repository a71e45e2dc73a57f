"""The roll call before torchrun starts on several nodes: who is there, who is missing, and whether all fit together.

    python -m train.distributed.rendezvous meet PROCESSES [SITE [MACHINE]]    until all NODES have joined; exit code 0: start
                                                                  torchrun now, 10: the run is done
    python -m train.distributed.rendezvous over CODE [WHY]                    tell the others that this node will not come back

Node 0 listens at MASTER_ADDR, where its torchrun will in a moment (registry.py); the others call until
they are heard. Both send lines of JSON. Node 0 greets first, so that a caller knows whom it has reached: between two
attempts it may be the store of a torchrun that is about to end, or another program. Then

    caller   {"node_rank": 1, "host": ..., versions, settings}     I am here; or {"over": 75, ...}: I shall not be
    node 0   {"waiting": "2 of 4 nodes have joined ..."}           every few seconds; the caller answers {}
    node 0   {"code": 0, "why": ""}                                go, or the exit code of all nodes and the reason

In pods, a node that is told to stop just leaves: it will be started again, and the others wait
for it. Once all are there node 0 says where each is, and what it costs where they are at several sites (wan.py).

Anyone who reaches the port can take part, as with torchrun's own: it belongs into a private network.
"""

import contextlib
import errno
import hashlib
import ipaddress
import logging
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from hardware.ports import free_ports
from record import locks, status
from record.exit_codes import BAD_DATA, INTERRUPTED, NODES_MISSING
from record.locks import RunFolderError, RunIsHeld
from record.provenance import git, version
from record.run_paths import RunPaths, list_checkpoints
from record.status import Status
from settings import ROOT, SettingsError
from settings.addresses import join_address
from settings.checks import PRETRAINING
from settings.config import SETTINGS, Config
from settings.declare import FREE
from train.distributed.pod import in_pod
from train.distributed.registry import (
    HELLO,
    LINGER_S,
    LONGEST_WHY,
    REMIND_S,
    SILENT_S,
    WAITING,
    Line,
    Lost,
    RollCall,
    Told,
    Verdict,
    last_word,
)
from train.distributed.wan import whereabouts

log = logging.getLogger(__name__)

ROOMS_THAT_TRAIN = (
    "settings",
    "record",
    "hardware",
    "train",
)  # whose source must be equal on all nodes
RUN_IS_DONE = 10  # exit code of `meet` if nothing is left to do; for train/launcher.py only
CONNECT_S = 5.0  # for node 0 to take a call, and to greet
PORT_S = 60.0  # for whoever has the port to let it go: a torchrun that is about to end


class Unreachable(Exception):
    """Node 0 cannot be talked to now; the message says how far it went, and what to look at."""


class LostSight(Unreachable):
    """Node 0 was there, and is gone."""


def meet(c: Config, processes: int, site: str = "", machine: str = "") -> Verdict:
    """Join the roll call of all nodes, on node 0 hold it. Returns what all of them do next.

    Of a run that is done there is none: the others have left, or will by themselves.
    """
    paths = RunPaths.of_node(c, ROOT)
    if done := finished(c, paths):
        return Verdict(RUN_IS_DONE, done)
    facts = facts_of(c, processes) | {"site": site, "machine": machine, "device": device_of(c)}
    if c.rank_in_site:
        return call(c, facts, c.start_timeout_s)
    try:
        # a machine that is gone may keep its lock for minutes, on a disk that it shared
        lock = locks.hold_run(paths, c.start_timeout_s if in_pod() else locks.RELEASE_S)
    except RunFolderError as error:
        # in a pod another try may find it free
        code = NODES_MISSING if in_pod() and isinstance(error, RunIsHeld) else BAD_DATA
        return Verdict(code, str(error))
    with lock:
        state = status_of(c, paths)
        state.phase(f"{WAITING} 1/{c.site_nodes}")
        verdict, members = receive(c, facts, state, c.start_timeout_s)
        if verdict.code:
            state.end(verdict.code)
        else:
            say_where(c, members, paths)
    return verdict


def receive(
    c: Config, facts: dict[str, Any], state: Status, timeout_s: float
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Hold the roll call, as soon as MASTER_ADDR has an address and its port is free. Returns also who came."""
    deadline = time.monotonic() + timeout_s
    try:
        listeners = listen(c, state, deadline)
    except Told:
        return last_word(facts, INTERRUPTED), []
    if isinstance(listeners, Verdict):
        return listeners, []
    roll_call = RollCall(facts, listeners, where(c), deadline - time.monotonic(), state, in_pod())
    roll_call.say()
    return roll_call.hold(), roll_call.members


def over(c: Config, code: int, why: str = "") -> None:
    """Tell the other nodes that this one ends for good, for as long as they may be on their way to the roll call."""
    if c.rank_in_site:
        call(c, who(c) | {"over": code, "why": why[:LONGEST_WHY]}, LINGER_S)
        return
    paths = RunPaths.of_node(c, ROOT)
    if str(status.read(paths.status).get("phase", "")).startswith(
        WAITING
    ):  # the trainer ended before it said more
        status_of(c, paths).end(code)
    state = Status(paths.status, active=False)
    listeners = listen(c, state, time.monotonic() + 1)
    if not isinstance(listeners, Verdict):
        RollCall(who(c), listeners, where(c), LINGER_S, state).hold(last_word(who(c), code, why))


# ---------------------------------------------------------------------------------------------------
# The calling side
# ---------------------------------------------------------------------------------------------------


def call(c: Config, content: dict[str, Any], timeout_s: float) -> Verdict:
    """Call node 0 until it answers, and return its verdict. Once it knows of this node, its patience is what counts."""
    deadline, reminder = time.monotonic() + timeout_s, Reminder()
    while True:
        try:
            with reached(c) as line:
                return talk(line, content, reminder, comes_back=in_pod())
        except LostSight as error:  # it was there: as long again for it to come back
            trouble, deadline = str(error), time.monotonic() + timeout_s
        except Unreachable as error:
            trouble = str(error)
        except Told:
            return last_word(content, INTERRUPTED)
        if (left := deadline - time.monotonic()) <= 0:
            return Verdict(NODES_MISSING, f"node 0 was not reached in {timeout_s:.0f} s: {trouble}")
        if "over" not in content:
            reminder.say(f"{trouble}; trying on", f"{trouble}; trying for {left:.0f} s more")
        try:
            time.sleep(min(1.0, left))
        except Told:
            return last_word(content, INTERRUPTED)


@contextlib.contextmanager
def reached(c: Config) -> Iterator[Line]:
    """A connection to node 0's roll call. Raises Unreachable."""
    try:
        connection = socket.create_connection((c.master_host, c.master_port), CONNECT_S)
    except socket.gaierror as error:
        raise Unreachable(unresolved(c, error)) from None
    except ConnectionRefusedError:
        raise Unreachable(
            f"{where(c)} refuses connections: node 0 has not been started yet, or MASTER_ADDR "
            "is not its address and port"
        ) from None
    except TimeoutError:
        raise Unreachable(
            f"{where(c)} does not answer in {CONNECT_S:.0f} s: a firewall drops what is sent there, or "
            "MASTER_ADDR is not node 0's address in this network"
        ) from None
    except OSError as error:
        raise Unreachable(
            f"{where(c)} cannot be reached ({error.strerror or error}); check MASTER_ADDR and the "
            "network"
        ) from None
    with connection:
        yield Line(connection)


def talk(line: Line, content: dict[str, Any], reminder: "Reminder", comes_back: bool) -> Verdict:
    """Say who this is and wait for the verdict. Raises Unreachable where the connection does not last.

    comes_back: whether a node that is told to stop will be started again.
    """
    greeted = False
    heard = time.monotonic()
    try:
        while True:
            for said in line.receive():
                heard = time.monotonic()
                if not greeted:
                    if said != HELLO:
                        raise Lost("it sent something else than a greeting")
                    greeted = True
                    line.send(content)
                elif isinstance(code := said.get("code"), int):
                    return Verdict(code, str(said.get("why", "")))
                else:
                    reminder.say(str(said.get("waiting", "")))
                    line.send({})
            if time.monotonic() - heard > (SILENT_S if greeted else CONNECT_S):
                raise Lost("it says nothing")
    except Lost as lost:
        if greeted:
            raise LostSight(f"the connection to node 0 was lost ({lost})") from None
        raise Unreachable(
            "something answers where node 0 should, but it calls no roll: an attempt of node 0 may still "
            "be ending, or another program has the port of MASTER_ADDR there"
        ) from None
    except Told:
        with contextlib.suppress(Lost):
            if greeted and not comes_back:
                line.send(content | {"over": INTERRUPTED})
        raise


class Reminder:
    """Says what is new at once, and what is not every 15 s."""

    def __init__(self) -> None:
        self.last, self.at = "", 0.0

    def say(self, text: str, shown: str = "") -> None:
        if text and (text != self.last or time.monotonic() - self.at > REMIND_S):
            log.info("%s", shown or text)
            self.last, self.at = text, time.monotonic()


# ---------------------------------------------------------------------------------------------------
# The listening side
# ---------------------------------------------------------------------------------------------------


def listen(c: Config, state: Status, deadline: float) -> "list[socket.socket] | Verdict":
    """Sockets that listen on the port of MASTER_ADDR, or why there are none. A name may come later, and a port may be freed."""
    reminder, began = Reminder(), time.monotonic()
    while True:
        try:
            return opened(c, reminder)
        except socket.gaierror as error:
            verdict = Verdict(NODES_MISSING, unresolved(c, error))
        except OSError as error:
            verdict = Verdict(BAD_DATA, busy_port(c, error))
            deadline = min(deadline, began + PORT_S)
        if (left := deadline - time.monotonic()) <= 0:
            return verdict
        reminder.say(f"{verdict.why}; trying on", f"{verdict.why}; trying for {left:.0f} s more")
        state.beat()
        time.sleep(min(0.5, left))


def opened(c: Config, reminder: Reminder) -> list[socket.socket]:
    """On loopback where MASTER_ADDR says so in words or figures; a host's own name may lead there too, as on Debian,
    and the others then know it by another address. Raises OSError where that fails."""
    found = socket.getaddrinfo(c.master_host, c.master_port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    here = [address for address in addresses if is_here(address)]
    if here and is_loopback(c.master_host):
        return [
            socket.create_server((address, c.master_port), family=family_of(address))
            for address in here
        ]
    if not here:
        reminder.say(
            f"MASTER_ADDR={c.master_addr} ({', '.join(addresses)}) is no address of this machine "
            f"({socket.gethostname()}), though it is node 0: the others will look for it there"
        )
    if socket.has_dualstack_ipv6():
        try:
            return [
                socket.create_server(
                    ("", c.master_port), family=socket.AF_INET6, dualstack_ipv6=True
                )
            ]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return [socket.create_server(("", c.master_port))]


def busy_port(c: Config, error: OSError) -> str:
    other = join_address(c.master_host, free_ports(1))
    return (
        f"MASTER_ADDR={c.master_addr}: port {c.master_port} cannot be listened on here "
        f"({error.strerror}); choose another on all nodes, for example MASTER_ADDR={other}"
    )


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_here(address: str) -> bool:
    """Whether it is an address of this machine."""
    try:
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# ---------------------------------------------------------------------------------------------------
# What nodes know of themselves
# ---------------------------------------------------------------------------------------------------


def who(c: Config) -> dict[str, Any]:
    return {"node_rank": c.rank_in_site, "host": socket.gethostname(), "nodes": c.site_nodes}


def facts_of(c: Config, processes: int) -> dict[str, Any]:
    """Who this is, and what must be equal on all nodes: versions, code, and the settings that the result hangs on."""
    fields = SETTINGS
    settings = {name: value for name, value in c.stored().items() if fields[name].resume != FREE}
    commit = git("rev-parse", "--short=12", "HEAD")
    files = sorted(path for room in ROOMS_THAT_TRAIN for path in (ROOT / room).rglob("*.py"))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return who(c) | {
        "torch": version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "commit": commit + " with changes" * bool(git("status", "--porcelain", "-uno"))
        if commit
        else "",
        "source": source.hexdigest()[:12],
        "settings": settings | {"RUN_NAME": c.run_name, "NPROC": processes},
    }


def device_of(c: Config) -> str:
    """The name of this node's first GPU as torch has it, without loading torch; CPU where there is none."""
    if c.device == "cpu":
        return "CPU"
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "CPU"
    return next(iter(said.splitlines()), "CPU").strip()


def is_done(c: Config, last: dict[str, Any]) -> bool:
    """Whether this is the status of a run that has made all steps, and been evaluated."""
    return (
        last.get("phase") == "done"
        and isinstance(at := last.get("step"), int)
        and at >= c.last_step
    )


def status_of(c: Config, paths: RunPaths) -> Status:
    """The run's status. That of a run which has nothing left to do stays as it is."""
    return status.of_run(c, paths, active=not is_done(c, status.read(paths.status)))


def finished(c: Config, paths: RunPaths) -> str:
    """What to say of a run that has nothing left to do, as all nodes see; empty where it has, or not all see it.

    They share the folder where each has its log in it. A checkpoint of the last step is not enough: the evaluation
    behind it wants all nodes.
    """
    if not all(paths.node_log(node).exists() for node in range(c.site_nodes)):
        return ""
    last = status.read(paths.status)
    if is_done(c, last):
        return f"run {c.run_name} is done: {last['step']} of {c.last_step} steps, in {paths.folder}"
    saved = max(list_checkpoints(paths.checkpoints), default=0)
    if saved > c.last_step:
        return f"run {c.run_name} is already at step {saved}, past step {c.last_step}: nothing is left to do"
    return ""


def say_where(c: Config, members: list[dict[str, Any]], paths: RunPaths) -> None:
    """Say which node is where, here and in the run's log, which outlives a pod's."""
    try:
        lines = whereabouts(c, members)
        for level, line in lines:
            log.log(level, "%s", line)
        with open(paths.train_log, "a", encoding="utf-8") as file:
            file.writelines(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} roll call: {line}\n" for _, line in lines
            )
    except Exception as error:  # all nodes have been told to start, and the run is whole without it
        log.warning("where the nodes are cannot be told: %r", error)


def where(c: Config) -> str:
    return join_address(c.master_host, c.master_port)


def unresolved(c: Config, error: OSError) -> str:
    return (
        f"MASTER_ADDR={c.master_addr} does not resolve on {socket.gethostname()} ({error.strerror}); a pod's name "
        "takes a moment, else give node 0's address, for example MASTER_ADDR=10.0.0.5"
    )


def stop_asked(number: int, frame: object) -> None:
    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)  # once is enough, and what follows is short
    raise Told


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="roll call: %(message)s", stream=sys.stdout)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if (
            number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ):  # detached from its terminal
            signal.signal(number, stop_asked)
    try:
        c = Config.load(without=PRETRAINING)  # which the trainer asks, of what it trains
        if argv[0] == "over":
            over(c, int(argv[1]), *argv[2:3])
            return 0
        verdict = meet(c, int(argv[1]), *argv[2:4])
    except SettingsError as error:
        log.error("%s", error)
        return error.exit_code
    except Told:
        return INTERRUPTED
    log.info("%s", verdict.why or "all nodes have joined")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
