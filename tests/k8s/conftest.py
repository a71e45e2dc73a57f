"""A cluster for each test that asks for one, and the real kubectl to talk to it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster_sim.cluster import Cluster

KUBECTL = Path(sys.executable).parent / "kubectl"
Kubectl = Callable[..., str]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An API server without pods or nodes, its namespace `lab` and default storage class `standard`."""
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def kubectl(cluster: Cluster) -> Kubectl:
    """Calls kubectl: its output, if it ends with `code`. Objects go to its standard input."""

    def call(*args: str, code: int = 0, stdin: Any = None) -> str:
        text = stdin if stdin is None or isinstance(stdin, str) else yaml.safe_dump(stdin)
        done = subprocess.run(
            [KUBECTL, *args],
            env=os.environ | cluster.env,
            input=text,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        assert done.returncode == code, (
            f"kubectl {' '.join(args)}: {done.returncode}\n{done.stdout}"
        )
        return done.stdout

    return call
