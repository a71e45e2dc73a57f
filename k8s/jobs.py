"""The targets that look after a run wherever it is: on this machine, or as a Job in a cluster (where.py decides).

    python -m k8s.jobs status|logs|attach|stop|restart|describe|checkpoints|fetch-run|plots|bad-nodes|clear-bad-nodes

Nothing here deletes a run, a volume or a Secret: stop takes away the Job, whose pods save before they leave. Exit
codes: those of README.md; status has the code that ended a Job that failed.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from k8s import checkpoints, describe, fetch_run, logs, slurm
from k8s.cluster import overview, words
from k8s.cluster.job_spec import LIGHTHOUSE, cluster_config
from k8s.cluster.kubectl import BAD_SETTING, Refused
from k8s.cluster.log_lines import own
from k8s.cluster.target import (
    DATA,
    Target,
    Thing,
    check_namespace,
    name_of,
    newest,
    runs,
    sent_by,
    target_of,
    tunes,
)
from k8s.cluster.volume import BAD_NODES_AT, Volume, say
from k8s.cluster.where import Place, decide, refuse_dry_run
from record import status
from record.bad_nodes import CLEAR_COMMAND, BadNode
from record.default_run import choose_run
from record.durable import make_printable
from record.regular_file import limit_silence
from record.run_paths import RunPaths
from settings import ROOT, SettingsError, explain_error
from settings.json_file import read_object
from settings.resolve import show_path

COMMANDS = (
    "status",
    "logs",
    "attach",
    "stop",
    "restart",
    "describe",
    "checkpoints",
    "fetch-run",
    "plots",
    "bad-nodes",
    "clear-bad-nodes",
)
NAMED = ("restart", "fetch-run")  # the run whose settings are given
LEAVE_S = 60  # beyond the grace period, for the cluster to take pods away
LINES = 2000  # of a pod's log, looked through for a checkpoint: hours, with a line of the node every 10 s
SAVED = re.compile(r"\bcheckpoint step_0*(\d+): ")


# ---------------------------------------------------------------------------------------------------
# In the cluster
# ---------------------------------------------------------------------------------------------------


def in_cluster(command: str, place: Place) -> int:
    target = target_of(place, say)
    if command == "status":
        return overview.show(place, target)
    if command in ("logs", "attach"):
        return logs.watching(
            lambda: logs.of_cluster(place, target, command == "attach" or sys.stdout.isatty())
        )
    if command == "stop":
        return stop(place, target)
    if command == "restart":
        return restart(place, target)
    if command == "describe":
        return describe.of_cluster(place, target)
    with Volume(place, target, writes=command == "clear-bad-nodes") as volume:
        if command == "bad-nodes":
            text = describe_bad_nodes(volume.bad_nodes())
        elif command == "clear-bad-nodes":
            volume.ask("sh", "-c", CLEAR_COMMAND, "sh", BAD_NODES_AT)
            text = "The list of bad nodes is empty. Pods still check every node that they start on."
        elif command == "plots":
            text = fetch_run.fetch(volume, place.paths, None, weights=False)
        elif command == "fetch-run":
            text = fetch_run.fetch(volume, place.paths, place.config.step)
        else:
            found, clock = checkpoints.on_volume(volume)
            text = (
                checkpoints.listing(found, "whole (fetch-run compares hashes)", clock)
                if found
                else f"run {place.paths.name} has no checkpoint on volume {place.value('volume')} yet; make status says "
                "how far it is"
            )
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return draw([str(place.paths.folder)]) if command == "plots" else 0


def describe_bad_nodes(nodes: list[BadNode]) -> str:
    if not nodes:
        return "No node is listed as bad."
    rows = [("NODE", "FOUND", "REASON")]
    for node in nodes:
        ago = words.short_time(time.time() - node.found_at)
        rows.append((node.name, f"{ago} ago", words.one_line(make_printable(node.reason))))
    return "\n".join(words.table(rows))


def draw(folders: list[str]) -> int:
    """Curves of these runs; of the settings' run, or of LOG_DIR, where none is named."""
    from analysis import plots  # numpy and what it reads with, for this alone

    return plots.main(folders)


def stop(place: Place, target: Target) -> int:
    """Take the run's Job away, and that of make data, and wait until their pods have saved and left; then the
    lighthouse of its sites, which they need until then."""
    jobs = of_the_run(place, target)
    if not jobs:
        check_namespace(target)
        sys.stdout.write(
            f"Job {target.job_name} is not in {target.words}: it was stopped already, or never sent; runs "
            f"and data on volume {place.value('volume')} are untouched\n"
        )
        return 0
    job, names = jobs.get(""), [name_of(found) for found in jobs.values()]
    grace = max(
        int(
            found["spec"]["template"]["spec"].get("terminationGracePeriodSeconds")
            or place.config.grace_period_s
        )
        for found in jobs.values()
    )
    first = next((pod for pod in newest(target.pods()) if runs(pod)), None) if job else None
    for found in (found for part, found in jobs.items() if part != LIGHTHOUSE or len(jobs) == 1):
        sys.stdout.write(
            f"stopping Job {name_of(found)}: "
            + (
                "it is over; its pods are taken away\n"
                if words.ended(found)
                else f"its pods save and leave, within {grace} s; Ctrl-C stops the waiting, not the stopping\n"
            )
        )
    sys.stdout.flush()
    saved = last_saved(target, name_of(first)) if first else None
    listener = Listener(target, name_of(first)) if first else None
    try:
        for some in filter(
            None,
            (
                [name for name in names if not name.endswith(LIGHTHOUSE)],
                [name for name in names if name.endswith(LIGHTHOUSE)],
            ),
        ):
            delete(target, some, grace + LEAVE_S)
        deadline = (
            time.monotonic() + LEAVE_S
        )  # its Job is taken away with the sites', and its pod behind that
        while LIGHTHOUSE in jobs and target.pods(LIGHTHOUSE) and time.monotonic() < deadline:
            time.sleep(0.5)
    except KeyboardInterrupt:
        sys.stdout.write("\nno longer waiting; the pods go on saving and leave: make status\n")
        return 130
    finally:
        saved = (listener.close() if listener else None) or saved
    if left := [name_of(pod) for part in jobs for pod in target.pods(part)]:
        raise Refused(
            1,
            f"of Job {' and '.join(names)} {', '.join(left)} did not leave in {grace + LEAVE_S} s; their "
            "nodes may be gone: "
            f"kubectl delete pod {left[0]} --grace-period=0 --force {' '.join(target.flags)}",
        )
    if DATA in jobs:
        sys.stdout.write(
            f"Job {name_of(jobs[DATA])} is stopped; the shards that are whole stay on volume "
            f"{place.value('volume')}, and make data WHERE=cluster goes on behind them\n"
        )
    if LIGHTHOUSE in jobs:
        sys.stdout.write(
            f"Job {name_of(jobs[LIGHTHOUSE])}, by which its sites find each other, is gone\n"
        )
    if job:
        sys.stdout.write(
            f"Job {target.job_name} is stopped"
            + (
                f"; last checkpoint: step {saved}"
                if saved
                else "; make checkpoints lists what is saved"
            )
            + f". Volume {place.value('volume')}, its runs and "
            f"data stay; {sent_by(job)} goes on from there\n"
        )
    return 0


def delete(target: Target, jobs: list[str], patience_s: int) -> None:
    """Delete Jobs, and wait so long for their pods to leave. Raises Refused where it may not be."""
    done = target.call(
        "delete",
        "job",
        *jobs,
        "--cascade=foreground",
        "--ignore-not-found",
        "--wait=true",
        f"--timeout={patience_s}s",
        timeout=patience_s + 30,
    )
    if done.code and not re.search(r"timed out", done.err):
        target.ask(
            "get", "job", jobs[0], "--ignore-not-found"
        )  # says it where the cluster is out of reach
        raise Refused(
            78,
            f"Job {jobs[0]} could not be stopped ({done.complaint}); ask the administrator of "
            f"{target.words} for the right to delete jobs",
        )


def of_the_run(place: Place, target: Target) -> dict[str, Thing]:
    """The Jobs that stop is to take away, "" that of the run, DATA that of make data, LIGHTHOUSE. JOB_NAME is the same
    for all who leave it alone, so what another run's name is on stays. Raises Refused where nothing but that is there.
    """
    there = {part: job for part in ("", DATA, LIGHTHOUSE) if (job := target.job(part))}
    others = {part: overview.another_run(job, place) for part, job in there.items()}
    for part, other in others.items():
        if other and (part == "" or "" not in there):
            raise Refused(
                BAD_SETTING,
                f"Job {name_of(there[part])} in {target.words} is that of run {other}, and this "
                f"asks for {place.paths.name}: make stop RUN_NAME={other} stops it; where "
                f"{place.paths.name} has a Job of its own, add its JOB_NAME",
            )
        if other:
            sys.stdout.write(
                f"Job {name_of(there[part])} goes on: it was sent with RUN_NAME={other}, with which make "
                "stop stops it\n"
            )
    return {part: job for part, job in there.items() if not others[part]}


def last_saved(target: Target, pod: str) -> str | None:
    """The step of the last checkpoint that a pod's log tells of."""
    said = target.call("logs", pod, "-c", "trainer", f"--tail={LINES}").out
    return max(SAVED.findall("".join(own(said.splitlines(keepends=True)))), key=int, default=None)


class Listener:
    """Hears, from the log of a pod that is told to stop, which checkpoint it wrote last."""

    def __init__(self, target: Target, pod: str):
        self.saved: str | None = None
        self.process = target.start(
            "logs",
            pod,
            "-c",
            "trainer",
            "-f",
            f"--tail={LINES}",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in own(self.process.stdout):
            if found := SAVED.search(line):
                self.saved = found[1]

    def close(self) -> str | None:
        """The step of the last checkpoint that was heard of."""
        self.thread.join(5)
        self.process.kill()
        self.process.wait()
        self.thread.join(5)
        return self.saved


def restart(place: Place, target: Target) -> int:
    """The Job anew, with the settings as they are now: what k8s/launch.py does, for the run that is meant."""
    c, _ = cluster_config()
    if c.run_name != place.paths.name:
        raise Refused(
            BAD_SETTING,
            f"run {place.paths.name} was sent to the cluster, and these settings would send "
            f"{c.run_name}: give make restart what make train-8xa100 was given, for example "
            f"PRESET={place.config.preset} RUN_NAME={place.paths.name}",
        )
    if target.context:
        raise Refused(
            BAD_SETTING,
            f"a run is restarted where kubectl is: kubectl config use-context {target.context}, "
            "and make restart again",
        )
    job = target.job()
    if job and not words.ended(job) and (other := overview.another_run(job, place)):
        raise Refused(
            BAD_SETTING,
            f"Job {target.job_name} in {target.words} is at work on run {other}, and this asks "
            f"for {place.paths.name}: make stop RUN_NAME={other} first, or give {place.paths.name} another "
            "JOB_NAME",
        )
    if job and tunes(job) != bool(c.model):
        raise Refused(
            BAD_SETTING,
            f"Job {target.job_name} in {target.words} was sent by {sent_by(job)}, and these "
            f"settings have {f'MODEL={c.model}' if c.model else 'no MODEL'}: give make restart what that was "
            "given, or make stop it first",
        )
    from k8s import launch

    return launch.main(["restart"])


# ---------------------------------------------------------------------------------------------------
# On this machine
# ---------------------------------------------------------------------------------------------------


def start_command(paths: RunPaths) -> list[str]:
    """What starts a run of this machine: one that has fine-tuned goes on so."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if read_object(paths.config)["settings"]["MODEL"]:
            return [sys.executable, "-m", "scripts.train", "finetune"]
    return [sys.executable, "-m", "scripts.train"]


def here(command: str, place: Place) -> int:
    """As ever, and the same for the commands that the cluster brought."""
    paths = place.paths
    if command in ("status", "stop", "restart") and (job := slurm.read_job(paths)):
        if command == "restart":
            raise Refused(
                BAD_SETTING,
                f"run {paths.name} is Slurm's job {job}. Use make stop, then the command that sent it.",
            )
        if command == "stop" and slurm.describe_queued(job):
            return slurm.stop(job, paths, place.config.grace_period_s)
        slurm.show_state(job)
        if not status.is_run(paths):
            return 0
    if command in ("status", "stop"):
        return status.main([command], paths)
    if command == "plots":
        # a run that is not there is reported by its name in the settings
        return draw(
            [str(paths.metrics)] if paths.metrics.exists() and not place.config.log_dir else []
        )
    if command == "restart":
        refuse_dry_run(place.config, command)
        code = status.main(["stop"])
        if code:
            return code
        os.chdir(ROOT)
        os.execv(sys.executable, start_command(paths))
    if command == "fetch-run":
        there = (
            f"is on this machine, in {paths.folder}"
            if paths.folder.is_dir()
            else "was sent nowhere from here"
        )
        raise Refused(
            78,
            f"run {paths.name} {there}: there is nothing to fetch; for one of the cluster add its "
            "RUN_NAME, and WHERE=cluster if somebody else has sent it",
        )
    if command in ("bad-nodes", "clear-bad-nodes"):
        raise Refused(78, "only the pods of a cluster list bad nodes; add WHERE=cluster for them")
    if not paths.folder.is_dir():
        say(status.explain_missing(paths))
        return 78
    if command in ("logs", "attach"):
        follow = command == "attach" or sys.stdout.isatty()
        return logs.watching(lambda: logs.of_here(place, follow))
    if command == "describe":
        code, text = describe.of_here(paths)
        (sys.stderr if code else sys.stdout).write(text + "\n")
        return code
    try:
        with limit_silence(paths.checkpoints, place.config.start_timeout_s):
            found = checkpoints.here(paths)
    except OSError as error:
        where = show_path(Path(error.filename or paths.checkpoints))
        raise Refused(78, f"{where}: cannot be read ({error.strerror})") from None
    sys.stdout.write(
        (
            checkpoints.listing(found, "whole, all hashes hold")
            if found
            else f"run {paths.name} has no checkpoint in {paths.checkpoints} yet; make status says how far it is"
        )
        + "\n"
    )
    return 0


def told_to_stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(
        128 + number
    )  # what is open is closed on the way out: a reader pod, a half file


def main(argv: list[str]) -> int:
    """`python -m k8s.jobs COMMAND`"""
    if len(argv) != 1 or argv[0] not in COMMANDS:
        say(f"usage: python -m k8s.jobs {'|'.join(COMMANDS)}")
        return BAD_SETTING
    try:
        chosen: dict[str, str] = {}
        if argv[0] not in NAMED:
            chosen = choose_run(must_run=argv[0] == "stop", with_sent=True)
        place = decide(chosen=chosen)
        logs_of_others = argv[0] == "plots" and place.config.log_dir
        return (in_cluster if place.cluster and not logs_of_others else here)(argv[0], place)
    except SettingsError as error:
        say(explain_error(error))
        return BAD_SETTING
    except Refused as refused:
        say(refused.sentence)
        return refused.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    for told in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(told, told_to_stop)
    sys.exit(main(sys.argv[1:]))
