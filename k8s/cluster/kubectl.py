"""kubectl, called with the user's own context and rights; and what it complains of, as a sentence with a way out.

Nothing here talks to a cluster in another way. What is secret goes in on standard input: command lines are seen by
everyone on the machine.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

BAD_SETTING, UNAVAILABLE, BAD_ENVIRONMENT = (
    64,
    69,
    78,
)  # exit codes, as record/exit_codes.py has them
PATIENCE_S = 60.0  # for a call that asks or applies
ANSWER_S = 10  # for the server's first answer, so that one that is out of reach is soon known
KEPT_TO: ContextVar[tuple[str, ...]] = ContextVar(
    "KEPT_TO", default=()
)  # flags that keep all calls to one context


class Refused(Exception):
    """It cannot be done as it stands: an exit code, and a sentence for each reason that says what to do.

    kind: "rights" where the user may not do it, "" else.
    """

    def __init__(self, code: int, *sentences: str, kind: str = ""):
        self.code, self.sentences, self.kind = code, list(sentences), kind
        super().__init__("\n".join(sentences))

    @property
    def sentence(self) -> str:
        return "\n".join(self.sentences)


@dataclasses.dataclass(frozen=True)
class Done:
    """How a call ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """kubectl's last words, without its own prefixes, on one line."""
        lines = [
            line.strip()
            for line in (self.err or self.out).splitlines()
            if line.strip()
            and not re.match(r"[EWI]\d{4} ", line)
            and not line.lower().startswith("warning:")
        ]
        text = re.sub(r"^([Ee]rror: )+", "", " ".join(lines))
        return re.sub(r"^Error from server( \(\w+\))?: ", "", text) or f"code {self.code}"


@dataclasses.dataclass(frozen=True)
class Context:
    """Which cluster kubectl talks to, and where in it."""

    name: str
    namespace: str
    server: str


@contextlib.contextmanager
def keeping_to(here: Context) -> Iterator[None]:
    """Within, all calls go to this context, whatever `kubectl config use-context` says meanwhile."""
    token = KEPT_TO.set(("--context", here.name) if here.name else ())
    try:
        yield
    finally:
        KEPT_TO.reset(token)


def program() -> str:
    """The path of kubectl: that of PATH, else the one that make setup-dev installs."""
    beside = Path(sys.prefix) / "bin" / "kubectl"
    found = shutil.which("kubectl") or (str(beside) if beside.exists() else None)
    if not found:
        raise Refused(
            BAD_ENVIRONMENT, "there is no kubectl on PATH; `make setup-dev` puts one beside python"
        )
    return found


def kubectl(*args: str, stdin: str | None = None, timeout: float = PATIENCE_S) -> Done:
    """Run `kubectl args...` and wait for it. What comes on its standard output and error is kept, not shown."""
    try:
        done = subprocess.run(
            [program(), *KEPT_TO.get(), *args],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL if stdin is None else None,
        )
    except subprocess.TimeoutExpired:
        raise Refused(
            UNAVAILABLE,
            f"the cluster has not answered `kubectl {' '.join(args[:2])}` in {timeout:.0f} s; "
            "see whether `kubectl get pods` answers, and try again",
        ) from None
    return Done(done.returncode, done.stdout, done.stderr)


def start(*args: str, **options: Any) -> subprocess.Popen:
    """Start `kubectl args...` for what streams: logs that are followed, archives. The options are Popen's."""
    return subprocess.Popen(
        [program(), *KEPT_TO.get(), *args], **{"stdin": subprocess.DEVNULL, **options}
    )


def succeed(*args: str, stdin: str | None = None, timeout: float = PATIENCE_S) -> str:
    """The standard output of `kubectl args...`; Refused, in words, where it fails."""
    done = kubectl(*args, stdin=stdin, timeout=timeout)
    if done.code:
        raise refusal(done, args)
    return done.out


def refusal(done: Done, args: tuple[str, ...] = ()) -> Refused:
    """What kubectl complains of, as a sentence and with the next command to type."""
    said = done.complaint
    if re.search(
        r"connection to the server .* was refused|dial tcp|no such host|i/o timeout|"
        r"context deadline exceeded|Unable to connect|TLS handshake|Client\.Timeout",
        said,
    ):
        return unreachable(said)
    if re.search(
        r"Unauthorized|must be logged in|provide credentials|getting credentials|expired", said
    ):
        return Refused(
            BAD_ENVIRONMENT,
            f"the cluster does not know you ({short(said)}); fetch a new kubeconfig from "
            "it, or choose another context: kubectl config use-context NAME",
        )
    if found := re.search(r'namespaces? "([^"]+)" not found', said):
        return Refused(BAD_ENVIRONMENT, no_namespace(found[1]))
    if found := re.search(
        r'cannot (\w+) resource "([^"]+)".*?(?: in the namespace "([^"]+)"|$)', said
    ):
        where = f" in namespace {found[3]}" if found[3] else ""
        return Refused(
            BAD_ENVIRONMENT,
            f"you may not {found[1]} {found[2]}{where}; ask its administrator for that "
            "right, or choose another NAMESPACE or context: kubectl config get-contexts",
            kind="rights",
        )
    if found := re.search(r"exceeded quota: .*", said):
        return Refused(
            BAD_ENVIRONMENT,
            f"the namespace's quota is used up ({short(found[0])}); see it with kubectl "
            "describe quota, and ask for less, or for more quota",
        )
    return Refused(
        BAD_ENVIRONMENT,
        f"kubectl {' '.join(args[:2])}: {short(said)}; kubectl describes it further with -v=6"
        if args
        else f"kubectl: {short(said)}",
    )


def unreachable(said: str) -> Refused:
    """The cluster does not answer."""
    try:
        here = context()
    except Refused as refused:
        return refused
    return Refused(
        UNAVAILABLE,
        f"the cluster of context {here.name} does not answer at {here.server} ({short(said)}); "
        "mend the connection, or choose another context: kubectl config use-context NAME (kubectl config "
        "get-contexts lists them)",
    )


def no_namespace(name: str) -> str:
    return (
        f"NAMESPACE={name}: there is no such namespace in this cluster; choose one of yours with NAMESPACE, or "
        f"another context with kubectl config use-context NAME, or make it: kubectl create namespace {name}"
    )


def short(text: str, most: int = 300) -> str:
    """At most so many characters of what another program said."""
    return text if len(text) <= most else text[: most - 3] + "..."


def context() -> Context:
    """The context in use; Refused where there is none."""
    done = kubectl(
        "config", "view", "--minify", "-o", "json"
    )  # certificates and tokens are left out by kubectl
    if done.code:
        raise Refused(
            BAD_ENVIRONMENT,
            f"kubectl knows no cluster to talk to ({short(done.complaint)}); set KUBECONFIG "
            "to the file that your cluster gave you, or choose a context: kubectl config use-context NAME",
        )
    view = json.loads(done.out)
    chosen, cluster = (view.get(part) or [{}] for part in ("contexts", "clusters"))
    return Context(
        view.get("current-context", ""),
        (chosen[0].get("context") or {}).get("namespace") or "default",
        (cluster[0].get("cluster") or {}).get("server", ""),
    )


def reach() -> Context:
    """The context in use, of a cluster that has just answered; Refused, in words, where it does not."""
    here = context()
    with keeping_to(here):
        done = kubectl("get", "--raw", "/version", f"--request-timeout={ANSWER_S}s")
    if done.code and not re.search(
        r"[Ff]orbidden", done.err
    ):  # who may not see its version still reached it
        raise refusal(done, ("get", "--raw"))
    return here
