"""make bench's table of how fast logs are read."""

from bench import log_reading


def test_every_step_of_the_logs_it_makes_is_read() -> None:
    kinds = [row["kind"] for row in log_reading.measure(1, size=100_000)]
    assert kinds == [*log_reading.KINDS]
