"""The rendezvous before torchrun starts on several nodes: who is there, and whether all fit together.

    meet            wait until all NODES have joined, and hear what all do next
    announce_end    tell the others that this node will not come back

Node 0's launcher serves the registry for as long as it lives, on the port after MASTER_ADDR's:
that one belongs to torchrun. Each node says every second that it is there, and hears the verdict,
which is the same for all. A start is known by the tokens of the processes that meet: a count of
attempts would not survive a node 0 that was replaced. In pods, a node that is told to stop just
leaves: it is started again, and the others wait for it.
"""

import contextlib
import functools
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator

from hardware.ports import free_ports
from record import status
from record.exit_codes import BAD_SETTING, DONE, INTERRUPTED, NODES_MISSING, STOPPED
from record.provenance import git, version
from record.run_paths import RunPaths
from record.status import Status
from record.wait import wait
from settings import ROOT
from settings.addresses import join_address
from settings.config import SETTINGS, Config
from settings.declare import FREE
from settings.tuning_rules import FITTED
from train.children import say
from train.distributed import run_secret
from train.distributed.pod import in_pod
from train.distributed.registry import (
    WAITING,
    Client,
    Facts,
    Member,
    Members,
    NotAdmitted,
    Unreachable,
    Verdict,
    differences,
    named,
    serve,
)

ROOMS_THAT_TRAIN = ("settings", "record", "hardware", "train")  # their source must be equal
BEAT_S = 1.0  # between two signs of life
GONE_S = 6.0  # a node that was not heard for so long has left
LINGER_S = 10.0  # for nodes that are on their way to hear that it is over
REMIND_S = 15.0  # between two words on who is missing
LONGEST_WHY = 1000  # characters of a node's last word


class CannotServe(Exception):
    """The registry cannot be served here. The message says why, and what to change."""


# ---- Node 0 judges


class Rendezvous(Members):
    """The registry of nodes: it knows who is missing, and gives all the same verdict.

    Attributes:
        where: what the nodes are to reach.
        start: tokens of the processes that are to start torchrun together.
        training: those that started it, until node 0 is back.
        end: how the run ends on all nodes.
        heard: the nodes that were told how it ends.
    """

    def __init__(self, nodes: int, timeout_s: float, where: str):
        super().__init__()
        self.nodes = nodes
        self.timeout_s = timeout_s
        self.where = where
        self.start: set[str] = set()
        self.training: dict[int, Member] = {}
        self.end: Verdict | None = None
        self.heard: set[int] = set()

    def hear(self, name: int, facts: Facts, address: str, now: float) -> None:
        if facts["token"] not in self.start:
            self.start = set()  # a node came back: that attempt has failed
            if name == 0:
                self.training.clear()
        super().hear(name, facts, address, now)

    def reply(self, name: int, now: float) -> Facts:
        facts = self.members[name].facts
        present = self.list_present(now)
        verdict = self.end or self.judge(present, now)
        if verdict:
            self.heard.add(name)
            if "over" not in facts:  # a node that is over and started again takes its word back
                self.end = verdict
        elif facts["token"] in self.start:
            verdict = Verdict(0)
            self.training[name] = self.members.pop(name)  # it trains, unless it speaks again
        return {
            "verdict": verdict,
            "roll": self.describe_roll(present),
            "missing": self.list_missing(present),
            "rival": self.find_rival(name, facts),
        }

    def find_rival(self, name: int, facts: Facts) -> str:
        """Return the host of another launcher that trains as this member; "" if there is none."""
        member = self.training.get(name)
        if member is None or member.facts["launcher"] == facts["launcher"]:
            return ""
        return f"{member.facts['host']} ({member.address})"

    def list_missing(self, present: dict[int, Member]) -> list[int]:
        return [rank for rank in range(self.nodes) if rank not in present]

    def list_present(self, now: float) -> dict[int, Member]:
        present = {}
        for rank, member in sorted(self.members.items()):
            if now - member.heard_at < GONE_S and "left" not in member.facts:
                present[rank] = member
        return present

    def judge(self, present: dict[int, Member], now: float) -> Verdict | None:
        """Return how the run ends on all nodes, or None. Choose who starts once all are there."""
        for member in self.members.values():
            if "over" in member.facts:
                return describe_end(member.facts)
        if 0 not in present:
            return None
        problems = []
        for rank, member in present.items():
            problems += differences(present[0].facts, member.facts)
            if member.rival:
                both = f"{member.facts['host']} ({member.address}) and {member.rival}"
                reason = f"NODE_RANK={rank} was given to both {both}; each node needs its own"
                problems.append(Verdict(BAD_SETTING, reason))
        if problems:
            return Verdict(problems[0].code, "; ".join(problem.why for problem in problems))
        if len(present) == self.nodes:
            self.start = {member.facts["token"] for member in present.values()}
        elif now - present[0].since > self.timeout_s:
            reason = f"after {self.timeout_s:.0f} s {self.describe_roll(present)}"
            return Verdict(
                NODES_MISSING,
                f"{reason}. Were they started with this address, and does a firewall close this port?",
            )
        return None

    def describe_roll(self, present: dict[int, Member]) -> str:
        """'2 of 4 nodes have joined: 0 (a), 2 (c); missing: 1, 3; they are to reach a:29501'"""
        joined = ", ".join(f"{rank} ({member.facts['host']})" for rank, member in present.items())
        roll = f"{len(present)} of {self.nodes} nodes have joined: {joined}"
        missing = self.list_missing(present)
        if missing:
            roll += f"; missing: {', '.join(map(str, missing))}; they are to reach {self.where}"
        return roll

    def linger(self) -> None:
        """Wait until all have heard how the run ends, if it ends for all."""

        def is_known() -> bool:
            with self.lock:
                ends = self.end or self.judge({}, 0.0)
                return not ends or len(self.heard - {0}) == self.nodes - 1

        wait(is_known, LINGER_S, 0.1)


def describe_end(facts: Facts) -> Verdict:
    """Return what the others are told when a node ends for good."""
    code = facts["over"]
    if code in (STOPPED, INTERRUPTED):
        return Verdict(code, f"{named(facts)} was told to stop")
    reason = " ".join(facts["why"].split())[:LONGEST_WHY] or "its log says why"
    return Verdict(code, f"{named(facts)} has ended with exit code {code}: {reason}")


@contextlib.contextmanager
def serving(config: Config, members: Members) -> Iterator[None]:
    """Serve a registry on node 0. Raises CannotServe."""
    port = config.registry_port
    try:
        run_secret.make_secret(config)
        server = serve(
            members, config.master_host, port, functools.partial(run_secret.find_secret, config)
        )
    except socket.gaierror as error:
        raise CannotServe(
            f"MASTER_ADDR={config.master_addr}: This name has no address ({error.strerror}). Set the "
            "address of node 0, for example MASTER_ADDR=10.0.0.5."
        ) from None
    except OSError as error:
        other = join_address(config.master_host, free_ports(2))
        raise CannotServe(
            f"MASTER_ADDR={config.master_addr}: port {port} cannot be served here "
            f"({error.strerror}). Choose another on all nodes, for example MASTER_ADDR={other}"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def registry_of(config: Config) -> Iterator[None]:
    """Serve the registry if this is the first of several nodes. Raises CannotServe."""
    if config.site_nodes == 1 or config.rank_in_site:
        yield
        return
    where = join_address(config.master_host, config.registry_port)
    rendezvous = Rendezvous(config.site_nodes, config.start_timeout_s, where)
    with serving(config, rendezvous):
        yield
        rendezvous.linger()


# ---- Each node calls


def client_of(config: Config) -> Client:
    """Return what this node speaks through."""
    return Client(
        config.master_host,
        config.registry_port,
        config.rank_in_site,
        functools.partial(run_secret.find_secret, config),
        run_secret.describe_missing(config),
    )


def call(
    client: Client,
    facts: Facts,
    timeout_s: float,
    is_stopped: Callable[[], bool],
    state: Status | None = None,
) -> Verdict:
    """Say that this node is there until all hear what they do.

    A node that is told to stop takes the others along. In a pod it comes back, and they wait.

    Args:
        timeout_s: while node 0 calls the roll, its own patience counts.
        is_stopped: whether this node was told to stop.
        state: the run's status, on node 0.
    """
    deadline = time.monotonic() + timeout_s
    news = ""
    said_at = 0.0
    while not is_stopped():
        last_news = news
        try:
            answer = client.say(**facts)
        except NotAdmitted as error:
            return Verdict(BAD_SETTING, str(error))
        except Unreachable as error:
            news = str(error)
        else:
            missing = answer["missing"]
            if state:
                joined = facts["nodes"] - len(missing)
                state.phase(f"{WAITING} {joined}/{facts['nodes']}", missing=missing)
            if answer["verdict"]:
                return Verdict(*answer["verdict"])
            news = answer["roll"]
            if 0 in missing:
                news = f"{client.where} answers, but node 0 is still busy with its last attempt"
                if answer["rival"]:
                    news = (
                        f"node {client.name} trains already, on {answer['rival']}. If it is lost, wait: "
                        f"node 0 will notice. Else stop this one, which needs another NODE_RANK than {client.name}"
                    )
            else:
                deadline = time.monotonic() + timeout_s
        now = time.monotonic()
        if now > deadline:
            return Verdict(NODES_MISSING, f"node 0 was not reached in {timeout_s:.0f} s: {news}")
        if news != last_news or now - said_at > REMIND_S:
            say(f"rendezvous: {news}")
            said_at = now
        time.sleep(BEAT_S)
    end = facts | {"over": INTERRUPTED}
    with contextlib.suppress(Unreachable):
        client.say(**(facts | {"left": True} if in_pod() else end))
    return describe_end(end)


def announce_end(config: Config, code: int, why: str) -> None:
    """Tell the other nodes, which may be on their way to the rendezvous, that this one has ended."""
    paths = RunPaths.of_node(config, ROOT)
    phase = str(status.read(paths.status).get("phase", ""))
    if config.rank_in_site == 0 and phase.startswith(WAITING):
        status_of(config, paths).end(code)  # the trainer ended before it said more
    client = client_of(config)

    def tell() -> bool:
        with contextlib.suppress(Unreachable):
            client.say(**who(config), over=code, why=why)
            return True
        return False

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(CannotServe):  # the launcher does, once it has started
            stack.enter_context(registry_of(config))
        wait(tell, LINGER_S, BEAT_S)


def meet(config: Config, processes: int, is_stopped: Callable[[], bool]) -> Verdict | None:
    """Meet all other nodes of a run that is not done, unless told to stop.

    Returns:
        How all nodes end, or None where they start torchrun together.
    """
    paths = RunPaths.of_node(config, ROOT)
    reason = find_end(config, paths)
    if reason:
        say(f"rendezvous: {reason}")
        return Verdict(DONE, reason)
    state = None
    if config.rank_in_site == 0:
        secret = run_secret.describe_file(config, sys.stdout.isatty())
        if secret and not in_pod():
            say(f"rendezvous: {secret}")
        state = status_of(config, paths)
    facts = facts_of(config, processes)
    verdict = call(client_of(config), facts, config.start_timeout_s, is_stopped, state)
    if verdict.code == DONE:
        say("rendezvous: all nodes have joined")
        return None
    if state:
        state.end(verdict.code)
    say(f"rendezvous: {verdict.why}")
    return verdict


# ---- What nodes know of themselves


def who(config: Config) -> Facts:
    host = socket.gethostname()
    return {
        "node_rank": config.rank_in_site,
        "host": host,
        "launcher": [host, os.getpid()],
        "nodes": config.site_nodes,
    }


def facts_of(config: Config, processes: int) -> Facts:
    """Say who this is, and what must be equal on all nodes: versions, code and settings."""
    settings: Facts = {"RUN_NAME": config.run_name, "NPROC": processes}
    for name, value in config.stored().items():
        # The first node may have taken these from its run folder. The trainers agree on them.
        is_fitted = config.model and name in FITTED
        if SETTINGS[name].resume != FREE and name not in settings and not is_fitted:
            settings[name] = value
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit and git("status", "--porcelain", "-uno"):
        commit += " with changes"
    source = hashlib.sha256()
    for room in ROOMS_THAT_TRAIN:
        for path in sorted((ROOT / room).rglob("*.py")):
            source.update(path.read_bytes())
    return who(config) | {
        "torch": version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "commit": commit,
        "source": source.hexdigest()[:12],
        "settings": settings,
    }


def status_of(config: Config, paths: RunPaths) -> Status:
    """Return the run's status. That of a run which has nothing left to do stays as it is."""
    is_done = status.is_done(status.read(paths.status), config.last_step)
    return status.of_run(config, paths, active=not is_done)


def find_end(config: Config, paths: RunPaths) -> str:
    """Say that the run has nothing left to do, if all nodes see that; "" otherwise.

    They share the folder if each has its log in it. A checkpoint of the last step is not enough:
    the evaluation after it needs all nodes.
    """
    last = status.read(paths.status)
    logs = [paths.node_log(node) for node in range(config.site_nodes)]
    if not status.is_done(last, config.last_step) or not all(log.exists() for log in logs):
        return ""
    made = f"{last['step']} of {config.last_step} steps"
    return f"run {config.run_name} is done: {made}, in {paths.folder}"
