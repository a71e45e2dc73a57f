"""docs/manifests.md: its table of settings and fields is what changing each setting does to the manifests; and the list
of what is in k8s/."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import k8s
from k8s.cluster.job_spec import cluster_config
from k8s.cluster.render import FIELDS, claim, objects, render
from settings import ROOT

PAGE = (ROOT / "docs" / "manifests.md").read_text()
OTHER = {
    "JOB_NAME": "mine",
    "RUN_NAME": "other",
    "NAMESPACE": "lab",
    "IMAGE_PULL_SECRET": "login",
    "NODES": "2",
    "GPUS_PER_NODE": "4",
    "GPU_PRODUCTS": "A",
    "EXCLUDE_NODES": "gpu-7,gpu-8.example.org",
    "SITE": "x",
    "POD_CPUS": "10",
    "POD_MEMORY_GB": "80",
    "VOLUME": "disk",
    "GRACE_PERIOD_S": "500",
    "TOLERATIONS": "k",
    "PRIORITY_CLASS": "low",
}
OF_THE_CLAIM = {"VOLUME_GB": "9", "STORAGE_CLASS": "fast"}
ROWS = {
    name: fields
    for names, fields in re.findall(
        r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| (.*) \|$", PAGE, re.MULTILINE
    )
    for name in re.findall(r"[A-Z_]+", names)
}


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.env").write_text("")
    return str(tmp_path / "own.env")


def leaves(thing: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all that an object holds; items of a list are called by their name, where they have one."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(thing, list):
        for i, item in enumerate(thing):
            yield from leaves(
                item, f"{path}.{item.get('name', i) if isinstance(item, dict) else i}"
            )
    else:
        yield path, thing


def fields_of(text: str) -> dict[str, Any]:
    """Path -> value over all objects, but for the pods' environment and what follows from it."""
    found = {
        f"{thing['kind']}{path}": value
        for thing in objects(text)
        for path, value in leaves(thing)
        if not path.startswith(".data.") and "pure-transformer/rendered" not in path
    }
    return {
        path: re.sub(r"-env-[a-z0-9]{10}$", "-env", str(value)) for path, value in found.items()
    }


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_a_setting_changes_the_fields_of_its_row_and_no_others(
    own: str, name: str, value: str
) -> None:
    before, after = (
        fields_of(render(cluster_config({"ENV_FILE": own, **settings})[0], "a:b"))
        for settings in ({}, {name: value})
    )
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    documented = {
        field
        for field in re.findall(r"`([^`]+)`", ROWS[name])
        if re.search(r"[a-z]", field) and field not in ("nvidia.com/gpu.product", "/dev/shm")
    }
    assert changed and not [
        path for path in changed if not any(field in path for field in documented)
    ]
    assert not [field for field in documented if not any(field in path for path in changed)]


def test_the_image_is_where_the_table_says(own: str) -> None:
    c = cluster_config({"ENV_FILE": own})[0]
    before, after = fields_of(render(c, "a:b")), fields_of(render(c, "a:c"))
    assert [path for path in before if before[path] != after[path]] == [
        "Job.spec.template.spec.containers.trainer.image"
    ]
    assert "`image`" in ROWS["IMAGE"]


@pytest.mark.parametrize(("name", "value"), OF_THE_CLAIM.items())
def test_size_and_class_are_the_claims(own: str, name: str, value: str) -> None:
    before, after = (
        cluster_config({"ENV_FILE": own, **settings})[0] for settings in ({}, {name: value})
    )
    assert claim(before) != claim(after) and render(before, "a:b") == render(after, "a:b")


def test_every_setting_of_the_manifests_has_a_row() -> None:
    assert set(ROWS) == OTHER.keys() | OF_THE_CLAIM.keys() | {"IMAGE", "POD_PATCH"}


def test_the_page_names_every_folder_and_every_overlay_has_its_fields() -> None:
    manifests = ROOT / "k8s" / "manifests"
    folders = {
        path.parent.relative_to(manifests).as_posix()
        for path in manifests.rglob("kustomization.yaml")
    }
    named = set(re.findall(r"^\| `([a-z/-]+)/`", PAGE, re.MULTILINE))
    assert folders - named == {
        "site",
        "diloco",
    }  # parts of pinned-site, and of all that SYNC=diloco takes
    assert {folder.split("/")[-1] for folder in folders} - {
        "base",
        "site",
        "finetune",
    } == FIELDS.keys()


def test_the_package_lists_its_modules_and_folders() -> None:
    listed = re.findall(r"^    (\w+) +\S", str(k8s.__doc__), re.MULTILINE)
    assert sorted(listed) == sorted(
        path.stem
        for folder in (ROOT / "k8s", ROOT / "k8s" / "cluster")
        for path in folder.glob("*.py")
        if path.stem != "__init__"
    )
    folders = {path.name for path in (ROOT / "k8s" / "manifests").iterdir() if path.is_dir()}
    assert {
        name
        for name in re.findall(r"(\w+)/", str(k8s.__doc__))
        if name not in ("docs", "cluster", "manifests")
    } == folders
