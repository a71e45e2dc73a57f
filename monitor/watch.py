"""Looks again and again, beside whoever shows it: a call to a cluster may take its time, and the screen goes on."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from k8s.cluster.kubectl import Refused
from k8s.cluster.where import Place
from monitor.facts import Expected, Fault, Seen
from record import locks, status
from settings import SettingsError
from settings.config import Config
from settings.resolve import name_run
from train.distributed.registry import WAITING

REFRESH_S = 2.0  # between two looks at this machine
CLUSTER_S = 10.0  # between two looks at a cluster
LEAVE_S = 2.0  # for a look that is under way to end
NO_RUN = 78
ENDED_WELL = ("done", "stopped", "not begun")


class NoRun(Exception):
    """There is no such run; the message says what to do."""


def unreadable(error: PermissionError) -> str:
    """Which file or folder of a run this user may not look at, and what to do."""
    return (
        f"{error.filename} may not be read ({error.strerror}): run make monitor as its owner, or let this user "
        "read its folder (chmod a+rx)"
    )


@dataclasses.dataclass(frozen=True)
class View:
    """What one look has brought. phase: in words, and since when; over: nobody is at work on the run, and it will say
    no more; trouble: why the last look brought nothing, in words: then the rest is of the one before."""

    seen: Seen
    faults: Sequence[Fault] = ()
    verdict: str = ""
    phase: tuple[str, float | None] = ("", None)
    over: bool = False
    trouble: str = ""
    remarks: tuple[str, ...] = ()  # on ALERT_CMD

    @property
    def told(self) -> object:
        """What must be another for it to be told again."""
        return (
            self.phase,
            self.over,
            self.verdict,
            self.trouble,
            tuple(fault.key for fault in self.faults),
        )

    @property
    def code(self) -> int:
        """What make monitor ends with: 1 where something is wrong, and where the run has ended otherwise than done or
        told to stop."""
        ended_badly = self.over and self.phase[0] not in ENDED_WELL and not self.seen.cluster
        unknown = bool(self.seen.cluster and self.seen.cluster.problem)
        return 1 if self.faults or self.trouble or unknown or ended_badly else 0


Look = Callable[[float], Seen]
Make = Callable[[], "tuple[Look, Judge]"]


class Watcher:
    """The last view, and a thread that renews it. make: loads what looks and judges, when it is first needed: it takes
    longer than to show that something is under way."""

    def __init__(self, make: Make, every_s: float):
        self.make, self.every_s = make, every_s
        self.made: tuple[Look, Judge] | None = None
        self.began = time.time()
        self.view: View | None = None
        self.gone: NoRun | None = None  # why there is nothing to watch
        self.told = threading.Event()  # something new to show
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.work, name="look", daemon=True)

    def once(self) -> View:
        """Look now. Raises NoRun."""
        self.made = self.made or self.make()
        look, judge = self.made
        seen = look(self.began)
        faults, verdict, remarks = judge.judge(seen)
        from monitor.phrases import phase

        at = phase(seen)
        return View(seen, faults, verdict, (at.words, at.since), at.over, "", remarks)

    def start(self) -> None:
        self.thread.start()

    @property
    def looking_s(self) -> float:
        """How long this watcher is at work."""
        return time.time() - self.began

    def wait(self, seconds: float) -> bool:
        """Until there is something new, or so long; returns whether there is."""
        found = self.told.wait(seconds)
        self.told.clear()
        return found

    def work(self) -> None:
        while not self.ended.is_set():
            began = time.monotonic()
            try:
                self.view = self.once()
            except NoRun as error:
                if self.view is None:
                    self.gone = error
                    self.told.set()
                    return
                self.view = dataclasses.replace(self.view, trouble=str(error))
            except (OSError, ValueError, Refused) as error:
                why = unreadable(error) if isinstance(error, PermissionError) else str(error)
                if self.view is not None:
                    self.view = dataclasses.replace(self.view, trouble=" ".join(why.split()))
                else:
                    self.gone = NoRun(why)
                    self.told.set()
                    return
            except Exception as error:  # of which nobody knew: a thread that ends would leave an old screen standing
                why = f"this look failed ({type(error).__name__}: {error}); ONCE=1 make monitor shows where"
                if self.view is None:
                    self.gone = NoRun(why)
                    self.told.set()
                    return
                self.view = dataclasses.replace(self.view, trouble=" ".join(why.split()))
            self.told.set()
            if self.view.over:
                return
            self.ended.wait(max(0.0, self.every_s - (time.monotonic() - began)))

    def end(self) -> list[str]:
        """No further look; one that is under way is hardly waited for. ALERT_CMD has its time to say what it has begun
        with; returns what is to be said of it."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(LEAVE_S)
        return self.made[1].alerts.close() if self.made else []


# ---------------------------------------------------------------------------------------------------
# What is looked at
# ---------------------------------------------------------------------------------------------------


class Planned:
    """What the plan computes, reckoned anew only where what it stands on has changed. c: the run's own settings, with
    the monitor's as they are now."""

    def __init__(self, place: Place):
        self.place, self.c = place, place.config
        self.stands_on: object = None
        self.found = Expected()

    def here(self, started: float | None) -> Expected:
        paths = self.place.paths
        try:
            written = paths.config.stat().st_mtime_ns
        except OSError:
            written = 0
        return self.of((written, started), started)

    def there(self, started: float | None, pods: int, sites: int, tunes: bool) -> Expected:
        return self.of((started, pods, sites, tunes), started, pods, sites, tunes)

    def of(
        self,
        stands_on: object,
        started: float | None,
        pods: int = 0,
        sites: int = 1,
        tunes: bool = False,
    ) -> Expected:
        if stands_on != self.stands_on:
            self.found, self.stands_on = self.reckoned(started, pods, sites, tunes), stands_on
        return self.found

    def reckoned(self, started: float | None, pods: int, sites: int, tunes: bool) -> Expected:
        from monitor import expected

        place = self.place
        try:
            run = (
                expected.of_cluster(place, pods or None, sites, tunes)
                if place.cluster
                else expected.of_here(place.config, place.paths)
            )
            self.c = run.c
            found = expected.expected(run.c, run.fleet, started, run.why)
        except SettingsError as error:
            return Expected(why="; ".join(error.problems))
        return (
            found
            if place.cluster
            else dataclasses.replace(found, phases=tuple(expected.took(place.paths).items()))
        )


def looking_here(place: Place, planned: Planned) -> Look:
    """Of a run of this machine. The look raises NoRun."""
    from monitor import local
    from monitor.tail import Tail

    paths = place.paths
    tail, between, known = Tail(paths.metrics), local.Between(paths), False

    def look(since: float) -> Seen:
        nonlocal known
        there = paths.status.exists() or paths.metrics.exists() or locks.has_job(paths)
        if not there:
            raise NoRun(
                f"run {paths.name} is gone from {paths.folder.parent}: its folder was moved or deleted while "
                "it was watched"
                if known
                else status.explain_missing(paths)
            )
        known = True
        node = local.look(planned.c, paths, tail, between)
        plan = planned.here(node.progress.started if node.progress else None)
        return with_limit(
            Seen(
                time.time(),
                paths.name,
                planned.c.preset,
                (node,),
                expected=plan,
                since=since,
                named=name_run(paths.folder),
            ),
            planned.c,
        )

    return look


def with_limit(seen: Seen, c: Config) -> Seen:
    """With how long the phase may take that the run is in, by the rules."""
    from monitor import snapshot
    from monitor.rules import run_rules

    name = snapshot.doing(seen)
    limit = run_rules.limit_s(name, seen, c)
    if name == WAITING:
        limit = 60 * run_rules.PEERS_MINUTES, ""
    if limit is None:
        return seen
    return dataclasses.replace(
        seen, expected=dataclasses.replace(seen.expected, limits=((name, limit[0]),))
    )


def looking_there(place: Place, planned: Planned) -> Look:
    """Of a run in the cluster. The look raises NoRun."""
    from k8s.cluster import overview
    from k8s.cluster.target import no_job
    from monitor import cluster
    from monitor.usual import Usual

    watch, usual, known = cluster.Watch(place), Usual(), False

    def look(since: float) -> Seen:
        nonlocal known
        there, nodes = watch.look(time.time())
        nodes = usual.of(nodes)  # those behind the first know of no steps
        if there.run and there.run != place.paths.name:
            raise NoRun(overview.another(there.run, place))
        if not there.wanted_pods and not there.problem and not known and watch.target:
            raise NoRun(no_job(watch.target).sentence)
        known |= there.wanted_pods > 0
        started = next((node.progress.started for node in nodes if node.progress), None)
        sites = len({pod.site for pod in there.pods if pod.site}) or 1
        plan = planned.there(started, there.wanted_pods, sites, there.tunes)
        return with_limit(
            Seen(time.time(), place.paths.name, planned.c.preset, nodes, there, plan, since),
            planned.c,
        )

    return look


class Judge:
    """The rules, and after a while the verdict; ALERT_CMD hears of both."""

    def __init__(self, place: Place, planned: Planned):
        from monitor.alert import Alerts, command_of

        self.planned, self.remarks = planned, list[str]()
        self.alerts = Alerts(command_of(place.config), place.paths)

    def judge(self, seen: Seen) -> tuple[list[Fault], str, tuple[str, ...]]:
        """What is wrong, the verdict in words unless it only repeats a fault, and remarks on ALERT_CMD."""
        from monitor.rules import judge as rules
        from monitor.verdict import FAILING, verdict

        faults = rules.judge(seen, self.planned.c)
        found = verdict(seen, self.planned.c, faults)
        self.remarks += self.alerts.look(seen, faults, found)
        words = found.sentence if found and found.word != FAILING else ""
        return faults, words, tuple(self.remarks)


def watcher_of(place: Place) -> Watcher:
    def make() -> tuple[Look, Judge]:
        planned = Planned(place)
        return (looking_there if place.cluster else looking_here)(place, planned), Judge(
            place, planned
        )

    return Watcher(make, CLUSTER_S if place.cluster else REFRESH_S)
