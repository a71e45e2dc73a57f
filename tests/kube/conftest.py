"""A cluster for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An API server without pods or nodes, its namespace `lab` and default storage class `standard`."""
    made = Cluster(tmp_path)
    yield made
    made.close()
