"""How fast the devices compute, without waiting for the network between nodes: an MFU times their peak.

The MFU is the first of these that is known:

    1. MFU, if the user set it
    2. finished runs here of exactly this step (plan/past_runs.py)
    3. what `make doctor PROBE=1` measured on this device for exactly this shape and process count
    4. the FLOP/s of finished runs here whose steps are similar (MOST_SCALED)
    5. MFU of the preset, on its own GPU and with its own model
    6. what others published for this GPU, for models of about a billion parameters (PUBLISHED)
    7. on a CPU, MFU_ON_CPU of the matrix products that were measured on it

MFU counts the model's own FLOPs, so recomputing activations lowers it (RECOMPUTE_KEEPS).
"""

import dataclasses
import math
from collections.abc import Collection

from hardware.gpu_specs import GpuSpec
from plan.fleet import Fleet
from plan.measured import Probe, of_card
from plan.past_runs import OF_A_STEP, devices_of, has_same
from plan.run import Run
from settings import load_preset
from settings.config import Config
from settings.declare import format_value
from settings.resolve import is_of_preset

SET = "set"
MEASURED = "measured"  # of exactly this step
SCALED = "scaled"
PRESET = "preset"
OTHERS = "published"
ASSUMED = "assumed"

# Percent of the bfloat16 peak by the first letters of a GPU's key, and who reached it; rounded down.
PUBLISHED = (
    ("a100", 50.0, "MPT 1.3B reached 60% on 8 of them, TinyLlama 1.1B 56%"),
    ("a800", 50.0, "as the A100, with less NVLink"),
    ("h100", 42.0, "MPT 1.3B reached 42% on 8 of them, GPT-2 1.6B in llm.c and nanochat d26 49%"),
    ("h200", 42.0, "as the H100, which has the same chip"),
    ("h800", 42.0, "as the H100, with less NVLink"),
    ("gh200", 42.0, "as the H100, which has the same chip"),
    ("rtx4090", 60.0, "llmq reached 83% with Qwen2.5 1.5B, in C++ and CUDA"),
)
UNKNOWN_GPU = 40.0  # percent, for any other GPU and for float32: nothing published was found
MFU_ON_CPU = 70.0  # percent of the machine's own matrix products: make bench has 63 to 91

# The share of the MFU that is left. "full" runs the forward pass twice; "selective" repeats no matrix
# product, only what is bound by memory.
RECOMPUTE_KEEPS = {"none": 1.0, "selective": 0.96, "full": 0.75}

# The FLOP/s of another finished run hold only if these settings are the same, and the FLOPs of a step differ at most so
# many times: small steps are slower. One with a 57th of the FLOPs of PRESET=tiny had a quarter of its FLOP/s on a CPU.
NOT_SCALED = ("dtype", "compile", "activation_checkpointing")
MOST_SCALED = 10.0

# The settings that make a model: a preset's MFU holds for its own only.
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
    """The speed of all devices together while they compute. What is not known is None.

    Attributes:
        mfu_percent: of `peak_flops`.
        peak_flops: FLOP/s of matrix products in DTYPE, of all devices.
        step_s: seconds of an optimizer step.
        source: SET, MEASURED, SCALED, PRESET, OTHERS or ASSUMED; "" if the speed is unknown.
        why: where the MFU is from, or why there is none.
    """

    mfu_percent: float | None
    peak_flops: float | None
    tokens_per_s: float | None
    step_s: float | None
    source: str
    why: str


def speed_of(run: Run, probe: Probe | None) -> Speed:
    """Return the speed of a run; probe is that of its slowest device."""
    config = run.config
    batch = config.batch_tokens
    flops = run.model.flops()
    peak = peak_flops(run, probe)
    if run.mfu_percent is None and not is_mfu_set(config):
        measured = as_in_past_run(run, OF_A_STEP, MEASURED)
        measured = measured or as_in_probe(run, probe) or as_in_past_run(run, NOT_SCALED, SCALED)
        if measured:
            tokens_per_s, source, why = measured
            percent = 100 * tokens_per_s * flops / peak if peak else None
            return Speed(percent, peak, tokens_per_s, batch / tokens_per_s, source, why)
    if peak is None:
        return Speed(None, None, None, None, "", why_no_peak(run))
    percent, source, why = choose_mfu(run)
    tokens_per_s = percent / 100 * peak / flops
    return Speed(percent, peak, tokens_per_s, batch / tokens_per_s, source, why)


def as_in_past_run(run: Run, same: Collection[str], source: str) -> tuple[float, str, str] | None:
    """Return (tokens/s, source, why) by the FLOP/s of the finished runs with the most similar steps; of equal steps by
    the median.

    Args:
        same: the settings in which they do not differ.
    """
    flops = run.model.flops()
    step_flops = flops * run.config.batch_tokens
    devices = devices_of(run.fleet)
    runs = []
    for past in run.past_runs:
        if past.devices == devices and has_same(past.settings, run.config, same):
            runs.append(past)
    runs.sort(key=lambda past: past.flops_per_s)
    distances = [abs(math.log(past.step_flops / step_flops)) for past in runs]
    nearest = min(distances, default=math.inf)
    if nearest > math.log(MOST_SCALED):
        return None
    runs = [past for past, distance in zip(runs, distances, strict=True) if distance == nearest]
    past = runs[(len(runs) - 1) // 2]
    how = "as in" if source == MEASURED else "scaled by FLOPs from"
    where = "on this machine" if run.fleet.on_cpu else "on the same GPUs"
    return past.flops_per_s / flops, source, f"{how} run {past.name} {where}"


def as_in_probe(run: Run, probe: Probe | None) -> tuple[float, str, str] | None:
    """Return (tokens/s, source, why) of the step that the doctor took."""
    step = probe.step(run.config, run.fleet.processes) if probe and not run.is_finetuning else None
    if step is None:
        return None
    return step.tokens_per_s, MEASURED, "as make doctor PROBE=1 measured it"


def peak_flops(run: Run, probe: Probe | None) -> float | None:
    """Return the FLOP/s of matrix products of all devices.

    Every GPU counts as the slowest, since each step waits for it. A CPU's peak is what was measured on
    it; its processes share it.
    """
    fleet, dtype = run.fleet, run.config.dtype
    if fleet.on_cpu:
        tflops = probe.matmul_tflops.get(dtype) if probe else None
        return tflops * 1e12 * fleet.nodes if tflops else None
    tflops = slowest_card(run.config, fleet).peak(dtype)
    return tflops * 1e12 * fleet.processes if tflops else None


def slowest_card(config: Config, fleet: Fleet) -> GpuSpec:
    """Return the GPU that sets the pace of a step. Not for CPUs.

    One without units for products in DTYPE comes before all others. Its peak is None, so nothing can be computed from it.
    """

    def reached(card: GpuSpec) -> float:
        percent = config.mfu if is_mfu_set(config) else published_mfu(card, config)[0]
        return (card.peak(config.dtype) or 0.0) * (percent or 0.0)

    return min((card for _, card in fleet.cards), key=reached)


def step_s_of_all(run: Run, card: GpuSpec) -> float | None:
    """Return the seconds of a step if every GPU were of this kind."""
    alike = dataclasses.replace(run, fleet=run.fleet.all_of(card))
    return speed_of(alike, of_card(run.config, card)).step_s


def why_no_peak(run: Run) -> str:
    dtype = run.config.dtype
    if run.fleet.on_cpu:
        return f"matrix products in {dtype} have not been measured on this machine. Run make doctor PROBE=1"
    return f"{slowest_card(run.config, run.fleet).key} has no {dtype} units"


def choose_mfu(run: Run) -> tuple[float, str, str]:
    """Return (percent, source, why) where no step was measured."""
    config = run.config
    if run.mfu_percent is not None:
        return run.mfu_percent, SET, f"MFU={format_value(run.mfu_percent)}"
    if config.mfu is not None and is_mfu_set(config):
        return config.mfu, SET, f"MFU={format_value(config.mfu)}"
    keeps = recompute_keeps(run)
    if run.fleet.on_cpu:
        percent, source, why = (
            MFU_ON_CPU,
            ASSUMED,
            "of the matrix products measured on this machine",
        )
    else:
        gpu = slowest_card(config, run.fleet)
        own = preset_mfu(run, gpu)
        if own is not None:
            return own, PRESET, f"presets/{config.preset}.env"
        percent, source, why = published_mfu(gpu, config)
    if keeps != 1:
        why += f", times {keeps:.2f} for recomputing"
    return percent * keeps, source, why


def is_mfu_set(config: Config) -> bool:
    """Tell whether the user set MFU. A preset's holds for its own GPU and model only."""
    if config.mfu is None:
        return False
    return config.mfu != load_preset(PRESET=config.preset).mfu or not is_of_preset("MFU")


def recompute_keeps(run: Run) -> float:
    how = run.config.activation_checkpointing
    if not run.is_finetuning:
        return RECOMPUTE_KEEPS[how]
    # Frozen weights have no gradient of their own, so that a second forward pass is a larger part.
    flops = run.model.flops()
    repeated = {"none": 0.0, "selective": 0.04 * flops, "full": run.model.forward_flops}[how]
    return flops / (flops + repeated)


def preset_mfu(run: Run, gpu: GpuSpec) -> float | None:
    """Return the preset's MFU if this is its GPU and its model, whatever is recomputed."""
    config = run.config
    preset = load_preset(PRESET=config.preset)
    if run.is_finetuning or preset.mfu is None or gpu.key != preset.cards.partition("x")[2]:
        return None
    if any(getattr(config, name) != getattr(preset, name) for name in SHAPE):
        return None
    ours = RECOMPUTE_KEEPS[config.activation_checkpointing]
    return preset.mfu * ours / RECOMPUTE_KEEPS[preset.activation_checkpointing]


def published_mfu(gpu: GpuSpec, config: Config) -> tuple[float, str, str]:
    if config.dtype == "bfloat16":
        for start, percent, who in PUBLISHED:
            if gpu.key.startswith(start):
                return percent, OTHERS, f"{gpu.key}: {who}"
    return UNKNOWN_GPU, ASSUMED, f"nothing published was found for {gpu.key} in {config.dtype}"
