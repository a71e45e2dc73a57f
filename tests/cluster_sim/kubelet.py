"""The kubelet: runs each pod's command as processes of this machine, and reports what becomes of them.

As Kubernetes' own, of pods with one container: scheduling, image, volumes and environment before the start; SIGTERM
and, after the grace period, SIGKILL at the end; exit codes, logs, exec, evictions, deadlines; with restartPolicy
OnFailure one that failed is started again at once. Left out: probes, limits on memory and disk, a root that is
read-only, other users, restartPolicy Always.
"""

import collections
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster_sim import rules, scheduling
from tests.cluster_sim.containers import Image, NotYet, Sandbox, mark, members
from tests.cluster_sim.kinds import kind_of
from tests.cluster_sim.store import Key, Refusal, Thing

if TYPE_CHECKING:
    from tests.cluster_sim.cluster import Cluster

LOOK_S = 0.03  # between two looks at what the processes do
AGAIN_S = 0.3  # between two tries to start a pod
MESSAGE_BYTES = 2048  # of a log, at most, as the last word of a container that failed
MESSAGE_LINES = 80


@dataclasses.dataclass
class Running:
    """A pod whose processes are there."""

    key: Key
    uid: str
    process: subprocess.Popen[bytes]
    sandbox: Sandbox
    log: Path
    since: float
    told: float | None = None  # when it got SIGTERM
    reason: tuple[str, str] = ("", "")  # of its end, if not its own
    restarts: int = 0
    # held by who kills its processes: else one that is started again meanwhile would be taken for one of them
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Ports(collections.defaultdict[str, int]):
    """A free port of this machine for each address of a first pod, always the same.

    A pod listens there long after it was found free. So it is none of those that the kernel gives to whoever asks for
    any (from 32768 on), and each of the processes that run tests side by side has a hundred of its own.
    """

    FIRST, EACH, SLOTS = 15000, 100, 170

    def __init__(self) -> None:
        super().__init__()
        self.second: set[int] = set()  # those that belong to a pair

    def __missing__(self, address: str) -> int:
        return self.found(address, 1)

    def pair(self, address: str) -> int:
        """Likewise, of a port whose next is free too."""
        return self[address] if address in self else self.found(address, 2)

    def found(self, address: str, count: int) -> int:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
        slot = os.getppid() + int(worker) if worker else os.getpid()  # workers have one parent
        first = self.FIRST + slot % self.SLOTS * self.EACH
        for port in range(first, first + self.EACH):
            wanted = range(port, port + count)
            if {*wanted} & {*self.values(), *self.second}:
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for one in wanted:
                    stack.enter_context(socket.create_server(("127.0.0.1", one)))
                self[address] = port
                self.second |= {*wanted}
                return port
        raise AssertionError(f"none of the ports {first} to {first + self.EACH - 1} is free")


class Kubelet:
    """Runs in a thread of its own until close(), which ends all pods and raises what went wrong in it."""

    def __init__(
        self,
        cluster: "Cluster",
        images: Iterable[str] | None = None,
        extra: dict[str, str] | None = None,
    ):
        self.cluster, self.store, self.folder = cluster, cluster.store, cluster.folder / "kubelet"
        self.images = None if images is None else set(images)  # those that can be pulled; None: all
        self.extra = extra or {}  # to the environment of every container
        self.of_nodes: dict[str, dict[str, str]] = {}  # likewise, of those on a node
        self.image = Image(self.folder)
        self.ports = Ports()
        self.running: dict[str, Running] = {}
        self.tried: dict[str, float] = {}
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.store.holds = lambda pod: pod["metadata"]["uid"] in self.running
        cluster.exec = self.exec
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def claim(self, name: str) -> Path:
        """The folder that is the volume of a claim, whether it is made already or not."""
        place = self.folder / "claims" / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def close(self) -> None:
        self.stopped.set()
        self.thread.join(10)
        for pod in self.running.values():
            kill_all(pod)
        if self.error is not None:
            raise self.error

    # ---- What tests do to pods
    def kill(self, name: str) -> None:
        """What the kernel does to a pod that is out of memory: SIGKILL to all of its processes."""
        running = self.of_name(name)
        with running.lock:
            kill_all(running)

    def evict(self, name: str) -> None:
        """What the scheduler does to a pod that one of higher priority displaces."""
        running = self.of_name(name)
        self.report(
            running.key,
            condition={
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "PreemptionByScheduler",
                "message": "default-scheduler: preempting to accommodate a higher priority pod",
                "lastTransitionTime": rules.now(),
            },
        )
        self.store.delete(running.key)

    def of_name(self, name: str) -> Running:
        return next(pod for pod in list(self.running.values()) if pod.key[2] == name)

    def exec(
        self, name: str, container: str, argv: list[str], stdin: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        """What kubectl exec runs: beside the pod's own command, with the same environment."""
        sandbox = self.of_name(name).sandbox
        try:
            done = subprocess.run(
                [sandbox.paths.here(word) for word in argv],
                cwd=sandbox.folder,
                input=stdin,
                env=sandbox.environment,
                capture_output=True,
                check=False,
                timeout=120,
            )
        except FileNotFoundError:
            return (
                127,
                b"",
                f'exec failed: "{argv[0]}": executable file not found in $PATH\n'.encode(),
            )
        return done.returncode, done.stdout, done.stderr

    # ---- The loop
    def work(self) -> None:
        try:
            while not self.stopped.wait(LOOK_S):
                there = {pod["metadata"]["uid"]: pod for pod in self.store.list(kind_of("Pod"))}
                for uid, pod in there.items():
                    if uid in self.running:
                        self.look_after(self.running[uid], pod)
                    elif (
                        pod["status"].get("phase") == "Pending"
                        and "deletionTimestamp" not in pod["metadata"]
                        and (time.monotonic() >= self.tried.get(uid, 0))
                    ):
                        self.tried[uid] = time.monotonic() + AGAIN_S
                        self.start(pod)
                for uid in self.running.keys() - there.keys():  # deleted by force
                    kill_all(self.running.pop(uid))
        except BaseException as error:
            self.error = error

    def start(self, pod: Thing) -> None:
        """From Pending to Running, as far as it gets."""
        meta, spec = pod["metadata"], pod["spec"]
        key = (kind_of("Pod"), meta["namespace"], meta["name"])
        claims = {
            claim["metadata"]["name"]: claim
            for claim in self.store.list(kind_of("PersistentVolumeClaim"), meta["namespace"])
        }
        node, problem = scheduling.place(
            pod, self.store.list(kind_of("Node")), self.store.list(kind_of("Pod")), claims
        )
        if problem:
            self.cluster.event(pod, "Warning", "FailedScheduling", problem)
            return self.report(
                key,
                condition={
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": problem,
                },
            )
        spec["nodeName"] = node
        self.report(key, node=node, condition={"type": "PodScheduled", "status": "True"})
        container = spec["containers"][0]
        folder = self.folder / "pods" / meta["uid"]
        try:
            if self.images is not None and container["image"] not in self.images:
                raise NotYet(
                    "ErrImagePull",
                    f'failed to pull and unpack image "{container["image"]}": not found',
                )
            sandbox = Sandbox(
                self.cluster,
                pod,
                self.image,
                folder,
                self.folder / "claims",
                self.ports,
                self.extra | self.of_nodes.get(node, {}),
            )
        except NotYet as why:
            self.cluster.event(pod, "Warning", "Failed", str(why))
            return self.report(key, state={"waiting": {"reason": why.reason, "message": str(why)}})
        argv = sandbox.command()
        log = folder / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        name, _, uid = mark(meta["uid"]).partition("=")
        sandbox.environment[name] = uid
        try:
            process = begin(sandbox, argv, log)
        except OSError as error:
            return self.report(
                key,
                phase="Failed",
                state={
                    "terminated": {
                        "exitCode": 128,
                        "reason": "StartError",
                        "message": str(error),
                        "finishedAt": rules.now(),
                    }
                },
            )
        self.cluster.log_files[meta["name"]] = log
        self.running[meta["uid"]] = Running(
            key, meta["uid"], process, sandbox, log, time.monotonic()
        )
        self.report(key, phase="Running", state={"running": {"startedAt": rules.now()}})
        self.cluster.event(pod, "Normal", "Started", f"Started container {container['name']}")

    def look_after(self, running: Running, pod: Thing) -> None:
        """End a pod that is to go or takes too long, and report one that has ended."""
        code, meta = running.process.poll(), pod["metadata"]
        if code is not None:
            if code and pod["spec"]["restartPolicy"] == "OnFailure" and running.told is None:
                return self.again(running, code)
            return self.finish(running, pod, code if code >= 0 else 128 - code)
        deadline = pod["spec"].get("activeDeadlineSeconds")
        if running.told is None and deadline and time.monotonic() - running.since > deadline:
            running.reason = (
                "DeadlineExceeded",
                "Pod was active on the node longer than the specified deadline",
            )
        if running.told is None and ("deletionTimestamp" in meta or running.reason[0]):
            running.told = time.monotonic()
            self.cluster.event(
                pod, "Normal", "Killing", f"Stopping container {running.sandbox.container['name']}"
            )
            os.kill(running.process.pid, signal.SIGTERM)  # it alone, as by tini without -g
        grace = meta.get("deletionGracePeriodSeconds", pod["spec"]["terminationGracePeriodSeconds"])
        if running.told is not None and time.monotonic() - running.told > grace:
            kill_all(running)
        return None

    def again(self, running: Running, code: int) -> None:
        """Start a container that has failed once more, in the same pod."""
        with running.lock:
            kill_all(running)
        running.process = begin(running.sandbox, running.sandbox.command(), running.log)
        running.restarts += 1
        self.report(
            running.key, restarts=running.restarts, state={"running": {"startedAt": rules.now()}}
        )

    def finish(self, running: Running, pod: Thing, code: int) -> None:
        """Report the end. What the first process left behind ends with it."""
        kill_all(running)
        policy, message = running.sandbox.container["terminationMessagePolicy"], ""
        if policy == "FallbackToLogsOnError" and code:
            lines = (
                running.log.read_bytes()[-MESSAGE_BYTES:]
                .decode(errors="replace")
                .splitlines(keepends=True)
            )
            message = "".join(lines[-MESSAGE_LINES:])
        self.report(
            running.key,
            phase="Failed" if code or running.reason[0] else "Succeeded",
            why=running.reason,
            state={
                "terminated": {
                    "exitCode": code,
                    "reason": "Error" if code else "Completed",
                    "message": message,
                    "startedAt": pod["status"].get("startTime", rules.now()),
                    "finishedAt": rules.now(),
                }
            },
        )
        del self.running[running.uid]
        if "deletionTimestamp" in pod["metadata"]:
            with contextlib.suppress(Refusal):  # somebody was faster
                self.store.delete(running.key, grace=0)

    def report(
        self,
        key: Key,
        *,
        phase: str = "",
        node: str = "",
        state: Thing | None = None,
        condition: Thing | None = None,
        why: tuple[str, str] = ("", ""),
        restarts: int = 0,
    ) -> None:
        """Write into a pod's status, if it is still there."""
        with self.store.changed:
            try:
                pod = self.store.find(*key)
            except Refusal:
                return
            status: dict[str, Any] = pod["status"]
            if node:
                pod["spec"]["nodeName"] = node
            if phase:
                status["phase"] = phase
                status.setdefault("startTime", rules.now())
                status |= {"podIP": "127.0.0.1", "hostIP": "127.0.0.1"}
            if why[0]:
                status |= {"reason": why[0], "message": why[1]}
            if state:
                status["containerStatuses"] = [
                    {
                        "name": container["name"],
                        "image": container["image"],
                        "imageID": "",
                        "restartCount": restarts,
                        "ready": "running" in state,
                        "started": "running" in state,
                        "state": state,
                    }
                    for container in pod["spec"]["containers"]
                ]
                ended = {"reason": "PodCompleted"} if phase == "Succeeded" else {}
                condition = condition or {
                    "type": "Ready",
                    "status": str("running" in state),
                    **ended,
                }
            if condition:
                status["conditions"] = [
                    c for c in status.get("conditions", []) if c["type"] != condition["type"]
                ]
                status["conditions"].append(condition)
            self.store.update(key, pod, "kubelet", system=True)


def begin(sandbox: Sandbox, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a container's command; what it says goes behind what is in the log."""
    program = shutil.which(argv[0], path=sandbox.environment["PATH"]) or argv[0]
    with open(log, "ab") as out:
        return subprocess.Popen(
            [program, *argv[1:]],
            cwd=sandbox.folder,
            env=sandbox.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_all(running: Running) -> None:
    """SIGKILL to every process of a pod; those that it starts meanwhile included."""
    while left := members(running.uid):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.poll()
        time.sleep(0.005)
