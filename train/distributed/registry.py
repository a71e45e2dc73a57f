"""The registry: who takes part in a run, what each says of itself, and what each is told.

    PUT /1   {"token": ..., "beat": 12, ...}   member 1 is there; again every second or two
    GET /members                               what all have said, and how many seconds ago

Node 0's launcher serves it for nodes (rendezvous.py), `make lighthouse` for sites
(diloco/site_registry.py), and node 0 of `make net-probe` for what it measures. Requests are signed
(signed_http.py). Only the server's clock counts. Standard library only.
"""

import dataclasses
import http.client
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from record.exit_codes import BAD_DATA, BAD_SETTING
from settings.addresses import join_address
from settings.json_file import parse_object
from train.distributed.signed_http import (
    FindSecret,
    Requests,
    SignedServer,
    WrongSecret,
    is_same,
    listen,
    sign,
    signed_request,
)

WAITING = "waiting for peers"  # phase of a run, followed by "i/n"
CALL_S = 5.0  # for the registry to answer
LONGEST_ANSWER = 2**24  # bytes; what a thousand nodes say of themselves takes 3 MB
LOOK_S = 0.2  # between two looks at it
MEMBER = re.compile(r"/([0-9]{1,5})")

Facts = dict[str, Any]


class Verdict(NamedTuple):
    """What all nodes do: 0 starts torchrun, anything else is the exit code. With the reason."""

    code: int
    why: str = ""


class Unreachable(Exception):
    """The registry does not answer. The message says where it should be, and what to look at."""


class NotAdmitted(Unreachable):
    """It answers, but not to this machine, which does not know the run's secret."""


@dataclasses.dataclass
class Member:
    """The process that speaks for a member, as it was heard last.

    Attributes:
        rival: host of another process that speaks for this member, too.
    """

    facts: Facts
    address: str
    since: float
    heard_at: float
    rival: str = ""


class Members:
    """What the server knows. All times are in seconds, of one clock."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.lock = threading.Lock()  # requests are answered in threads
        self.turns: dict[str, int] = {}  # token of a process -> how often it took a place

    def hear(self, name: int, facts: Facts, address: str, now: float) -> None:
        """Note what a process says. Messages may be lost, or overtake each other.

        Another process than before takes the place, since that one is dead as a rule. The last
        word of a dead one may come late; of two that take the place three times each, both live.
        """
        known = self.members.get(name)
        token = facts["token"]
        if known and known.facts["token"] == token:
            if facts["beat"] > known.facts["beat"]:
                known.facts = facts
                known.heard_at = now
            return
        self.turns[token] = self.turns.get(token, 0) + 1
        member = Member(facts, address, now, now)
        if known and min(self.turns[token], self.turns[known.facts["token"]]) > 2:
            member.rival = f"{known.facts['host']} ({known.address})"
        self.members[name] = member

    def reply(self, name: int, now: float) -> Facts:
        """Return what a member is told whenever it speaks."""
        return {}

    def describe(self, now: float) -> Facts:
        """Return what GET /members brings: facts by name, with address and age in seconds."""
        described = {}
        for name, member in self.members.items():
            presence = {"address": member.address, "age_s": now - member.heard_at}
            described[str(name)] = member.facts | presence
        return described


class Answers(Requests):
    """Requests to a registry."""

    members: Members  # of the server

    def respond(self, body: bytes) -> None:
        address = str(self.client_address[0]).removeprefix("::ffff:")
        member = MEMBER.fullmatch(self.path)
        with self.members.lock:
            now = time.monotonic()
            if member:
                self.members.hear(int(member[1]), parse_object(body), address, now)
                answer = self.members.reply(int(member[1]), now)
            else:
                answer = self.members.describe(now)
        text = json.dumps(answer).encode()
        self.answer(200, text, Signature=sign(self.secret, self.signature, text))


def serve(members: Members, host: str, port: int, find_secret: FindSecret) -> SignedServer:
    """Serve in a thread, on loopback if `host` is that. Raises OSError."""
    answers = type("AnswersHere", (Answers,), {"members": members})
    return SignedServer(listen(host, port), answers, find_secret)


class Client:
    """What a process says to a registry for a member, and hears.

    Args:
        advice: what to do if this machine does not know the secret.
    """

    def __init__(self, host: str, port: int, name: int, find_secret: FindSecret, advice: str):
        self.address = (host, port)
        self.where = join_address(host, port)
        self.name = name
        self.find_secret = find_secret
        self.advice = advice
        self.said: Facts = {"host": socket.gethostname(), "token": uuid.uuid4().hex, "beat": 0}

    def ask(self, method: str, path: str, body: bytes = b"") -> Facts:
        """Return the answer. Raises Unreachable."""
        request = signed_request(self.address, self.find_secret, method, path, body, CALL_S)
        try:
            with request as (response, secret, signature):
                text = response.read(LONGEST_ANSWER)
            if not is_same(response.headers.get("Signature"), sign(secret, signature, text)):
                raise WrongSecret
        except WrongSecret:
            raise NotAdmitted(f"{self.where} refuses this machine: {self.advice}") from None
        except ConnectionRefusedError:
            problem = "refuses connections: nothing is started there yet, or the address is wrong"
        except TimeoutError:
            problem = f"does not answer in {CALL_S:.0f} s: a firewall, or another network's address"
        except OSError as error:
            problem = (
                f"cannot be reached ({error.strerror or error}): check the address and the network"
            )
        except http.client.HTTPException:
            problem = "is another program's port: choose another one"
        else:
            return parse_object(text)
        raise Unreachable(f"{self.where} {problem}")

    def say(self, **facts: Any) -> Facts:
        """Say that this member lives, and what is new. Raises Unreachable."""
        self.said |= facts | {"beat": self.said["beat"] + 1}
        return self.ask("PUT", f"/{self.name}", json.dumps(self.said).encode())

    def read(self) -> dict[int, Facts]:
        """Return what all members have said. Raises Unreachable."""
        return {int(name): facts for name, facts in self.ask("GET", "/members").items()}

    def listen_for(
        self, patience_s: float, enough: Callable[[dict[int, Facts]], object]
    ) -> dict[int, Facts]:
        """Return the members that speak from now on, once they are enough. Raises Unreachable."""
        began = time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            members = self.read()
            heard = {name: members[name] for name in members if members[name]["age_s"] < elapsed}
            if enough(heard) or elapsed > patience_s:
                return heard
            time.sleep(LOOK_S)


def named(facts: Facts) -> str:
    return f"node {facts['node_rank']} ({facts['host']})"


REMEDIES = {
    "torch": "make setup with one TORCH_BACKEND on all",
    "python": "make setup with one PYTHON on all",
    "commit": "check out the same commit on all, without changes",
    "source": "check out the same commit on all, without changes",
    # Of sites, whose trainers know more:
    "data": "copy DATA_DIR from one to the other",
    "processes": "start as many at all",
}


def differences(first: Facts, other: Facts) -> list[Verdict]:
    """Say why two nodes cannot train together. Versions come first: settings follow from them."""
    problems = []
    names = dict.fromkeys([*REMEDIES, *first["settings"], *other["settings"]])
    for name in names:
        mine = first["settings"].get(name, first.get(name))
        theirs = other["settings"].get(name, other.get(name))
        is_unknown = name == "commit" and not (mine and theirs)  # an image has no history
        if mine != theirs and not is_unknown:
            both = f"{name}={mine} on {named(first)} and {name}={theirs} on {named(other)}"
            code = BAD_DATA if name in REMEDIES else BAD_SETTING
            remedy = REMEDIES.get(name, "give all nodes the same")
            problems.append(Verdict(code, f"{both}: {remedy}"))
    return problems
