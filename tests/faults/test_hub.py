"""The hub is asked while data is prepared, never while a run trains on it."""

import sys
from collections import Counter

import pytest

from tests import running
from tests.faults.hub import REPOSITORY, REVISION, Repository, hub, questions
from tests.faults.trial import STEPS, Trial

FILE = f"GET /datasets/{REPOSITORY}/resolve/{REVISION}/"


@pytest.fixture
def far(tmp_path, data):
    """A run whose data is on a hub."""
    where = data | {"DATA_DIR": str(tmp_path / "data")}
    return Trial(tmp_path, where, **STEPS, DATA_MIX="usmle:1", SHARD_TOKENS=1000, DATA_STREAM=0)


@pytest.mark.slow
def test_a_file_that_the_tokenizer_had_fetched_ahead_is_not_fetched_again_for_the_shards(far):
    served = Repository({"a.jsonl": questions(), "b.jsonl": questions()}, "slow file", 1000)
    script = (
        "import sys; from train.data import prepare; prepare.TOKENIZER_TEXT_BYTES = 2000\n"
        "sys.exit(prepare.main(['data']))"
    )
    with hub(repositories={REPOSITORY: served}) as server:
        env = far.env(VOCAB_SIZE=300) | server.environment(far.folder) | {"TOKENIZER": "train"}
        out = running.train(env, command=[sys.executable, "-c", script])
    assert "trained BPE tokenizer" in out and "asking again" not in out
    requests = Counter(served.requests)
    assert [requests[FILE + name] for name in served.files] == [1, 1]
    left = (far.folder / "data").rglob("*")
    assert not [path for path in left if "downloads" in path.parts and path.is_file()]


@pytest.mark.slow
@pytest.mark.fault(12)
def test_training_asks_the_hub_for_nothing_and_only_one_process_prepares(far):
    with hub() as server:
        far.where |= server.environment(far.folder)
        far.prepare()
        requests = Counter(server.requests)
        assert requests[f"{FILE}train.jsonl"] == requests[f"GET /api/datasets/{REPOSITORY}"] == 1
        far.prepare()
        far.train(NPROC=2)
        assert Counter(server.requests) == requests
    assert len(far.steps) == STEPS["MAX_STEPS"]
