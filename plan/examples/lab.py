"""Three plans that a lab made, worked through: the tables of docs/plans.md.

What they noted is theirs, written down as they had it; every other figure is computed by what make plan computes with.
"""

from hardware.gpu_specs import GpuSpec, load_gpu_specs
from hardware.model_size import flops_of, parameters
from plan import scaling, storage
from plan.checks import capacity_bytes, memory_of
from plan.fleet import Fleet, fleet_of
from plan.hours import pace_of
from plan.network import evidence, traffic
from plan.network.traffic import Sync
from plan.network.wan import gradient_bytes
from plan.speed import speed
from record import number_formats
from settings import load_config
from settings.config import Config


def configured(**settings: str) -> Config:
    """A preset's settings and these, with no folder of this machine in them."""
    return load_config(
        {
            "ENV_FILE": "",
            "MASTER_ADDR": "planned",
            "RUNS_DIR": "no-runs",
            "DATA_DIR": "no-data",
            **settings,
        }
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def rate(tokens_per_s: float) -> str:
    return (
        f"{tokens_per_s / 1000:,.0f}k" if tokens_per_s < 999_500 else f"{tokens_per_s / 1e6:.2f}M"
    )


def tokens_per_s(c: Config, percent: float) -> float:
    """Of the fleet that c names, at so much MFU and without a wait."""
    found = speed(c.replace(mfu=percent), fleet_of(c), None).tokens_per_s
    assert found is not None
    return found


def card(key: str) -> GpuSpec:
    found = load_gpu_specs().get(key)
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------------------
# 1. Eight A100 at four sites
# ---------------------------------------------------------------------------------------------------


def xlarge() -> Config:
    return configured(PRESET="xlarge-8xa100")


def at_four_sites(gbit: float) -> tuple[float, dict[str, Sync]]:
    """(seconds that a step computes at 50% MFU, what each way sends by its name)."""
    c = xlarge().replace(nodes=4, sites=4, wan_gbit=gbit)
    step_s = c.batch_tokens / tokens_per_s(c, 50.0)
    return step_s, {sync.name: sync for sync in traffic.syncs(c, fleet_of(c), step_s)}


def ddp_at(gbit: float) -> tuple[float, float]:
    """(seconds of a step with its wait, share of it spent computing) of DDP over four sites."""
    step_s, ways = at_four_sites(gbit)
    wait_s = ways["DDP, float32 gradients"].between_nodes_s
    return step_s + wait_s, step_s / (step_s + wait_s)


def claims() -> str:
    """What the notes have beside what the chips do."""
    c = xlarge()
    peak, half, tokens = tokens_per_s(c, 100.0), tokens_per_s(c, 50.0), c.train_tokens
    (slow_s, slow), (fast_s, fast) = ddp_at(1), ddp_at(10)
    size = parameters(c).total

    def through(rate_per_s: float) -> str:
        return f"{tokens / rate_per_s / 3600:,.0f} hours"

    rows = [
        [
            "one A100: 150k tokens/s",
            f"{rate(peak / 8)} at 100% MFU, {rate(half / 8)} at 50%: the claim is "
            f"{150_000 / (peak / 8):.1f} times the chip's peak",
        ],
        [
            "eight: 1.0M to 1.1M tokens/s, 27 to 30 hours",
            f"{rate(peak)} at 100% MFU ({through(peak)}), {rate(half)} at 50% ({through(half)})",
        ],
        ["later: 400k tokens/s, 69.4 hours", f"{400_000 / peak:.1f} times the peak of all eight"],
        [
            "with InfiniBand: 1.2M tokens/s, 23 hours",
            f"{1_200_000 / peak:.1f} times the peak; no network makes a chip faster",
        ],
        [
            "over the WAN 60 to 75% efficiency: 840k tokens/s, 33 hours",
            f"{100 * slow:.0f}% with 1 Gbit/s between the "
            f"sites ({rate(slow * half)}), {100 * fast:.0f}% with 10 ({rate(fast * half)}), where nothing hides behind "
            "computing",
        ],
        ["worst case: 0.5M tokens/s, 55 hours", f"{500_000 / peak:.1f} times the peak"],
        [
            "rule: above 700k tokens/s is on track, below 500k look for alternatives",
            f"no run of this model on eight A100 gets past {rate(peak)}",
        ],
        [
            "two days",
            f"{number_formats.count(half * 48 * 3600)} tokens at 50% MFU, on one node of eight",
        ],
        ["a synchronization: 2.6 GB in bfloat16, 20 to 30 s at 1 Gbit/s", synchronisation(c)],
        [
            "steps of 30 to 60 s",
            f"{slow_s:.0f} s at 1 Gbit/s, {fast_s:.0f} s at 10, of which "
            f"{c.batch_tokens / half:.1f} s are computing",
        ],
        [
            "100M tokens of warm-up in 1.5 hours, 1B in 15 minutes, 10B in 3 hours, 50B in 14 hours",
            ", ".join(
                f"{number_formats.count(t)} in {number_formats.hours(t / half / 3600)}"
                for t in (1e8, 1e9, 1e10, 5e10)
            )
            + ", at 50% MFU on "
            "one node",
        ],
        [
            "measured: 17.3 GB used, GPUs at 100%, no step logged",
            f"weights and moments alone are "
            f"{number_formats.size(12 * size)}, with gradients {number_formats.size(16 * size)}, all float32: no step had been made. A GPU "
            "that waits in a collective shows 100% as well",
        ],
    ]
    return markdown(["their notes", "what is possible"], rows)


def synchronisation(c: Config) -> str:
    ways = at_four_sites(1)[1]
    whole, half = ways["DDP, float32 gradients"], ways["DDP, bfloat16 gradients"]
    return (
        f"gradients are float32, {number_formats.size(gradient_bytes(c))}, and in a ring of four 1.5 times as much leaves "
        f"each site: {number_formats.size(whole.bytes_per_step)}, {number_formats.seconds(whole.seconds_per_step or 0)}; of bfloat16 "
        f"{number_formats.seconds(half.seconds_per_step or 0)}"
    )


DILOCO = {"NODES": "4", "SITES": "4", "SYNC": "diloco", "PARALLEL": "fsdp"}
LISTED: tuple[tuple[str, dict[str, str]], ...] = (
    ("4 sites x 2, DDP, 1 Gbit/s", {"NODES": "4", "SITES": "4"}),
    ("4 sites x 2, DDP, 10 Gbit/s", {"NODES": "4", "SITES": "4", "WAN_GBIT": "10"}),
    ("4 sites x 2, DiLoCo with H=30, 1 Gbit/s", DILOCO | {"SYNC_EVERY": "30"}),
    ("4 sites x 2, DiLoCo with H=100, 1 Gbit/s", DILOCO | {"SYNC_EVERY": "100"}),
    ("2 sites x 4, DDP, 1 Gbit/s", {"NODES": "2", "SITES": "2"}),
    ("one region: 4 nodes x 2, 25 Gbit/s", {"NODES": "4"}),
    ("one region: 2 nodes x 4, 25 Gbit/s", {"NODES": "2"}),
    ("one node of 8", {}),
    ("one node of 4", {"CARDS": "4xa100-80gb-sxm"}),
    (
        "one node: 4 A100 and 4 A6000",
        {
            "CARDS": "4xa100-80gb-sxm,4xa6000",
            "MICRO_BATCH_SIZE": "4",
            "ACTIVATION_CHECKPOINTING": "selective",
        },
    ),
    (
        "one node: 4 A100, 2 A6000 and 2 V100 of 32 GB",
        {
            "CARDS": "4xa100-80gb-sxm,2xa6000,2xv100-32gb-sxm",
            "DTYPE": "float32",
            "MICRO_BATCH_SIZE": "4",
            "ACTIVATION_CHECKPOINTING": "full",
        },
    ),
)


def alternatives() -> str:
    """What they had listed, on the same model and tokens."""
    rows = []
    for name, settings in LISTED:
        c = configured(**{"PRESET": "xlarge-8xa100", **settings})
        fleet = fleet_of(c)
        fast = pace_of(c, fleet, None).tokens_per_s
        assert fast is not None and memory_of(c, fleet).total <= capacity_bytes(fleet)
        rows.append(
            [
                name,
                rate(fast),
                f"{c.train_tokens / fast / 3600:,.0f}",
                number_formats.count(48 * 3600 * fast),
                remark_on(c, fleet),
            ]
        )
    return markdown(["where", "tokens/s", "hours for 100B", "tokens in 48 hours", "remark"], rows)


def remark_on(c: Config, fleet: Fleet) -> str:
    if c.sync == "diloco":
        percent, says = evidence.loss(parameters(c).total, c.sites, c.sync_every, streaming=False)
        return f"loss {evidence.percent_told(percent)}" + (
            f", by {says}" if percent is not None else ""
        )
    if len(fleet.cards) == 1:
        return ""
    slow, fast = fleet.slowest(c.dtype), speed(c, fleet, None)
    typed = f"MICRO_BATCH_SIZE={c.micro_batch_size} ACTIVATION_CHECKPOINTING={c.activation_checkpointing}"
    only = (
        "the V100 has no bfloat16, so DTYPE=float32 for all, and " if c.dtype == "float32" else ""
    )
    return (
        f"{only}every step waits for the {slow.key}: {slow.peak(c.dtype):g} TFLOP/s, {fast.mfu_percent:.0f}% MFU "
        f"assumed; {typed}"
    )


# ---------------------------------------------------------------------------------------------------
# 2. Two H100, four depths
# ---------------------------------------------------------------------------------------------------

NOTED = {
    16: ("470M", "4.3, measured", "20.8 and 28.5, measured"),
    20: ("738M", "6", "33"),
    24: ("1.06B", "7.7", "45"),
    32: ("1.9B", "17", "70 to 75"),
}
PEAK = 2 * 989e12  # FLOP/s of two H100


def depth(n: int) -> Config:
    """A depth on two H100, of the preset that has it; of depth 32, which is for eight, with more accumulation."""
    return configured(PRESET=f"d{n}-{'8' if n == 32 else '2'}xh100", CARDS="2xh100-sxm")


def depths() -> str:
    rows = []
    for n, (size, hours, memory) in NOTED.items():
        c = depth(n)
        fleet, total = fleet_of(c), parameters(c).total
        fast = speed(c, fleet, None)
        assert fast.tokens_per_s and fast.mfu_percent
        rows.append(
            [
                f"d{n}",
                f"{total:,}",
                size,
                number_formats.count(c.train_tokens),
                f"{rate(fast.tokens_per_s)} at {fast.mfu_percent:g}%",
                f"{c.train_tokens / fast.tokens_per_s / 3600:.1f}",
                hours,
                f"{memory_of(c, fleet).total / 1e9:.1f}",
                memory,
                f"{scaling.expected_loss(total, c.train_tokens):.2f}",
            ]
        )
    return markdown(
        [
            "depth",
            "parameters",
            "noted",
            "tokens, 20 a parameter",
            "tokens/s at MFU",
            "hours",
            "noted",
            "GB a GPU",
            "noted",
            "expected loss",
        ],
        rows,
    )


def miscounts() -> str:
    """Why 470M, and what followed from it."""
    parts = parameters(depth(16))
    twice = parts.total + 2 * parts.embedding
    by_square = ", ".join(
        f"{number_formats.count(470e6 * (n / 16) ** 2)} for d{n} ({NOTED[n][0]})"
        for n in (20, 24, 32)
    )
    return (
        f"Depth 16 has {parts.total:,} parameters: {parts.hidden:,} in its blocks, an embedding and a head of "
        f"{parts.embedding:,} each, {parts.norms:,} in norms. Their log says 336M as well; the 470M of their notes is "
        f"what comes out if the two tables are counted twice ({number_formats.count(twice)}). The other depths look scaled from "
        f"there by the square of the depth, {by_square}, and d32 comes out right by chance: with a width of 64 times "
        "the depth tables grow with the depth, and blocks with its cube. Of d24 their log has 880,803,840; the "
        f"{parameters(depth(24)).total:,} here are that and {parameters(depth(24)).norms:,} in norms."
    )


def d24_took() -> str:
    return (
        f"Hours went wrong with it. At 20 tokens a parameter work grows with the square of the size, {growth(24):.1f} "
        f"times from d16 to d24, and their estimate grew 1.8 times. Their own log of d24 has 33,600 steps of 2.94 s, "
        f"{33_600 * 2.94 / 3600:.1f} hours. Depth 20 was recommended for 6 hours, and takes twice that."
    )


def growth(n: int) -> float:
    """Of the work of a whole run, from d16."""
    work = [depth(of).train_tokens * flops_of(depth(of)) for of in (16, n)]
    return work[1] / work[0]


def memory_by_part() -> str:
    """Theirs is weights, AdamW, gradients, activations: 0.94, 3.76, 0.94, 14 to 16 GB."""
    c = depth(16)
    parts = memory_of(c, fleet_of(c)).parts
    logits = 4 * c.micro_batch_size * c.seq_len * c.vocab_size

    def of(name: str) -> str:
        return f"{parts[name] / 1e9:.2g}"

    return (
        f"Memory of d16 by part, in GB. Noted: weights 0.94, gradients 0.94 (two bytes for each of 470M), AdamW 3.76 "
        f"(eight), activations 14 to 16. Computed: weights {of('weights')}, gradients {of('gradients')} (four bytes), "
        f"moments {of('optimizer')} (Muon keeps one for the blocks), activations {of('activations')}, logits "
        f"{of('logits')}. What was measured is of another program, which holds the logits of a whole micro-batch: "
        f"{c.micro_batch_size} x {c.seq_len:,} x {c.vocab_size:,} in float32 are {logits / 1e9:.1f} GB, and their "
        "gradient as much. This one computes the loss in chunks."
    )


def measured() -> str:
    rows = []
    for n, logged, percent in ((16, 430_600, 43.8), (24, 178_000, 50.3)):
        c = depth(n)
        theirs = 6 * (12 * n * c.n_embd**2 + parameters(c).head) + 12 * n * c.n_embd * c.seq_len
        computed = tokens_per_s(c, percent)
        rows.append(
            [
                f"d{n}",
                f"{logged:,}",
                f"{percent}%",
                f"{100 * logged * theirs / PEAK:.1f}%",
                f"{100 * logged * flops_of(c) / PEAK:.1f}%",
                f"{computed:,.0f}",
                f"{c.batch_tokens / computed:.2f} s",
            ]
        )
    return markdown(
        [
            "depth",
            "tokens/s, logged",
            "MFU, logged",
            "MFU of that, their blocks",
            "MFU of that, these blocks",
            "tokens/s at the logged MFU",
            "a step",
        ],
        rows,
    )


# ---------------------------------------------------------------------------------------------------
# 3. Sixteen H200
# ---------------------------------------------------------------------------------------------------

MIXTURE, NODES, A_NODE = (
    108e9,
    2,
    8,
)  # parameters of GLM-4.5-Air as they noted them; two nodes of eight H200
STEP_S, STEPS = 85.0, 500  # 80 to 90 s
GATHERED = 5_032_216_576


def sixteen() -> str:
    """A mixture of 108B under FSDP with adapters, by the same formulas, though the model is none of this version's."""
    bf16 = 2 * MIXTURE
    across = bf16 / NODES  # what a node lacks of the weights comes from the other

    def passes(gbit: float) -> str:
        once = across * 8 / (gbit * 1e9)
        return f"{once:.0f} s a pass, {2 * once:.0f} s for forward and backward"

    fetching = 2 * across * 8 / 63e9
    rows = [
        [
            "measured: 138.2 of 139.8 GB used",
            f"weights in bfloat16 are {number_formats.size(bf16)}, "
            f"{number_formats.size(bf16 / (NODES * A_NODE))} a GPU, split over 16, and adapters are small beside them: the rest is "
            "activations, and what is gathered at once",
        ],
        [
            "measured: 30, then 63 Gbit/s between the nodes, on sockets",
            "each node fetches the half of the weights that "
            f"the other has, {number_formats.size(across)}, for each pass: {passes(30)}; at 63 Gbit/s {passes(63)}",
        ],
        [
            "80 to 90 s a step, about 500 steps, 11 to 12 hours",
            f"{STEPS} x {STEP_S:g} s are "
            f"{STEPS * STEP_S / 3600:.1f} hours; fetching at 63 Gbit/s is {100 * fetching / STEP_S:.0f}% of a step of one "
            "micro-batch, where nothing hides it. A copy of the weights in each node (HSDP) takes "
            f"{number_formats.size(bf16 / A_NODE)} a GPU, and only the adapters' gradients cross",
        ],
        [
            f"measured: a checkpoint timed out after 30 minutes, in a gather of {GATHERED:,} elements; of the adapter "
            "alone it took 10 s",
            f"that gather is {number_formats.size(2 * GATHERED)} in bfloat16, "
            f"{2 * GATHERED * 8 / 63e9:.1f} s at 63 Gbit/s, and all weights to one disk are "
            f"{number_formats.hours(bf16 / (storage.MB_PER_S * 1e6) / 3600)} at {storage.MB_PER_S:g} MB/s: speed does not explain "
            "30 minutes",
        ],
    ]
    return markdown(["their notes", "computed"], rows)


def on_sixteen() -> str:
    """What the same sixteen cards do for the models that this version trains."""
    rows = []
    for preset in ("xlarge-8xa100", "d32-8xh100"):
        for gbit in (63.0, 400.0):
            c = configured(PRESET=preset, CARDS="16xh200", NODES="2", LAN_GBIT=f"{gbit:g}")
            fleet = fleet_of(c)
            pace = pace_of(c, fleet, None)
            assert pace.tokens_per_s and pace.fast.mfu_percent
            rows.append(
                [
                    preset,
                    f"{gbit:g}",
                    f"{pace.fast.mfu_percent:.3g}%",
                    rate(pace.tokens_per_s),
                    f"{c.train_tokens / pace.tokens_per_s / 3600:.1f}",
                    f"{number_formats.gib(memory_of(c, fleet).total)} of {number_formats.gib(capacity_bytes(fleet))}",
                ]
            )
    return markdown(
        ["preset", "Gbit/s between the nodes", "MFU assumed", "tokens/s", "hours", "GiB a GPU"],
        rows,
    )
