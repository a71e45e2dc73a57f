"""The volume of a run, read by commands in a pod: one of the run's own while there is one, else a reader pod.

The reader pod is made when it is needed, ends by itself after a quarter of an hour (k8s/manifests/reader), and is removed at the
end, after Ctrl-C and failure too. One that a killed command has left is used if it runs, else replaced. A pod may end
while it is read from: `place` finds or makes the next.
"""

import json
import re
import signal
import subprocess
import threading
import time
from types import TracebackType

from k8s.cluster import render
from k8s.cluster.image_ref import image_of
from k8s.cluster.job_spec import IN_POD, VOLUME_AT
from k8s.cluster.kubectl import Done, Refused
from k8s.cluster.target import DATA, Target, Thing, check_namespace, container_of, runs
from k8s.cluster.where import Place
from k8s.cluster.words import seconds_of, trouble
from record.bad_nodes import FOLDER, LIST_COMMAND, BadNode, parse
from settings.terminal import complain

START_S = (
    600.0  # for a reader pod to start: its image is large, where the node does not have it yet
)
HOPELESS_S = 20.0  # what cannot mend itself (no such image) is given up after this time
LEFT_S = 120.0  # a reader pod that was left behind must have so long to live, to be used
POLL_S = 1.0
BAD_NODES_AT = f"{IN_POD['RUNS_DIR']}/{FOLDER}"
LIVES_S = 900.0  # as k8s/manifests/reader/pod.yaml has it; after that it is over anyway


class Volume:
    """A run's folder on the volume. Use as `with Volume(...) as volume`."""

    def __init__(
        self,
        place: Place,
        target: Target,
        start_s: float = START_S,
        told: bool = True,
        writes: bool = False,
    ):
        self.writes = writes
        self.origin, self.target, self.start_s, self.told = place, target, start_s, told
        self.folder = f"{VOLUME_AT}/runs/{place.paths.name}"
        # A reader that is there already cannot write.
        self.reader = f"{target.job_name}-{'writer' if writes else 'reader'}"
        self.pod: tuple[str, str] | None = None  # name and container that commands run in
        self.made = False

    def __enter__(self) -> "Volume":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the reader pod. A second Ctrl-C does not keep it."""
        if not self.made:
            return
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            done = self.target.call(
                "delete", "pod", self.reader, "--ignore-not-found", "--wait=false"
            )
            if done.code:
                say(
                    f"pod {self.reader} could not be removed ({done.complaint}); it ends by itself after a quarter of "
                    f"an hour, or with: kubectl delete pod {self.reader} {' '.join(self.target.flags)}"
                )
            self.made = False
        except Refused as refused:
            say(
                f"pod {self.reader} is left behind and ends by itself after a quarter of an hour ({refused.sentence})"
            )
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

    # ---- Commands

    def run(self, *argv: str, timeout: float = 120.0) -> Done:
        """Run a command where the volume is."""
        pod, container = self.place()
        return self.target.execute(pod, container, *argv, timeout=timeout)

    def ask(self, *argv: str, timeout: float = 120.0) -> str:
        """What a command prints. Raises Refused where it fails; tried again once, in a pod that lives."""
        for last in (False, True):
            done = self.run(*argv, timeout=timeout)
            if done.code == 0:
                return done.out
            if last or not self.lost():
                break
        raise self.refused(done)

    def content(self, *argv: str, timeout: float = 120.0) -> bytes:
        """What a command prints, as bytes, whether or not it was all. Raises Refused where it fails."""
        pod, container = self.place()
        process = self.target.start(
            "exec",
            pod,
            "-c",
            container,
            "--",
            *argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = b"", b"it does not answer"
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise self.refused(Done(process.returncode, "", err.decode(errors="replace")))
        return bytes(out)

    def bad_nodes(self) -> list[BadNode]:
        """The nodes that pods have found bad. Raises Refused."""
        return parse(self.ask("sh", "-c", LIST_COMMAND, "sh", BAD_NODES_AT))

    def refused(self, done: Done) -> Refused:
        """Why a command in the pod failed, as a sentence."""
        said = done.complaint
        if re.search(r"No such file or directory|can't cd to", said):
            return self.no_run()
        if re.search(r'cannot create resource "pods/exec"', said):
            return Refused(
                78,
                f"you may not run commands in pods of {self.target.words}, by which the volume is read; "
                "ask its administrator for the right to create pods/exec",
            )
        return Refused(
            69,
            f"the volume could not be read through pod {self.pod and self.pod[0]} ({said}); try again",
        )

    def no_run(self) -> Refused:
        return Refused(
            78,
            f"there is no run {self.origin.paths.name} on volume {self.origin.value('volume')} of "
            f"{self.target.words}: it has written nothing yet, or RUN_NAME or VOLUME is another; make "
            "status says what its pods do",
        )

    # ---- The pod

    def place(self) -> tuple[str, str]:
        """A pod that runs and has the volume, and its container. Raises Refused."""
        if self.pod is None:
            live = [pod for pod in self.target.pods() if runs(pod)] or [
                pod for pod in self.target.pods(DATA) if runs(pod)
            ]
            self.pod = (
                (live[0]["metadata"]["name"], "trainer")
                if live
                else (self.read_through(), "reader")
            )
        return self.pod

    def lost(self) -> bool:
        """Forget the pod if it runs no more; whether that is so."""
        if self.pod is None:
            return True
        found = self.target.get("pod", self.pod[0])
        if found is None or not runs(found):
            self.pod = None
        return self.pod is None

    def read_through(self) -> str:
        """Have a reader pod that runs."""
        self.check_volume()
        before = self.target.get("pod", self.reader)
        if before and not self.is_usable(before):
            self.target.ask(
                "delete",
                "pod",
                self.reader,
                "--ignore-not-found",
                "--grace-period=1",
                "--wait=true",
                "--timeout=120s",
                timeout=150,
            )
            before = None
        self.made = True  # also where another has left it: it is removed at the end
        if before is None:
            self.create()
        self.wait()
        return self.reader

    def is_usable(self, pod: Thing) -> bool:
        """Whether a pod that was left behind will do: it runs, and for a while yet."""
        left = LIVES_S - (time.time() - seconds_of(pod["metadata"].get("creationTimestamp")))
        return runs(pod) and left > LEFT_S

    def create(self) -> None:
        sent = str(self.origin.sent.get("image") or "")
        image = sent if sent and "IMAGE" not in self.origin.given else image_of(self.origin.config)
        c = self.origin.config.replace(
            namespace=self.target.namespace,
            job_name=self.target.job_name,
            volume=self.origin.value("volume"),
        )
        pod = render.reader_pod(c, image, self.reader)
        if self.writes:
            for mount in pod["spec"]["containers"][0]["volumeMounts"]:
                mount["readOnly"] = False
        if self.told:
            say(
                f"no pod of the run is there to read its volume through; starting {self.reader}, which takes a moment"
            )
        done = self.target.call("create", "-f", "-", stdin=json.dumps(pod))
        if done.code and "AlreadyExists" not in done.err:  # another command was faster
            self.made = False
            self.target.ask("get", "pods")  # says it in words, where it is rights or reach
            raise Refused(
                78,
                f"pod {self.reader}, to read the volume through, cannot be made in {self.target.words} "
                f"({done.complaint}); ask its administrator for the right to create pods, or look while the "
                "run's own pods live",
            )

    def wait(self) -> None:
        """Until the reader pod runs. Raises Refused with what keeps it."""
        began = time.monotonic()
        while True:
            pod = self.target.get("pod", self.reader)
            if pod is None:
                raise Refused(
                    69,
                    f"pod {self.reader}, to read the volume through, was removed by somebody; try again",
                )
            if runs(pod):
                return
            waited, wrong = time.monotonic() - began, trouble(pod)
            reason = str((container_of(pod).get("waiting") or {}).get("reason", ""))
            hopeless = bool(wrong) and (
                reason not in ("", "ContainerCreating") or "terminated" in container_of(pod)
            )
            if waited > self.start_s or (hopeless and waited > min(HOPELESS_S, self.start_s)):
                raise Refused(
                    69,
                    f"pod {self.reader}, to read the volume through, did not start in {waited:.0f} s: "
                    f"{wrong or self.last_event() or 'it is still being made'}; try again later, or see "
                    f"kubectl describe pod {self.reader} {' '.join(self.target.flags)}",
                )
            time.sleep(POLL_S)

    def last_event(self) -> str:
        events = self.target.events([self.reader])
        return str(events[-1].get("message", "")) if events else ""

    def check_volume(self) -> None:
        """Raises Refused where there is no such volume."""
        volume = self.origin.value("volume")
        if self.target.get("pvc", volume) is None:
            check_namespace(self.target)
            raise Refused(
                78,
                f"VOLUME={volume}: there is no such claim in {self.target.words}, so nothing of a run "
                "is kept there; make train-8xa100 makes it, and VOLUME names another",
            )


def say(text: str) -> None:
    """A word beside what a command prints."""
    complain(text)
