"""What was published or measured about the loss that DiLoCo costs. Nothing is computed or interpolated.

A row holds for a run with the same interval and number of sites, whose model is as large as the row's or up to
NEAR times larger: the loss grows with the interval and with the number of sites, and shrinks with the model. Below
PUBLISHED_FROM only what was measured here counts: published figures are of runs with 20 tokens per parameter, and with a
batch and a learning rate that were searched for.
"""

import dataclasses

NEAR = 1.5
ROUNDED = 0.97  # 1.34B counts as 1.3B
PUBLISHED_FROM = ROUNDED * 1.3e9  # parameters

SCALING_LAWS = "arXiv 2503.09799, table 4"
HERE = "the tiny preset with 256 tokens per site (BENCHMARKS.md)"

# The best BATCH_TOKENS of 3.3M parameters at 4 sites, by the laws of arXiv 2503.09799: 11 sequences of 2,048 tokens. It
# grows with the model and with the number of sites.
LEAST_BATCH = 22_528


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A run that was compared with data parallelism at equal tokens.

    Attributes:
        sites: replicas.
        every: H, local steps between synchronizations.
        percent: of evaluation loss above data parallelism.
    """

    source: str
    parameters: float
    sites: int
    every: int
    percent: float


MEASURED_LOSS = Evidence(HERE, 3_344_064, 4, 30, 17.8)
ROWS = (
    MEASURED_LOSS,
    Evidence(HERE, 3_344_064, 4, 100, 16.2),
    Evidence(SCALING_LAWS, 1.3e9, 2, 30, 0.2),
    Evidence(SCALING_LAWS, 1.3e9, 4, 30, 0.5),
    Evidence(SCALING_LAWS, 1.3e9, 8, 30, 1.3),
    Evidence(SCALING_LAWS, 2.4e9, 4, 30, 0.3),
    Evidence(SCALING_LAWS, 4e9, 4, 30, 0.18),
    Evidence(SCALING_LAWS, 10e9, 4, 30, 0.29),
)


def find_evidence(parameters: float, sites: int, every: int, is_streaming: bool) -> Evidence | None:
    """Return the row that holds for such a run, the nearest in size; None where nobody compared one."""
    holding = []
    for row in ROWS:
        is_near = ROUNDED * row.parameters <= parameters <= NEAR * row.parameters
        if is_near and (row.sites, row.every, False) == (sites, every, is_streaming):
            holding.append(row)
    return max(holding, key=lambda row: row.parameters, default=None)
