"""What cannot be: too little memory or disk, a target out of reach, a dtype that a GPU lacks, an uneven batch.

    FAIL    it cannot be: the target needs more than matrix products alone reach, or than was measured of this run
    WARN    it is not what is planned: the target needs a higher MFU than the plan assumes

Each finding has the number that breaks it and, where there are any, settings with which these devices could do it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from hardware.host_memory import read_memory
from hardware.model_size import parameters
from plan import storage
from plan.fleet import Fleet
from plan.gpu_groups import taking
from plan.measured import Probe
from plan.memory import PART_NAMES, usable_bytes
from plan.network import diloco
from plan.network.diloco import PUBLISHED_EVERY
from plan.network.evidence import LEAST_BATCH, MEASURED_LOSS
from plan.run import RECOMPUTE, Run, added, changed, sharded, smaller_models
from plan.scaling import SMALLEST, TOKENS_PER_PARAMETER, rule_tokens
from plan.speed import MEASURED, slowest_card
from plan.storage import Place
from plan.time import Pace, pace_of, steps_within, time_of
from record.number_formats import GIB, count, gib, hours, number, percent, seconds, size
from settings.checks import find_batch_problem
from settings.declare import format_value
from settings.finding import FAIL, WARN, Finding
from train import timeouts

CODE = 64  # a setting has to change
BUSY = 0.75  # the share of the time computing that DiLoCo's interval is chosen for
MEASUREMENT_MARGIN = 1.1  # by which a minute's measurement may be too low
MOST_PROPOSED = 3
LORA_LEARNING_RATE = 2e-4  # adapters hardly learn at the rate of all weights
FEWEST_KEPT = 2  # of KEEP_LAST

# Percent of the bfloat16 peak that matrix products of the best sizes reach, by the first letters of a GPU's key:
# Bekman, Machine Learning Engineering, compute/accelerator (271 of 312 and 794.5 of 989 TFLOP/s on the SXM GPUs).
MATRIX_PRODUCTS = (
    ("a100", 86.9),
    ("a800", 86.9),
    ("h100", 80.3),
    ("h200", 80.3),
    ("h800", 80.3),
    ("gh200", 80.3),
)


def find_problems(
    run: Run,
    probe: Probe | None,
    pace: Pace,
    capacity_bytes: float,
    places: Iterable[Place] = (),
    done: int = 0,
) -> list[Finding]:
    """Return what is wrong with a plan.

    Args:
        probe: what was measured of the slowest device.
        capacity_bytes: of memory that a process may use.
        places: file systems that the run writes to.
        done: steps that the run has made already; targets are for the rest.
    """
    if uneven := check_batch(run):
        return [uneven]  # there is no such run
    findings = [check_dtype(run)]
    if not run.is_finetuning and done < run.config.last_step:
        findings += [
            check_hours(run, probe, pace, done),
            check_tokens_per_s(run, probe, pace, done),
        ]
    if run.fleet.sites > 1 and not run.is_finetuning:
        if run.config.sync == "diloco":
            findings += [check_copies(run), check_rejoin(run), check_interval(run, pace)]
            findings += [check_site_batch(run), check_slowest_site(run)]
        else:
            findings.append(check_wan(run, pace))
    findings.append(check_memory(run, capacity_bytes))
    findings += [check_disk(run, pace.step_s, place) for place in places]
    return [finding for finding in findings if finding]


def suggest(proposals: Iterable[str]) -> str:
    texts = [text for text in proposals if text]
    return f"Try: {'; or '.join(texts)}" if texts else ""


def check_batch(run: Run) -> Finding | None:
    problem = find_batch_problem(run.config, run.fleet.processes)
    if not problem:
        return None
    text, _, nearest = problem.removesuffix(".").partition(". The nearest is ")
    return Finding("batch", FAIL, f"{text}, on {run.fleet.text}", suggest([nearest]), CODE)


def check_dtype(run: Run) -> Finding | None:
    """Report GPUs without bfloat16 units: torch would emulate them at a fraction of float32's speed."""
    if run.config.dtype != "bfloat16":
        return None
    able = [(count, card) for count, card in run.fleet.cards if card.bf16_tflops]
    without_bf16 = [(count, card) for count, card in run.fleet.cards if not card.bf16_tflops]
    if not without_bf16:
        return None
    names = " and ".join(sorted(card.key for _, card in without_bf16))
    text = f"DTYPE=bfloat16: {names} has no bfloat16 units"
    proposals = ["DTYPE=float32"]
    if able:
        peak = sum(count * (card.bf16_tflops or 0.0) for count, card in able)
        more = sum(count * card.fp32_tflops for count, card in without_bf16)
        text += f", and in float32 would add {percent(more / peak)} to the peak of the others"
        other = taking(run, [card.key for _, card in able])
        proposals = [added(run, other) if other else "", *proposals]
    return Finding("bf16", FAIL, text, suggest(proposals), CODE)


# ---------------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------------


def check_hours(run: Run, probe: Probe | None, pace: Pace, done: int) -> Finding | None:
    config = run.config
    if config.target_hours is None:
        return None
    setting = f"TARGET_HOURS={format_value(config.target_hours)}"
    time = time_of(config, pace, done)
    if time is None or pace.speed.mfu_percent is None:
        return target_not_known("target-hours", setting, pace)
    left = 3600 * config.target_hours - time.waiting_seconds
    if time.total_seconds <= 3600 * config.target_hours:
        return None
    needed = None
    if left > 0:
        computing = time.training_seconds + time.evaluating_seconds
        needed = pace.speed.mfu_percent * computing / left
    planned = f"{hours(time.total_seconds / 3600)} at {pace.speed.mfu_percent:.3g}% MFU"
    proposals = propose_for_hours(run, probe, pace, done)
    return target_finding("target-hours", setting, needed, planned, run, probe, pace, proposals)


def check_tokens_per_s(run: Run, probe: Probe | None, pace: Pace, done: int) -> Finding | None:
    config = run.config
    if config.target_tokens_per_s is None:
        return None
    setting = f"TARGET_TOKENS_PER_S={format_value(config.target_tokens_per_s)}"
    speed = pace.speed
    if pace.tokens_per_s is None or speed.step_s is None or speed.mfu_percent is None:
        return target_not_known("target-tokens-per-s", setting, pace)
    if pace.tokens_per_s >= config.target_tokens_per_s:
        return None
    left = config.batch_tokens / config.target_tokens_per_s - pace.wait_s
    needed = speed.mfu_percent * speed.step_s / left if left > 0 else None
    planned = f"{pace.tokens_per_s:,.0f} tokens/s at {speed.mfu_percent:.3g}% MFU"
    proposals = propose_for_speed(run, probe, done)
    return target_finding(
        "target-tokens-per-s", setting, needed, planned, run, probe, pace, proposals
    )


def target_not_known(name: str, setting: str, pace: Pace) -> Finding:
    return Finding(name, WARN, f"{setting} cannot be checked: {pace.speed.why}", "", CODE)


def target_finding(
    name: str,
    setting: str,
    needed_percent: float | None,
    planned: str,
    run: Run,
    probe: Probe | None,
    pace: Pace,
    proposals: Iterable[str],
) -> Finding:
    """Return FAIL for what no device reaches, else WARN. needed_percent: MFU while computing, None if the network
    alone takes too long."""
    fix = suggest(proposals)
    if needed_percent is None:
        text = (
            f"{setting}: every step waits {seconds(pace.wait_s)} for other nodes, and these waits alone "
            f"take longer. Planned: {planned}"
        )
        return Finding(name, FAIL, text, fix, CODE)
    limit, why = highest_mfu(run, probe, pace)
    text = f"{setting} needs {number(needed_percent)}% MFU. Planned: {planned}"
    if needed_percent > limit:
        return Finding(name, FAIL, f"{text}. {why}", fix, CODE)
    return Finding(name, WARN, text, fix, CODE)


def highest_mfu(run: Run, probe: Probe | None, pace: Pace) -> tuple[float, str]:
    """Return the MFU in percent past which a target cannot be, and why."""
    speed, dtype = pace.speed, run.config.dtype
    if speed.source == MEASURED and speed.mfu_percent is not None:
        why = f"This step was measured at {speed.mfu_percent:.3g}% MFU"
        return MEASUREMENT_MARGIN * speed.mfu_percent, why
    if run.fleet.on_cpu:
        return 100.0, "Training is never faster than matrix products alone"
    card = slowest_card(run.config, run.fleet)
    peak = card.peak(dtype)
    measured = probe.matmul_tflops.get(dtype) if probe else None
    if peak and measured:
        why = f"Matrix products alone were measured at {measured:,.4g} of {peak:,.4g} TFLOP/s"
        return 100 * measured / peak, why
    if dtype == "bfloat16":
        for start, share in MATRIX_PRODUCTS:
            if card.key.startswith(start):
                return share, f"Matrix products alone reach {share:g}% on {card.key}"
    return 100.0, "No GPU exceeds its peak"


def propose_for_hours(run: Run, probe: Probe | None, pace: Pace, done: int) -> Iterator[str]:
    """Yield settings with which these devices are done in TARGET_HOURS: DiLoCo, fewer tokens, a smaller model."""
    target_hours = run.config.target_hours
    assert target_hours is not None

    def is_in_time(other: Run) -> bool:
        time = time_of(other.config, pace_of(other, probe), done)
        return time is not None and time.total_seconds <= 3600 * target_hours

    for other in with_diloco(run):
        if is_in_time(other):
            yield added(run, other)
            break
    steps = steps_within(run.config, pace, target_hours, done)
    if steps:
        shorter = with_steps(run, done + steps)
        if shorter:
            yield added(run, shorter)
    if done:
        return
    for other in models_of_a_known_loss(run):
        tokens = round(rule_tokens(parameters(other.config).total))
        steps = round(tokens / run.config.batch_tokens)
        if 0 < steps < run.config.last_step:
            other = with_steps(other, steps) or other
        if is_in_time(other):
            size_of = count(parameters(other.config).total)
            yield f"{added(run, other)} ({size_of} parameters, {TOKENS_PER_PARAMETER} tokens each)"
            return


def with_steps(run: Run, steps: int) -> Run | None:
    if run.config.max_steps:
        return changed(run, max_steps=steps)
    return changed(run, train_tokens=steps * run.config.batch_tokens)


def propose_for_speed(run: Run, probe: Probe | None, done: int) -> Iterator[str]:
    """Yield settings with which these devices reach TARGET_TOKENS_PER_S."""
    target = run.config.target_tokens_per_s or 0.0

    def is_fast(other: Run) -> bool:
        rate = pace_of(other, probe).tokens_per_s
        return rate is not None and rate >= target

    for other in with_diloco(run):
        if is_fast(other):
            yield added(run, other)
            break
    if not done:
        for other in models_of_a_known_loss(run):
            if is_fast(other):
                yield f"{added(run, other)} ({count(parameters(other.config).total)} parameters)"
                break
    planned = pace_of(run, probe).tokens_per_s
    if planned:
        yield f"TARGET_TOKENS_PER_S={int(planned)}"


def models_of_a_known_loss(run: Run) -> Iterator[Run]:
    """Yield smaller models as large as the loss law covers: nobody could say what a smaller one is worth."""
    for other in smaller_models(run):
        if parameters(other.config).total >= SMALLEST:
            yield other


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


def capacity_of(fleet: Fleet) -> float:
    """Return the bytes that a process may use: of the smallest GPU, or its share of this machine's memory."""
    if fleet.cards:
        return usable_bytes(fleet.smallest)
    return read_memory().most / fleet.processes_of_a_node


def check_memory(run: Run, capacity_bytes: float) -> Finding | None:
    need = run.memory
    if need.total <= capacity_bytes:
        return None
    parts = []
    for name, part in sorted(need.parts.items(), key=lambda entry: -entry[1]):
        if part >= 0.05 * GIB:
            parts.append(f"{PART_NAMES.get(name, name)} {gib(part)}")
    config = run.config
    settings = [
        f"MICRO_BATCH_SIZE={run.micro_batch}",
        f"PARALLEL={config.parallel}",
        f"ACTIVATION_CHECKPOINTING={config.activation_checkpointing}",
    ]
    if run.is_finetuning:
        settings += [f"DTYPE={config.dtype}", f"LORA_RANK={config.lora_rank}"]
    each = "process" if run.fleet.on_cpu else "GPU"
    where = "this machine" if run.fleet.on_cpu else run.fleet.smallest.key
    text = (
        f"{' '.join(settings)} needs {gib(need.total)} GiB per {each} ({', '.join(parts)}), and {where} "
        f"has {gib(capacity_bytes)} GiB for it"
    )
    fix = suggest(propose_for_memory(run, capacity_bytes))
    return Finding("memory", FAIL, text, fix or "No setting makes it fit on these devices", CODE)


def propose_for_memory(run: Run, capacity_bytes: float) -> list[str]:
    """Return settings with which memory holds the run, those that cost the least speed first.

    Each remedy is added to the ones before it, with the largest micro-batch that then fits.
    """
    proposals = []
    changes: dict[str, Any] = {}
    for remedy in memory_remedies(run):
        other = changed(run, **(changes | remedy))
        if other is None:
            continue
        changes |= remedy
        if other.memory.total > capacity_bytes:
            largest = other.largest_micro_batch(capacity_bytes)
            smaller = changed(run, **changes, micro_batch_size=largest) if largest else None
            if smaller is None or largest >= run.micro_batch:
                continue
            other = smaller
        if other.config != run.config:
            proposals.append(f"{added(run, other)} ({gib(other.memory.total)} GiB)")
        if len(proposals) == MOST_PROPOSED:
            return proposals
    if not run.is_finetuning:
        for other in models_of_a_known_loss(run):
            if other.memory.total <= capacity_bytes:
                size_of = count(parameters(other.config).total)
                memory = gib(other.memory.total)
                proposals.append(f"{added(run, other)} ({memory} GiB, {size_of} parameters)")
                break
    return proposals


def memory_remedies(run: Run) -> Iterator[dict[str, Any]]:
    config = run.config
    yield {}  # only a smaller micro-batch
    if config.sync == "diloco" and config.sync_fragments == 1:
        yield {"sync_fragments": min(diloco.MOST_FRAGMENTS, config.n_layer, config.sync_every)}
    for how in RECOMPUTE[RECOMPUTE.index(config.activation_checkpointing) + 1 :]:
        yield {"activation_checkpointing": how}
    if run.site_processes > 1 and config.parallel == "ddp":
        yield sharded(run)
    if run.is_finetuning and not config.lora_rank:
        yield {"lora_rank": 16, "learning_rate": max(config.learning_rate, LORA_LEARNING_RATE)}
    if run.is_finetuning and config.dtype != "bfloat16":
        yield {"dtype": "bfloat16"}


# ---------------------------------------------------------------------------------------------------
# Disk
# ---------------------------------------------------------------------------------------------------


def check_disk(run: Run, step_s: float | None, place: Place) -> Finding | None:
    """Report a file system that the run would fill. step_s: with everything that recurs, None if not known."""
    if not place.missing:
        return None
    parts = [f"{name} {size(need)}" for name, need in place.needs.items() if need]
    names = " and ".join(place.settings)
    total = sum(place.needs.values())
    text = (
        f"{names}: the run still writes up to {size(total)} to {place.folder} ({', '.join(parts)}), and "
        f"{size(place.free)} are free"
    )
    proposals = [added(run, other) for other in disk_remedies(run, step_s, place)]
    return Finding(
        "disk", FAIL, text, suggest([*proposals, f"{names} on a disk with {size(total)}"]), CODE
    )


def disk_remedies(run: Run, step_s: float | None, place: Place) -> Iterator[Run]:
    """Yield settings with which the run fits: fewer checkpoints, or a smaller cache of streamed data."""
    config = run.config
    tried: list[dict[str, Any]] = []
    if config.keep_last > FEWEST_KEPT:
        tried.append({"keep_last": FEWEST_KEPT})
    if config.keep_every:
        tried.append({"keep_every": 0})
        tried.append({"keep_last": min(config.keep_last, FEWEST_KEPT), "keep_every": 0})
    if run.is_finetuning and config.lora_rank and config.checkpoint_mode == "full":
        tried.append({"checkpoint_mode": "lite"})
    if "shards" in place.needs:
        room = place.free - place.needs.get("checkpoints", 0.0) - place.needs.get("downloads", 0.0)
        gigabytes = int(room // 1e9)
        if 0 < gigabytes < config.data_cache_gb:
            tried.append({"data_stream": "1", "data_cache_gb": float(gigabytes)})
    for changes in tried:
        other = changed(run, **changes)
        if other and missing_with(run, other, step_s, place) <= 0:
            yield other


def missing_with(run: Run, other: Run, step_s: float | None, place: Place) -> float:
    """Return the bytes that would not fit with other settings; what is on the disk already stays."""
    before = storage.disk_of(run, step_s)
    after = storage.disk_of(other, step_s)
    needs = 0.0
    for part, need in place.needs.items():
        needs += max(0.0, need + after[part] - before[part])
    return needs - place.free


# ---------------------------------------------------------------------------------------------------
# Sites
# ---------------------------------------------------------------------------------------------------


def with_diloco(run: Run, step_s: float | None = None) -> Iterator[Run]:
    """Yield the run with SYNC=diloco, from the interval that is known best to the longest."""
    if run.fleet.sites == 1 or run.config.sync == "diloco" or run.is_finetuning:
        return
    step_s = step_s or pace_of(run, None).speed.step_s
    for schedule in sorted(diloco.schedules(run, step_s), key=lambda one: one.every):
        other = changed(run, **schedule.settings(run))
        if other:
            yield other


def check_wan(run: Run, pace: Pace) -> Finding | None:
    """Report data parallelism that waits for the WAN in every step."""
    step_s = pace.speed.step_s
    if step_s is None or pace.busy is None or pace.busy >= BUSY:
        return None
    proposal = ""
    for other in with_diloco(run, step_s):
        busy = pace_of(other, None).busy
        if busy is not None and busy >= BUSY:
            proposal = f"{added(run, other)} (GPUs busy {percent(busy)})"
            break
    text = (
        f"every step waits {seconds(pace.wait_s)} for the network between {run.fleet.sites} sites and "
        f"computes for {seconds(step_s)}: the GPUs are busy {percent(pace.busy)} of the time"
    )
    return Finding("wan", WARN, text, suggest([proposal]), CODE)


def check_copies(run: Run) -> Finding | None:
    """Report sites whose processes hold whole copies: each would send all of it."""
    changes = diloco.sharded_in_site(run, run.site_processes)
    if not changes:
        return None
    text = (
        f"SYNC=diloco with PARALLEL={run.config.parallel}: each of the {run.site_processes} processes of a "
        "site would send the whole model to the other sites"
    )
    other = changed(run, **changes)
    return Finding("wan", FAIL, text, suggest([added(run, other)] if other else []), CODE)


def check_rejoin(run: Run) -> Finding | None:
    """Report a link too slow for a site that rejoins: it fetches up to a checkpoint from another one."""
    whole = storage.checkpoint_bytes(run.config)
    needed = storage.wan_save_s(run.config) or 0.0
    if needed <= timeouts.SYNC_TIMEOUT_S:
        return None
    text = (
        f"a site that rejoins fetches up to {size(whole)} from another one, which takes {seconds(needed)} "
        f"with WAN_GBIT={run.config.wan_gbit:g}; it gives up after {seconds(timeouts.SYNC_TIMEOUT_S)}"
    )
    fix = f"Use a link of {8e-9 * whole / timeouts.SYNC_TIMEOUT_S:.2g} Gbit/s or more"
    return Finding("wan", WARN, text, fix, CODE)


def check_site_batch(run: Run) -> Finding | None:
    """Report a batch that is too small to be divided among sites."""
    config = run.config
    if config.batch_tokens >= LEAST_BATCH:
        return None
    text = (
        f"BATCH_TOKENS={config.batch_tokens} leaves each of {config.sites} sites "
        f"{config.batch_tokens // config.sites:,} tokens per step, too few for DiLoCo: the laws of arXiv "
        f"2503.09799 find {LEAST_BATCH:,} in all best for 3.3M parameters at 4 sites, and more for larger models; "
        f"{MEASURED_LOSS.source} lost {MEASURED_LOSS.percent}%"
    )
    other = changed(run, batch_tokens=diloco.large_batch(run))
    return Finding("sites", WARN, text, suggest([added(run, other)] if other else []), CODE)


def check_slowest_site(run: Run) -> Finding | None:
    """Report sites so slow that synchronizations continue without them."""
    schedule = diloco.schedule_of(run)
    longest = diloco.longest_interval(run)
    if schedule.interval <= longest:
        return None
    slow = slowest_card(run.config, run.fleet).key
    text = (
        f"a synchronization waits {seconds(timeouts.SITE_WAIT_S)} for a slow site, and {schedule.interval} "
        f"steps make those with {slow} later than that: the others continue without them"
    )
    proposals = []
    every = int(longest) * schedule.fragments
    other = changed(run, sync_every=every) if every else None
    if other:
        proposals.append(added(run, other))
    return Finding("sites", FAIL, text, suggest(proposals), CODE)


def check_interval(run: Run, pace: Pace) -> Finding | None:
    """Report a synchronization that takes longer than the steps between two of them."""
    step_s = pace.speed.step_s
    if step_s is None:
        return None
    schedule = diloco.schedule_of(run)
    needed = diloco.synchronization_s(run, schedule)
    between = schedule.every / schedule.fragments * step_s
    if needed <= between:
        return None
    steps = schedule.fragments * -(-needed // step_s)
    fitting = [n for n in PUBLISHED_EVERY if n >= steps and n % schedule.fragments == 0]
    other = changed(run, sync_every=int(min(fitting, default=steps)))
    text = (
        f"a synchronization between {run.fleet.sites} sites takes {seconds(needed)}, and the "
        f"steps between two take {seconds(between)} (SYNC_EVERY={schedule.every}, "
        f"SYNC_FRAGMENTS={schedule.fragments})"
    )
    return Finding("wan", WARN, text, suggest([added(run, other)] if other else []), CODE)
