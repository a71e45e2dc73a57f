"""What is drawn: the lines of matplotlib are looked at, and the files that it writes."""

import numpy as np
import pytest

from analysis.figure import write_figure, write_paper_figure
from analysis.groups import CURVES, Lines
from analysis.summary import smooth
from tests.analysis.made_runs import make_eval, make_run


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def savefig(self, *args, **options):
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_a_run_is_drawn_raw_and_smooth_with_its_evaluations(tmp_path, drawn):
    loss = np.linspace(5, 3, 90)
    loss[50] = np.nan
    evals = [make_eval(30, 4.5), make_eval(60, 4.0), make_eval(90, 3.5, full=True)]
    run = make_run("a", loss, evals, columns={"grad_norm": np.logspace(-2, 1, 90)})
    path = tmp_path / "new" / "a.png"
    write_figure(path, [run], 50)
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = {(panel.get_title(loc="left"), panel.get_xlabel()): panel for panel in drawn[0].axes}
    assert len(axes) == len(drawn[0].axes) == 4  # without those that have no numbers
    by_time = axes["Loss (nats per token)", "minutes"]
    lines = {
        str(line.get_marker()): line.get_xydata() for line in by_time.lines if len(line.get_xdata())
    }
    np.testing.assert_allclose(lines["o"], [[0.5, 4.5], [1, 4]])
    np.testing.assert_allclose(lines["*"], [[1.5, 3.5]])
    smooth_line, raw_line = (line for line in by_time.lines if len(line.get_xdata()) == 90)
    np.testing.assert_array_equal(smooth_line.get_ydata(), smooth(loss, 5))
    np.testing.assert_array_equal(raw_line.get_ydata(), loss)
    assert axes["Gradient norm before clipping (logarithmic)", "step"].get_yscale() == "log"
    assert axes["Throughput (tokens/s, whole job)", "step"].get_ylim()[0] == 0


def test_validation_has_a_color_of_its_own_and_a_place_in_the_legend(tmp_path, drawn):
    evals = [make_eval(1, 4.5), make_eval(2, 3.5, full=True)]
    write_figure(tmp_path / "a.png", [make_run("a", [5.0, 4.0], evals)])
    training, *_ = lines = drawn[0].axes[0].lines
    points = [line for line in lines if line.get_marker() in ("o", "*")]
    assert {line.get_color() for line in points}.isdisjoint({training.get_color()})
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == [
        "training, smoothed",
        "training, each step",
        "validation, subset",
        "validation, full set",
    ]
    write_figure(tmp_path / "b.png", [make_run("a", [5.0, 4.0], evals[:1]), make_run("b")])
    names = [text.get_text() for text in drawn[1].legends[0].get_texts()]
    assert names == ["a", "b", "validation, subset"]


def test_several_runs_have_lines_of_their_own_and_a_legend(tmp_path, drawn):
    names = [str(number) for number in range(13)]
    write_figure(tmp_path / "a.png", [make_run(name) for name in names])
    lines = [line for line in drawn[0].axes[0].lines if len(line.get_xdata())]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 13
    assert lines[0].get_marker() == "."  # a run of one step is seen too
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == names


def test_a_figure_for_a_paper_has_its_size_its_fonts_and_a_band(tmp_path, drawn):
    x = np.array([0.0, 1e6])
    points = {"a": [(x, x + 5)], "b": [(x, x), (x, x + 8)]}
    for kind in ("pdf", "svg"):
        path = tmp_path / "new" / f"loss.{kind}"
        write_paper_figure(path, Lines(CURVES[0], "tokens", points, 0, 1e6))
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.lines[1].get_ydata()[[0, -1]], x + 4)
    band = axes.collections[1].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0, 1e6 + 8)
    pdf = (tmp_path / "new" / "loss.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf  # embedded, as TrueType
    assert b"/MediaBox [ 0 0 237.6 180 ]" in pdf  # 3.3 inches
    svg = (tmp_path / "new" / "loss.svg").read_text()
    assert 'width="237.6pt"' in svg and "<image" not in svg
