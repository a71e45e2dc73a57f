"""docs/kubernetes.md names targets, settings and messages that there are."""

import re

from k8s.cluster import words
from settings import ROOT
from settings.config import SETTINGS

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
LAB = PAGE.split("## The lab's kubectl lines")[1].split("##")[0]
SAID = PAGE.split("## What failures look like")[1].split("##")[0]


def test_each_target_and_setting_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z][a-z0-9-]+)\b", PAGE))
    assert {
        "status",
        "stop",
        "restart",
        "logs",
        "describe",
        "checkpoints",
        "fetch-run",
        "sites",
        "push",
    } <= named
    assert named <= targets
    settings = set(re.findall(r"\b([A-Z][A-Z_]{3,})\b(?==|`)", PAGE))
    assert len(settings) > 15 and settings - {"NAME"} <= SETTINGS.keys()


def test_each_line_that_the_lab_typed_has_a_target() -> None:
    rows = re.findall(r"^\| (.+?) \| ((?:[^|]|\\\|)+) \|$", LAB, re.MULTILINE)[1:]
    rows = [row for row in rows if not row[0].startswith("---")]
    assert len(rows) >= 15 and all("`make " in now or "`.env`" in now for _, now in rows)
    before = " ".join(row[0] for row in rows)
    for typed in (
        "get pods",
        "logs -l job-name",
        "train/loss",
        "NCCL",
        "Node rank",
        "MEMBER",
        "nvidia-smi",
        "cp POD",
        "describe job",
        "delete job",
        "apply -f",
    ):
        assert typed in before, typed


def test_each_message_is_said_by_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "k8s").rglob("*.py"))
    said = re.findall("`(.+?)`", "\n".join(re.findall(r"^\| (.+?) \|", SAID, re.MULTILINE)))
    assert len(said) > 15
    for message in said:
        meant = re.search(r"exit code (\d+) \((.+)\)", message)
        if meant:
            assert words.MEANING[int(meant[1])].startswith(meant[2]), message
            continue
        fixed = max(re.split(r"\d+(?::\d+)?|\.\.\.|\(\w+\)|: 0/12.*", message), key=len).strip()
        assert fixed in code or fixed == "Pending", message


def test_the_launchers_last_word_is_told_whole() -> None:
    said = "  raise ChildFailed(\nlaunch: exit code 64: 2 problems in the settings:\n  N_EMBD=64: no\n  MLP_DIM=1: no\n"
    assert words.last_words(said) == "2 problems in the settings: N_EMBD=64: no MLP_DIM=1: no"
    assert words.last_words("a\nlaunch: exit code 1: a\nb\nlaunch: exit code 78: c\n\n") == "c"
    assert words.last_words("a\nKilled\n") == "Killed" and words.last_words("\n") == ""
