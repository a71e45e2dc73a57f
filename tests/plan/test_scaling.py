"""plan/scaling.py against figures of the papers, and against minima that are searched for instead of solved for."""

import math
from pathlib import Path

import pytest

from plan import scaling
from settings import ROOT, load_config, load_preset

CHINCHILLA = 70e9, 1.4e12  # Hoffmann et al. 2022: the model that they trained
LAB_D16, LAB_D24 = (336_630_784, 6_710_886_400), (880_885_248, 17_616_076_800)


def test_the_loss_by_hand() -> None:
    # 70e9^0.3478 = exp(0.3478 x 24.97181) = 5,914; 1.4e12^0.3658 = exp(0.3658 x 27.96750) = 27,738
    assert scaling.expected_loss(*CHINCHILLA) == pytest.approx(
        1.8172 + 482.01 / 5914 + 2085.43 / 27738, abs=1e-4
    )


def test_the_rule_is_the_lab_s_own_count_for_depth_24() -> None:
    assert scaling.rule_tokens(880_803_840) == 17_616_076_800


def test_text_that_is_repeated() -> None:
    """Muennighoff et al., 3.1: at R* passes after the first the repeats are worth 1 - 1/e of new text, and however
    many there are never more than R* passes. Four passes lose little, forty are close to the end."""
    assert scaling.effective_tokens(1e9, 5e8) == 5e8 and scaling.effective_tokens(1e9, 1e9) == 1e9
    passes = 16.387756
    assert scaling.effective_tokens(1e9, passes * 1e9) == pytest.approx(
        1e9 * (1 + 15.387756 * (1 - 1 / math.e))
    )
    assert scaling.effective_tokens(1e9, 1e15) == pytest.approx(passes * 1e9)
    # 1 + 15.387756 x (1 - exp(-3 / 15.387756)) = 1 + 15.387756 x 0.17713
    assert scaling.effective_tokens(1e9, 4e9) == pytest.approx(3.7256e9, rel=1e-4)


def test_a_first_repeat_is_worth_what_new_text_is() -> None:
    assert scaling.effective_tokens(1e9, 1e9 + 1e6) - 1e9 == pytest.approx(1e6, rel=1e-3)


def test_what_a_runs_tokens_are_worth(tmp_path: Path) -> None:
    """usmle has 2 million tokens, 2% of them held out, and the lab's mixture takes a hundredth of its 100B tokens of
    it."""
    (tmp_path / "empty.env").touch()
    source, unique = "usmle", 1_960_000
    c = load_config({"PRESET": "xlarge-8xa100", "ENV_FILE": str(tmp_path / "empty.env")})
    other = load_config(
        {
            "PRESET": "xlarge-8xa100",
            "ENV_FILE": str(tmp_path / "empty.env"),
            "DATA_MIX": f"{source}:1",
        }
        | {"TRAIN_TOKENS": str(c.train_tokens * c.mixture[source] // 100)}
    )
    passes = other.last_step * other.batch_tokens / unique
    assert scaling.worth(other) == pytest.approx(
        unique * (1 + 15.387756 * (1 - math.exp((1 - passes) / 15.387756)))
    )
    assert scaling.worth(c) < c.last_step * c.batch_tokens


def test_sources_that_do_not_say_how_many_tokens_they_have_count_as_new(tmp_path: Path) -> None:
    declared = (ROOT / "sources" / "usmle.toml").read_text()
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "questions.toml").write_text(
        "".join(
            line for line in declared.splitlines(keepends=True) if not line.startswith("tokens")
        )
    )
    (tmp_path / "empty.env").touch()
    c = load_config(
        {
            "PRESET": "xlarge-8xa100",
            "ENV_FILE": str(tmp_path / "empty.env"),
            "DATA_MIX": "questions:1",
            "DATA_DIR": str(tmp_path),
        }
    )
    assert scaling.worth(c) == c.last_step * c.batch_tokens


def test_the_labs_runs_lie_as_the_law_says_they_should() -> None:
    """Not a fit: other data, another tokenizer. Depth 24 ends below depth 16; and at equal tokens, in the middle of
    both runs (step 5,000 and 10,000 of 524,288 tokens), the two were 0.143 and 0.157 apart."""
    assert scaling.expected_loss(*LAB_D24) < scaling.expected_loss(*LAB_D16) - 0.2
    for step, apart in ((5_000, 3.0704 - 2.9279), (10_000, 2.9700 - 2.8135)):
        tokens = step * 524_288
        found = scaling.expected_loss(LAB_D16[0], tokens) - scaling.expected_loss(
            LAB_D24[0], tokens
        )
        assert found == pytest.approx(apart, abs=0.02)


def test_a_run_s_loss_is_that_of_a_model_and_tokens_that_the_law_knows() -> None:
    """By hand for d16: 1.8172 + 482.01 / 336,630,784^0.3478 + 2085.43 / 6,710,886,400^0.3658; of one step it would have
    19.2, above the ln 65,536 = 11.1 of a guess."""
    d16 = scaling.loss_of(load_preset(PRESET="d16-2xh100"))
    assert d16 == pytest.approx(
        1.8172 + 482.01 / 336_630_784**0.3478 + 2085.43 / 6_710_886_400**0.3658
    )
    assert scaling.loss_of(load_preset(PRESET="d16-2xh100", MAX_STEPS="1")) is None
    assert scaling.loss_of(load_preset(PRESET="tiny")) is None
