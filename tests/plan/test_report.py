"""plan/report.py: each line against the plan or against hand-worked numbers, and that all of it is one screen."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from plan.fleet import fleet_of
from plan.planner import Plan, plan
from plan.report import brief, clock, entry, findings, rate, table, told
from plan.storage import Place
from record.metrics import SCHEMA, to_json
from record.run_paths import RunPaths
from settings import ROOT, load_config
from settings.finding import FAIL, WARN, Finding

NOW = datetime.datetime(2026, 11, 22, 9, 0)
MEMORY = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "copies",
    "logits",
    "other",
    "total",
    "fits",
    "largest",
)

SHOWN = [
    {"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4", "TARGET_HOURS": "48"},
    {"PRESET": "xlarge-8xa100"},
    {"PRESET": "d16-2xh100"},
    {"PRESET": "d32-8xh100", "PARALLEL": "hsdp", "OPTIMIZER": "adamw", "NODES": "2"},
    {"PRESET": "gpt2-124m", "CARDS": "1xt4", "DTYPE": "float32"},
    {"PRESET": "tiny", "CARDS": "cpu"},
    {"PRESET": "d16-2xh100", "CARDS": "8xv100-32gb-sxm"},
    {"PRESET": "d16-2xh100", "CARDS": "4xa100-80gb-sxm,4xa6000"},
    {"PRESET": "tiny", "CARDS": "cpu", "NPROC": "2", "DTYPE": "bfloat16", "MAX_STEPS": "1"},
    {"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4", "SYNC": "diloco", "PARALLEL": "fsdp"},
    {"PRESET": "d16-2xh100", "NODES": "2", "SITES": "2", "WAN_GBIT": "0.02"},
    {
        "PRESET": "d24-2xh100",
        "PARALLEL": "fsdp",
        "OPTIMIZER": "adamw",
        "CARDS": "16xh200",
        "NODES": "2",
    },
]


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    def made(places: tuple[Place, ...] = (), **settings: str) -> Plan:
        c = load_config(
            {
                "ENV_FILE": "",
                "MASTER_ADDR": "planned",
                "RUNS_DIR": str(tmp_path / "runs"),
                "DATA_DIR": str(tmp_path / "data"),
                **settings,
            }
        )
        return plan(c, fleet_of(c, here=()), NOW, places)

    return made


def lines_of(p: Plan) -> list[str]:
    return told(p).splitlines()


def paragraph(p: Plan, name: str) -> str:
    """What stands beside a name, in one line."""
    found = lines_of(p)
    first = next(i for i, line in enumerate(found) if line.startswith(name.ljust(9)))
    rest = next(
        (i for i in range(first + 1, len(found)) if not found[i].startswith(9 * " ")), len(found)
    )
    return " ".join([found[first][9:], *(line.strip() for line in found[first + 1 : rest])])


def rows(p: Plan, head: str, until: str) -> list[list[str]]:
    """Of a table: the cells of each row, between its head and the line that begins so."""
    found = lines_of(p)
    first = next(i for i, line in enumerate(found) if line.startswith(head))
    last = next(i for i in range(first, len(found)) if found[i].startswith(until))
    return [re.split(r"\s{2,}", line) for line in found[first:last]]


# ---- The whole


@pytest.mark.parametrize("settings", SHOWN, ids=lambda settings: " ".join(settings.values()))
def test_it_is_one_screen(planned: Any, settings: dict[str, str]) -> None:
    found = lines_of(planned(**settings))
    across = (
        int(settings.get("SITES", "1")) > 1
    )  # with the choice between ways, and whose figures it rests on
    assert len(found) <= (75 if across else 55) and max(len(line) for line in found) <= 120
    assert not [line for line in found if line != line.rstrip() or not line]
    assert not re.search(
        r"(?<![0-9<.])0\.0+(?![0-9])|\bnan\b|\binf\b|e\+|None|\b1 (tokens|steps|GPUs|processes)\b",
        "\n".join(found),
    )


@pytest.mark.parametrize("settings", SHOWN, ids=lambda settings: " ".join(settings.values()))
def test_every_setting_that_is_named_exists(planned: Any, settings: dict[str, str]) -> None:
    named = set(re.findall(r"\b([A-Z][A-Z0-9_]{3,})=", told(planned(**settings))))
    assert named <= set(load_config({"ENV_FILE": ""}).stored()) | {
        "HF_TOKEN",
        "WANDB_API_KEY",
        "PROBE",
    }


def test_the_first_line_is_what_is_planned(planned: Any) -> None:
    assert (
        lines_of(planned(PRESET="d16-2xh100"))[0]
        == "plan of d16-2xh100 on 2 x h100-sxm: computed, not measured"
    )
    assert " ".join(
        lines_of(planned(PRESET="xlarge-8xa100", NODES="4", SITES="2", RUN_NAME="far"))[:2]
    ) == (
        "plan of far (PRESET=xlarge-8xa100) on 8 x a100-80gb-sxm on 4 nodes at 2 sites: computed, not       measured"
    )


# ---- Line by line, by hand


def test_what_the_labs_eight_a100_take(planned: Any) -> None:
    """Figures of presets/xlarge-8xa100.env; 19,073.5 is a tenth of its steps; 205.93 h are 8 days, 13:55."""
    p = planned(PRESET="xlarge-8xa100", PRICE_GPU_HOUR="2", PRICE_KWH="0.25")
    assert paragraph(p, "model") == (
        "1,336,248,320 parameters: embedding 103M (and head: one table), attention 403M, MLP 830M, norms 100,352 9.22 "
        "GFLOP a token, 8.62 GFLOP where attention counts its causal half only"
    )
    assert paragraph(p, "run").startswith(
        "190,735 steps of 524,288 tokens: 100B, 74.8 a parameter; 3.74 times the "
        "compute-optimal 26.7B (20 a parameter) 9.22e20 FLOP; expected loss 2.34 "
    )
    assert paragraph(p, "speed") == (
        "135,000 tokens/s, 3.9 s a step: 50% MFU of 2.5 PFLOP/s in bfloat16 (8 x 312 TFLOP/s; A100 Tensor Core GPU data "
        "sheet) MFU: presets/xlarge-8xa100.env states 50% for it"
    )
    # 1,647.4 x 2 and 658.98 x 0.25; evaluations: 190 and 20 of 4.19M tokens, 10.3 s each
    assert paragraph(p, "time") == (
        "206 h: training 205 h, evaluation up to 36 min 1,647 GPU-hours; 659 kWh, the GPUs alone at their limit; cost "
        "3,460 at PRICE_GPU_HOUR=2 and PRICE_KWH=0.25"
    )
    assert rows(p, "when", "GiB")[1:] == [
        ["warm-up ends", "191", "100M", "12 min", "Sun 22 Nov 09:12"],
        ["first checkpoint", "232", "122M", "15 min", "Sun 22 Nov 09:15"],
        ["10%", "19,074", "10B", "20:36 h", "Mon 23 Nov 05:35"],
        ["50%", "95,368", "50B", "103 h", "Thu 26 Nov 15:57"],
        ["100%", "190,735", "100B", "206 h", "Mon 30 Nov 22:55"],
    ]
    assert paragraph(p, "disk") == (
        "up to 64.1 GB of checkpoints, 50 GB of shards, 10 GB of downloads a checkpoint is 16 GB, safe on disk after "
        "32 s at 500 MB/s (assumed; make doctor PROBE=1 measures it)"
    )
    assert rows(p, "data", "WARN")[1:] == [
        ["fineweb-edu", "65B", "99.9B", "0.65", "about, by sources/fineweb-edu.toml"],
        ["finepdfs", "34B", "999B", "0.034", "about, by sources/finepdfs.toml"],
        ["usmle", "1B", "1.96M", "510", "about, by sources/usmle.toml"],
    ]


def test_four_sites_are_told_with_and_without_their_waits(planned: Any) -> None:
    """64.2 s of waiting beside 3.88 s: 524,288 tokens in 68.1 s are 7,698 a second."""
    p = planned(PRESET="xlarge-8xa100", NODES="4", SITES="4")
    assert paragraph(p, "speed").startswith(
        "135,000 tokens/s, 3.9 s a step while computing: 50% MFU"
    )
    assert paragraph(p, "speed").endswith(
        "7,700 tokens/s with 64 s of waiting for the network in each step"
    )
    assert paragraph(p, "time").startswith(
        "3,609 h: training 205 h, waiting for the network 3,403 h, evaluation up to"
    )
    assert "to a volume at another site it takes 128 s with WAN_GBIT=1" in paragraph(p, "disk")
    network = {row[0]: row[1:] for row in rows(p, "network", "* as set; WAN_GBIT=1")}
    assert network["network, in each step"] == [
        "leaves a site",
        "takes",
        "time computing",
        "hours",
        "loss, published",
    ]
    assert network["DDP, float32 gradients *"] == ["8.02 GB", "64 s", "5.7%", "3,609", "none"]
    assert network["DDP, bfloat16 gradients"][-1] == "not in this version"
    # 1.5 x 2 bytes each of 1.336B in 100 steps, 0.32 s, and 0.036 s of what two GPUs of a site fetch from each other
    assert network["DiLoCo, H=100"] == [
        "40.1 MB",
        "0.36 s",
        "91.4 to 92.4%",
        "223",
        "not published",
    ]
    note, flat = next(sync.note for sync in p.syncs if sync.chosen), re.sub(r"\s+", " ", told(p))
    assert (
        note.startswith("goes in 121 pieces")
        and f"* as set; WAN_GBIT=1 WAN_RTT_MS=30; {note}" in flat
    )
    assert "make train-8xa100 NODES=4 SITES=4 SYNC=diloco SYNC_EVERY=30 PARALLEL=fsdp" in flat


def test_muon_s_split_weights_are_offered_with_adamw(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100")
    network = {row[0]: row[1:] for row in rows(p, "network", "data")}
    assert network["network, in each step"][0] == "leaves a GPU"
    assert network["FSDP2 over all"][-1] == "with OPTIMIZER=adamw"
    assert network["DDP, bfloat16 gradients"][-1] == "not in this version"
    assert [row[0] for row in rows(p, "GiB", "* as set")[1:]] == [
        "ddp *",
        "ddp",
        "ddp",
        *3 * ["fsdp, adamw"],
    ]


def test_memory_is_a_table_of_all_parts(planned: Any) -> None:
    """4 bytes of 1.336B weights are 4.98 GiB, and an eighth of that is 0.62."""
    p = planned(PRESET="xlarge-8xa100")
    head, *found = rows(p, "GiB", "* as set: 8 x 2,048 tokens at once; fits: of 74.0 GiB;")
    assert head == ["GiB a GPU", "recompute", *MEMORY]
    assert [row[:3] for row in found] == [
        ["ddp *", "none", "5.0"],
        ["ddp", "selective", "5.0"],
        ["ddp", "full", "5.0"],
        ["fsdp", "none", "0.62"],
        ["fsdp", "selective", "0.62"],
        ["fsdp", "full", "0.62"],
    ]
    for row, held in zip(found, p.memory, strict=True):
        assert float(row[9]) == pytest.approx(held.need.total / 2**30, abs=0.05)
        assert sum(float(cell.lstrip("<")) for cell in row[2:9]) == pytest.approx(
            float(row[9]), abs=0.3
        )
        assert row[10:] == ["yes", str(held.largest_micro_batch)]


def test_what_does_not_fit_is_said_in_its_row(planned: Any) -> None:
    p = planned(PRESET="xlarge-8xa100", CARDS="8xa100-40gb-sxm")
    found = {tuple(row[:2]): row[10:] for row in rows(p, "GiB", "* as set")[1:]}
    assert found["ddp *", "none"][0] == "no" and found["ddp", "full"][0] == "yes"
    assert found["ddp *", "none"][1] == str(p.chosen.largest_micro_batch)


def test_a_small_model_is_told_in_mebibytes(planned: Any) -> None:
    """4 bytes of 3,344,064 are 12.8 MiB."""
    p = planned(PRESET="tiny", CARDS="cpu")
    head, first, *_ = rows(p, "MiB", "* as set")
    assert head[0] == "MiB a process" and first[:3] == ["one process *", "none", "12.8"]


def test_what_is_not_known_says_why(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100", CARDS="8xv100-32gb-sxm")
    assert paragraph(p, "speed") == "n/a: v100-32gb-sxm has no bfloat16 units"
    assert not [line for line in lines_of(p) if line.startswith(("time", "when"))]
    assert lines_of(p)[-2].startswith(
        "FAIL  bf16  DTYPE=bfloat16: v100-32gb-sxm has no bfloat16 units; what would"
    )
    small = planned(PRESET="tiny", CARDS="1xt4", DTYPE="float32")
    assert "expected loss n/a. The scaling law covers 70M to 16B parameters." in paragraph(
        small, "run"
    )
    assert "6% of the compute-optimal 66.9M" in paragraph(small, "run")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"MFU": "45"}, "MFU as set: MFU=45"),
        ({}, "MFU: presets/d16-2xh100.env states 43.8% for it"),
        ({"CARDS": "8xa100-80gb-sxm"}, "MFU: known of a100-80gb-sxm: MPT 1.3B"),
        ({"CARDS": "1xl40s"}, "MFU assumed: nothing published is known of l40s in bfloat16"),
    ],
)
def test_the_mfu_says_where_it_is_from(planned: Any, settings: dict[str, str], said: str) -> None:
    assert said in paragraph(planned(**{"PRESET": "d16-2xh100"} | settings), "speed")


def test_a_mixed_fleet_names_the_card_that_all_wait_for(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100", CARDS="4xa100-80gb-sxm,4xa6000")
    assert (
        "of 1.24 PFLOP/s in bfloat16 (8 x 155 TFLOP/s of the a6000, for which the others wait; "
        in paragraph(p, "speed")
    )


def test_disk_says_what_is_free_and_what_nobody_knows(planned: Any, tmp_path: Path) -> None:
    place = Place(("RUNS_DIR", "DATA_DIR"), tmp_path, {"checkpoints": 1e9}, 5e12)
    assert paragraph(planned((place,), PRESET="d16-2xh100"), "disk").startswith(
        "up to 12.9 GB of checkpoints, 13.4 GB of shards, 5 GB of downloads (5 TB free for RUNS_DIR and DATA_DIR)"
    )
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "mine.toml").write_text(
        'files = ["/nowhere/*.txt"]\nvalidation_fraction = 0.01\n'
    )
    own = planned(PRESET="d16-2xh100", DATA_MIX="mine:1", DATA_DIR=str(tmp_path), SAVE_EVERY="0")
    assert paragraph(own, "disk") == "up to shards of mine, whose size is unknown"


def test_disk_holds_no_more_checkpoints_than_the_run_writes(planned: Any, tmp_path: Path) -> None:
    """In 4:23 h: 17 by SAVE_MINUTES=15, 4 by SAVE_EVERY=3000, and the last."""
    one = 3_230_983_856  # bytes
    place = Place(("RUNS_DIR",), tmp_path, {"checkpoints": 5001 * one}, 100e9)
    p = planned((place,), PRESET="d16-2xh100", KEEP_LAST="5000")
    assert paragraph(p, "disk").startswith("up to 71.1 GB of checkpoints, ")
    assert not [finding for finding in p.findings if finding.name == "disk"]
    assert p.places[0].needs["checkpoints"] == pytest.approx(22 * one, rel=1e-3)


# ---- A run that has begun


def test_a_run_that_has_begun_says_from_where_it_goes_on(planned: Any) -> None:
    c = planned(PRESET="d16-2xh100").c
    folder = RunPaths.of(c.runs_dir, c.run_name, ROOT)
    (folder.checkpoints / "step_0006400").mkdir(parents=True)
    (folder.checkpoints / "step_0006400" / "MANIFEST.json").write_text("{}")
    folder.metrics.write_text(
        to_json({"schema": SCHEMA, "event": "step", "time": 1.0, "step": 6500}) + "\n"
    )
    p = planned(PRESET="d16-2xh100")
    assert paragraph(p, "begun") == (
        "step 6,400 of 12,800 is made (the step of its newest checkpoint; its record goes to 6,500): time, cost and "
        "dates are of what is left"
    )
    # 6,400 x 524,288 tokens at 428,987 tokens/s are 2.173 h, and 33 evaluations 108 s
    assert paragraph(p, "time").startswith("2:12 h more: training 2:10 h, evaluation up to 1.8 min")
    assert [row[0] for row in rows(p, "when", "GiB")[1:]] == ["next checkpoint", "100%"]
    assert brief(p, p.c).startswith(
        "plan: 6,400 more steps of 524,288 tokens, about 2:12 h (429,000 tokens/s, "
    )
    (folder.checkpoints / "step_0006400").rename(folder.checkpoints / "step_0012800")
    through = planned(PRESET="d16-2xh100")
    assert paragraph(through, "time") == "none: the run is through"
    assert brief(through, through.c) == "plan: all 12,800 steps are done"


# ---- Small things


def test_brief_is_one_line(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100")
    need = f"{p.chosen.need.total / 2**30:.1f} of 74.0 GiB of memory per GPU"
    assert brief(p, p.c) == (
        "plan: 12,800 steps of 524,288 tokens, about 4:23 h (429,000 tokens/s, an MFU of 43.8%), "
        f"{need}"
    )
    unknown = planned(PRESET="d16-2xh100", CARDS="2xl40s")
    assert " tokens/s, an assumed MFU of 40%), " in brief(unknown, unknown.c)
    without = planned(PRESET="d16-2xh100", CARDS="8xv100-32gb-sxm")
    assert brief(without, without.c).endswith(
        " per GPU. The hours are not known: v100-32gb-sxm has no bfloat16 units"
    )


def test_brief_promises_no_time_of_a_cpu_that_nobody_measured(planned: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        p = planned(PRESET="tiny", DTYPE=dtype, DEVICE="cpu", MAX_STEPS="100", LOG_EVERY="20")
        need = f"{p.chosen.need.total / 2**30:.2f} of "
        told = brief(p, p.c)
        assert told.startswith(f"plan: 100 steps of {p.c.batch_tokens:,} tokens, {need}")
        assert told.endswith(" GiB of memory; time left is printed every 20 steps")
    p = planned(PRESET="tiny", DEVICE="cpu", MAX_STEPS="20", LOG_EVERY="20")
    assert brief(p, p.c).endswith(" GiB of memory")
    p = planned(PRESET="tiny", DEVICE="cpu", DTYPE="float32", MAX_STEPS="100", MFU="50")
    assert ", about " in brief(p, p.c)


def test_brief_counts_the_waits(planned: Any) -> None:
    p = planned(PRESET="xlarge-8xa100", NODES="4", SITES="4")
    assert brief(p, p.c).startswith(
        "plan: 190,735 steps of 524,288 tokens, about 3,609 h (7,700 tokens/s, "
    )


def test_findings_hang_below_their_level() -> None:
    found = findings(
        [
            Finding("disk", FAIL, "word " * 30 + "end", "a remedy"),
            Finding("target-hours", WARN, "short"),
        ]
    )
    assert (
        found[0].startswith("FAIL  disk          word word")
        and found[-1] == "WARN  target-hours  short"
    )
    assert (
        len(found) == 3 and found[1].startswith("      word") and found[1].endswith("end; a remedy")
    )
    assert all(len(line) <= 100 for line in found)


def test_columns_stand_under_their_heads() -> None:
    assert table([["a", "bb", "c"], ["long", "1", ""], ["x", "333", "z"]], left=(0, 2)) == [
        "a      bb  c",
        "long    1",
        "x     333  z",
    ]
    assert table([]) == []


def test_a_clock_names_the_year_where_it_is_another() -> None:
    assert clock("2026-12-31T23:59", NOW) == "Thu 31 Dec 23:59"
    assert clock("2027-01-01T00:01", NOW) == "Fri 01 Jan 2027 00:01"


def test_a_table_that_a_terminal_has_no_room_for_goes_on_below(monkeypatch):
    rows = [["model", "way", *(f"column {i}" for i in range(9))]]
    rows.append(["a", "b", *map(str, range(9))])
    assert len(table(rows, left=(0, 1))) == 2  # a file takes any width
    monkeypatch.setattr("settings.terminal.find_columns", lambda: 80)
    lines = table(rows, left=(0, 1))
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines] == [["model", "way"], ["a", "b"]] * 2
    assert " ".join(lines[1::2]).split() == ["a", "b", *"0123456", "a", "b", "7", "8"]


@pytest.mark.parametrize("columns", [80, 60, None])
def test_a_plan_fits_the_terminal(planned, monkeypatch, columns):
    monkeypatch.setattr("settings.terminal.find_columns", lambda: columns)
    lines = lines_of(planned(CARDS="8xa100-80gb-sxm", PRESET="d16-2xh100", NPROC="8"))
    tables = ("ddp", "fsdp", "hsdp", "GiB a GPU")  # in a file as wide as they are
    assert max(len(line) for line in lines if columns or not line.startswith(tables)) <= (
        columns or 100
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (948.4, "948"),
        (7698.2, "7,700"),
        (9994, "9,990"),
        (9996, "10,000"),
        (135_287, "135,000"),
        (1.2e6, "1.2M"),
        (3.21, "3.21"),
        (0.0214, "0.0214"),
    ],
)
def test_rates_have_three_digits(value: float, said: str) -> None:
    assert rate(value) == f"{said} tokens/s"


def test_a_paragraph_stands_beside_its_name() -> None:
    assert entry("disk", "word " * 20) == [
        "disk     " + "word " * 17 + "word",
        " " * 9 + "word word",
    ]


def test_a_run_of_millennia_is_told_all_the_same(planned: Any) -> None:
    found = told(
        planned(
            PRESET="d24-2xh100",
            N_LAYER="64",
            N_EMBD="262144",
            N_HEAD="2048",
            TRAIN_TOKENS=str(10**13),
        )
    )
    assert re.search(r"^100% .* n/a$", found, re.MULTILINE) and "1,056T (20 a parameter)" in found
