"""The page in a browser: what it draws, what it says under the pointer, after a zoom, and with each switch."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from analysis.curves import smoothed, smoothing_window
from analysis.load import Run, Sampled, load
from analysis.logs.dialect import read_dialects
from analysis.logs.log_runs import drawn, read_log
from analysis.page.build import write_page
from tests.analysis.test_plots import START, write_run
from tests.browser import Browser, needs_chromium

pytestmark = needs_chromium

N, BATCH = 1000, 524288
RNG = np.random.default_rng(2)
SECONDS = 0.35 + 0.01 * RNG.random(N)
LOSS = (
    (3 + 8 * np.exp(-np.arange(N) / 20) + 0.05 * RNG.normal(size=N))
    .astype(np.float32)
    .astype(np.float64)
)
LOSS[700] += 4


def records(n: int = N, faster: float = 1.0, lower: float = 0.0) -> list[dict]:
    """A run of so many steps. Its record's clock starts at START, and it resumes at step 400."""
    took = SECONDS[:n] / faster
    ends = START + 60 + np.cumsum(took)
    made: list[dict] = [{"event": "start", "step": 0, "time": START, "attempt": 0}]
    for i in range(n):
        speed = BATCH / took[i]
        made.append(
            {
                "event": "step",
                "step": i + 1,
                "tokens": (i + 1) * BATCH,
                "time": ends[i],
                "loss": LOSS[i] - lower,
                "grad_norm": 0.5,
                "lr": 6e-4 * (1 - i / N),
                "step_ms": 1000 * took[i],
                "tokens_per_s": speed,
                "mfu": speed * 3e-5,
            }
        )
        if i + 1 == 400:
            made.append({"event": "resume", "step": 400, "time": ends[i], "attempt": 1})
        if i + 1 in (250, 500):
            made.append(
                {
                    "event": "eval",
                    "step": i + 1,
                    "time": ends[i],
                    "val_loss": 3.125 - lower,
                    "val_bpb": 1.0,
                    "full": False,
                }
            )
    return made


def samples(run: Run) -> Sampled:
    """One GPU at 500 W for the time of the run, 10 stretches."""
    begin, end = run.started, float(run.columns["time"][-1])
    time = begin + (np.arange(10) + 0.5) * (end - begin) / 10
    watts = 500.0 + np.arange(10)
    return Sampled(2, time, watts, watts - 50, watts + 50, np.arange(10) / 8, None, None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    first = load(write_run(folder / "depth16", records()))
    return [
        dataclasses.replace(first, sampled=samples(first)),
        load(write_run(folder / "depth24", records(800, 0.5, 0.25))),
    ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def one(browser: Browser, runs: list[Run], tmp_path: Path) -> Browser:
    browser.open(write_page(tmp_path / "one.html", runs[:1], ["depth16"]))
    return browser


@pytest.fixture
def two(browser: Browser, runs: list[Run], tmp_path: Path) -> Browser:
    browser.open(write_page(tmp_path / "two.html", runs, ["depth16", "depth24"]))
    return browser


def chart(title: str) -> str:
    return f"page.charts.find(chart => chart.box.querySelector('h2').textContent.startsWith({json.dumps(title)}))"


def place(browser: Browser, title: str, x: float) -> tuple[float, float]:
    """Where a value of x lies on the screen, half way down the panel, which is brought into view."""
    left, pixel, top, height = browser.value(
        f"(() => {{ const c = {chart(title)}; c.box.scrollIntoView({{block: 'center'}});"
        f" const box = c.over.getBoundingClientRect(); return [box.left, c.at.x({x}), box.top, box.height]; }})()"
    )
    return left + pixel, top + height / 2


def said(browser: Browser, title: str, x: float) -> list[str]:
    """The lines of what is shown while the pointer is there."""
    browser.hover(*place(browser, title, x))
    text = browser.value(f"{chart(title)}.tip.hidden ? '' : {chart(title)}.tip.innerText")
    return [line.strip() for line in text.splitlines() if line.strip()]


def zoom(browser: Browser, title: str, begin: float, end: float) -> None:
    (x0, y), (x1, _) = place(browser, title, begin), place(browser, title, end)
    browser.drag(x0, x1, y)


def test_under_the_pointer_are_the_recorded_numbers(one: Browser) -> None:
    """At 1,000 points to 1,200 pixels each step is under some pixel."""
    mean = smoothed(LOSS, smoothing_window(N))
    for step in (1, 123, 500, 701):
        minutes = np.cumsum(SECONDS)[step - 1] / 60
        head, values, *rest = said(one, "Loss (nats/token) by step", step)
        assert head == f"step {step} · {step * BATCH:,} tokens · {minutes:.2f} min"
        assert values.split(" ") == [f"{LOSS[step - 1]:.9g}", "mean", f"{mean[step - 1]:.6g}"]
        assert rest == {
            500: ["validation 3.125, 1 bpb at step 500"],
            701: ["spike: loss 8 standard deviations above the 128 steps before (step 701)"],
        }.get(step, [])
    assert (
        said(one, "Throughput", 123)[1].split(" ")[0] == f"{float(f'{BATCH / SECONDS[122]:.9g}'):,}"
    )
    assert "resumed, attempt 2 (step 400)" in said(one, "Learning rate", 400)
    assert one.complaints == []


def test_a_zoom_shows_every_step_of_its_stretch_in_all_panels_of_that_axis(one: Browser) -> None:
    assert one.value(f"{chart('MFU')}.box.dataset.inView") == "1000"
    zoom(one, "Loss (nats/token) by step", 600, 640)
    for title in ("Loss (nats/token) by step", "MFU"):
        low, high = (float(v) for v in one.value(f"{chart(title)}.box.dataset.range").split(","))
        assert low == pytest.approx(600, abs=1) and high == pytest.approx(640, abs=1)
        assert 40 <= int(one.value(f"{chart(title)}.box.dataset.inView")) <= 43
    assert one.value(f"{chart('Loss (nats/token) by training time')}.range") is None
    assert said(one, "Loss (nats/token) by step", 617)[1].startswith(f"{LOSS[616]:.9g} ")
    low, high = one.value(f"(c => [c.at.low, c.at.high])({chart('Loss (nats/token) by step')})")
    least, most = LOSS[600:640].min(), LOSS[600:640].max()
    assert least - 0.05 < low < least < most < high < most + 0.05
    one.value("document.getElementById('whole').click()")
    assert one.value(f"{chart('MFU')}.box.dataset.inView") == "1000"


def test_switches_change_the_axis_the_scale_and_the_smoothing(one: Browser) -> None:
    one.choose("axis", "tokens")
    assert said(one, "Loss (nats/token) by tokens", 500 * BATCH)[0].startswith(
        "step 500 · 262,144,000 tokens"
    )
    one.choose("axis", "wall")  # minutes since the start, 60 s of them before the first step
    wall = 1 + np.cumsum(SECONDS)[299] / 60
    assert said(one, "Learning rate", wall)[0].startswith("step 300 ")
    one.choose("axis", "step")
    middle = (
        "(c => [c.at.low, c.at.high, c.at.y(Math.sqrt(c.at.low * c.at.high)), c.height])("
        f"{chart('Loss (nats/token) by step')})"
    )
    one.choose("log", True)
    _, high, y, height = one.value(middle)
    assert y == pytest.approx(
        (8 + height - 38) / 2, abs=0.5
    )  # half way between the margins: a logarithmic scale
    one.choose("log", False)
    one.choose("smooth", "0")
    assert "mean" not in said(one, "Loss (nats/token) by step", 500)[1]
    one.choose("smooth", "5")
    assert said(one, "Loss (nats/token) by step", 500)[1].endswith(
        f" mean {smoothed(LOSS, 101)[499]:.6g}"
    )
    one.choose("cut", True)
    assert one.value(middle)[1] < 8 < high  # the spike of 7 is the highest behind the start


def test_samples_of_the_gpus_lie_under_the_same_axis(one: Browser, runs: list[Run]) -> None:
    one.choose("axis", "wall")
    sampled, minutes = samples(runs[0]), [(t - START) / 60 for t in samples(runs[0]).time]
    assert said(one, "Power of a GPU", minutes[4])[1] == "504 (454 to 554)"
    assert said(one, "Energy of all GPUs", minutes[6])[1] == "0.75"
    one.choose("axis", "step")
    step = np.interp(sampled.time[4], runs[0].columns["time"], runs[0].columns["step"])
    assert said(one, "Power of a GPU", step)[1] == "504 (454 to 554)"
    assert one.value(f"{chart('Network')} === undefined")


def test_runs_are_compared_at_equal_steps_and_times(two: Browser) -> None:
    rows = [
        row.split("\t") for row in two.value("document.getElementById('by').innerText").splitlines()
    ]
    assert rows[0][:4] == ["step", "depth16", "depth24", "less depth16"]
    assert [row[0] for row in rows[1:]] == ["1", "200", "400", "600", "800"]
    first, second = (
        smoothed(LOSS, smoothing_window(1000)),
        smoothed(LOSS[:800] - 0.25, smoothing_window(800)),
    )
    gap = second[399] - first[399]
    assert rows[3] == [
        "400",
        f"{first[399]:.4f}",
        f"{second[399]:.4f}",
        f"{gap:+.4f}".replace("-", "\u2212"),
        f"{100 * gap / first[399]:+.1f}%".replace("-", "\u2212"),
    ]
    two.choose("equal", "minutes")
    two.choose("place", "2")
    facts = dict(
        row.split("\t", 1)
        for row in two.value("document.getElementById('there').innerText").splitlines()
    )
    steps = [int((np.cumsum(SECONDS) <= 120).sum()), int((np.cumsum(SECONDS / 0.5) <= 120).sum())]
    assert facts["step"].split("\t")[0] == str(steps[0]) and facts["step"].split("\t")[
        1
    ].startswith(f"{steps[1]} (")
    rates = [
        steps[0] * BATCH / SECONDS[: steps[0]].sum(),
        steps[1] * BATCH / (SECONDS[: steps[1]] / 0.5).sum(),
    ]
    assert facts["mean tokens/s"].split("\t") == [
        f"{rates[0]:,.0f}",
        f"{rates[1]:,.0f} (\u2212{100 * (1 - rates[1] / rates[0]):.1f}%)",
    ]


def test_a_run_can_be_hidden_and_shown_again(two: Browser) -> None:
    assert len(said(two, "Loss (nats/token) by step", 300)) == 4  # where both are, and both values
    two.value("document.querySelector('.shown').click()")
    lines = said(two, "Loss (nats/token) by step", 300)
    assert len(lines) == 2 and lines[1].endswith("depth24")
    assert two.complaints == []


def test_dark_and_light_are_those_of_the_system_and_can_be_turned(one: Browser) -> None:
    def ground() -> str:
        return one.value("getComputedStyle(document.body).backgroundColor")

    one.dark(True)
    dark = ground()
    one.dark(False)
    light = ground()
    assert dark != light
    one.value("document.getElementById('theme').click()")
    assert ground() == dark


def test_keys_go_from_step_to_step(one: Browser) -> None:
    said(one, "Loss (nats/token) by step", 500)
    press = "dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    one.value(f"{chart('Loss (nats/token) by step')}.box.{press}")
    assert one.value(f"{chart('Loss (nats/token) by step')}.tip.innerText").startswith("step 501 ")


def test_a_loss_that_is_a_mean_already_is_not_smoothed_again(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    path = write_page(
        tmp_path / "mean.html", [dataclasses.replace(runs[0], loss_is="a mean, as printed")], ["r"]
    )
    browser.open(path)
    assert said(browser, "Loss (nats/token) by step", 600)[1] == f"{LOSS[599]:.9g}"
    assert "mean" in said(browser, "Throughput", 600)[1]


@pytest.mark.slow
def test_200_000_steps_are_drawn_and_may_be_looked_into(
    browser: Browser, runs: list[Run], tmp_path: Path
) -> None:
    n = 200_000
    columns = {key: np.tile(values, n // N) for key, values in runs[0].columns.items()}
    columns["step"] = np.arange(1.0, n + 1)
    columns["loss"] = columns["loss"] + np.arange(n) * 2.0**-20
    columns |= {
        "tokens": columns["step"] * BATCH,
        "minutes": np.cumsum(columns["step_ms"]) / 60_000,
        "time": START + np.cumsum(columns["step_ms"]) / 1000,
    }
    long = dataclasses.replace(runs[0], columns=columns, sampled=None)
    path = write_page(tmp_path / "long.html", [long], ["long"])
    assert path.stat().st_size < 5_000_000
    assert browser.open(path) < 20  # about one; make bench has what making it takes
    begin, end = 0.0, float(n)
    for _ in range(6):
        zoom(
            browser,
            "Loss (nats/token) by step",
            begin + (end - begin) * 0.3,
            begin + (end - begin) * 0.6,
        )
        begin, end = (
            float(v) for v in browser.value(f"{chart('MFU')}.box.dataset.range").split(",")
        )
    step = round((begin + end) / 2)
    assert end - begin < 400
    assert (
        said(browser, "Loss (nats/token) by step", step)[1].split(" ")[0]
        == f"{columns['loss'][step - 1]:.9g}"
    )


def test_a_loss_that_is_not_finite_is_called_so(browser: Browser, tmp_path: Path) -> None:
    """Of a log nan and inf as printed, and n/a where a line names none; our own record has null."""
    line = (
        " iteration {:8d}/ 500 | elapsed time per iteration (ms): 50.0 | learning rate: 1.0E-04 |{} number of nan "
        "iterations: 0 |\n"
    )
    losses = {40: "nan", 50: "inf", 60: None, 70: "nan"}
    path = tmp_path / "m.log"
    path.write_text(
        "".join(
            line.format(
                s, "" if (loss := losses.get(s, f"{s / 64:.6E}")) is None else f" lm loss: {loss} |"
            )
            for s in range(1, 71)
        )
    )
    (logged,) = read_log(path, read_dialects()).runs
    browser.open(write_page(tmp_path / "log.html", [drawn(logged, "m", tmp_path, START)], ["m"]))
    shown = {
        s: said(browser, "Loss (nats/token) by step", s)[1].split(" ")[0]
        for s in (39, 40, 50, 60, 70)
    }
    assert shown == {39: "0.609375", 40: "nan", 50: "inf", 60: "n/a", 70: "nan"}
    text = browser.value("document.body.innerText")
    assert "m: the loss is not finite on 3 steps, first at step 40" in text
    assert "(1.0781 at step 69 before)" in text  # 69 / 64
    ours = records(50)
    for record in ours[-10:]:
        record["loss"] = None
    browser.open(
        write_page(tmp_path / "own.html", [load(write_run(tmp_path / "own", ours))], ["own"])
    )
    head, values, *_ = said(browser, "Loss (nats/token) by step", 50)
    assert head.startswith("step 50 ") and values.startswith("not finite")
    assert browser.complaints == []
