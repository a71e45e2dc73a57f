"""The plan of a fine-tuning in words, as plan/report.py has it of pretraining, and as JSON."""

import dataclasses
from typing import Any

from plan.as_json import SCHEMA, of_card
from plan.finetuning.hf_shape import Block
from plan.finetuning.tuned import tuned_of
from plan.finetuning.tuning import TOKEN_BYTES, Held, Tuning
from plan.network.traffic import Sync
from plan.report import entry, findings, shares, table, wrapped
from record.number_formats import GIB, MIB, binary, count, gib, hours, rate, seconds, si, size
from settings import tuning_rules

# A moment of plan/finetuning/tuned_memory.py in words.
WHEN = {
    "loading": "while weights are loaded",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "sending": "while gradients are sent",
    "end": "at the end of the backward pass",
    "evaluation": "in an evaluation",
}


def told(p: Tuning) -> str:
    """All of it."""
    parts = [title(p), model(p), run(p), pace(p), memory(p), disk(p), ways(p), findings(p.findings)]
    return "\n".join(line for part in parts for line in part) + "\n"


def title(p: Tuning) -> list[str]:
    c, fleet = p.c, p.fleet
    where = fleet.text + (f" on {fleet.nodes} nodes" if fleet.nodes > 1 else "")
    preset = f" (PRESET={c.preset})" if c.run_name != c.preset else ""
    return wrapped(
        f"plan of the fine-tuning {c.run_name}{preset} on {where}: computed, not measured"
    )


def model(p: Tuning) -> list[str]:
    """Parameters: all, those that a token passes, and what is trained."""
    t, shape = p.t, p.t.shape
    found = entry(
        "model",
        f"{p.model}, a {shape.kind} of {shape.layers} blocks: {shape.total:,} parameters, of which "
        f"a token passes {shape.active:,}; by {p.source}",
    )
    if shape.experts:
        found += entry(
            "",
            f"a mixture of {shape.experts} experts a block, {shape.passed} for each token"
            + (
                f"; {shape.more} more block{'s' * (shape.more > 1)} for predicting more tokens is skipped"
                if shape.more
                else ""
            ),
        )
    if t.lora:
        found += entry(
            "",
            f"trained: {t.adapters:,} in adapters of LORA_RANK={p.c.lora_rank} beside "
            f"{p.c.lora_targets} ({100 * t.adapters / shape.total:.2g}%); the rest is frozen, in "
            f"{p.c.dtype}",
        )
    else:
        found += entry(
            "", f"trained: all, in float32; adapters with LORA_RANK=16 would be {small(p)}"
        )
    return found + entry(
        "",
        f"{si(t.flops())}FLOP a token, forward and backward "
        f"({'4 a weight that is frozen' if t.lora else '6 a weight'})",
    )


def small(p: Tuning) -> str:
    c = p.c.replace(lora_rank=16, lora_targets="attention")
    return f"{count(tuned_of(c, p.t.shape).adapters)} beside attention"


def run(p: Tuning) -> list[str]:
    c = p.c
    micro = c.micro_batch(p.fleet.processes)
    of_step = (
        f"{c.batch_tokens:,} tokens a step: {p.fleet.processes} x "
        f"{c.batch_windows // p.fleet.processes // max(1, micro)} x {micro} x {c.seq_len:,} (processes x "
        "accumulation x sequences x tokens)"
    )
    if p.steps is None:
        return entry(
            "run",
            f"{of_step}; how many steps EPOCHS={c.epochs} of DATA are, it says when it is prepared",
        )
    return entry("run", f"{of_step}; {p.steps:,} steps, {count(p.steps * c.batch_tokens)} tokens")


def pace(p: Tuning) -> list[str]:
    """Tokens/s, and of what; what waiting leaves of it."""
    fast = p.pace.fast
    if fast.tokens_per_s is None or fast.step_s is None or p.pace.step_s is None:
        return entry("speed", f"n/a: {fast.why}")
    found = entry(
        "speed",
        f"{rate(fast.tokens_per_s)}, {seconds(fast.step_s)} a step while computing: "
        f"{fast.mfu_percent:.3g}% MFU, {fast.why}",
    )
    if p.pace.wait_s:
        found += entry(
            "",
            f"{seconds(p.pace.step_s)} a step with {seconds(p.pace.wait_s)} of waiting for other nodes",
        )
    steps = p.steps or 100
    name = f"{steps:,} steps" if p.steps else "100 steps"
    parts = [f"{name} take {hours(steps * p.pace.step_s / 3600)}"]
    if c_eval := p.evaluation_s:
        parts.append(
            f"an evaluation of {tuning_rules.HELD_OUT_CONVERSATIONS} conversations at most {seconds(c_eval)}"
        )
    return found + entry("time", "; ".join(parts))


def memory(p: Tuning) -> list[str]:
    """A row for each way to spread the weights and to compute anew; the one that is set has a star."""
    unit, name = (GIB, "GiB") if max(held.need.total for held in p.memory) >= GIB else (MIB, "MiB")
    each, parts = "process" if p.fleet.on_cpu else "GPU", list(p.memory[0].need.parts)
    rows = [[f"{name} a {each}", "recompute", *parts, "total", "fits", "largest"]]
    rows += [
        [
            way(held, p),
            held.t.c.activation_checkpointing,
            *(binary(held.need.parts[part], unit) for part in parts),
            binary(held.need.total, unit),
            "yes" if held.fits else "no",
            str(held.largest_micro_batch or "none"),
        ]
        for held in p.memory
    ]
    micro = p.c.micro_batch(p.fleet.processes)
    said = (
        f"* as set: {micro} x {p.c.seq_len:,} tokens at once, in evaluation too; its peak is "
        f"{WHEN[p.chosen.need.moment]}; fits: of {binary(p.capacity_bytes, unit)} {name}; largest: "
        "MICRO_BATCH_SIZE that does; gathered, under fsdp and hsdp: a block, the next and what is outside of them"
    )
    host = (
        ""
        if p.fleet.on_cpu
        else (
            f"; of the host's memory a process takes up to {gib(p.host_bytes)} GiB while "
            "weights are loaded"
        )
    )
    return [*table(rows, left=(0, 1)), *wrapped(said + host, "  ")]


def way(held: Held, p: Tuning) -> str:
    name = held.t.c.parallel if p.fleet.processes > 1 else "alone"
    return f"{name}{' *' if held.chosen else ''}"


def disk(p: Tuning) -> list[str]:
    c, t = p.c, p.t
    parts = [f"{size(number)} of {name}" for name, number in p.disk_bytes.items() if number]
    found = entry(
        "disk",
        f"up to {', '.join(parts)}; of DATA up to {TOKEN_BYTES} bytes a token; MODEL itself "
        f"{size(2 * t.shape.total)} in bfloat16",
    )
    if c.save_every == 0:
        return found
    content = " (weights and moments)"
    if c.checkpoint_mode == "lite":
        content = (
            f" (CHECKPOINT_MODE=lite: adapters alone; full, with moments, {size(t.full_bytes)})"
        )
    elif t.lora:
        content = f" (with moments; CHECKPOINT_MODE=lite would be {size(t.lite_bytes)})"
    kinds = f"a checkpoint is {size(p.checkpoint_bytes)}{content}"
    return found + entry(
        "",
        f"{kinds}, safe on disk after {seconds(p.checkpoint_bytes / (p.write_mb_s * 1e6))} at "
        f"{p.write_mb_s:g} MB/s ({p.write_why})",
    )


def ways(p: Tuning) -> list[str]:
    """Each way to keep processes together."""
    if not p.syncs:
        return []
    unit = "GPU"
    if p.fleet.nodes > 1:
        unit = "node"
    elif p.fleet.on_cpu:
        unit = "process"
    rows = [
        ["network, in each step", f"leaves a {unit}", "takes", "time computing"],
        *(
            [
                sync.name + (" *" if sync.chosen else ""),
                size(sync.bytes_per_step),
                "n/a" if sync.seconds_per_step is None else seconds(sync.seconds_per_step),
                shares(sync),
            ]
            for sync in p.syncs
            if sync.offered
        ),
    ]
    said = f"* as set; LAN_GBIT={p.c.lan_gbit:g}" if p.fleet.nodes > 1 else "* as set"
    return [*table(rows, left=(0,)), *wrapped(said, "  ")]


def brief(p: Tuning) -> str:
    """One line for the start of a run."""
    parts = ", ".join(
        f"{name} {gib(part)}" for name, part in p.chosen.need.parts.items() if part >= 0.05 * GIB
    )
    each = "process" if p.fleet.on_cpu else "GPU"
    step = f", {seconds(p.pace.step_s)} per step with an assumed MFU" if p.pace.step_s else ""
    return (
        f"plan: {gib(p.chosen.need.total)} of {gib(p.capacity_bytes)} GiB of memory per {each}"
        f"{f' ({parts})' if parts else ''}, {count(p.t.trained)} of {count(p.t.shape.total)} "
        f"parameters are trained{step}. make plan shows all of it"
    )


# ---------------------------------------------------------------------------------------------------
# As JSON
# ---------------------------------------------------------------------------------------------------


def as_json(p: Tuning) -> dict[str, Any]:
    """Its keys are those of pretraining where they are of the same thing."""
    c, t, fast = p.c, p.t, p.pace.fast
    return {
        "schema": SCHEMA,
        "fine_tuning": True,
        "preset": c.preset,
        "run_name": c.run_name,
        "model": p.model,
        "source": p.source,
        "settings": {
            "dtype": c.dtype,
            "parallel": c.parallel,
            "seq_len": c.seq_len,
            "lora_rank": c.lora_rank,
            "lora_targets": c.lora_targets,
            "micro_batch_size": c.micro_batch(p.fleet.processes),
            "activation_checkpointing": c.activation_checkpointing,
        },
        "devices": {
            "processes": p.fleet.processes,
            "nodes": p.fleet.nodes,
            "sites": p.fleet.sites,
            "cards": [of_card(number, card, c.dtype) for number, card in p.fleet.cards],
        },
        "parameters": {
            "total": t.shape.total,
            "active": t.shape.active,
            "trained": t.trained,
            "adapters": t.adapters,
            "blocks": [of_block(block) for block in t.shape.blocks],
        },
        "steps": p.steps,
        "batch_tokens": c.batch_tokens,
        "flops_per_token": t.flops(),
        "flops_per_token_causal": t.flops(causal=True),
        "speed": {
            "mfu_percent": fast.mfu_percent,
            "why": fast.why,
            "tokens_per_s": p.pace.tokens_per_s,
            "step_seconds": p.pace.step_s,
            "step_seconds_computing": fast.step_s,
        },
        "evaluation_seconds": p.evaluation_s,
        "memory": {
            "capacity_bytes": p.capacity_bytes,
            "host_loading_bytes": p.host_bytes,
            "ways": [
                {
                    "parallel": one.t.c.parallel,
                    "activation_checkpointing": one.t.c.activation_checkpointing,
                    "bytes": one.need.parts,
                    "moment": one.need.moment,
                    "total_bytes": one.need.total,
                    "fits": one.fits,
                    "largest_micro_batch": one.largest_micro_batch,
                    "chosen": one.chosen,
                }
                for one in p.memory
            ],
        },
        "disk": {
            "bytes": p.disk_bytes,
            "checkpoint_bytes": p.checkpoint_bytes,
            "lite_bytes": t.lite_bytes,
            "full_bytes": t.full_bytes,
            "bytes_per_s": 1e6 * p.write_mb_s,
            "why": p.write_why,
        },
        "network": [of_sync(one) for one in p.syncs],
        "findings": [dataclasses.asdict(one) for one in p.findings],
    }


def of_block(block: Block) -> dict[str, Any]:
    return {
        "times": block.times,
        "total": block.size,
        "active": sum(matrix.active for matrix in block.matrices),
    }


def of_sync(one: Sync) -> dict[str, Any]:
    return {
        "name": one.name,
        "bytes": one.bytes_per_step,
        "seconds": one.seconds_per_step,
        "computing": one.efficiency,
        "computing_overlapped": one.overlapped,
        "offered": one.offered,
        "chosen": one.chosen,
        "note": one.note,
    }
