"""Whether this process runs in a pod of the manifests, and how it ends there by a fault of its machine."""

import os
from pathlib import Path

from record import bad_nodes
from record.exit_codes import MACHINE_FAULT
from record.machine_faults import MACHINE_FAULTS, classify


def node_name() -> str:
    """Return the name of the machine that this pod runs on; "" by hand. Its manifest sets K8S_NODE."""
    return os.environ.get("K8S_NODE", "")


def in_pod() -> bool:
    """Whether a pod runs this process.

    A pod that is lost is started again, so the other nodes of the run wait for it. By hand they end.
    """
    return bool(node_name())


def exit_code_of_fault(fault: str) -> int:
    """Return the exit code of a machine's fault, by its name in record/machine_faults.py."""
    return MACHINE_FAULT if in_pod() else MACHINE_FAULTS[fault].by_hand


def list_node(runs_dir: Path, fault: str, reason: str) -> None:
    """List the node of this pod if later ones are to refuse it for this fault. Nothing happens by hand."""
    if in_pod() and fault in MACHINE_FAULTS and MACHINE_FAULTS[fault].is_listed:
        bad_nodes.add(runs_dir / bad_nodes.FOLDER, node_name(), reason)


def exit_code_of(error: Exception, otherwise: int) -> int:
    """Return the exit code of a process that ends by this error: `otherwise`, if the machine is not at fault."""
    if in_pod() and classify(error):
        return MACHINE_FAULT
    return otherwise
