"""make status of a run in the cluster: the Job and its pods, what keeps them, what the run says of itself, and what to
type next."""

import contextlib
import json
import re
import sys
from typing import Any

from k8s.cluster import words
from k8s.cluster.job_spec import DEFAULTS, LIGHTHOUSE
from k8s.cluster.kubectl import Refused
from k8s.cluster.target import (
    DATA,
    RUN,
    Target,
    Thing,
    annotation,
    is_of_sites,
    name_of,
    newest,
    no_job,
    runs,
)
from k8s.cluster.unscheduled import advise
from k8s.cluster.volume import Volume
from k8s.cluster.where import Place
from record import status
from record.metrics import duration, parse_record, to_console
from settings.json_file import parse_object

SILENT_S = 180.0  # without a heartbeat, a run that trains is looked at with suspicion
EVENT_MINUTES = 20.0
READER_S = 90.0  # status waits no longer for a reader pod

# Of the run's folder: the clock there, its status and, behind their numbers, those of its other sites; the records of
# its last checkpoint and its last sync between sites, and the last of all.
LOOK = (
    'date +%s; cd "$1" 2>/dev/null || exit 0; [ -f STATUS.json ] && tr -d "\\n" <STATUS.json; echo; '
    'for f in site_*/STATUS.json; do [ -f "$f" ] && { printf "%s " "$f"; tr -d "\\n" <"$f"; echo; }; done; '
    "[ -f metrics.jsonl ] && { for e in checkpoint sync; do tail -c 16000000 metrics.jsonl | "
    'grep -a "\\"event\\": \\"$e\\"" | tail -n 1; done; tail -n 60 metrics.jsonl; }; exit 0'
)
SITE = re.compile(r"site_([0-9]+)/STATUS\.json (.*)")


def show(place: Place, target: Target) -> int:
    """Print all of it. Returns 0 where the run is at work or done, else the code that ended the Job."""
    job, pods = target.job(), target.pods()
    lines, code, alone, other = [], 0, False, another_run(job, place) if job else ""
    if job is None:
        lines.append(
            f"Job {target.job_name} in {target.words}: is not there: stopped, never sent, or over for a week"
        )
    else:
        lines.append(f"Job {target.job_name} in {target.words}: {words.state(job, pods)}")
        code = words.exit_code(job, pods) if words.ended(job) == "Failed" and not other else 0
        lines += [another(other, place)] if other else []
    data = target.job(DATA)
    if data:
        its_pods = target.pods(DATA)
        lines.append(f"Job {name_of(data)} (make data): {words.state(data, its_pods)}")
        if alone := job is None and not pods:  # its pods are those to look at
            pods, code = (
                its_pods,
                words.exit_code(data, its_pods) if words.ended(data) == "Failed" else 0,
            )
    lighthouse = target.job(LIGHTHOUSE) if is_of_sites(job) else None
    if is_of_sites(job):
        lines += of_lighthouse(target, lighthouse, over=bool(job and words.ended(job)))
    if pods:
        lines += words.pod_table(pods, sites := target.sites(pods))
        lines += [] if is_of_sites(job) else apart(pods, sites)
        lines += advice(target, pods, place)
    pending = [name_of(pod) for pod in newest(pods) if not runs(pod)]
    about = [*pending, target.job_name, target.job_name + DATA]
    events = words.event_lines(target.events(about), EVENT_MINUTES) if pending else []
    lines += ["events of the last minutes:", *(f"  {line}" for line in events)] if events else []
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    at_work = job is not None and not words.ended(job) and not other
    known = of_run(place, target, [] if other or alone else pods, at_work)
    if not known and job is None and data is None:
        refused = no_job(target)
        if not place.sent:
            raise refused
    if other:
        step = f"make status RUN_NAME={other} for that Job; another JOB_NAME to send {place.paths.name} beside it"
    else:
        step = (
            next_of_data(data, code, place) if data and alone else next_step(job, pods, code, place)
        )
    sys.stdout.write(f"next: {step}\n")
    return code


def advice(target: Target, pods: list[Thing], place: Place) -> list[str]:
    """Return which setting lets pods without a node find one, where the nodes may be read."""
    waiting = [
        pod for pod in newest(pods) if words.condition(pod, "PodScheduled").get("status") == "False"
    ]
    if not waiting:
        return []
    done = target.call("get", "nodes", "-o", "json")
    if done.code:
        return []
    sentence = advise(waiting[0], json.loads(done.out)["items"], place.config)
    return [f"{sentence}, then make restart"] if sentence else []


def of_lighthouse(target: Target, lighthouse: Thing | None, over: bool) -> list[str]:
    """What the lighthouse of sites does, and what to do about one that is not there; over: the sites' Job has ended."""
    name = target.job_name + LIGHTHOUSE
    if lighthouse is None:
        return (
            []
            if over
            else [
                f"Job {name}, by which the sites find each other, is not there: they wait for it at "
                "their next sync; make train-8xa100 with the same settings creates it again"
            ]
        )
    pods = target.pods(LIGHTHOUSE)
    wrong = "".join(f"; {trouble}" for pod in pods[-1:] if (trouble := words.trouble(pod)))
    line = f"Job {name} (its sites find each other by it): {words.state(lighthouse, pods)}{wrong}"
    return [
        line + ("; make stop takes it away too" if over and not words.ended(lighthouse) else "")
    ]


def another_run(thing: Thing, place: Place) -> str:
    """The run that a Job or a pod is of, where that is not the one that was asked for; else ""."""
    name = annotation(thing, RUN)
    return name if name != place.paths.name else ""


def another(other: str, place: Place) -> str:
    """A sentence where the Job is not about the run that was asked for."""
    return (
        f"that Job trains run {other}, and this asks for {place.paths.name}: add RUN_NAME={other}"
    )


def apart(pods: list[Thing], sites: dict[str, str]) -> list[str]:
    """A sentence where the pods that run are at several sites."""
    found: dict[str, int] = {}
    for pod in newest(pods):
        if site := sites.get(name_of(pod), ""):
            found[site] = found.get(site, 0) + 1
    if len(found) < 2:
        return []
    listed = ", ".join(f"{site} ({count})" for site, count in sorted(found.items()))
    return [
        f"the pods are at {len(found)} sites: {listed}; every step waits for the network between them. SITE=NAME "
        "with make restart keeps them together (make sites)"
    ]


def of_run(place: Place, target: Target, pods: list[Thing], at_work: bool) -> bool:
    """Print what the run says of itself; whether anything is known."""
    live = any(runs(pod) for pod in pods)
    stuck = [pod for pod in pods if not live and "image" in words.trouble(pod)]
    if stuck:  # a reader pod needs the same image
        sys.stdout.write(
            "what the run last said cannot be read as long as the image cannot be fetched\n"
        )
        return False
    try:
        with Volume(place, target, start_s=READER_S) as volume:
            clock, state, sites, records = parsed(volume.ask("sh", "-c", LOOK, "sh", volume.folder))
    except Refused as refused:
        sys.stdout.write(f"what the run says of itself is not known: {refused.sentence}\n")
        return False
    if not state and not records:
        sys.stdout.write(
            f"run {place.paths.name} has written nothing on volume {place.value('volume')} yet\n"
        )
        return False
    lines = told(place.paths.name, state, records, clock, at_work, live)
    sys.stdout.write("\n".join(lines + told_of_sites(sites, records, clock)) + "\n")
    return True


def parsed(
    text: str,
) -> tuple[float, dict[str, Any], dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """What LOOK prints: the clock, the status, those of other sites, and the records that are whole."""
    clock, _, rest = text.partition("\n")
    first, _, tail = rest.partition("\n")
    others = [match for line in tail.splitlines() if (match := SITE.fullmatch(line))]
    sites = {int(match[1]): as_object(match[2]) for match in others}
    records = []
    for line in tail.splitlines():
        with contextlib.suppress(ValueError):
            records.append(parse_record(line.encode()))
    return float(clock or 0), as_object(first), dict(sorted(sites.items())), records


def as_object(text: str) -> dict[str, Any]:
    """Return {} for anything but a JSON object."""
    try:
        return parse_object(text.encode())
    except ValueError:
        return {}


def told(
    name: str,
    state: dict[str, Any],
    records: list[dict[str, Any]],
    clock: float,
    at_work: bool,
    live: bool,
) -> list[str]:
    """The lines of what a run says of itself, in the words of `make status` on one machine."""
    lines = []
    if state:
        phase = str(state.get("phase", "?"))
        over = phase in status.OVER
        if not over and not live:
            phase = f"killed while {phase}" if not at_work else f"{phase}, when its pods were lost"
            over = True
        lines.append(status.line_of(f"{name} ", state, phase, over, clock))
        silent = clock - float(state.get("heartbeat") or clock)
        if not over and silent > SILENT_S:
            lines.append(
                f"no heartbeat for {duration(silent)}: it hangs, or its volume does; make logs "
                "ONLY=errors, and make restart goes on from the last checkpoint"
            )
    last = next((r for r in reversed(records) if r.get("event") == "step" and "step" in r), None)
    if last:
        lines.append(to_console(last, state.get("last_step") or 0))
    held = next(
        (r for r in reversed(records) if r.get("event") == "checkpoint" and "step" in r), None
    )
    if held:
        lines.append(
            f"last checkpoint: step {held['step']}, {words.short_time(clock - held.get('time', clock))} ago"
        )
    return lines


def told_of_sites(
    sites: dict[int, dict[str, Any]], records: list[dict[str, Any]], clock: float
) -> list[str]:
    """The other sites of a run, a line each, and when the first synced with how many of them."""
    lines = []
    for site, state in sites.items():
        phase = str(state.get("phase", "?"))
        silent = clock - float(state.get("heartbeat") or clock)
        away = phase not in status.OVER and silent > SILENT_S
        lines.append(
            status.line_of(
                f"site {site} ",
                state,
                f"{phase}, and silent" if away else phase,
                phase in status.OVER,
                clock,
            )
        )
    last = next((r for r in reversed(records) if r.get("event") == "sync" and "step" in r), None)
    if last:
        lines.append(
            f"last sync: step {last['step']}, of {last.get('sites', '?')} sites, "
            f"{words.short_time(clock - last.get('time', clock))} ago"
            + ("" if last.get("committed", True) else "; it failed, and is made up for by the next")
        )
    return lines


def next_of_data(data: Thing, code: int, place: Place) -> str:
    """What to type next where only the Job of make data is there."""
    name = ("" if place.sent else " WHERE=cluster") + (
        f" RUN_NAME={place.paths.name}" if "RUN_NAME" in place.given else ""
    )
    if words.ended(data) == "Complete":
        return f"make train-8xa100{name.replace(' WHERE=cluster', '')}"
    if words.ended(data) == "Failed":
        return (
            f"make logs{name}, where the reason of exit code {code} stands; make stop{name} takes the Job away, "
            "and make data WHERE=cluster goes on behind the last whole shard"
        )
    return (
        f"make logs{name}; make stop{name} stops it, and make data WHERE=cluster goes on behind the last whole "
        "shard"
    )


def next_step(job: Thing | None, pods: list[Thing], code: int, place: Place) -> str:
    """What to type next."""
    name = f" RUN_NAME={place.paths.name}" if "RUN_NAME" in place.given else ""
    if job is None:
        preset = (
            f" PRESET={place.config.preset}" if place.config.preset != DEFAULTS["PRESET"] else ""
        )
        by = place.sent.get("by") or f"make train-8xa100{preset}"
        return (
            f"{by}{name} goes on from the last checkpoint; make fetch-run{name} brings the results"
        )
    if words.ended(job) == "Complete":
        return f"make fetch-run{name}"
    if words.ended(job) == "Failed":
        return f"make logs{name} ONLY=errors; then {words.HINT.get(code, 'make restart' + name)}"
    if words.state(job, pods).startswith("waiting"):
        meanwhile = "train without them" if is_of_sites(job) else "wait for the others"
        return f"make sites shows where GPUs are; make stop{name} gives back those that {meanwhile}"
    return f"make logs{name}; make stop{name} saves and stops"
