"""How fast a run will be: an MFU, and where it is from, times what the devices could do. Waits for a network aside.

    1. MFU, the setting
    2. what make doctor PROBE=1 measured on this kind of device, of just this shape and as many processes
    3. what the preset states at its top, on the card that it names and with its own model
    4. what is known of the card (KNOWN), for models of about a billion parameters
    5. on CPU: SHARE_ON_CPU of the matrix products that the machine was measured to do

MFU counts the model's own work, so recomputation costs some of it: RECOMPUTED says how much.
"""

import dataclasses
import re

from hardware.model_size import flops_of
from plan.fleet import Fleet
from plan.measured import Probe
from settings import ROOT, load_preset
from settings.config import Config
from settings.declare import format_value

# Per cent of the bfloat16 peak, by the first letters of a card's key, and who reached it; rounded down.
KNOWN = (
    ("a100", 50.0, "MPT 1.3B reached 60% on 8 of them, TinyLlama 1.1B 56%"),
    ("a800", 50.0, "as of the A100, with less NVLink"),
    (
        "h100",
        42.0,
        "MPT 1.3B reached 42% on 8 of them, GPT-2 1.6B in llm.c and nanochat's depth 26 49%",
    ),
    ("h200", 42.0, "as of the H100, whose chip it has"),
    ("h800", 42.0, "as of the H100, with less NVLink"),
    ("gh200", 42.0, "as of the H100, whose chip it has"),
)
ASSUMED = 40.0  # per cent, of any other card and of float32: nothing published was found
SHARE_ON_CPU = (
    70.0  # per cent of the machine's own matrix products: make bench found 63 to 91 (BENCHMARKS.md)
)

# Share of the MFU that is left where backward computes anew: "full" runs forward twice, 4/3 of the work; "selective"
# repeats no product, and what it repeats is bound by memory: a few per cent.
RECOMPUTED = {"none": 1.0, "selective": 0.96, "full": 0.75}

SHAPE = (
    "vocab_size",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "mlp_dim",
    "tie_embeddings",
    "seq_len",
    "dtype",
)


@dataclasses.dataclass(frozen=True)
class Speed:
    """mfu_percent: of peak_tflops, that of all devices together; tokens_per_s of the whole job, step_s an optimizer
    step without any wait for a network between nodes. why: where the MFU is from, in words. All but why are None where
    they are not known; measured: whether a step was, rather than computed."""

    mfu_percent: float | None
    peak_tflops: float | None
    tokens_per_s: float | None
    step_s: float | None
    why: str
    measured: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """Of another model than ours. flops: of a token, as MFU counts them; kept: share of the MFU that is left where
    backward computes anew; remark: what is to be known of an MFU that is assumed."""

    flops: float
    kept: float
    remark: str = ""


def speed(c: Config, fleet: Fleet, probe: Probe | None, work: Work | None = None) -> Speed:
    """Of c on these devices; probe: of the slowest of them, or None."""
    peak = peak_tflops(c, fleet, probe)
    if c.mfu is None and not work and probe and (step := probe.step(c, fleet.processes)):
        percent = 100 * step.tokens_per_s * flops_of(c) / (peak * 1e12) if peak else None
        return Speed(
            percent,
            peak,
            step.tokens_per_s,
            c.batch_tokens / step.tokens_per_s,
            "make doctor PROBE=1 measured a step of this shape here",
            measured=True,
        )
    if peak is None:
        return Speed(None, None, None, None, no_peak(c, fleet))
    percent, why = mfu(c, fleet, work)
    tokens_per_s = percent / 100 * peak * 1e12 / (work.flops if work else flops_of(c))
    return Speed(percent, peak, tokens_per_s, c.batch_tokens / tokens_per_s, why)


def peak_tflops(c: Config, fleet: Fleet, probe: Probe | None) -> float | None:
    """What all devices together could do: processes times the slowest card's peak, since each step waits for it; on
    CPU what the machine was measured to do, which its processes share."""
    if fleet.on_cpu:
        measured = (probe.matmul_tflops if probe else {}).get(c.dtype)
        return measured * fleet.nodes if measured else None
    peak = fleet.slowest(c.dtype).peak(c.dtype)
    return fleet.processes * peak if peak else None


def no_peak(c: Config, fleet: Fleet) -> str:
    if fleet.on_cpu:
        return (
            f"the speed of {c.dtype} matrix multiplication on this machine has not been measured. "
            "Run make doctor PROBE=1"
        )
    return f"{fleet.slowest(c.dtype).key} has no {c.dtype} units"


def mfu(c: Config, fleet: Fleet, work: Work | None = None) -> tuple[float, str]:
    """(per cent, where it is from): what is assumed where no step was measured."""
    if c.mfu is not None:
        return c.mfu, f"MFU={format_value(c.mfu)}"
    if fleet.on_cpu:
        return recomputed(
            c,
            SHARE_ON_CPU,
            f"assumed: of this machine's own products in {c.dtype}, which were measured",
            work,
        )
    key = fleet.slowest(c.dtype).key
    stated, its_card, its_own = (None, "", None) if work else stated_by_preset(c)
    if stated and its_own and its_card == key:
        kept = RECOMPUTED[c.activation_checkpointing] / RECOMPUTED[its_own.activation_checkpointing]
        return (
            stated * kept,
            f"presets/{c.preset}.env states {format_value(stated)}% for it" + less(kept),
        )
    known = next(
        ((percent, source) for start, percent, source in KNOWN if key.startswith(start)), None
    )
    if known and c.dtype == "bfloat16":
        return recomputed(c, known[0], f"known of {key}: {known[1]}", work)
    measures = "" if work else "; make doctor PROBE=1 measures it there"
    return recomputed(
        c, ASSUMED, f"assumed: nothing published is known of {key} in {c.dtype}{measures}", work
    )


def recomputed(c: Config, percent: float, why: str, work: Work | None = None) -> tuple[float, str]:
    kept = work.kept if work else RECOMPUTED[c.activation_checkpointing]
    return percent * kept, why + less(kept) + (work.remark if work else "")


def less(kept: float) -> str:
    return "" if kept == 1 else f", times {kept:.2f} for what is computed anew"


def stated_by_preset(c: Config) -> tuple[float | None, str, Config | None]:
    """(per cent that the preset states at its top, the card that it is about, its own settings where the model is
    still its own), from the line `hours ... at 50% MFU of ...` and CARDS."""
    path = ROOT / "presets" / f"{c.preset}.env"
    found = re.search(
        r"^#   hours +[0-9.,]+ +at ([0-9.]+)% MFU of ",
        path.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    own = load_preset(PRESET=c.preset)
    card = own.cards.partition("x")[2]
    same = all(getattr(c, name) == getattr(own, name) for name in SHAPE)
    return float(found[1]) if found else None, card, own if same else None
