"""A disk that is full for a while: said, and training goes on."""

import pytest

from tests.faults.inject import Fault
from tests.faults.trial import Trial
from tests.small_disk import needs_mount, small_disk


@pytest.mark.slow
@pytest.mark.fault(7)
@needs_mount
def test_a_disk_that_fills_up_on_the_way_ends_nothing(tmp_path, data):
    fill = [Fault("step", "fill the disk", step=step, every=True) for step in range(6, 17)]
    make_room = Fault("step", "make room", step=11, every=True)
    with small_disk(tmp_path / "small", "8m") as small:
        # Filled again at each step: a save that failed gave its room back.
        for name, faults, code in (("freed", [*fill[:5], make_room], 0), ("full", fill, 78)):
            trial = Trial(small / name, data, SAVE_EVERY=4, MAX_STEPS=16)
            out = trial.train(*faults, code=code)
            assert "checkpoint failed" in out and "Traceback" not in out
            assert not list(small.rglob("*tmp*"))
            assert out.count("STATUS.json: cannot be written (No space left on device)") == 1
            steps = [step["step"] for step in trial.steps]
            assert len(steps) == 16 if name == "freed" else len(steps) >= 5
            assert steps == list(range(1, len(steps) + 1))
