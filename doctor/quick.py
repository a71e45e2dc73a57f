"""The part that make train runs before anything else: no torch is loaded, no network asked, nothing written.

It takes what Python takes to start and, where there are GPUs, one question to nvidia-smi.
"""

from doctor import disk, gpus, installed, machine, site_checks
from hardware.host_memory import read_memory
from settings.config import Config
from settings.finding import Finding
from settings.precision import read_cpu_flags


def quick(c: Config) -> list[Finding]:
    """What can be told of this machine at once; those that fail stop a run, but for ALLOW_FAIL (settings.finding.split)."""
    seen = gpus.see()
    folders = disk.folders(c)
    on_gpus, processes = gpus.uses_gpus(c, seen), gpus.processes_of(c, seen)
    return present(
        *gpus.gpus(c, seen),
        gpus.driver(c, seen, installed.torch_build()),
        gpus.bf16(c, seen, read_cpu_flags()),
        gpus.attention(c, seen),
        machine.compiler(c, machine.compiler_here(), on_gpus, None),
        machine.memory(c, read_memory(), processes, on_gpus),
        machine.shm(machine.shm_free(), processes, on_gpus),
        machine.open_files(machine.files_limit(), machine.files_needed(c, processes, on_gpus)),
        machine.loopback(machine.loopback_fault(), processes) if processes > 1 else None,
        *disk.rights(folders),
        *disk.room(disk.places(c, folders)),
        installed.code(),
        *site_checks.findings(c, ask=False),
    )


def present(*found: Finding | None) -> list[Finding]:
    """Without those that there was no reason for."""
    return [finding for finding in found if finding]
