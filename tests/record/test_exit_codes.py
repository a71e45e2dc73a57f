"""record/exit_codes.py: what others say and do about a code is what the table says."""

import re

import pytest
import yaml

from k8s.cluster import words
from record.exit_codes import DONE, EXIT_CODES, OTHER, ROWS, describe
from record.status import Status, read
from settings import ROOT


def test_the_cluster_ends_the_job_at_the_codes_that_a_retry_cannot_help():
    job = yaml.safe_load((ROOT / "k8s/manifests/base/job.yaml").read_text())
    disrupted, final, ignored = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in (disrupted, final, ignored)] == [
        "Ignore",
        "FailJob",
        "Ignore",
    ]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert final["onExitCodes"]["operator"] == ignored["onExitCodes"]["operator"] == "In"
    codes = final["onExitCodes"]["values"]
    assert {*codes, DONE} == {row.code for row in ROWS if row.ends_job}
    assert tuple(codes) == words.FINAL
    assert ignored["onExitCodes"]["values"] == [row.code for row in ROWS if row.is_ignored]


def test_the_reference_has_the_table():
    section = (
        (ROOT / "docs/reference.md").read_text().partition("## Exit codes")[2].partition("\n## ")
    )
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) ?\| (yes|no) \|$", section[0], re.MULTILINE)
    expected = {
        row.code: (row.meaning, row.fix, "no" if row.ends_job else "yes") for row in [*ROWS, OTHER]
    }
    assert {int(code): tuple(rest) for code, *rest in rows} == expected


def test_two_nodes_lists_every_code():
    text = (ROOT / "docs/two-nodes.md").read_text().partition("Exit codes")[2]
    assert set(map(int, re.findall(r"\| (\d+) ", text))) == EXIT_CODES.keys()


def test_a_code_that_is_not_in_the_table_is_a_failed_try():
    assert [row.code for row in ROWS] == sorted(EXIT_CODES)
    assert describe(137).counts
    assert describe(137).code == 137
    assert {row.code for row in ROWS if row.counts} == {69, 71, 143}
    assert not any(row.counts and row.ends_job for row in ROWS)
    assert not OTHER.ends_job


@pytest.mark.parametrize(
    ("before", "code", "phase"),
    [
        ("training", 75, "stopped"),
        ("data", 143, "stopped"),
        ("data", 70, "crashed"),
        ("data", 64, "refused"),
        ("data", 78, "refused"),
        ("training", 78, "crashed"),
    ],
)
def test_a_status_tells_a_stop_and_a_refusal_from_a_crash(tmp_path, before, code, phase):
    status = Status(tmp_path / "STATUS.json", active=True)
    status.phase(before)
    status.phase("saving")
    status.end(code)
    assert read(status.path)["phase"] == phase
