"""make bench's table of how fast text is written."""

from bench import generation, run


def test_ours_and_transformers_write_the_same_and_both_are_measured() -> None:
    one, eight = generation.measure(1, turn_s=0.0, piece=6, names=("6 x 256",))
    assert (one["batch"], eight["batch"]) == (1, 8)
    for found in (one, eight):
        assert found["same"] is True
        (taken,) = found["rounds"]
        assert 0 < taken["ours_tokens_per_s"] < 1e6 and 0 < taken["theirs_tokens_per_s"] < 1e6


def test_a_row_has_ratios_of_one_round_and_says_where_there_is_no_peer() -> None:
    rounds = [
        {"ours_tokens_per_s": a, "theirs_tokens_per_s": b, "foreign_percent": 2.0}
        for a, b in ((100.0, 100.0), (400.0, 100.0), (90.0, 30.0))
    ]
    found = {"shape": "tiny", "dtype": "float32", "batch": 8, "same": True, "rounds": rounds}
    assert generation.row(found, run.spread) == (
        "| tiny in float32 | 8 | 100 (90-400) | 3.00 (1.00-4.00) | 100 (30-100) | yes | 2 |"
    )
    for taken in rounds:
        del taken["theirs_tokens_per_s"]
    alone = generation.row(found | {"same": None}, run.spread)
    assert "| n/a, it is not installed (make setup-dev) | n/a | n/a | 2 |" in alone
