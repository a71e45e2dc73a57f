"""train/hooks/final_sample.py: what a terminal shows of a sample."""

import logging

import pytest

from train import console
from train.hooks import final_sample


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" \n\n    def f():\n\n \t\n\n        pass\n  \n", "    def f():\n\n        pass"),
        ("a\nb\n\nc", "a\nb\n\nc"),
        ("\n".join("abcdefghij"), "\n".join("abcdefgh")),
        ("\n \n", ""),
        (f"{40 * '字'}", f"{36 * '字'}..."),  # two columns each
        (f"{77 * 'x'}\n{76 * 'y'}", f"{73 * 'x'}...\n{76 * 'y'}"),
    ],
)
def test_a_terminal_shows_the_first_lines_of_a_sample(text, shown):
    assert final_sample.excerpt(text) == shown


def test_what_a_model_writes_cannot_command_a_terminal():
    text = "def f():\n\tx = 1 \x1b[2J\x07\u200e é\r\n"
    shown = "def f():\n        x = 1 \\x1b[2J\\x07\\u200e é\\r\n"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,)})
    assert console.Printable().format(record) == shown
    assert final_sample.excerpt(text) == shown.removesuffix("\n")
