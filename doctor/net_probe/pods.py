"""make net-probe in a cluster: the same between the running pods of the job, started in each of them by kubectl exec.

Pods find each other by the addresses that the API tells; the job goes on meanwhile, so its own traffic is in the
figures, and it is slowed for the minute that this takes. What node 0 found comes back on its standard output.
"""

import re
from concurrent.futures import ThreadPoolExecutor

from doctor.net_probe import net, net_nodes
from doctor.net_probe.net_rounds import rounds
from k8s.cluster.kubectl import Done, Refused, short
from k8s.cluster.target import Target, Thing, name_of, newest, no_job, runs, target_of
from k8s.cluster.volume import say
from k8s.cluster.where import Place
from plan.network import links

PORT = 29590  # of the pod that is node 0 here: not that of the rendezvous, nor of the lighthouse
JOIN_S = 60  # for all to come to node 0
TOTAL_S = net_nodes.TOTAL_S


def main(place: Place) -> int:
    """Measures, prints and keeps it; an exit code."""
    try:
        found, code = probe(place, target_of(place, say))
    except Refused as refused:
        say(refused.sentence)
        return refused.code
    net.tell(found, place.config.runs_dir)
    return code


def probe(place: Place, target: Target) -> tuple[links.Links, int]:
    """What was found, and how it ended. Raises Refused where nothing was."""
    pods = running(target)
    sites = target.sites(pods)
    named = [sites.get(name_of(pod), "") for pod in pods]
    first = str(pods[0]["status"].get("podIP") or "")
    if not first:
        raise Refused(69, f"pod {name_of(pods[0])} has no address yet; try again in a moment")
    say(
        f"measuring between {len(pods)} pods of Job {target.job_name}, which goes on meanwhile: its own traffic is in "
        "the figures"
    )
    lasts = len(rounds(named)) * net_nodes.MOST_S + net_nodes.ALL_S + net_nodes.LATE_S + JOIN_S

    said = [str(value) for value in (len(pods), first, PORT, TOTAL_S, JOIN_S)]

    def start(rank: int) -> Done:
        return target.execute(
            name_of(pods[rank]),
            "trainer",
            "python",
            "-m",
            "doctor.net_probe.net",
            "pod",
            str(rank),
            *said,
            named[rank],
            timeout=lasts,
        )

    with ThreadPoolExecutor(len(pods)) as pool:
        ended = list(pool.map(start, range(len(pods))))
    found = links.of_json(ended[0].out)
    if ended[0].code or not found:
        sentence = why(pods, ended, target)
        if not found:
            raise sentence
        say(sentence.sentence)
    return found, ended[0].code


def running(target: Target) -> list[Thing]:
    """The pods of the Job that commands can be run in, by index; two at least. Raises Refused."""
    pods = newest(target.pods())
    able = [pod for pod in pods if runs(pod)]
    if not pods:
        raise no_job(target)
    if len(able) < 2:
        raise Refused(
            69,
            f"of {len(pods)} pods of Job {target.job_name} {len(able)} can be measured from, and it "
            "takes two; make status says what the others wait for",
        )
    if len(able) < len(pods):
        absent = [name_of(pod) for pod in pods if not runs(pod)]
        say(
            f"without {', '.join(absent)}, which {'does' if len(absent) == 1 else 'do'} not run; make status says why"
        )
    return able


def why(pods: list[Thing], ended: list[Done], target: Target) -> Refused:
    """Node 0's reason, or what kept a pod from taking part."""
    for pod, done in zip(pods, ended, strict=True):
        said = done.complaint
        if re.search(r'cannot create resource "pods/exec"', said):
            return Refused(
                78,
                f"you may not run commands in pods of {target.words}; ask its administrator for the "
                "right to create pods/exec",
            )
        if re.search(r"No module named|executable file not found", done.err):
            return Refused(
                78,
                f"the image of pod {name_of(pod)} has no net-probe: it is of an earlier version; make "
                "push and make restart bring this one",
            )
    own = [
        line.removeprefix("net-probe: ")
        for line in ended[0].err.splitlines()
        if line.startswith("net-probe: ")
    ]
    code = ended[0].code if ended[0].code in (64, 69, 78) else 69
    return Refused(code, own[-1] if own else f"pod {name_of(pods[0])}: {short(ended[0].complaint)}")
