"""The settings of a run at several sites, with a WAN in between. A part of config.py's Config."""

import dataclasses

from settings.declare import TRACKED, setting
from settings.sections.tools import Outside


@dataclasses.dataclass(frozen=True)
class AtSites(Outside):
    """How sites stay together, and how they find each other."""

    # ---- Sites
    sync: str = setting(
        "ddp",
        help="how sites stay together: by gradients in every step, or by DiLoCo, which "
        "exchanges what SYNC_EVERY steps have changed; docs/four-sites.md",
        choices=("ddp", "diloco"),
        resume=TRACKED,
    )
    sites: int = setting(
        1,
        help="places over which the NODES are spread evenly, with a WAN in between",
        minimum=1,
        maximum=4096,
        resume=TRACKED,
    )
    lighthouse: str = setting(
        "",
        help="where make lighthouse listens, which tells sites of each other",
        pattern=r"[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]{4,5}",
        example="10.0.0.5:29510",
    )
    sync_every: int = setting(
        30,
        help="steps from one exchange to the next (H); with SYNC_FRAGMENTS each has its turn in it",
        unit="steps",
        minimum=1,
        resume=TRACKED,
    )
    sync_fragments: int = setting(
        1,
        help="parts of the model that are exchanged in turn (streaming DiLoCo)",
        minimum=1,
        resume=TRACKED,
    )
    sync_delay: int = setting(
        0,
        help="steps that go on while an exchange is under way",
        unit="steps",
        minimum=0,
        resume=TRACKED,
    )
    outer_learning_rate: float = setting(
        0.7,
        help="of the step that an exchange ends with (Nesterov; Douillard et al. 2023)",
        above=0,
        maximum=2,
        resume=TRACKED,
    )
    outer_momentum: float = setting(
        0.9, help="of that step", minimum=0, maximum=0.999, resume=TRACKED
    )
    sync_dtype: str = setting(
        "bfloat16",
        help="in which changes travel; they are added up in float32",
        choices=("bfloat16", "float32"),
        resume=TRACKED,
    )
    min_sites: int = setting(
        1, help="sites that train on when others are away", minimum=1, maximum=4096
    )
