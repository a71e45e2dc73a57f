"""A plan as JSON. Its keys are a contract, which docs/plans.md prints."""

import dataclasses
from typing import Any

from hardware.gpu_specs import GpuSpec
from hardware.model_size import flops_of, parameters
from plan import between, scaling, storage
from plan.planner import Held, Plan

SCHEMA = 1

# Key -> what it is. Of a list the keys of each entry; of parameters, bytes and the like by part any part has its own.
KEYS = {
    "schema": "1; new keys do not change it",
    "preset, run_name": "as set",
    "now": "local time, ISO 8601",
    "from_step": "steps that a run of this name has made; time, cost, milestones are of what is left",
    "settings": "dtype, parallel, optimizer, seq_len, micro_batch_size, activation_checkpointing",
    "devices": "processes, nodes, sites; cards, none on CPU: count, card, peak_flops_per_s, memory_bytes, watts, "
    "source",
    "parameters": "embedding, attention, mlp, norms, head (0 where tied), total; matmul: in products for each token",
    "tokens, steps, batch_tokens": "of the whole run, and of a step",
    "flops_per_token, flops_per_token_causal, flops": "forward and backward; of the whole run",
    "compute_optimal_tokens, expected_loss": "20 a parameter; nats/token by plan/scaling.py",
    "speed": "mfu_percent of peak_flops_per_s of all devices, why, measured; tokens_per_s and step_seconds with waits "
    "for the network between nodes, tokens_per_s_computing and step_seconds_computing without",
    "time": "training_seconds, waiting_seconds, evaluating_seconds (at most), total_seconds",
    "gpu_hours, kwh, cost": "kwh of the GPUs alone at their limit; cost at PRICE_GPU_HOUR and PRICE_KWH",
    "milestones": "name, step, tokens, seconds from now, clock",
    "memory": "capacity_bytes of a process; ways: parallel, optimizer, activation_checkpointing, bytes by part, "
    "total_bytes, fits, largest_micro_batch (0: none), chosen",
    "disk": "bytes by part, at most; unknown: sources whose size is unknown; checkpoint_bytes, save_seconds "
    "at bytes_per_s, why; other_site_save_seconds; places: settings, needs_bytes by part, free_bytes",
    "network": "name, bytes (that leave a site, else a node, else a process, in a step), seconds; computing: share of "
    "the time, 0 to 1, where nothing hides, computing_overlapped where all does that may; offered, chosen, "
    "note; total_seconds of the run with it; loss_percent beyond that of DDP and loss_evidence, as "
    "published; outer, of DiLoCo: every, fragments, delay",
    "between_sites": "which of these to take: name, why, command (empty: as it is set); null at one site",
    "data": "source, wanted_tokens, there_tokens, origin, epochs, counted",
    "findings": "name, level (WARN, FAIL), text, fix, code (64: a setting is to be changed)",
}


def as_json(p: Plan) -> dict[str, Any]:
    """Plain numbers in seconds, bytes, tokens, FLOPs and FLOP/s, or as a key's end says; None where a thing is not
    known. New keys do not change `schema`."""
    c, parts, best = p.c, parameters(p.c), scaling.rule_tokens(parameters(p.c).total)
    return {
        "schema": SCHEMA,
        "preset": c.preset,
        "run_name": c.run_name,
        "now": p.now.isoformat(timespec="minutes"),
        "from_step": p.done,
        "settings": {
            "dtype": c.dtype,
            "parallel": c.parallel,
            "optimizer": c.optimizer,
            "seq_len": c.seq_len,
            "micro_batch_size": c.micro_batch(p.fleet.processes),
            "activation_checkpointing": c.activation_checkpointing,
        },
        "devices": {
            "processes": p.fleet.processes,
            "nodes": p.fleet.nodes,
            "sites": p.fleet.sites,
            "cards": [of_card(count, card, c.dtype) for count, card in p.fleet.cards],
        },
        "parameters": dataclasses.asdict(parts) | {"total": parts.total, "matmul": parts.matmul},
        "tokens": p.tokens,
        "steps": c.last_step,
        "batch_tokens": c.batch_tokens,
        "flops_per_token": flops_of(c),
        "flops_per_token_causal": flops_of(c, causal=True),
        "flops": flops_of(c) * p.tokens,
        "compute_optimal_tokens": best,
        "expected_loss": p.expected_loss,
        "speed": of_speed(p),
        "time": of_time(p),
        "gpu_hours": p.gpu_hours,
        "kwh": p.kwh,
        "cost": p.cost,
        "milestones": [
            {
                "name": one.name,
                "step": one.step,
                "tokens": one.tokens,
                "seconds": 3600 * one.hours,
                "clock": one.clock,
            }
            for one in p.milestones
        ],
        "memory": {"capacity_bytes": p.capacity_bytes, "ways": [of_way(one) for one in p.memory]},
        "disk": {
            "bytes": storage.disk(c, p.pace.step_s),
            "unknown": storage.unknown(c),
            "checkpoint_bytes": storage.checkpoint_bytes(c) if c.save_every != 0 else None,
            "save_seconds": p.save_s,
            "bytes_per_s": 1e6 * p.write_mb_s,
            "why": p.write_why,
            "other_site_save_seconds": storage.wan_save_s(c) if c.save_every != 0 else None,
            "places": [
                {"settings": list(one.settings), "needs_bytes": one.needs, "free_bytes": one.free}
                for one in p.places
            ],
        },
        "network": [
            {
                "name": one.name,
                "bytes": one.bytes_per_step,
                "seconds": one.seconds_per_step,
                "computing": one.efficiency,
                "computing_overlapped": one.overlapped,
                "offered": one.offered,
                "chosen": one.chosen,
                "note": one.note,
                **of_option(option),
            }
            for one, option in zip(p.syncs, between.options(p), strict=True)
        ],
        "between_sites": of_verdict(between.verdict(p)),
        "data": [dataclasses.asdict(one) for one in p.epochs],
        "findings": [dataclasses.asdict(one) for one in p.findings],
    }


def of_card(count: int, card: GpuSpec, dtype: str) -> dict[str, Any]:
    peak = card.peak(dtype)
    return {
        "count": count,
        "card": card.key,
        "peak_flops_per_s": None if peak is None else peak * 1e12,
        "memory_bytes": card.memory_gib * 2.0**30,
        "watts": card.watts,
        "source": card.source,
    }


def of_speed(p: Plan) -> dict[str, Any]:
    fast = p.pace.fast
    return {
        "mfu_percent": fast.mfu_percent,
        "why": fast.why,
        "measured": fast.measured,
        "peak_flops_per_s": None if fast.peak_tflops is None else fast.peak_tflops * 1e12,
        "tokens_per_s": p.pace.tokens_per_s,
        "tokens_per_s_computing": fast.tokens_per_s,
        "step_seconds": p.pace.step_s,
        "step_seconds_computing": fast.step_s,
    }


def of_time(p: Plan) -> dict[str, float] | None:
    if p.time is None:
        return None
    return {
        f"{name}_seconds": 3600 * hours
        for name, hours in (dataclasses.asdict(p.time) | {"total": p.time.total}).items()
    }


def of_option(one: between.Option) -> dict[str, Any]:
    return {
        "total_seconds": None if one.hours is None else 3600 * one.hours,
        "loss_percent": one.percent,
        "loss_evidence": one.says,
        "outer": dataclasses.asdict(one.sync.outer) if one.sync.outer else None,
    }


def of_verdict(found: between.Verdict | None) -> dict[str, str] | None:
    return (
        None
        if found is None
        else {"name": found.option.sync.name, "why": found.said, "command": found.typed}
    )


def of_way(one: Held) -> dict[str, Any]:
    return {
        "parallel": one.c.parallel,
        "optimizer": one.c.optimizer,
        "activation_checkpointing": one.c.activation_checkpointing,
        "bytes": one.need.parts,
        "total_bytes": one.need.total,
        "fits": one.fits,
        "largest_micro_batch": one.largest_micro_batch,
        "chosen": one.chosen,
    }
