"""What is planned against what a GPU takes: parameters exactly, memory within 10%."""

import pytest
import torch

from bench import planned
from bench.planned import Row, row_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

ROWS = [
    row_of("gpt2", "bfloat16", "eager"),
    row_of("gpt2", "bfloat16", "compiled"),
    row_of("gpt2", "float32", "eager"),
    row_of("gpt2", "bfloat16", "compiled", activation_checkpointing="selective"),
    row_of("gpt2", "bfloat16", "eager", activation_checkpointing="full"),
    row_of("d16", "bfloat16", "compiled"),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.text for row in ROWS])
def test_memory_is_what_was_planned(row: Row) -> None:
    found = planned.measured(row)
    assert found["parameters"] == found["predicted"]["parameters"]
    assert found["predicted"]["mib"] == pytest.approx(found["peak_mib"], rel=0.1), found
