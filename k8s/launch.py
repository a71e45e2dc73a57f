"""Sends a run to the cluster: checks, plan, Secret, volume, manifests; then where its pods are, and what to type next.

    python -m k8s.launch             make train-8xa100; DRY_RUN=1 prints the manifests, WAIT=1 tries until all fit
    python -m k8s.launch finetune    make finetune-k8s: the same with MODEL, which makes a fine-tuning of any of these
    python -m k8s.launch restart     make restart: the Job anew; volume and Secret stay
    python -m k8s.launch data        make data: as a Job without GPUs where WHERE says the cluster, else here

Nothing is changed before all checks have passed. A run that is sent leaves RUNS_DIR/RUN_NAME/cluster.json.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from k8s import apply, launch_plan, slurm
from k8s.cluster import nodes as sites
from k8s.cluster import placement, secret
from k8s.cluster.image_ref import image_of
from k8s.cluster.job_spec import cluster_config, nccl_from_here
from k8s.cluster.kubectl import BAD_SETTING, UNAVAILABLE, Context, Refused, keeping_to, reach
from k8s.cluster.preflight import Found, check, claim_bytes
from k8s.cluster.render import avoid, claim, objects, render
from k8s.cluster.standing import Standing, of_another_run, of_kind, standing
from k8s.cluster.target import Target
from k8s.cluster.volume import Volume
from k8s.cluster.where import SENT, Place, look, read_sent, refuse_dry_run
from plan.planner import Plan
from record.durable import write_whole
from record.run_paths import RunPaths
from settings import ROOT, SettingsError, explain_error
from settings.config import Config
from settings.finding import split
from settings.terminal import complain

PLACE_S = 60.0  # a launch waits so long for its pods to have nodes
FIT_S = 120.0  # so long it does in each try with WAIT=1
BAD_NODES_S = 30.0  # a launch waits so long for a pod to read the list of bad nodes through
WAIT_MINUTES = 3.0  # between such tries
TOLD_TO_STOP = 143


class Told(Exception):
    """A signal that asks this process to end."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be sent where."""

    c: Config
    here: Context
    namespace: str
    image: str
    text: str  # YAML of all but volume and Secret
    again: str  # the command that sends it anew
    data: bool = False
    notes: tuple[str, ...] = ()  # what to say of it when it is sent

    @functools.cached_property
    def job(self) -> str:
        name: str = of_kind("Job", objects(self.text))["metadata"]["name"]
        return name

    @property
    def target(self) -> str:
        """Of make, which sends it."""
        return "make finetune-k8s" if self.c.model else "make train-8xa100"

    @property
    def has_lighthouse(self) -> bool:
        return self.c.sync == "diloco" and not self.data

    @property
    def run(self) -> RunPaths:
        """The run's folder here."""
        return RunPaths.of(self.c.runs_dir, self.c.run_name, ROOT)

    @property
    def pods(self) -> int:
        return 1 if self.data else self.c.nodes

    def look(self) -> placement.Placed:
        return placement.look(self.job, self.namespace, self.pods, self.image, self.again)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def remark(text: str) -> None:
    complain(text)


# ---------------------------------------------------------------------------------------------------
# Before anything is changed
# ---------------------------------------------------------------------------------------------------


def send(command: str) -> int:
    """make train-8xa100, finetune-k8s, restart or data in the cluster."""
    data, again = (
        command == "data",
        "make data WHERE=cluster" if command == "data" else "make restart",
    )
    c, remarks = cluster_config()
    if command == "finetune" and not c.model:
        raise Refused(
            BAD_SETTING,
            "MODEL is not set; give a model on the volume or its name on the hub, and DATA as "
            "well, for example MODEL=/volume/models/qwen3-1.7b DATA=/volume/chats.jsonl",
        )
    if data and c.model:
        raise Refused(
            BAD_SETTING,
            f"MODEL={c.model}: make data makes shards of text to pretrain on; the pods of a "
            "fine-tuning prepare DATA themselves: make finetune-k8s",
        )
    for text in remarks:
        remark(text)
    if c.engine == "slurm" and command in ("train", "finetune"):
        return slurm.send(c, "finetune-k8s" if c.model else "train-8xa100")
    for name, value in nccl_from_here().items():
        remark(f"{name}={value}, of your environment, goes to the pods")
    image, missing = "", list[str]()
    try:
        image = image_of(c)
    except Refused as refused:
        missing = refused.sentences
    if c.dry_run:  # asks no cluster
        if missing:
            raise Refused(BAD_SETTING, *missing)
        sys.stdout.write(f"{claim(c).rstrip()}\n---\n{render(c, image, data_job=data)}")
        return 0
    here = reach()
    with keeping_to(here):
        gpu = None
        notes = tuple[str, ...]()
        by_product = True  # asks for GPU_PRODUCTS
        if not data and c.device != "cpu":
            offer = sites.read_offer(c)
            gpu = offer.gpu
            c = sites.fit_pod(c, offer)
            by_product = offer.has_products
            if gpu is None:
                notes = (f"you may not read nodes, so pods request GPUs as {sites.GPU}",)
        text = render(
            c,
            image or "unknown",
            data_job=data,
            gpu=gpu or sites.GPU,
            by_product=by_product,
        )
        order = Order(c, here, c.namespace or here.namespace, image, text, again, data, notes)
        return send_there(command, order, missing)


def send_there(command: str, order: Order, missing: list[str]) -> int:
    """What is left to be done by asking and telling the cluster. missing: why there is no image."""
    c, again = order.c, order.again
    if command == "restart":
        check_place(order)
    found = check(c, order.namespace, on_gpus=not order.data)
    found.setting(*missing)
    stands = stand(order, found) if order.image and found.namespace_is_there else Standing("none")
    if stands.state == "same" and command != "restart":
        say(stands.sentence)
        if order.has_lighthouse and apply.missing_beside(order.text, order.namespace):
            names = apply.apply_beside(order.text, order.namespace, again)
            say(f"its lighthouse was gone, and is applied again: {', '.join(names)}")
        if sent := secret.to_send(c):
            say(f"{' and '.join(sent)}: not sent again; where it has changed, {again} sends it")
        say(next_steps(order))
        return 0
    whose = of_another_run(stands, order.job, order.namespace, c.run_name)
    if whose and not order.data:
        found.setting(whose)
    elif stands.state == "differs" and command != "restart":
        found.setting(stands.sentence)
    elif stands.state in ("complete", "failed") and command in ("train", "finetune"):
        found.environment(stands.sentence)  # of a data Job that has ended nothing is to be kept
    p = planned(order, found)
    found.refuse()
    tell_plan(order, p)
    for text in (*order.notes, *found.remarks):
        remark(text)
    return carry_out(order, found, stands, p)


def stand(order: Order, found: Found) -> Standing:
    """The Job that is there; what a user may not see has been named by the checks."""
    again = (
        f"kubectl delete job {order.job} -n {order.namespace}, then {order.again}"
        if order.data
        else order.again
    )
    try:
        return standing(objects(order.text), order.namespace, again)
    except Refused as refused:
        if refused.kind != "rights":
            found.problems += [(refused.code, sentence) for sentence in refused.sentences]
        return Standing("none")


def check_place(order: Order) -> None:
    """A restart in another place than the run was sent to would be a second run of the same name."""
    sent, run = read_sent(order.run), order.c.run_name
    if sent.get("context", order.here.name) != order.here.name:
        raise Refused(
            BAD_SETTING,
            f"run {run} was sent to context {sent['context']}, and kubectl uses "
            f"{order.here.name}: kubectl config use-context {sent['context']}, or send it here by "
            f"{order.target}",
        )
    if sent.get("namespace", order.namespace) != order.namespace:
        raise Refused(
            BAD_SETTING,
            f"run {run} was sent to namespace {sent['namespace']}, and this is about "
            f"{order.namespace}: set NAMESPACE={sent['namespace']}, or send it here by {order.target}",
        )


def planned(order: Order, found: Found) -> Plan | None:
    """What it will cost; what of that cannot be is among what is found."""
    c = order.c.replace(data_stream="0") if order.data else order.c
    p = launch_plan.plan(c)
    has_bytes = claim_bytes(found.claim) if found.claim else None
    said = (
        launch_plan.too_large(c, p, has_bytes)
        if order.data
        else launch_plan.findings(c, p, has_bytes)
    )
    stopping, _ = split(c.allow_fail, said)
    for one in said:
        if one in stopping:
            found.setting(f"{one.text}; {one.fix} (ALLOW_FAIL={one.name} sends it all the same)")
        else:
            found.remarks.append(f"{one.text}; {one.fix}")
    return p


def tell_plan(order: Order, p: Plan | None) -> None:
    if order.data:
        c = order.c.replace(data_stream="0")
        say(
            f"plan (computed, not measured): {launch_plan.shards_told(c)} at most, on VOLUME={c.volume}"
        )
    else:
        sys.stdout.write(launch_plan.told(order.c, p))


# ---------------------------------------------------------------------------------------------------
# From here on things change
# ---------------------------------------------------------------------------------------------------


def carry_out(order: Order, found: Found, stands: Standing, plan: Plan | None) -> int:
    """Secret, volume and manifests; then where the pods are. Returns an exit code."""
    c = order.c
    if sent := secret.send(c, order.namespace):
        say(f"Secret {secret.NAME}: {' and '.join(sent)} sent")
    if found.claim is None:
        apply.apply_claim(claim(c, found.one_node_disk), order.namespace)
        say(f"VOLUME={c.volume} of {c.volume_gb} GiB is made; no target ever deletes it")
    with told_by_signals():
        if found.claim is not None and c.device != "cpu" and not order.data:
            order = avoid_bad_nodes(order)
        make_way(order, stands)
        placed = gather(order) if c.wait else once(order)
    if not order.data:
        write_sent(order)
    nodes = (
        sites.nodes() if found.nodes is not None else None
    )  # there may be others after a long wait
    sys.stdout.write(placement.table(placed, nodes))
    if placed.problem:
        raise Refused(placed.code, placed.problem)
    if not placed.all_have_nodes:
        meanwhile = "train without them" if order.has_lighthouse else "hold their GPUs meanwhile"
        say(
            f"{placement.why_not(placed, order.job, order.namespace)}. Pods that have one {meanwhile}: make stop gives "
            f"their GPUs back, {order.target} WAIT=1 tries until all fit, make sites lists what there is"
            + ("" if order.data else f"; where the others land: make status RUN_NAME={c.run_name}")
        )
    for pod in placed.pods:
        if pod.state == "Failed":
            say(
                f"pod {pod.name} has ended with code {pod.exit_code}, and the Job makes another; make logs says more"
            )
    waits = placed.all_have_nodes and not placed.all_run
    if waits and (said := placement.warnings(placed, order.job, order.namespace)):
        say(f"the cluster's last complaint: {said}")
    if across := placement.across_sites(placed, nodes, c, plan):
        say(across)
    say(next_steps(order))
    return 0


def avoid_bad_nodes(order: Order) -> Order:
    """Leave out the nodes that pods have listed as bad. They are in no hash: the same settings stay the same Job."""
    place = Place(True, order.c, order.run, frozenset(), {})
    target = Target("", order.namespace, order.job)
    try:
        with Volume(place, target, BAD_NODES_S, told=False) as volume:
            nodes = [node.name for node in volume.bad_nodes()]
    except Refused as refused:
        remark(f"bad nodes are left to the pods, which refuse them: {refused.sentence}")
        return order
    if nodes:
        say(
            f"no pod goes to {', '.join(nodes)}: make bad-nodes says why, make clear-bad-nodes allows it"
        )
    return dataclasses.replace(order, text=avoid(order.text, nodes))


def make_way(order: Order, stands: Standing) -> None:
    """Wait until the Job that is there is gone, and tell it to go where it has not been told."""
    patience_s = order.c.grace_period_s + 60
    try:
        if stands.state == "leaving":
            say(f"{stands.sentence}: waiting for that, up to {patience_s} s")
            apply.wait_until_gone(order.job, order.namespace, patience_s)
        elif stands.state != "none":
            say(f"stopping Job {order.job}: its pods save and end, up to {patience_s} s")
            apply.delete_job(order.job, order.namespace, patience_s)
        if order.has_lighthouse:  # one that is on its way out would take the next with it
            apply.delete_lighthouse(order.job, order.namespace, patience_s)
    except Told:
        say(
            f"Job {order.job} is on its way out, and no other was sent: "
            f"{order.again if order.data else order.target} sends it"
        )
        raise


def once(order: Order) -> placement.Placed:
    """Apply, and look at the pods for a while; the Job stays whatever comes of it."""
    try:
        say(apply.apply(order.text, order.namespace, order.again))
        apply.sweep(order.c, order.namespace)
        if not order.data:
            write_sent(order)  # the pods are on their way, whether or not anybody watches
        return placement.wait(order.look, PLACE_S, say)
    except Told:
        say(f"Job {order.job} stays in the cluster; {next_steps(order)}")
        raise


def gather(order: Order) -> placement.Placed:
    """Try until all pods have a node: a Job of which only some fit is taken away, so that it holds no GPU idle."""
    minutes, patience_s = f"{WAIT_MINUTES:g}", order.c.grace_period_s + 60
    leaving = False  # an earlier try's Job was told to go, and nobody has seen it gone
    try:
        while True:
            try:
                if leaving and apply.is_there(order.text, order.namespace):
                    apply.delete_job(
                        order.job, order.namespace, patience_s
                    )  # told again, if it was not heard
                if leaving and order.has_lighthouse:
                    apply.delete_lighthouse(order.job, order.namespace, patience_s)
                leaving = False
                say(apply.apply(order.text, order.namespace, order.again))
                placed = placement.wait(order.look, FIT_S, say)
                if placed.all_have_nodes and not placed.problem:
                    apply.sweep(order.c, order.namespace)
                    return placed
                reason = placed.problem or placement.why_not(placed, order.job, order.namespace)
                if placed.problem:
                    with contextlib.suppress(
                        Refused
                    ):  # else it is taken back below, and not waited for
                        apply.delete_job(order.job, order.namespace, patience_s)
                    raise Refused(placed.code, placed.problem)
                leaving = True
                apply.delete_job(order.job, order.namespace, patience_s)
                if order.has_lighthouse:
                    apply.delete_lighthouse(order.job, order.namespace, patience_s)
                leaving = False
                say(f"{reason}; taken back, the next try is in {minutes} minutes (Ctrl-C gives up)")
            except Refused as refused:
                if refused.code != UNAVAILABLE:
                    raise
                say(f"{refused.sentence}; the next try is in {minutes} minutes")
            time.sleep(60 * WAIT_MINUTES)
    except (Told, Refused):
        with ignoring_signals():
            say("giving up: what was sent is taken back; volume and Secret stay")
            apply.take_back(order.c, order.text, order.namespace)
        raise


def next_steps(order: Order) -> str:
    if order.data:
        there = f" WHERE=cluster RUN_NAME={order.c.run_name}"
        return (
            f"next: make logs{there}; make stop{there} stops it, and make data WHERE=cluster goes on behind the "
            "last sealed shard"
        )
    run = f" RUN_NAME={order.c.run_name}"  # which no run of this machine takes the place of
    return (
        f"next: make status{run}, make logs{run}, make stop{run} (saves and stops; {order.target} then goes on "
        "from the last checkpoint)"
    )


# ---------------------------------------------------------------------------------------------------
# Signals, and the note of where a run was sent
# ---------------------------------------------------------------------------------------------------

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def told_by_signals() -> Iterator[None]:
    """Within, a signal that asks to end raises Told."""

    def tell(number: int, _: FrameType | None) -> None:
        raise Told(signal.Signals(number).name)

    with handling(tell):
        yield


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Within, what is being put in order is not interrupted."""
    with handling(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def handling(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def write_sent(order: Order) -> None:
    """Note where the run is, for the commands that look after it."""
    path = order.run.folder / SENT
    c = order.c
    by = (
        {"by": f"{order.target} PRESET={c.preset} MODEL={c.model} DATA={c.data}"} if c.model else {}
    )
    note = {
        "job_name": order.job,
        "namespace": order.namespace,
        "context": order.here.name,
        "image": order.image,
        "volume": order.c.volume,
        "sent": int(time.time()),
    } | by
    try:
        write_whole(path, f"{json.dumps(note, indent=1)}\n".encode())
    except OSError as error:
        remark(
            f"{path}: cannot be written ({error.strerror}), so say WHERE=cluster to the commands that look after "
            "the run"
        )


def is_in_cluster(place: Place) -> bool:
    """Whether make data is to work there: WHERE says so, or the very run that the settings name was sent there."""
    return place.config.where == "cluster" or (place.config.where == "auto" and bool(place.sent))


def main(argv: list[str]) -> int:
    """`python -m k8s.launch [finetune|restart|data]`; exit code 64, 69, 78 or 143."""
    command = (argv or ["train"])[0]
    try:
        place = look(None, ROOT, {})
        if command == "data" and not is_in_cluster(place):
            refuse_dry_run(place.config, command)
            os.execv(sys.executable, [sys.executable, "-m", "train.data.prepare", "data"])
        return send(command)
    except SettingsError as error:
        remark(explain_error(error))
        return error.exit_code
    except Refused as refused:
        remark(refused.sentence)
        return refused.code
    except (Told, KeyboardInterrupt):
        return TOLD_TO_STOP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
