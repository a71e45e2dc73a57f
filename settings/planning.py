"""Settings of the plan and the doctor."""

from settings.declare import Format, Positive, Section, section, setting
from settings.run import NAMES
from settings.targets import TRAIN, TRAIN_HERE


@section
class Planning(Section):
    """What to plan with, and what a run must achieve."""

    USED_BY = TRAIN

    cards: str = setting(
        "",
        "GPUs to plan for. `here` means the GPUs of this machine, which are also the default.",
        format=Format(
            r"here|cpu|[1-9][0-9]{0,3}x[a-z0-9-]+(,[1-9][0-9]{0,3}x[a-z0-9-]+)*",
            "COUNTxGPU with commas between several, or here, or cpu",
        ),
        example="8xa100-80gb-sxm",
    )
    mfu: float | None = setting(
        None,
        "Model FLOPs utilization to plan with, in percent: 45, not 0.45. "
        "Default: what `make doctor PROBE=1` measured, or else what is usual for the GPU.",
        unit="percent",
        minimum=1,
        maximum=100,
    )
    lan_gbit: Positive = setting(
        25,
        "Bandwidth between the nodes of a site, in each direction.",
        unit="Gbit/s",
        needs="NODES!=1",
        needed_by=TRAIN_HERE,
    )
    wan_gbit: Positive = setting(
        1,
        "Bandwidth between two sites, in each direction.",
        unit="Gbit/s",
        needs="SITES!=1",
        needed_by=TRAIN_HERE,
        used_by=TRAIN | {"wan-lab"},
    )
    wan_rtt_ms: float = setting(
        30,
        "Round-trip time between two sites.",
        unit="milliseconds",
        needs="SITES!=1",
        needed_by=TRAIN_HERE,
        used_by=TRAIN | {"wan-lab"},
    )
    price_gpu_hour: Positive | None = setting(
        None,
        "Price of one GPU for an hour, in your currency. `make plan` and `make energy` print the cost.",
        used_by=TRAIN | {"energy"},
    )
    price_kwh: Positive | None = setting(
        None,
        "Price of electricity per kWh, in the same currency. `make energy` adds both.",
        used_by=TRAIN | {"energy"},
    )
    target_hours: Positive | None = setting(
        None,
        "Time from now within which the run must finish. A run that cannot is refused.",
        unit="hours",
    )
    target_tokens_per_s: Positive | None = setting(
        None,
        "Speed that the run must reach. A run that cannot is refused.",
        unit="tokens/s",
    )
    allow_fail: str = setting(
        "",
        "Checks to ignore, by the names that `make plan` and `make doctor` print.",
        format=NAMES,
        example="disk,target-hours",
    )
    sweep: str = setting(
        "",
        "Compare depths (`depth`, or `1`) or numbers of GPUs (`gpus`), and recommend one.",
        choices=("depth", "gpus", "1"),
        needs="REVIEW!=1",
        used_by={"plan"},
    )
    review: bool = setting(
        False,
        "Compare the runs in RUNS_DIR with what was planned before they began.",
        used_by={"plan"},
    )
    probe: bool = setting(
        False,
        "Measure this machine for a minute: matmuls, memory, disk, links and one real step.",
        used_by={"doctor"},
    )
    more: bool = setting(
        False,
        "Print every layout and table of a plan, and every check of the doctor.",
        needs="REVIEW!=1",
        used_by={"plan", "doctor"},
    )
    json: bool = setting(False, "Print JSON.", used_by={"plan", "doctor", "compare"})
