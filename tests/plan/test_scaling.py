"""plan/scaling.py against figures of the papers, and against minima that are searched for instead of solved for."""

import math
from pathlib import Path

import pytest

from plan import scaling
from plan.scaling import LAW, Law
from settings import ROOT, load_config, load_preset

CHINCHILLA = 70e9, 1.4e12  # Hoffmann et al. 2022: the model that they trained
GOPHER_FLOPS = 5.76e23  # the compute that it had
FIRST_FIT = Law(1.6934, 406.4, 410.7, 0.3392, 0.2849)  # theirs, to the digits of the paper's source
LAB_D16, LAB_D24 = (336_630_784, 6_710_886_400), (880_885_248, 17_616_076_800)


def searched(law: Law, flops: float) -> float:
    """The size of least loss at 6 N D = flops, by golden section over log N."""
    low, high, golden = math.log(1e6), math.log(1e14), (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - golden * (high - low), low + golden * (high - low)
        on_left, on_right = (law.loss(math.exp(x), flops / 6 / math.exp(x)) for x in (left, right))
        if on_left < on_right:
            high = right
        else:
            low = left
    return math.exp(low)


def test_the_loss_by_hand() -> None:
    # 70e9^0.3478 = exp(0.3478 x 24.97181) = 5,914; 1.4e12^0.3658 = exp(0.3658 x 27.96750) = 27,738
    assert scaling.expected_loss(*CHINCHILLA) == pytest.approx(
        1.8172 + 482.01 / 5914 + 2085.43 / 27738, abs=1e-4
    )


def test_the_first_fit_gives_the_size_that_its_paper_names() -> None:
    """Section 3.4 of Hoffmann et al.: by approach 3 Gopher's compute is best spent on 40B parameters."""
    assert FIRST_FIT.best_parameters(GOPHER_FLOPS) == pytest.approx(40e9, rel=0.02)


def test_the_new_fit_scales_as_its_paper_says() -> None:
    """Besiroglu et al.: a = 0.5126; about 20 tokens a parameter at the compute of Chinchilla, where the first fit has
    about 60."""
    assert LAW.share == pytest.approx(0.5126, abs=5e-5)
    size = scaling.optimal_parameters(GOPHER_FLOPS)
    assert 17 < GOPHER_FLOPS / 6 / size**2 < 23
    assert size == pytest.approx(70e9, rel=0.1)
    assert 55 < GOPHER_FLOPS / 6 / FIRST_FIT.best_parameters(GOPHER_FLOPS) ** 2 < 65


@pytest.mark.parametrize("flops", [1.36e19, 9.22e20, GOPHER_FLOPS, 1e26])
@pytest.mark.parametrize("law", [LAW, FIRST_FIT], ids=["new", "first"])
def test_the_best_size_is_where_a_search_finds_it(law: Law, flops: float) -> None:
    best = law.best_parameters(flops)
    assert best == pytest.approx(searched(law, flops), rel=1e-6)
    assert law.best_tokens(best) == pytest.approx(flops / 6 / best)
    assert law.least_flops(law.loss(best, flops / 6 / best)) == pytest.approx(flops)


def test_tokens_a_parameter_by_the_law_and_by_the_rule() -> None:
    """The law's fall slowly with size; the rule's do not."""
    assert [
        round(scaling.optimal_tokens(size) / size) for size in (336_630_784, 880_885_248, 70e9)
    ] == [24, 23, 18]
    assert scaling.rule_tokens(880_803_840) == 17_616_076_800  # the lab's own count for depth 24


def test_what_training_past_the_optimum_costs() -> None:
    """By search: the lab's 100B tokens on 1.34B parameters, 75 a parameter, and what a larger model needs for it."""
    size, tokens = 1_336_248_320, 1e11
    loss = scaling.expected_loss(size, tokens)
    low, high = 1e18, 6 * size * tokens
    for _ in range(100):
        middle = math.sqrt(low * high)
        best = searched(LAW, middle)
        low, high = (low, middle) if LAW.loss(best, middle / 6 / best) < loss else (middle, high)
    assert scaling.wasted(size, tokens) == pytest.approx(1 - low / (6 * size * tokens), rel=1e-4)
    assert 0.1 < scaling.wasted(size, tokens) < 0.2
    assert scaling.wasted(size, 1e9) > 0.5  # 0.75 a parameter: far too few
    assert scaling.wasted(size, scaling.optimal_tokens(size)) == pytest.approx(0, abs=1e-9)


def test_a_loss_that_no_compute_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.8 is not above 1\.8172"):
        LAW.least_flops(1.8)


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
