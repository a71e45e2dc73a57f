"""The page in a browser: what it shows, with each control, by pointer, touch and keys, and without JavaScript."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from analysis.page.build import write_page
from analysis.runs import read_run
from analysis.summary import find_window, smooth
from record.goodput import Timeline
from settings import load_preset
from tests.analysis import made_runs
from tests.analysis.made_runs import START, write_run
from tests.browser import Browser, needs_chromium
from tests.record.clock import Clock
from tests.running import wait_until

pytestmark = needs_chromium

LOSS = "Loss (nats per token) by step"
RANGES = "[c.at.x0, c.at.x1, c.at.low, c.at.high]"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def make_run(name="d16", n=1000, lower=0.0, **facts):
    """Return a run of n steps that was evaluated after half of them. Its clock starts 60 s before the first."""
    random = np.random.default_rng(2)
    step = np.arange(1.0, n + 1)
    step_ms = 350 + 10 * random.random(n)
    loss = np.float32(3 + 8 * np.exp(-step / 20) + random.normal(size=n) / 20 - lower)
    columns = facts.pop("columns", {}) | {
        "tokens": step * 524288,
        "time": START + 60 + np.cumsum(step_ms) / 1000,
        "step_ms": step_ms,
        "minutes": np.cumsum(step_ms) / 60_000,
        "grad_norm": random.random(n, np.float32).astype(float),
        "lr": 6e-4 * (1 + np.cos(step / n)),
        "tokens_per_s": 524288 / step_ms * 1000,
    }
    evals = [made_runs.make_eval(n // 2, 3.125 - lower)]
    return made_runs.make_run(name, list(loss), evals, columns=columns, **facts)


class Page(Browser):
    """A browser with a page of runs, and what a reader does there."""

    path: Path

    def draw(self, *runs, width=1280, **more):
        is_phone = width < 500
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        write_page(self.path, runs, **more)
        self.open(self.path)

    def select(self, name, value):
        self.value(
            f"{{ const box = document.querySelector('[data-view={name}]'); box.value = '{value}';"
            " box.dispatchEvent(new Event('input', {bubbles: true})); }"
        )

    def click(self, selector):
        self.value(f"document.querySelector('{selector}').click()")

    def chart(self, title, expression):
        """Return what an expression is for the chart `c`."""
        find = f"charts.find(c => c.heading.textContent.startsWith({json.dumps(title)}))"
        return self.value(f"(c => {expression})({find})")

    def place(self, title, x, share=0.5):
        """Return where a value of x is on the screen, at a share of the height of a chart."""
        self.chart(title, "c.box.scrollIntoView({block: 'center'})")
        box = "c.over.getBoundingClientRect()"
        left, top = self.chart(title, f"[{box}.x + c.at.x({x}), {box}.y + {share} * c.height]")
        return left, top

    def look(self, title, x):
        """Return what the chart says under the pointer."""
        self.hover(*self.place(title, x))
        return self.chart(title, "c.tip.innerText").splitlines()

    def pull(self, title, start, end):
        """Drag from one place to another, each in x and as a share of the height."""
        first, last = self.place(title, *start), self.place(title, *end)
        self.mouse("mousePressed", *first, buttons=1)
        self.mouse("mouseMoved", *last, buttons=1)
        self.mouse("mouseReleased", *last)

    def press(self, *keys):
        for key in keys:
            self.chart(LOSS, f"c.box.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")

    def texts(self, selector):
        """Return the texts of the elements that can be seen."""
        visible = f"[...document.querySelectorAll('{selector}')].filter(e => e.checkVisibility())"
        return self.value(f"{visible}.map(e => e.innerText)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Page(tmp_path_factory.mktemp("browser"))
    with opened:
        yield opened
    assert opened.complaints == []  # of scripts, and of the content policy


@pytest.fixture
def page(browser, tmp_path):
    browser.path = tmp_path / "page.html"
    return browser


def test_the_pointer_and_the_text_alternative_say_what_was_recorded(page):
    run = make_run()
    loss = run.columns["loss"]
    loss[700] += 4
    page.draw(run)
    notes = {500: ["validation 3.125 (step 500)"], 701: ["spike (step 701)"]}
    for step in (123, 500, 701):
        place, values, *others = page.look(LOSS, step)
        minutes = run.columns["minutes"][step - 1]
        assert place == f"step {step} · {step * 524288:,} tokens · {minutes:.2f} min"
        assert values == f"{loss[step - 1]:.9g} mean {smooth(loss, 21)[step - 1]:.6g}"
        assert others == notes.get(step, [])
    page.draw(make_run(loss_is="a running mean"))
    assert " mean " not in page.look(LOSS, 600)[1]
    page.select("window", "51")
    mean = smooth(make_run().columns["loss"], 51)[599]
    assert page.look(LOSS, 600)[1].endswith(f" mean {mean:.6g}")


def test_each_chart_has_a_text_alternative(page):
    run = make_run()
    loss = run.columns["loss"]
    page.draw(run)
    labels = page.value("charts.filter(c => !c.box.hidden).map(c => c.canvas.ariaLabel)")
    assert len(labels) == len(page.texts(".panel")) == 5
    assert labels[0].startswith(f"{LOSS}. step from 0 to 1000. d16: {loss[0]:.5g} at 1 to ")


def test_an_evaluation_between_two_steps_is_drawn_between_them(page):
    page.draw(make_run(n=2, columns={"step": np.array([100.0, 200.0])}))
    places = page.value("[50, 150, 201].map(step => placeOf(data.runs[0], 'tokens', step))")
    assert places == [262144, 786432, None]


def test_drags_zoom_in_x_and_y_and_keys_stop_at_the_ends(page):
    page.draw(make_run())
    whole = page.chart(LOSS, RANGES)
    page.pull(LOSS, (600, 0.5), (640, 0.5))
    assert page.chart("Learning rate", RANGES)[:2] == pytest.approx([600, 640], abs=1)
    page.pull(LOSS, (620, 0.25), (620, 0.6))
    low, high = page.chart(LOSS, RANGES)[2:]
    assert 2.7 < low < high < 3.2
    page.press(*"-" * 9)
    assert page.chart(LOSS, RANGES) == [*whole[:2], low, high]
    page.press("0", "ArrowUp")
    assert page.chart(LOSS, RANGES)[3] < whole[3]
    page.look(LOSS, 500)
    page.press("ArrowRight")
    assert page.chart(LOSS, "c.tip.innerText").startswith("step 501 ")


def test_the_address_keeps_the_view(page):
    page.draw(make_run(), make_run("d24"))
    page.select("window", "51")
    page.click("[value=d24]")
    page.pull(LOSS, (200, 0.3), (300, 0.6))
    view, ranges = page.value("view"), page.chart(LOSS, RANGES)
    page.value("window.isOld = true")
    page.call("Page.reload")
    wait_until(lambda: page.value("!window.isOld && document.documentElement?.dataset.ready"))
    assert page.value("view") == view and view["hidden"] == ["d24"]
    assert page.chart(LOSS, RANGES) == ranges
    assert page.value("document.querySelector('[data-view=window]').value") == "51"
    damaged = "%7B%22zoom%22:{%22step%22:3},%22hidden%22:{},%22x%22:%22no%22}"
    page.value(f"location.hash = '{damaged}'")
    wait_until(lambda: page.value("view.hidden") == [])
    assert page.chart(LOSS, RANGES)[:2] == [0, 1000]


def test_a_spike_does_not_widen_the_range_unless_wanted(page):
    run = make_run()
    run.columns["loss"][[300, 700]] = -50, 90
    page.draw(run)
    low, high = page.chart(LOSS, RANGES)[2:]
    assert -2 < low < 2.8 and run.columns["loss"][0] < high < 14
    page.click("[data-view=clip]")
    low, high = page.chart(LOSS, RANGES)[2:]
    assert low < -50 and high > 90


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(page):
    runs = [make_run("b-seed1"), make_run("b-seed2", lower=0.5), make_run("b-seed9", 400, 0.25)]
    page.draw(*runs, make_run("muon", 800, 1.0))
    means = [smooth(run.columns["loss"], find_window(run.steps)) for run in runs]
    values = [mean[299] for mean in means]
    range_of = f"{min(values):.5g} to {max(values):.5g}, 3 runs"
    assert f"{np.mean(values):.6g} ({range_of}) b" in page.look(LOSS, 300)
    assert len(page.look(LOSS, 600)) == 2  # the line of b ends where its first run ends
    ends = page.chart(LOSS, "c.lines.map(line => line.x[line.y.findLastIndex(Number.isFinite)])")
    assert ends == [400, 800]
    assert page.look("Loss minus", 300)[-1].endswith(" muon minus b")
    page.click("[value=b]")
    assert len(page.look(LOSS, 300)) == 2
    page.click("#runs button")
    page.click("#runs button")
    assert page.texts("#runs tbody tr")[0].startswith("muon")
    page.select("search", "SEED2")
    assert len(page.texts("#runs tbody tr")) == 1


def test_35_runs_leave_the_chart_on_the_screen(page):
    page.draw(*[make_run(f"run-{i}-with-a-long-name", 50) for i in range(35)])
    assert page.chart(LOSS, "c.box.getBoundingClientRect().top") < 330
    assert len(page.texts("#groups label")) == 35


def test_a_tap_shows_values_on_a_phone_and_nothing_is_too_wide(page):
    page.draw(make_run(), make_run("d24"), width=390)
    x, y = page.place(LOSS, 500)
    page.value("onpointerout = () => window.hasLeft = true")
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    wait_until(lambda: page.value("window.hasLeft"))
    assert " d24" in page.chart(LOSS, "c.tip.checkVisibility() && c.tip.innerText")
    assert page.value("document.documentElement.scrollWidth") == 390
    assert page.value("$('runs').offsetWidth > $('runs').parentElement.clientWidth")


SCROLLING = (
    "[...document.querySelectorAll('header, header *, .controls, .controls *, .legend, #groups')]"
    ".filter(e => /auto|scroll/.test(getComputedStyle(e).overflow)).map(e => e.tagName)"
)


def test_header_and_controls_do_not_scroll_inside_a_phone(page):
    tiny = load_preset(PRESET="tiny").stored()
    page.draw(make_run(settings=tiny), width=390)
    assert page.value(SCROLLING) == []
    assert page.value("getComputedStyle(document.querySelector('.controls')).position") == "static"


def test_the_legend_names_training_and_validation(page):
    run = make_run()
    page.draw(replace(run, evals=[*run.evals, made_runs.make_eval(1000, 3.0, full=True)]))
    names = [
        "training, smoothed",
        "training, each step",
        "validation, subset",
        "validation, full set",
    ]
    for text, name in zip(page.texts("#key label"), names, strict=True):
        assert text.endswith(name)
    line, point = page.chart(LOSS, "[c.lines[0].color, c.points[0].color]")
    assert line != point
    page.draw(make_run(), make_run("d24"))  # each in its color
    assert len(page.texts("#key label")) == 3
    assert page.chart(LOSS, "c.points.map(p => p.color)") == ["--line0", "--line1"]


def test_a_column_of_tokens_is_sorted_by_number(page):
    page.draw(make_run("long", 100), make_run("short", 1))
    page.value("update({sort: 'tokens'})")
    assert page.texts("#runs tbody tr")[0].startswith("short")  # 524,288 is less than 52.4M


def test_a_chart_is_saved_as_csv_svg_and_png(page):
    runs = [make_run(), make_run('d"<24', lower=1.0)]
    page.draw(*runs)
    page.value("update({zoom: {step: [100, 110]}})")
    folder = page.path.parent
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.chart(LOSS, "[...c.box.querySelectorAll('button')].forEach(button => button.click())")
    wait_until(lambda: len(list(folder.glob("loss_by_step.?[svn]?"))) == 3)
    head, *rows = (folder / "loss_by_step.csv").read_text().splitlines()
    assert head == "run,step,value,smoothed,lowest,highest" and len(rows) == 22
    assert rows[-1].startswith(f'"d""<24",110,{runs[1].columns["loss"][109]},')
    drawing = (folder / "loss_by_step.svg").read_text()
    assert f">{LOSS}</text>" in drawing and '>d"&#60;24</text>' in drawing
    assert (folder / "loss_by_step.png").read_bytes().startswith(b"\x89PNG")


def test_without_javascript_there_are_the_picture_and_the_numbers(page):
    write_page(page.path, [make_run(), make_run("d24", lower=1.0)], base64.b64decode(PIXEL))
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=page.path.as_uri())
    wait_until(lambda: page.value("document.querySelector('noscript img')?.naturalWidth") == 1)
    assert page.texts(".controls, .legend") == []
    assert "2.1250" in page.texts("#runs tbody tr")[1]
    page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_paper_is_light_and_has_no_controls(page):
    page.draw(make_run())
    page.select("theme", "dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.value(ground)
    page.value("dispatchEvent(new Event('beforeprint'))")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert "252, 253" in page.value(ground) and page.texts(".controls") == []
    page.value("dispatchEvent(new Event('afterprint'))")
    page.call("Emulation.setEmulatedMedia", media="")
    assert page.value(ground) == dark


def test_a_page_says_what_was_trained_and_what_words_mean(page):
    clock = Clock().start().steps(1, 1, seconds=60.0).resume(1, down=20.0)
    folder = write_run(page.path.parent / "d16", 3.0)
    run = read_run(folder)
    evals = [*run.evals, made_runs.make_eval(20, 3.5, full=True, compressed_bpb={"xz -9": 1.698})]
    page.draw(replace(run, evals=evals, timeline=Timeline(clock.records)))
    (header,) = page.texts("header")
    for words in ("abc123", "1.698", "3.5000"):
        assert words in header
    widths = page.value("[...document.querySelectorAll('.bar span')].map(e => e.offsetWidth)")
    assert widths[0] == pytest.approx(3 * sum(widths[1:]), rel=0.01)
    page.click("summary")
    assert "tokenizers" in "".join(page.texts("details dd"))


def test_settings_that_differ_and_the_verdict_are_shown(page):
    tiny = load_preset(PRESET="tiny").stored()
    name = "</script>"
    runs = [make_run(settings=tiny), make_run(name, settings=tiny | {"LEARNING_RATE": 0.5})]
    verdict = SimpleNamespace(rows=[{"": name, "LOSS": "3.1"}], sentences=["<b wins"])
    page.draw(*runs, comparison=verdict)
    assert "LEARNING_RATE\n0.01, 0.5" in page.texts("header")[0]
    assert "<b wins" in page.texts("p") and page.texts("td")[:2] == [name, "3.1"]
    assert page.texts("#groups label")[1] == name


def test_samples_of_the_gpus_are_under_the_same_axis(page):
    run = make_run()
    times = START + 30 * np.arange(10)
    watts = 500.0 + np.arange(10)
    samples = {"time": times, "power_w": watts, "energy_kwh": np.arange(10) / 8}
    samples |= {"power_low_w": watts - 50, "power_high_w": watts + 50, "in_mb_s": times * np.nan}
    page.draw(replace(run, samples=samples))
    step = np.interp(times[4], run.columns["time"], run.columns["step"])
    assert page.look("Power per GPU", step)[1] == "504 (454 to 554)"
    page.select("x", "wall")
    assert page.look("Energy", 0.5)[1] == "0.125"  # before the first step


def test_a_loss_that_is_not_finite_is_called_so(page):
    run = make_run(n=70, not_finite={"loss": np.isin(np.arange(70), (39, 40, 69))})
    run.columns["loss"][39:] = [np.nan, np.inf, *[np.nan] * 29]
    page.draw(run)
    words = [page.look(LOSS, step)[1].split(" mean")[0] for step in (40, 41, 60, 70)]
    assert words == ["not finite", "inf", "n/a", "not finite"]
    assert "the loss is not finite on 3 steps, first at step 40" in page.texts("body")[0]


def test_two_runs_of_200_000_steps_are_exact_in_8_mb(page):
    runs = [make_run("long", 200_000), make_run("longer", 200_000, 1.0)]
    runs[0].columns["loss"][:5] = np.nan, np.inf, -np.inf, -0.0, 1e-310
    page.draw(*runs)
    assert page.path.stat().st_size < 8_000_000
    for name in ("step", "tokens", "step_ms", "minutes", "loss", "lr", "grad_norm"):
        bits = page.value(f"[...new BigUint64Array(data.runs[0].columns.{name}.buffer)].join()")
        assert bits == ",".join(map(str, runs[0].columns[name].view(np.uint64)))
    page.value("update({zoom: {step: [123450, 123460]}})")
    value = f"{runs[0].columns['loss'][123455]:.9g} mean"
    assert any(line.startswith(value) for line in page.look(LOSS, 123456))
