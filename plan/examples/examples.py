"""docs/plans.md, printed by `python -m plan.examples.examples`; a test holds it equal. Its worked plans are of plan/examples/lab.py."""

import datetime
import re
import sys
import textwrap

from hardware.gpu_specs import load_gpu_specs
from hardware.model_size import flops_of, parameters
from plan import between, scaling
from plan.as_json import KEYS
from plan.examples import lab
from plan.examples.lab import configured, markdown, tokens_per_s
from plan.finetuning import tuned_report, tuning
from plan.finetuning.hf_shape import KINDS
from plan.fleet import fleet_of
from plan.memory import memory
from plan.network import evidence
from plan.network.outer import GOOD
from plan.planner import Plan, plan
from plan.published import PUBLISHED
from plan.report import told, wrapped
from record import number_formats
from settings import ROOT, load_config
from settings.config import Config

PARAGRAPH = re.compile(r"^(?![#|<])\S.*(?:\n(?![#|<])\S.*)*", re.MULTILINE)  # its lines
DAY = datetime.datetime(
    2026, 12, 1, 9, 0
)  # when the examples begin, so that their text stays as it is


def planned(c: Config) -> Plan:
    return plan(c, fleet_of(c), DAY)


def cards() -> str:
    rows = [
        [
            one.key,
            "none" if one.bf16_tflops is None else f"{one.bf16_tflops:g}",
            f"{one.fp32_tflops:g}",
            f"{one.memory_gib:g}",
            f"{one.bandwidth_gb_s:,g}",
            f"{one.link_gb_s:g}",
            f"{one.watts:g}",
            one.source,
        ]
        for one in load_gpu_specs().values()
    ]
    return markdown(
        [
            "CARDS",
            "bfloat16 TFLOP/s",
            "float32 TFLOP/s",
            "memory GiB",
            "memory GB/s",
            "to others GB/s",
            "W",
            "source",
        ],
        rows,
    )


def keys() -> str:
    return markdown(
        ["key", "what it is"],
        [
            [", ".join(f"`{key}`" for key in names.split(", ")), text]
            for names, text in KEYS.items()
        ],
    )


def refused() -> str:
    """What TARGET_HOURS=48 brings."""
    found = planned(configured(PRESET="xlarge-8xa100", TARGET_HOURS="48")).findings
    one = next(finding for finding in found if finding.name == "target-hours")
    return "\n".join(wrapped(f"{one.level}  {one.name}  {one.text}; {one.fix}"))


def page() -> str:
    return filled("\n".join([head(), first(), second(), third(), tuned(), last()]))


def filled(text: str) -> str:
    """With the lines of each paragraph filled; tables, blocks of code and headings as they are."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part
        if part.startswith("```")
        else PARAGRAPH.sub(
            lambda found: textwrap.fill(
                found[0], 120, break_long_words=False, break_on_hyphens=False
            ),
            part,
        )
        for part in parts
    )


def head() -> str:
    return f"""<!-- Written by `python -m plan.examples.examples > docs/plans.md`: change that, and write it again. -->
# Plans

`make plan` computes what a run will take before you start it: time, memory, disk, network and money. It rejects
impossible plans (exit code 64) and suggests alternatives. It needs no GPU and loads no torch.

```
make plan PRESET=d16-2xh100                     # on the cards that the preset names
make plan PRESET=d16-2xh100 CARDS=here          # on this machine's; CARDS=4xrtx4090, CARDS=4xa100-80gb-sxm,4xa6000
make plan PRESET=xlarge-8xa100 NODES=4 SITES=4 WAN_GBIT=10    # four nodes, each at a site of its own, and what to take
make net-probe NODES=4 NODE_RANK=0 MASTER_ADDR=10.0.0.5       # measures WAN_GBIT and WAN_RTT_MS between them
make plan PRESET=xlarge-8xa100 TARGET_HOURS=48  # refused, with what would be through by then
make plan PRESET=d16-2xh100 SWEEP=1             # depths 12 to 32; SWEEP=gpus
make plan MODEL=models/qwen3-1.7b LORA_RANK=16 CARDS=1xrtx4090 # a fine-tuning
make plan PRESET=d16-2xh100 PRICE_GPU_HOUR=2.5 PRICE_KWH=0.3 JSON=1
```

What is assumed is the MFU, and the plan says where it has it from: MFU=45; or what `make doctor PROBE=1`
measured of just this run; or what its preset states; or what others reached on such a card; else 40%. A network gives
what WAN_GBIT and LAN_GBIT say, or what `make net-probe` measured, a disk 500 MB/s unless it was measured. All else
follows, by the formulas in `plan/`, each with its derivation or source.
Where a run of that name has made steps, hours and dates are of what is left;
so are those of SWEEP=gpus, while another depth is another run, from its first step. A row
of a sweep that memory holds only with less has the hours of what is typed with it. Where RUNS_DIR or DATA_DIR
of this machine cannot be read, or the data is bad, the exit code is 78.

## Between sites
With SITES above 1 the table of the network has DDP beside DiLoCo with 30, 100 and 500 steps between exchanges
(SYNC_EVERY), as it is set, and in fragments with overlap; the hours of each; and what was published of its loss against
DDP at equal tokens (`plan/network/evidence.py`). A figure counts where interval and number of sites are the same and
the size is within a factor of {evidence.NEAR:g}; else the table says "not published", and below it which run comes nearest. Time
can be computed, that loss cannot: small models lose more, longer intervals and more sites too. What to take is DDP
where it computes for {100 * between.ENOUGH:.0f}% of the time, else the shortest interval with {100 * GOOD:.0f}%.

`make net-probe` measures what that hangs on, in a minute: on each node `make net-probe NODES=4 NODE_RANK=i
MASTER_ADDR=host`, node 0's address, with SITES where several nodes share one; or `make net-probe WHERE=cluster` for the
pods of a job that runs. Each node sends to each other, in rounds that share neither a node nor a site's link, with one
connection and with 16; then all send at once, as an exchange does. The slowest of these and the longest round
trip are what it prints for make plan, which finds them in RUNS_DIR/net_probe.json where WAN_GBIT and WAN_RTT_MS are not
set. It is plain Python: links beyond some 20 Gbit/s are measured as that. Ports are those that it finds free, as gloo's
and NCCL's are: it says which node cannot reach which. It has no password, and belongs into a private network.

The three plans below were made by a lab in late 2025. What its notes have is beside what `make plan` computes with.
"""


def first() -> str:
    c = lab.xlarge()
    half, best = tokens_per_s(c, 50.0), scaling.rule_tokens(parameters(c).total)
    four = configured(PRESET="xlarge-8xa100", CARDS="4xa100-80gb-sxm")
    hours, of_four = (of.train_tokens / tokens_per_s(of, 50.0) / 3600 for of in (c, four))
    a100, a6000 = (lab.card(key).bf16_tflops or 0.0 for key in ("a100-80gb-sxm", "a6000"))
    example = told(planned(configured(PRESET="xlarge-8xa100", NODES="4", SITES="4"))).rstrip()
    shares = {
        name: f"{100 * (sync.efficiency or 0):.0f}%"
        for name, sync in lab.at_four_sites(1)[1].items()
    }
    return f"""## 1. Eight A100 at four sites, 100B tokens
A model of {number_formats.count(parameters(c).total)} parameters takes {flops_of(c) / 1e9:.2f} GFLOP a token, and an
A100 does {a100:g} TFLOP/s at best. Every rate that was planned with is past that, 1.5 to 4.4 times:

{lab.claims()}

The alternatives that they listed, the A100 at 50% MFU and with nothing hidden behind computing:

{lab.alternatives()}

So no network and no arrangement of eight A100 trains this model on 100B tokens in two days; the compute-optimal
{number_formats.count(best)} tokens take {best / half / 3600:.0f} hours on one node of eight. Who has four GPUs now may wait
{of_four - hours:.0f} hours for eight and be through as soon. Across sites DDP computes for
{shares["DDP, float32 gradients"]} of its time at 1 Gbit/s; SYNC=diloco makes that {shares["DiLoCo, H=30"]} with
SYNC_EVERY=30 and {shares["DiLoCo, H=100"]} with 100, at a loss of which the plan below says what was published. Cards
that differ bring nothing here: at the pace of the
A6000 eight have {8 * a6000:,.0f} TFLOP/s, and the four A100 alone {4 * a100:,.0f}.

`make plan PRESET=xlarge-8xa100 TARGET_HOURS=48` says

```
{refused()}
```

and `make plan PRESET=xlarge-8xa100 NODES=4 SITES=4`, typed on {DAY:%d %B %Y} at {DAY:%H:%M},

```
{example}
```
"""


def second() -> str:
    return f"""## 2. Two H100, depth 16, 20, 24 or 32
Noted is what the lab estimated, but for d16, which it ran. The MFU of d16 and d24 is the lab's, measured; those
of d20 and d32 are assumed.

{lab.depths()}

{lab.miscounts()}

{lab.d24_took()}

{lab.memory_by_part()}

What was measured agrees with the counting here. At depth 16 blocks have 0.5% more weights than the lab's, since
SwiGLU comes in multiples of 64:

{lab.measured()}
"""


def third() -> str:
    split = configured(PRESET="xlarge-8xa100", CARDS="16xh200", NODES="2").replace(parallel="fsdp")
    return f"""## 3. Sixteen H200
A mixture of experts with 108B parameters (GLM-4.5-Air) was tuned with adapters under FSDP. What that took:

{lab.sixteen()}

The preset for it is the first plan of the next part. What the same cards, as two nodes of eight, pretrain:

{lab.on_sixteen()}

Each GPU holds a whole copy with room to spare (DDP), so splitting gains nothing: with PARALLEL=fsdp it would
hold {number_formats.gib(memory(split, 16, 8, False).total)} GiB of the first instead, and send more. With 400 Gbit/s between
the nodes this is what would meet the two days of the first plan.
"""


def planned_tuning(**settings: str) -> str:
    """As `make plan` says it."""
    loaded = load_config(
        {"ENV_FILE": "", "RUNS_DIR": "no-runs", "DATA_DIR": "no-data", **settings},
        ROOT,
        {"MASTER_ADDR": "planned"},
        without=tuning.NOT_ASKED,
    )
    c = tuning.in_nodes(loaded)
    return tuned_report.told(tuning.plan(c, fleet_of(c))).rstrip()


def tuned() -> str:
    return f"""## 4. Fine-tuning
With MODEL, or a preset that is for it, `make plan` plans a fine-tuning: parameters that there are, that a token passes
and that are trained; memory by part, for each way to spread weights and to compute anew; what nodes send each other. It
reads the config.json of MODEL and neither its weights nor transformers; of {
        " and ".join(PUBLISHED)
    } it needs no file
(`plan/published.py`). Kinds that it knows are {
        ", ".join(KINDS)
    }; of another it says so. A block keeps what
transformers' classes keep, which tests hold against the tensors that live in a step. What is assumed is the MFU: that
of pretraining is more than tuning reaches, so hours are a least. How many steps there are DATA decides, or MAX_STEPS.
`make finetune` says the memory in one line before it begins, and does not start what cannot fit.

`make plan PRESET=glm-4.5-air-16xh200` says

```
{planned_tuning(PRESET="glm-4.5-air-16xh200")}
```

and `make plan MODEL=models/qwen3-1.7b LORA_RANK=16 DTYPE=bfloat16 CARDS=1xrtx4090 MAX_STEPS=500`

```
{
        planned_tuning(
            PRESET="finetune",
            MODEL="models/qwen3-1.7b",
            LORA_RANK="16",
            DTYPE="bfloat16",
            CARDS="1xrtx4090",
            MAX_STEPS="500",
        )
    }
```
"""


def last() -> str:
    return f"""## JSON
`JSON=1` prints one object, of a fine-tuning with `fine_tuning` in it and keys of the same meaning. Numbers are
seconds, bytes, tokens, FLOPs and FLOP/s, or as a key's end says; null is
what is not known.

{keys()}

## Cards
{cards()}

A card that is not here is asked for, not guessed: an entry in `hardware/gpus.toml` makes it known. On CPU the products
of the machine are measured, by `make plan` itself in float32 and by `make doctor PROBE=1` in both types.
"""


if __name__ == "__main__":
    sys.stdout.write(page())
