"""What make train shows in terminals of 60, 80 and 120 columns: a first run, a second, one that is stopped and
one that is refused. The screens are in terminal_screens.txt, with every number as N."""

import re
import signal
from pathlib import Path

import pytest

from settings.config import SETTINGS
from tests.conftest import make_data
from tests.running import environment
from tests.terminal import show

SCREENS = (Path(__file__).parent / "terminal_screens.txt").read_text()


def normalize(screen, folder):
    """Return a screen with long lines whole again, numbers as N, and what the model wrote left out."""
    screen = re.sub(r"(?<=\S)\n(  |      )(?=\S)", " ", screen)
    screen = screen.replace(str(folder), "FOLDER")
    screen = re.sub(r"    (xdg-open |open |)(?=FOLDER)", "    OPEN ", screen)
    screen = re.sub(r"(Samples .*\n)(    .*\n|\n(?=    ))*", r"\1", screen)
    # A slow machine says after the second step how long it will take; a fast one has nothing to say.
    screen = re.sub(r"^about \d+ minutes left\n", "", screen, flags=re.MULTILINE)
    screen = re.sub(r"^step=.*\n(step=.*\n)*", "step=...\n", screen, flags=re.MULTILINE)
    screen = re.sub(r"(RUN_NAME=longer TRAIN_TOKENS=\w+) .*", r"\1 ...", screen)  # what was typed
    screen = re.sub(r"as planned|\d+% less", "0% more", screen)
    screen = re.sub(r"(about \S+) (s|h)\b", r"\1 min", screen)
    screen = screen.replace(" ms per step", " s per step")
    return re.sub(r"\d[\d.,:]*(?<=\d)", "N", screen)


def expected(name):
    return SCREENS.partition(f"==== {name}\n")[2].partition("\n====")[0] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_make_train_is_read_as_it_was_written(tmp_path, columns):
    data = make_data(tmp_path / "data", tokens=2_000_000)
    recipe = {"PRESET": "tiny", "MIN_LEARNING_RATE": 0, "SAVE_EVERY": 100_000}
    env = environment(tmp_path, data, RUN_NAME="tiny", **recipe)
    settings = [f"{name}={value}" for name, value in env.items() if name in SETTINGS]
    others = {name: value for name, value in env.items() if name not in SETTINGS}
    train = ["make", "train", *settings]
    screens = {
        "first": show(train, others, columns),
        "second": show(train, others, columns),
        "stopped": show(
            [*train, "RUN_NAME=stopped", "TRAIN_TOKENS=5M"], others, columns, "\r\nstep=10/"
        ),
        "refused": show([*train, "SEQ_LENGHT=3"], others, columns),
    }
    codes = {name: code for name, (code, _) in screens.items()}
    assert codes == {"first": 0, "second": 0, "stopped": -signal.SIGINT, "refused": 2}  # make's
    for name, (_, screen) in screens.items():
        assert normalize(screen, tmp_path) == expected(name)
        for line in screen.split("\n"):
            is_whole = len(line) <= columns or line.startswith("    ")
            assert is_whole or str(tmp_path) in line, f"{name}: {line}"
