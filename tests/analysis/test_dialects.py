"""Each dialect on the line that its trainer prints; and lines that were cut, torn or printed into."""

import re
import tomllib
from pathlib import Path

import pytest

from analysis.logs.dialect import Dialect, DialectError, read_dialects

BY_NAME = {dialect.name: dialect for dialect in read_dialects()}
LINES = tomllib.loads(Path(__file__).with_name("dialect_lines.toml").read_text())


@pytest.fixture(params=LINES)
def name(request):
    return request.param


@pytest.fixture
def line(name):
    return LINES[name]["line"]


@pytest.fixture
def whole(name):
    """The numbers of the line."""
    numbers = {key: None if value == "n/a" else value for key, value in LINES[name].items()}
    del numbers["line"]
    return {"step": 100, **numbers}


def test_a_line_gives_its_numbers_and_no_other_dialect_takes_it(name, line, whole):
    (found,) = BY_NAME[name].read(line)
    assert found.values == whole
    assert [dialect.name for dialect in BY_NAME.values() if dialect.read(line)] == [name]


def test_wherever_a_line_is_cut_no_number_is_another(name, line, whole):
    """Only a number without a unit at the very end of a line cannot be told from a part of it."""
    for end in range(1, len(line)):
        for found in BY_NAME[name].read(line[:end]):
            differing = [key for key, value in found.values.items() if value != whole[key]]
            assert not differing or re.search(r"[-+0-9.,eEna/]$", line[:end])
            assert len(differing) <= 1


def test_another_process_printed_before_or_behind(name, line, whole):
    """The whole line is read. Its last number is left out if nothing tells where it ends."""
    dialect = BY_NAME[name]
    for other in ("Killing subprocess 12", "saved a=1 to 'x.pt'", "[12%] 7 of 9 files ", line[:40]):
        assert dialect.read(other + line)[-1].values == whole
        for found in dialect.read(other + line) + dialect.read(line + other):
            assert found.values.items() <= whole.items()
        missing = [whole.keys() - found.values.keys() for found in dialect.read(line + other)[:1]]
        assert not missing or len(missing[0]) <= 1


def test_numbers_are_read_in_every_form_and_never_in_part():
    for form in [
        "3.5",
        "1e-05",
        "0.1234567890123456789",
        "12",
        "1,234,567.5",
        "-0.5",
        "3.",
        "7.0E+02",
        "-inf",
    ]:
        (found,) = BY_NAME["build_nanogpt"].read(f"step 100 | loss: {form} | norm: 0.5")
        assert found.values["loss"] == float(form.replace(",", ""))
    (mixed,) = BY_NAME["build_nanogpt"].read(
        "step 100 | loss: 9.1 | lr 6e-04 | loss: 8.0 | norm: 3.0"
    )
    assert mixed.values == {"step": 100, "loss": 9.1, "lr": 6e-4}  # the rest is of another line
    for step in ("nan", "inf", "n/a", "1e9"):
        assert not BY_NAME["nanogpt"].read(f"iter {step}: loss 3.5, time 251.30ms, mfu 31.20%")


def test_code_quotations_and_comments_are_no_data():
    line = "step:12/100 train_time:50ms step_avg:5.00ms"
    assert BY_NAME["modded_nanogpt"].read(line)
    for code in (
        f'print0(f"{line}")',
        f"x = '{line}'",
        f"# {line}",
        f"  // {line}",
        f"as in `{line}`",
        f"foo() # {line}",
    ):
        assert not BY_NAME["modded_nanogpt"].read(code)
    assert not BY_NAME["llmc"].read("step 2000: train loss 3.2104, val loss 3.2345")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('head = "iter {stepp}:"', "must hold {step}"),
        ('head = "iter {step}"\nfeilds = []', "feilds = [] is none of these keys"),
        ('head = "iter {step"', "{step is no part of a template"),
        ("head = ", "declares no dialect"),
        *(
            (f'head = "iter {{step}}"\n{line}', words)
            for line, words in (
                ('fields = ["{minutes*60}"]', "{minutes*60} is no part of a template"),
                ('fields = ["{minutes/0}"]', "{minutes/0} is no part"),
                ('ends = "done"', "ends = 'done' is none of these keys"),
                ('zero_based = "no"', "zero_based = true"),
                ('fields = ["loss {loss}", "mean {loss}"]', "loss is there twice"),
            )
        ),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused(tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(f'source = "mine"\n{text}\n')
    with pytest.raises(DialectError) as error:
        read_dialects(tmp_path)
    assert words in str(error.value) and "mine.toml" in str(error.value)


def test_the_example_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs/logs.md").read_text()
    declaration = re.search("```toml\n(.*?)```", text, re.S)
    line = re.search("`(.*?)`:\n\n```toml", text)
    assert declaration and line
    dialect = Dialect("mine", **tomllib.loads(declaration[1]))
    (found,) = dialect.read(line[1])
    assert found.values == {"step": 12, "loss": 3.25, "grad_norm": 0.5, "step_ms": 1500}
    assert not dialect.read("[12] loss 3.25; gnorm 0.5; 1.5")
