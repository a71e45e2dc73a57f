"""What a run suffered, marked in the curves, and where its time went: the page's and the picture's, by hand."""

import itertools
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from analysis import bar, plots
from tests.analysis.pages import page_of
from tests.analysis.test_plots import RECORDS, START, write_run

# Every second of the 11 that the record spans, a record a second; steps say that they took longer than there was.
BOOKED = {
    "training": 0.999 + 1 + 1 + 2,
    "data_wait": 0.001,
    "evaluation": 1 + 1,
    "lost_work": 0.099,
    "down": 1,
    "other": 1.901 + 1,
}

# A run to which everything happens: 10 steps of 2 s, of which it goes back behind 2 by a kill and 3 by a rollback.
STEP = {
    "event": "step",
    "loss": 5.0,
    "grad_norm": 1.0,
    "lr": 0.001,
    "step_ms": 2000.0,
    "tokens_per_s": 4096.0,
}
HURT = [
    {"event": "start", "step": 0, "after": 4, "startup_s": {"import": 3.0, "model": 1.0}},
    *({**STEP, "step": step, "after": 2} for step in (1, 2, 3, 4)),
    {
        "event": "eval",
        "step": 4,
        "after": 5,
        "val_loss": None,
        "val_bpb": None,
        "error": "HTTP 403",
        "eval_s": 5.0,
    },
    {"event": "resume", "step": 2, "after": 20, "attempt": 1, "startup_s": {"import": 6.0}},
    {
        "event": "eval",
        "step": 2,
        "after": 1,
        "val_loss": None,
        "error": "<timed out>",
        "eval_s": 1.0,
    },
    *({**STEP, "step": step, "after": 2} for step in (3, 4)),
    {
        "event": "skip",
        "step": 5,
        "after": 2,
        "reason": "loss",
        "loss": 9.25,
        "grad_norm": 31.5,
        "step_ms": 2000.0,
    },
    *({**STEP, "step": step, "after": 2} for step in (5, 6, 7)),
    {"event": "nonfinite", "step": 8, "after": 2, "loss": None},
    {
        "event": "skip",
        "step": 8,
        "after": 0,
        "reason": "nonfinite",
        "loss": None,
        "step_ms": 2000.0,
    },
    {"event": "rollback", "step": 4, "after": 3, "from": 7, "passed_over": 1024, "seconds": 3.0},
    {**STEP, "step": 5, "after": 2},
]
HURT_BOOKED = {
    "start_up": 4 + 6,
    "training": 5 * 2,
    "evaluation": 5 + 1,
    "lost_work": (2 + 3) * 2 + 2 * 2,
    "down": 14,
    "checkpoint": 3,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of test_plots.py, drawn."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "plain", RECORDS)
    assert plots.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """The run to which everything happens, drawn."""
    moments = itertools.accumulate((record["after"] for record in HURT), initial=START)
    records = [
        record | {"time": moment} for record, moment in zip(HURT, list(moments)[1:], strict=True)
    ]
    folder = write_run(tmp_path_factory.mktemp("runs") / "hurt", records)
    assert plots.main([str(folder)]) == 0
    return folder


def test_the_page_marks_skips_rollbacks_and_failed_evaluations_and_says_what_they_are(hurt):
    page = page_of(hurt / "plots/loss_curves.html")
    events = page["runs"][0]["events"]
    places = {kind: [e["step"] for e in events if e["kind"] == kind] for kind in page["marks"]}
    assert places == {
        "skip": [5, 8],
        "rollback": [4],
        "resume": [2],
        "evaluation failed": [2],
    }  # that at 4 was lost
    assert {kind for kind, mark in page["marks"].items() if mark["upright"]} == {
        "rollback",
        "resume",
    }
    assert all(mark["means"] for mark in page["marks"].values())
    assert [e["words"] for e in events if e["kind"] != "resume"] == [
        "skipped, loss out of bounds; loss 9.25; gradient norm 31.5",
        "skipped, not finite",
        "rolled back from step 7; 1,024 windows of text passed over",
        "evaluation failed: <timed out>",
    ]


def test_the_page_says_where_the_time_went(plain, hurt):
    def said(folder: Path) -> list[str]:
        text = (folder / "plots/loss_curves.html").read_text("utf-8")
        found = re.search(r'<div class="goodput">.*?</ul></div>', text, re.S)[0]
        return [
            re.sub("<.*?>", "", words).strip()
            for words in re.findall("<(?:h2|li)>.*?</(?:h2|li)>", found)
        ]

    assert said(hurt) == [
        "Goodput 17.5% of 0:57",
        "training 0:10 (17.5%)",
        "start-up 0:10 (17.5%) (import 0:09, model 0:01)",
        "evaluation 0:06 (10.5%)",
        "checkpoint 0:03 (5.3%)",
        "lost work 0:14 (24.6%) (5 steps lost, 2 steps skipped)",
        "down 0:14 (24.6%) (2 attempts)",
    ]
    assert said(plain)[:2] == ["Goodput 45.4% of 0:11", "training 0:05 (45.4%)"]


def widths_of_the_bar(path: Path) -> dict[str, float]:
    """Category -> per cent of the picture's bar, measured by its colours along one row of pixels."""
    pixels = (imread(path)[-90:, :, :3] * 255).round().astype(int)
    codes = {
        category: [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        for category, colour in bar.COLOURS.items()
    }
    counts = {
        category: (abs(pixels - code).max(axis=2) <= 1).sum(axis=1)
        for category, code in codes.items()
    }
    row = sum(counts.values()).argmax()  # that with the most of it, where no letters are
    return {
        category: 100 * count[row] / sum(c[row] for c in counts.values())
        for category, count in counts.items()
    }


def test_the_bar_of_the_picture_is_divided_as_the_time_was(plain, hurt):
    for folder, booked in ((plain, BOOKED), (hurt, HURT_BOOKED)):
        shares = {
            category: 100 * seconds / sum(booked.values()) for category, seconds in booked.items()
        }
        expected = dict.fromkeys(bar.COLOURS, 0.0) | shares
        assert widths_of_the_bar(folder / "plots/loss_curves.png") == pytest.approx(
            expected, abs=0.3
        )


def test_a_run_of_a_few_seconds_has_no_bar(tmp_path):
    folder = write_run(tmp_path / "r", RECORDS[:5])
    assert plots.main([str(folder)]) == 0
    assert imread(folder / "plots/loss_curves.png").shape[:2] == (800, 2000)
    assert 'class="goodput"' not in (folder / "plots/loss_curves.html").read_text("utf-8")
