"""A run at three sites in a cluster (SYNC=diloco), one a pod, with their lighthouse beside them: what is lost and comes
back stops nobody. By the real kubectl; pods are processes on this machine."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from record import metrics as record_reader
from record.run_paths import RunPaths
from tests.k8s.test_end_to_end import IMAGE, Lab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc"),
]

SITES, RUN, NAME = 3, "apart", "job-apart-lighthouse"
ASKED = {"SYNC": "diloco", "SYNC_EVERY": "10"}
Records = list[dict[str, Any]]


class Sites:
    """The run, as its sites write of it."""

    def __init__(self, lab: Lab):
        self.lab = lab

    def paths(self, site: int) -> RunPaths:
        return self.lab.paths(RUN).of_site(site)

    def events(self, site: int, event: str = "") -> Records:
        path = self.paths(site).metrics
        return (
            [r for r in record_reader.read_records(path) if event in ("", r["event"])]
            if path.exists()
            else []
        )

    def syncs(self, site: int, of: int, beyond: int = 0) -> Records:
        """Those that counted, of so many sites."""
        return [
            r
            for r in self.events(site, "sync")
            if r["committed"] and r["sites"] == of and r["outer_step"] > beyond
        ]

    def last(self, site: int) -> int:
        return max(
            (r["outer_step"] for r in self.events(site, "sync") if r["committed"]), default=0
        )

    def until(self, sites: list[int], of: int, count: int, what: str) -> None:
        """Wait until each of these sites has made so many more syncs with so many of them."""
        begun = {site: self.last(site) for site in sites}
        self.lab.until(
            lambda: all(len(self.syncs(site, of, begun[site])) >= count for site in sites), what
        )

    def lighthouses(self) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.lab.cluster.objects("Pod")
            if pod["metadata"]["labels"].get("job-name") == NAME
        ]

    def left(self) -> set[tuple[str, str]]:
        """What there is of the run in the cluster."""
        return {
            (kind, thing["metadata"]["name"])
            for kind in ("Job", "Pod", "Service")
            for thing in self.lab.cluster.objects(kind)
        }


@dataclasses.dataclass
class Story:
    """begun, lost, back: uids of the pods, by index; alone: the syncs of the first site while one was away; after:
    outer steps with all three again; told: what make status said then; stopped: what make stop said; left: what was
    there behind it; ended: the records of each site by then; lighthouses: uid and restarts of its pod, before and
    behind its end."""

    begun: dict[int, str]
    lost: dict[int, str]
    alone: Records
    back: dict[int, str]
    after: int
    lighthouses: list[tuple[str, int]]
    told: str
    stopped: str
    left: set[tuple[str, str]]
    ended: dict[int, Records]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> Iterator[Sites]:
    lab = Lab(tmp_path_factory.mktemp("sites"), Path(data["DATA_DIR"]))
    yield Sites(lab)
    lab.cluster.close()


@pytest.fixture(scope="module")
def story(sites: Sites) -> Story:
    lab, everybody = sites.lab, list(range(SITES))
    lab.make("train-8xa100", RUN, MAX_STEPS="100000", **ASKED)
    sites.until(everybody, SITES, 2, "all three sync")
    begun = lab.uids(RUN)
    before = sites.last(0)
    lab.kubelet.images.clear()  # so that the next pod takes its time
    lab.kubelet.kill(lab.pods(RUN)[2]["metadata"]["name"])
    sites.until([0, 1], 2, 2, "two go on without the third")
    lost, alone = lab.uids(RUN), sites.syncs(0, 2, before)
    lab.kubelet.images.add(IMAGE)
    sites.until(everybody, SITES, 2, "the third is back")
    back, after = lab.uids(RUN), sites.last(0)
    (lighthouse,) = sites.lighthouses()
    lab.kubelet.kill(lighthouse["metadata"]["name"])
    sites.until(everybody, SITES, 2, "the lighthouse is back")
    told = lab.make("status", RUN)
    seen = [
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in (lighthouse, *sites.lighthouses())
    ]
    stopped = lab.make("stop", RUN)
    return Story(
        begun,
        lost,
        alone,
        back,
        after,
        seen,
        told,
        stopped,
        sites.left(),
        {site: sites.events(site) for site in everybody},
    )


def test_a_lost_site_stops_nobody(story: Story) -> None:
    assert set(story.begun) == {0, 1, 2} and {index: story.lost[index] for index in (0, 1)} == {
        index: story.begun[index] for index in (0, 1)
    }
    assert len(story.alone) >= 2 and all(r["sites"] == 2 for r in story.alone)


def test_it_comes_back_and_stands_where_the_others_do(sites: Sites, story: Story) -> None:
    assert story.back[2] != story.begun[2] and {index: story.back[index] for index in (0, 1)} == {
        index: story.begun[index] for index in (0, 1)
    }
    hashes = [
        {
            (r["outer_step"], r["fragment"]): r["hash"]
            for r in story.ended[site]
            if r["event"] == "sync" and r["committed"]
        }
        for site in range(SITES)
    ]
    together = set.intersection(*map(set, hashes))
    assert len([outer for outer, _ in together if outer > story.alone[-1]["outer_step"]]) >= 4
    assert all(hashes[0][key] == hashes[1][key] == hashes[2][key] for key in together)
    assert len({hashes[0][key] for key in together}) == len(together)
    gaps = [r for r in story.ended[2] if r["event"] == "gap"]
    assert gaps and gaps[0]["reason"] == "away" and gaps[0]["to"] > gaps[0]["from"]


def test_the_lighthouse_is_started_again_where_it_was(story: Story) -> None:
    (uid, before), (same, behind) = story.lighthouses
    assert uid == same and (before, behind) == (0, 1)
    for site, resumes in {0: 0, 1: 0, 2: 1}.items():  # only the one that was killed has begun anew
        assert sum(r["event"] in ("start", "resume") for r in story.ended[site]) == 1 + resumes


def test_status_tells_of_each_site(story: Story) -> None:
    assert "running: all 3 pods run" in story.told and f"Job {NAME}" in story.told
    assert "site 1 " in story.told and "site 2 " in story.told and "last sync: step" in story.told
    assert "of 3 sites" in story.told and "every step waits" not in story.told


def test_a_stop_saves_at_all_sites_and_leaves_nothing_of_the_lighthouse(story: Story) -> None:
    for site, records in story.ended.items():
        assert records[-1]["event"] == "end" and records[-1]["reason"] == "stopped", site
        made = [r["step"] for r in records if r["event"] == "step"]
        assert [r["step"] for r in records if r["event"] == "checkpoint"][-1] == made[-1], site
    assert "last checkpoint: step" in story.stopped and NAME in story.stopped
    assert story.left == {("Service", f"job-{RUN}")}


def test_a_run_that_is_done_leaves_no_lighthouse_either(sites: Sites, story: Story) -> None:
    saved = [
        max(r["step"] for r in records if r["event"] == "checkpoint")
        for records in story.ended.values()
    ]
    lab = sites.lab
    lab.make("train-8xa100", RUN, MAX_STEPS=str(max(saved) + 15), **ASKED)
    lab.until(lambda: "Complete" in lab.conditions(RUN), "the run is done")
    assert {site: sites.events(site)[-1]["reason"] for site in range(SITES)} == dict.fromkeys(
        range(SITES), "done"
    )
    lab.until(
        lambda: ("Job", NAME) not in sites.left() and not sites.lighthouses(),
        "the lighthouse has gone",
    )
    assert lab.made(RUN) >= 2 * SITES + 1 and "done" in lab.make("status", RUN)
