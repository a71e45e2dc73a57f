"""Whether this process runs in a pod of the manifests."""

import os


def in_pod() -> bool:
    """Whether a pod runs this process: its manifest names the machine in K8S_NODE.

    A pod that is lost is started again, so the other nodes of the run wait for it. By hand they end.
    """
    return bool(os.environ.get("K8S_NODE"))
