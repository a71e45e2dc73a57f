"""What is seen as plain text: a fact a line, in one order, each beginning with a word to search for.

    run: tiny, preset tiny, seen 2026-11-22 08:12:48
    fault hang: no step for 5:10 ...; next: make logs ONLY=errors
    phase: training for 12:10
    gpu 0/3: utilisation 98%, memory 71.2 of 80.0 GiB, ...     of node 0, its fourth

Faults come first, and none where nothing is wrong. What is not known is n/a, or its line is left out.
"""

import datetime
from collections.abc import Iterator, Sequence

from monitor import phrases
from monitor.facts import Fault, Gpu, Node, Pod, Seen
from monitor.phrases import NA, number, span
from record import number_formats


def text(seen: Seen, faults: Sequence[Fault], verdict: str = "") -> str:
    """All of it, with a line end behind each line."""
    at = datetime.datetime.fromtimestamp(seen.now)
    lines = [
        f"run: {seen.run}, preset {seen.preset}, seen {at:%Y-%m-%d %H:%M:%S}",
        *map(fault, faults),
    ]
    if verdict:
        lines.append(f"verdict: {verdict}")
    lines += [f"phase: {phrases.phase_words(seen)}", *of_run(seen)]
    for node in seen.nodes:
        lines += of_node(node, seen)
    lines += of_cluster(seen)
    return "".join(f"{' '.join(phrases.clean(line).split())}\n" for line in lines)


def fault(found: Fault) -> str:
    about = f" {found.about}" if found.about else ""
    return f"fault {found.name}{about}: {found.text}" + (
        f"; next: {found.next}" if found.next else ""
    )


def of_run(seen: Seen) -> Iterator[str]:
    p, plan = seen.progress, seen.expected
    if p is not None:
        whole = f" of {p.last_step:,}, {100 * p.step / p.last_step:.1f}%" if p.last_step else ""
        yield f"step: {p.step:,}{whole}, attempt {p.attempt + 1}"
        yield f"tokens: {number_formats.count(p.tokens)}"
        yield f"loss: {number(p.loss)} nats/token, median of the last steps {number(p.median_loss)}"
        behind = f" at step {p.val_step:,}" if p.val_step is not None else ""
        yield f"validation: {number(p.val_loss)}{' nats/token' if p.val_loss is not None else ''}{behind}"
        yield f"speed: {phrases.speed(seen)}"
        planned = f", the plan's {plan.mfu_percent:.1f}%" if plan.mfu_percent is not None else ""
        yield f"mfu: {NA if p.mfu_percent is None else f'{p.mfu_percent:.1f}%'}{planned}"
        yield (
            f"step time: {NA if p.step_s is None else f'{1000 * p.step_s:,.1f} ms (median; speed is a mean)'}"
            + (
                f", waiting for data {100 * p.data_wait_fraction:.1f}%"
                if p.data_wait_fraction is not None
                else ""
            )
        )
        yield f"memory of a process: {number(p.mem_gib, '.2f')} GiB at its peak" + (
            f", the plan's {plan.memory_gib:.2f}" if plan.memory_gib is not None else ""
        )
        left = phrases.eta_s(seen)
        if left is not None:
            at = phrases.clock(seen.now + left, seen.now)
            yield f"eta: {span(left)}, at {at}{phrases.planned_end(seen)}"
        yield f"goodput: {phrases.goodput_words(seen)}"
        yield f"checkpoint: {phrases.saved(seen)}"
        if p.damaged_lines:
            lines = "line" if p.damaged_lines == 1 else "lines"
            yield f"record: {p.damaged_lines:,} damaged {lines} in metrics.jsonl left out"
        if p.skipped_steps or p.rollbacks:
            yield (
                f"skipped: {p.skipped_steps} of the last steps, of which {p.nonfinite_steps} not finite; "
                f"{p.rollbacks} rollbacks"
            )
    if plan.tokens_per_s is None and plan.why:
        yield f"plan: {NA}: {plan.why}"
    elif plan.why:
        yield f"plan: {plan.tokens_per_s:,.0f} tokens/s, computed: {plan.why}"
    if energy := phrases.energy(seen):
        yield f"energy: {energy}"
    if network := phrases.planned_network(seen):
        yield f"network: {network}"


def of_node(node: Node, seen: Seen) -> Iterator[str]:
    yield f"node {node.node}: {node.host}, seen {span(seen.now - node.time)} ago"
    yield f"disk {node.node}: {phrases.disk(node, seen)}"
    if node.memory_bytes is not None:
        yield f"host memory {node.node}: {phrases.memory(node)}"
    if node.gpus_why:
        yield f"gpus {node.node}: {NA}: {node.gpus_why}"
    for each in node.gpus:
        yield f"gpu {node.node}/{each.index}: {gpu(each)}"
    for link in node.links:
        yield f"link {node.node}/{link.name}: {phrases.link_words(link)}"
    if node.complaint:
        yield f"complaint {node.node}: {node.complaint}"


def gpu(g: Gpu) -> str:
    if g.lost:
        return f"{g.name or 'a GPU'} is lost: it no longer answers"
    temperature = NA if g.temp_c is None else f"{g.temp_c:.0f} C"
    return (
        f"{g.name + ', ' if g.name else ''}utilisation {number(g.utilisation_percent, '.0f')}"
        f"{'' if g.utilisation_percent is None else '%'}, memory "
        f"{phrases.of(g.memory_gib, g.memory_total_gib, '.1f')} GiB, power "
        f"{phrases.of(g.power_w, g.power_limit_w)} W, {temperature}, throttled by "
        f"{phrases.reasons(g) or 'nothing'}"
    )


def of_cluster(seen: Seen) -> Iterator[str]:
    there = seen.cluster
    if there is None:
        return
    yield f"job: {there.job_name} in {there.words}: {there.job}"
    if there.problem:
        yield f"cluster: {there.problem}"
    if there.quota:
        yield f"quota: {there.quota}"
    for each in there.pods:
        yield from pod(each, seen.now)
    for event in there.events:
        yield f"event: {event}"


def pod(p: Pod, now: float) -> Iterator[str]:
    yield (
        f"pod {p.index}: {phrases.pod_state(p, now)}, node {p.node or NA}, site {p.site or NA}, restarts "
        f"{p.restarts}, {p.name}"
    )
    if p.trouble:
        yield f"trouble {p.index}: {p.trouble}"
    if said := phrases.last_line(p, now):
        yield f"last line {p.index}: {said}"
