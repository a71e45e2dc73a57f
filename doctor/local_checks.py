"""All checks of this machine, side by side, in the order of what stands on what."""

from concurrent.futures import ThreadPoolExecutor

from doctor import disk, gpus, installed, kernels, machine, online, site_checks, web
from doctor.quick import present
from hardware.host_memory import read_memory
from settings.config import Config
from settings.finding import FAIL, Finding
from settings.precision import read_cpu_flags

DISK_S = 20.0  # a disk that has not answered by then is out of order


def findings(c: Config) -> list[Finding]:
    """What is found on this machine for the run that the settings describe. Changes nothing."""
    seen = gpus.see()
    on_gpus, processes = gpus.uses_gpus(c, seen), gpus.processes_of(c, seen)
    disks = web.within(
        DISK_S, lambda: disk_findings(c)
    )  # before other checks read from the same disk
    if disks is None:
        disks = [
            Finding(
                "disk",
                FAIL,
                f"RUNS_DIR or DATA_DIR does not answer within {DISK_S:.0f} s",
                "look at the network disk, or choose other folders",
            )
        ]
    with ThreadPoolExecutor() as pool:  # all of these end by themselves
        asked_wandb, asked_hub = pool.submit(online.ask_wandb, c), pool.submit(online.ask_hub, c)
        by_torch = pool.submit(kernels.by_torch)
        environment, build = installed.environment(), installed.torch_build()
        nvml = gpus.nvml(seen)
        wandb, hub, torch = asked_wandb.result(), asked_hub.result(), by_torch.result()
    return present(
        installed.python(environment),
        (build.version and kernels.loaded(torch))
        or installed.torch(build, installed.pinned_torch()),
        installed.code(),
        *gpus.gpus(c, seen),
        *kernels.stronger(gpus.driver(c, seen, build), kernels.seen_alike(c, seen, torch)),
        gpus.bf16(c, seen, read_cpu_flags()),
        kernels.attention(c, torch) or gpus.attention(c, seen),
        machine.compiler(
            c, machine.compiler_here(), on_gpus, torch.worth_compiling if torch.version else None
        ),
        nvml,
        machine.memory(c, read_memory(), processes, on_gpus),
        machine.shm(machine.shm_free(), processes, on_gpus),
        machine.open_files(machine.files_limit(), machine.files_needed(c, processes, on_gpus)),
        machine.loopback(machine.loopback_fault(), processes) if processes > 1 else None,
        *disks,
        machine.ports(c, machine.meeting(c)) if c.site_nodes > 1 else None,
        *site_checks.findings(c),
        *online.hub(hub),
        online.wandb(c, wandb),
        online.clock(
            [wandb, hub.who, *hub.answers],
            machine.is_kept(),
            c.nodes > 1 or bool(hub.wanted or wandb),
        ),
    )


def disk_findings(c: Config) -> list[Finding]:
    """Rights and room, and speed where anything can be written."""
    found = disk.folders(c)
    said = disk.rights(found) + disk.room(disk.places(c, found))
    return said if found[0].problem else [*said, disk.speed(c, *disk.write_mb_s(found[0].there))]
