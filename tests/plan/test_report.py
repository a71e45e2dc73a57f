"""plan/report.py: its screens, and what holds for every screen.

screens/ has what is expected. `python -m tests.plan.test_report` writes it again.

The numbers on them are those of a plan, which golden.json, test_time.py, test_network.py and test_memory.py hold.
"""

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest

from plan.fleet import fleet_of
from plan.load import with_nodes
from plan.planner import Plan, make_plan
from plan.report import between_sites, brief, clock, report, table
from plan.storage import Place
from settings import ROOT, load_config, terminal
from settings.checks import PRETRAINING, check_batch
from tests.plan.conftest import NOW, Given, Planned

FOLDER = Path(__file__).with_name("screens")
WIDTHS = (60, 80, 120)
SCREENS: dict[str, Given] = {
    "d16": {"PRESET": "d16-2xh100", "PRICE_GPU_HOUR": "2.5"},
    "four-sites": {"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4", "TARGET_HOURS": "48"},
    "too-large": {"PRESET": "d32-8xh100", "CARDS": "8xrtx4090", "MORE": "1"},
    "glm": {"PRESET": "glm-4.5-air-16xh200"},
    "two-kinds": {
        "PRESET": "xlarge-8xa100",
        "CARDS": "4xa100-80gb-sxm,4xa6000",
        "NODES": "4",
        "SITES": "4",
        "SYNC": "diloco",
        "SYNC_EVERY": "20",
        "PARALLEL": "fsdp",
        "MICRO_BATCH_SIZE": "4",
    },
}
SHOWN: list[Given] = [
    *SCREENS.values(),
    {"PRESET": "xlarge-8xa100"},
    {"PRESET": "d32-8xh100", "PARALLEL": "hsdp", "OPTIMIZER": "adamw", "NODES": "2"},
    {"PRESET": "gpt2-124m", "CARDS": "1xt4", "DTYPE": "float32"},
    {"PRESET": "tiny", "CARDS": "cpu"},
    {"PRESET": "d16-2xh100", "CARDS": "8xv100-32gb-sxm"},
    {"PRESET": "d16-2xh100", "CARDS": "2xa100-80gb-sxm,6xa6000"},
    {"PRESET": "d16-2xh100", "CARDS": "4xa100-80gb-sxm,4xv100-32gb-sxm"},
    {"PRESET": "tiny", "CARDS": "4xt4", "NODES": "4", "SITES": "4", "DTYPE": "float32"},
    {"PRESET": "tiny", "CARDS": "cpu", "NPROC": "2", "DTYPE": "bfloat16", "MAX_STEPS": "1"},
    {"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4", "SYNC": "diloco", "PARALLEL": "fsdp"},
    {"PRESET": "d16-2xh100", "NODES": "2", "SITES": "2", "WAN_GBIT": "0.02"},
    {"MODEL": "x/Qwen3-1.7B", "CARDS": "1xrtx4090", "PRESET": "finetune", "MAX_STEPS": "50"},
]
PRETRAINED = [path.stem for path in (ROOT / "presets").glob("*.env") if path.stem != "finetune"]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch):
    """wide(80): standard output is a terminal of so many columns."""
    return lambda columns: monkeypatch.setattr(terminal, "find_columns", lambda: columns)


def draw(plan: Plan) -> str:
    return report(plan, plan.run.config.more)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_screens(planned: Planned, wide, name: str, columns: int) -> None:
    wide(columns)
    assert draw(planned(SCREENS[name])) == (FOLDER / f"{name}-{columns}.txt").read_text()


@pytest.mark.parametrize("preset", PRETRAINED)
def test_a_plan_is_24_lines_of_100_columns(planned: Planned, preset: str) -> None:
    cards = {"CARDS": "cpu"} if preset == "tiny" else {}
    lines = draw(planned({"PRESET": preset}, cards)).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("more", ["0", "1"])
@pytest.mark.parametrize("settings", SHOWN, ids=lambda settings: " ".join(settings.values()))
def test_every_screen(planned: Planned, settings: Given, more: str) -> None:
    """No number is nan, None or all zeros, one thing is not plural, and every setting that it names exists."""
    text = draw(planned(settings | {"MORE": more}))
    assert not re.search(r"(?<![0-9<.])0\.0+(?![0-9])|\bnan\b|\binf\b|e\+|None", text)
    assert not re.search(r"(?<![\d.,])1 (tokens|steps|GPUs|processes|nodes|sites)\b", text)
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    named = set(re.findall(r"\b([A-Z][A-Z0-9_]{3,})=", text))
    assert named <= set(load_config({"ENV_FILE": ""}).stored()) | {"PROBE"}


def test_what_is_wrong_comes_first(planned: Planned) -> None:
    lines = draw(planned(SCREENS["four-sites"])).splitlines()
    levels = [line[:4].strip() for line in lines[1:12] if line[:4].strip()]
    assert levels == ["FAIL", "WARN", "WARN", "PASS"]
    assert [line for line in lines if line.startswith("PASS  Time")] == []


def test_disks_of_this_machine(load, tmp_path) -> None:
    place = Place(("RUNS_DIR",), tmp_path, {"checkpoints": 1e9}, 5e9)
    plan = make_plan(*load({"PRESET": "d16-2xh100"}), NOW, places=[place])
    assert "5 GB are free" in " ".join(draw(plan).split())


def test_a_begun_run_says_from_where(planned: Planned, tmp_path) -> None:
    folder = tmp_path / "runs" / "d16-2xh100" / "checkpoints" / "step_0006400"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    plan = planned({"PRESET": "d16-2xh100"})
    assert "resumes at step 6,400 of 12,800" in draw(plan)
    assert brief(plan, plan.run.config).startswith("plan: 6,400 more steps of 524,288 tokens")
    complete = dataclasses.replace(plan, from_step=12_800)
    assert "the run is complete" in draw(complete)
    assert brief(complete, plan.run.config) == "plan: all 12,800 steps are done"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"PRESET": "d16-2xh100"},
            "plan: 12,800 steps of 524,288 tokens, about 4:23 h (429,000 tokens/s, 43.8% MFU assumed, "
            "from the preset), 15.0 of 74.0 GiB of memory per GPU",
        ),
        (
            {"PRESET": "d16-2xh100", "CARDS": "8xv100-32gb-sxm"},
            "plan: 12,800 steps of 524,288 tokens, 15.0 of 28.9 GiB of memory per GPU. The hours are "
            "not known: v100-32gb-sxm has no bfloat16 units",
        ),
    ],
)
def test_one_line_at_the_start_of_a_run(planned: Planned, settings: Given, line: str) -> None:
    plan = planned(settings)
    assert brief(plan, plan.run.config) == line


def test_a_cpu_of_which_nothing_is_known_gets_no_hours(planned: Planned) -> None:
    plan = planned({"PRESET": "tiny", "CARDS": "cpu"})
    assert "time left is printed every 50 steps" in brief(plan, plan.run.config)


def test_columns_that_have_no_room_follow_below(wide) -> None:
    rows = [["name", "first", "second"], ["x", "1", "2"]]
    assert table(rows) == ["name  first  second", "x         1       2"]
    wide(12)
    assert table(rows) == ["name  first", "x         1", "name  second", "x          2"]


def test_a_clock_of_another_year_has_it() -> None:
    assert clock("2026-11-22T05:10", "2026-01-01T00:00") == "Sun 22 Nov 05:10"
    assert clock("2027-11-22T05:10", "2026-01-01T00:00") == "Mon 22 Nov 2027 05:10"


def test_the_figures_of_the_page_are_the_plan_s(planned: Planned) -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    assert len(page.split()) <= 900
    sites = planned({"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4"})
    rows = between_sites(sites)[1:-2]
    assert len(rows) == 6 and "\n".join(rows) in page
    computes_s = sites.speed.step_seconds_computing
    assert f"computes {computes_s:.1f} s and waits {sites.pace.wait_s:.1f} s" in page
    ddp = next(option for option in sites.network if option.name == "DDP")
    assert f"{ddp.busy:.1%} at 1 Gbit/s" in page and f"{ddp.bytes / 1e9:.2f} GB leave" in page
    one = planned({"PRESET": "xlarge-8xa100"})
    assert f"{one.time.training_seconds / 3600:.0f} h at 50% MFU" in page
    peak = 2 * one.speed.tokens_per_s
    assert f"{peak / 8:,.0f}"[:4] == "33,8" and f"{150_000 / (peak / 8):.1f} times the peak" in page
    assert f"{400_000 / peak:.0%} of the peak" in page
    (target,) = planned({"PRESET": "xlarge-8xa100", "TARGET_HOURS": "48"}).findings[:1]
    tokens = int(re.search(r"TRAIN_TOKENS=(\d+)", target.fix)[1])
    assert f"{tokens / 1e9:.1f}B tokens in 48 h" in page
    depth20 = planned({"PRESET": "d20-2xh100"})
    assert f"{depth20.time.training_seconds / 3600:.1f} h: work" in page


def draw_screens() -> None:
    FOLDER.mkdir(exist_ok=True)
    places = {"RUNS_DIR": tempfile.mkdtemp(), "DATA_DIR": tempfile.mkdtemp(), "ENV_FILE": ""}
    for name, settings in SCREENS.items():
        is_tuning = name == "glm"
        without = (*PRETRAINING, check_batch) if is_tuning else (check_batch,)
        defaults = {"MASTER_ADDR": "planned"}
        config = with_nodes(load_config(places | settings, ROOT, defaults, without=without))
        plan = make_plan(config, fleet_of(config, here=()), NOW, places=())
        for columns in WIDTHS:
            terminal.find_columns = lambda columns=columns: columns
            (FOLDER / f"{name}-{columns}.txt").write_text(draw(plan))


if __name__ == "__main__":
    draw_screens()
