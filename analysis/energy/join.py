"""The energy of a run by cause and by step: its record and the samples of its GPUs on one clock.

    metrics.jsonl -> intervals by cause, steps -+-> joules of each GPU in each, in one pass over the files
    gpu_metrics_* -> readings of each GPU      -+

Record and samples have one monotonic clock if both name the same boot of a machine, so that setting the wall clock
moves no energy. Otherwise the wall clock joins them. A step has energy if all GPUs of the run, and no others, were sampled from
its start to its end. The energy of a cause covers only the time that was sampled, and the table says how much that is.
After `make stop`, and when training is done, the GPUs are free: that time has neither energy nor cost. Samples may
still be growing; the sums end at the last record.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.energy.downsample import SampleBuckets, sum_known
from analysis.energy.intervals import RunIntervals
from analysis.energy.result import Cause, Energy
from analysis.energy.samples import (
    FAST,
    SLOW,
    GpuEnergy,
    SampleFile,
    find_files,
    find_readings,
    read_columns,
)
from analysis.runs import Run
from record.goodput import CATEGORIES

ROUNDING_S = 1e-6


def add_energy(run: Run) -> Run:
    """Return the run with energy, buckets of its samples and the columns energy_j and power_w; the same run if its GPUs
    were not sampled. Raises OSError."""
    if not run.folder or not run.timeline:  # a log
        return run
    files, remarks = find_files(run.folder)
    if not files and not remarks:
        return run
    intervals = RunIntervals(run, run.timeline)
    count = len(intervals.seconds)
    begins, ends = intervals.find_edges(intervals.offsets)
    wall_bounds = np.append(begins[:count], ends[count - 1])
    buckets = SampleBuckets(wall_bounds[0], wall_bounds[-1])
    meters = read_files(files, intervals, buckets, remarks)
    energy, joules = add_up_meters(meters, intervals, remarks)
    return dataclasses.replace(
        run,
        columns={**run.columns, "energy_j": energy.energy_j, "power_w": energy.power_w},
        energy=energy,
        samples=buckets.finish(wall_bounds, np.append(0.0, np.cumsum(joules))),
    )


def read_files(
    files: Sequence[SampleFile], intervals: RunIntervals, buckets: SampleBuckets, remarks: list[str]
) -> dict[str, GpuEnergy]:
    """Return the energy of each GPU in all intervals and then all steps of the intervals, and fill the buckets."""
    meters: dict[str, GpuEnergy] = {}
    hosts = {(file.node, file.host) for file in files}
    nodes = {file.node for file in files}
    offsets = {file.boot: file.offset_s for file in files}  # as the wall clock was set last
    for file in files:
        is_same = intervals.boots == file.boot
        offset_s = offsets[file.boot]
        begins, ends = intervals.find_edges(np.where(is_same, 0.0, intervals.offsets - offset_s))
        columns = read_columns(file.path, FAST, remarks)
        if not columns:
            continue
        times = columns["elapsed_sec"] + file.zero_s
        for gpu, counter, power_w in find_readings(columns):
            name = gpu
            if len(hosts) > len(nodes):  # the sampler of each was started without NODE_RANK
                name = f"{file.host}.{gpu}"
            elif len(nodes) > 1:
                name = f"node{file.node}.{gpu}"
            meter = meters.setdefault(name, GpuEnergy(len(begins)))
            meter.add(file.boot, times, counter, power_w, begins, ends)
            buckets.add("power", None, times + offset_s, power_w)

        slow_path = file.path.with_name(file.path.name.replace("metrics", "slow"))
        if slow_path.is_file():
            columns = read_columns(slow_path, SLOW, remarks)
            for direction in ("in", "out"):
                rates = [rate for name, rate in columns.items() if f"_{direction}_bytes_" in name]
                if rates:
                    slow_times = columns["elapsed_sec"] + file.zero_s + offset_s
                    buckets.add(direction, file.node, slow_times, sum_known(rates) / 1e6)
    return meters


def add_up_meters(
    meters: Mapping[str, GpuEnergy], intervals: RunIntervals, remarks: list[str]
) -> tuple[Energy, np.ndarray]:
    """Return the energy of all GPUs, and (n,) joules of each interval."""
    count = len(intervals.seconds)
    joules = np.zeros(count)
    covered_s = np.zeros(count)
    step_j = np.zeros(len(intervals.step_s))
    gpus = np.zeros(len(intervals.offsets), int)
    steps = {}
    for gpu, meter in meters.items():
        joules += meter.joules[:count]
        covered_s += meter.covered_s[:count]
        is_sampled = np.bincount(intervals.attempt, meter.covered_s[:count], len(gpus)) > 0
        gpus += is_sampled
        is_covered = meter.covered_s[count:] > intervals.step_s - ROUNDING_S
        steps[gpu] = np.where(is_covered, meter.joules[count:], np.nan)
        step_j += np.where(is_sampled[intervals.step_attempt], steps[gpu], 0.0)

    processes = intervals.processes
    is_complete = (gpus > 0) & ((gpus == processes) | (processes == 0))  # or unknown
    for number in np.flatnonzero((gpus > 0) & ~is_complete):
        remarks.append(
            f"attempt {number + 1}: sampled GPUs {gpus[number]}, processes {processes[number]}. Energy "
            "and cost are of these GPUs, and steps have none. To sample only some GPUs of a machine, "
            "set CUDA_VISIBLE_DEVICES for make gpu-sampler"
        )
    energy_j = np.where(is_complete[intervals.step_attempt], step_j, np.nan)

    gpu_s = intervals.seconds * np.maximum(gpus, processes)[intervals.attempt] * intervals.has_gpus
    parts = np.stack([intervals.seconds, gpu_s, covered_s, joules])
    causes = {}
    for category in CATEGORIES:
        causes[category] = Cause(*parts[:, intervals.category == category].sum(1).tolist())
    energy = Energy(
        causes=causes,
        total=Cause(*parts.sum(1).tolist()),
        energy_j=energy_j,
        power_w=energy_j / intervals.step_s,
        steps=steps,
        remarks=remarks,
    )
    return energy, joules
