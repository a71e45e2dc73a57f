"""make finetune-k8s: what of a fine-tuning is sent, told and refused, by the real kubectl against the in-memory API."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s import jobs, launch, launch_plan
from k8s.cluster.job_spec import OF_FINETUNING, cluster_config, overlay_of, pod_environment
from k8s.cluster.render import objects, render
from settings import SettingsError
from settings.config import Config
from settings.finding import Finding
from tests.cluster_sim.cluster import Cluster
from tests.k8s.test_job_spec import as_a_pod
from tests.k8s.user import A100, User, a_user

TRAIN = ["tini", "--", "/opt/venv/bin/python", "-m", "scripts.train"]

user = a_user
IMAGE = "registry.example.org/lab/pure-transformer@sha256:" + 64 * "a"
OURS = {"MODEL": "/volume/models/qwen3-1.7b", "DATA": "/volume/chats.jsonl"}
AIR = {
    "PRESET": "glm-4.5-air-16xh200",
    "NODES": "2",
    "MODEL": "an-owner/GLM-4.5-Air",
    "DATA": "/volume/chats.jsonl",
}
HERE = AIR | {"GPU_PRODUCTS": A100}  # of which there are some

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    (tmp_path / "own.env").write_text("")
    return lambda **environ: cluster_config({"ENV_FILE": str(tmp_path / "own.env"), **environ})[0]


def pods_of(c: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Job's specification, and its container."""
    spec = next(thing for thing in objects(render(c, IMAGE)) if thing["kind"] == "Job")["spec"]
    return spec, spec["template"]["spec"]["containers"][0]


# ---- What is sent


def test_a_fine_tuning_is_one_pod_with_its_own_command(load: Load) -> None:
    c = load(**OURS)
    assert (c.preset, c.nodes, c.gpus_per_node, c.nproc, overlay_of(c)) == (
        "finetune",
        1,
        1,
        1,
        "single-node",
    )
    spec, container = pods_of(c)
    assert container["command"] == [*TRAIN, "finetune"] and spec["completions"] == 1
    _, pretraining = pods_of(load())
    assert pretraining["command"] == TRAIN


@pytest.mark.parametrize(
    ("settings", "overlay"),
    [
        ({}, "nrp"),
        ({"SITE": "ucsd"}, "pinned-site"),
        ({"NODES": "1", "GPUS_PER_NODE": "8"}, "single-node"),
        ({"DEVICE": "cpu", "DTYPE": "float32", "GPUS_PER_NODE": "1"}, "cpu-smoke"),
    ],
)
def test_it_takes_every_overlay(load: Load, settings: dict[str, str], overlay: str) -> None:
    c = load(**AIR | settings)
    assert overlay_of(c) == overlay
    spec, container = pods_of(c)
    assert container["command"] == [*TRAIN, "finetune"]
    things = {thing["kind"] for thing in objects(render(c, IMAGE))}
    assert {"Job", "ConfigMap", "NetworkPolicy"} <= things and ("Service" in things) == (
        overlay != "single-node"
    )
    assert ("nodeSelector" in spec["template"]["spec"]) == (overlay == "pinned-site")


def test_memory_is_told_before_anything_is_sent_where_the_model_is_known(load: Load) -> None:
    def told(c: Config) -> str:
        return launch_plan.told(c, launch_plan.plan(c))

    def findings(c: Config) -> list[Finding]:
        return launch_plan.findings(c, launch_plan.plan(c), None)

    c = load(**AIR)
    assert " of 131.6 GiB of memory per GPU, " in told(c) and not findings(c)
    assert "44.3M of 107B parameters are trained" in told(c)
    (problem,) = findings(load(**AIR, PARALLEL="ddp"))
    assert (problem.name, problem.code) == ("memory", 64) and "PARALLEL=fsdp (" in problem.fix
    unknown = load(**OURS | {"MODEL": "/volume/models/ours"})
    assert "memory  n/a: MODEL is read in the pods" in told(unknown)
    assert "memory  n/a: MODEL" in told(load(**AIR, GPU_PRODUCTS="NVIDIA-Unheard-Of"))


def test_glm_on_sixteen_h200_is_two_pods_of_eight(load: Load) -> None:
    c = load(**AIR, SITE="ucsd")
    spec, container = pods_of(c)
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"] and limits["nvidia.com/gpu"] == "8"
    memory, shared = (
        int(text.removesuffix("Gi"))
        for text in (
            limits["memory"],
            next(
                volume["emptyDir"]["sizeLimit"]
                for volume in spec["template"]["spec"]["volumes"]
                if volume["name"] == "shm"
            ),
        )
    )
    assert memory >= 8 * 8 + shared and shared >= 32
    expressions = spec["template"]["spec"]["affinity"]["nodeAffinity"]
    assert "NVIDIA-H200" in str(expressions) and "A100" not in str(expressions)
    told = pod_environment(c)
    assert {
        name: told[name]
        for name in (
            "MODEL",
            "DATA",
            "PRESET",
            "PARALLEL",
            "NPROC",
            "NODES",
            "CHECKPOINT_MODE",
            "POD_NETWORK",
            "OMP_NUM_THREADS",
        )
    } == {
        "MODEL": "an-owner/GLM-4.5-Air",
        "DATA": "/volume/chats.jsonl",
        "PRESET": "glm-4.5-air-16xh200",
        "PARALLEL": "hsdp",
        "NPROC": "8",
        "NODES": "2",
        "CHECKPOINT_MODE": "lite",
        "POD_NETWORK": "site",
        "OMP_NUM_THREADS": "4",
    }
    assert "NCCL_IB_DISABLE" not in told  # inside one site InfiniBand is taken where it is


@pytest.mark.parametrize(
    "settings",
    [
        OURS,
        AIR,
        {
            **OURS,
            "LORA_RANK": "16",
            "LORA_ALPHA": "8",
            "EPOCHS": "3",
            "WARMUP_TOKENS": "900000000",
            "EVAL_DATA": "an-owner/chats:test_sft",
            "LORA_TARGETS": "q_proj",
        },
    ],
    ids=["full", "air", "more"],
)
def test_a_pod_gives_every_setting_of_fine_tuning_the_value_that_was_checked_here(
    load: Load, tmp_path: Path, settings: dict[str, str]
) -> None:
    c = load(**settings)
    told = pod_environment(c)
    there = as_a_pod(
        {name: value for name, value in told.items() if name != "WARMUP_TOKENS"}, tmp_path
    )
    for name in [
        *OF_FINETUNING,
        "PARALLEL",
        "SEQ_LEN",
        "BATCH_TOKENS",
        "LEARNING_RATE",
        "DTYPE",
        "KEEP_LAST",
    ]:
        assert getattr(there, name.lower()) == getattr(c, name.lower()), name
    assert told.get("WARMUP_TOKENS", "0") == str(
        c.warmup_tokens
    )  # EPOCHS of DATA decide there what fits
    assert not OF_FINETUNING & pod_environment(load()).keys()


# ---- What is refused before anything is sent


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"MODEL": "~/models/q"},
            r"MODEL=~/models/q is a path, .*MODEL=/volume/models/qwen3-1.7b, or .*MODEL=OWNER/NAME$",
        ),
        (
            {"MODEL": "/data/q"},
            r"MODEL=/data/q is a path, where pods do not reach it; .* on the volume",
        ),
        ({"MODEL": "/volume/../etc"}, r"MODEL=/volume/../etc is a path"),
        (
            {"MODEL": "train/data"},
            r"MODEL=train/data is on this machine, where pods do not reach it",
        ),
        (
            {"DATA": "chats.jsonl"},
            r"DATA=chats.jsonl is a path, .*DATA=/volume/chats.jsonl, or .*OWNER/NAME:CONFIG:SPLIT",
        ),
        ({"DATA": "/volume/a.jsonl,b/c.parquet"}, r"DATA=b/c.parquet is a path"),
        ({"DATA": ""}, r"DATA is not set, .* for example DATA=/volume/chats.jsonl"),
        (
            {"EVAL_DATA": "./held.jsonl"},
            r"EVAL_DATA=./held.jsonl is a path, .*EVAL_DATA=/volume/chats.jsonl",
        ),
        (
            {"POD_MEMORY_GB": "60", "GPUS_PER_NODE": "8"},
            r"POD_MEMORY_GB=60: .* set POD_MEMORY_GB=77$",
        ),
        (
            {"SYNC": "diloco", "NODES": "2"},
            r"SYNC=diloco: not available in fine-tuning, .* Leave SYNC out",
        ),
        ({"OPTIMIZER": "muon"}, r"OPTIMIZER=muon: not available in fine-tuning"),
        (
            {"CHECKPOINT_MODE": "lite", "MAKE_SETTINGS": "CHECKPOINT_MODE"},
            r"CHECKPOINT_MODE \(command line\): Has no effect with LORA_RANK=0",
        ),
    ],
)
def test_one_sentence_says_what_is_wrong_and_what_would_do(
    load: Load, settings: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load(**OURS | settings)
    assert len(error.value.problems) == 1
    assert re.search(said, error.value.problems[0])


def test_a_run_of_this_machine_is_not_on_the_volume_and_one_of_the_cluster_is(
    load: Load, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    where = {"RUNS_DIR": str(tmp_path), "MODEL": "mine"}
    with pytest.raises(
        SettingsError, match=r"MODEL=mine is a run of this machine, .*MODEL=/volume/models/mine"
    ):
        load(**OURS | where)
    (tmp_path / "mine" / "cluster.json").write_text("{}")
    assert load(**OURS | where).model == "mine"
    assert load(**OURS | {"MODEL": "an-owner/qwen3", "DATA": "an-owner/chats:train_sft"}).data


def test_nothing_is_applied_for_a_model_that_pods_cannot_read(user: User, cluster: Cluster) -> None:
    done = user.launch("finetune", **OURS | {"MODEL": "~/models/q"})
    assert done.code == 64 and "MODEL=~/models/q is a path" in done.err
    done = user.launch("finetune", DATA="/volume/chats.jsonl")
    assert done.code == 64 and re.search(
        "MODEL is not set; .*for example MODEL=/volume/models", done.err
    )
    done = user.launch("data", WHERE="cluster", **OURS)
    assert (
        done.code == 64
        and "the pods of a fine-tuning prepare DATA themselves: make finetune-k8s" in done.err
    )
    assert cluster.objects("Job") == cluster.objects("ConfigMap") == []


# ---- From the launch to the stop


def test_a_launch_tells_what_is_asked_for(user: User, cluster: Cluster) -> None:
    done = user.launch("finetune", RUN_NAME="air", **HERE)
    assert done.code == 0, done.err
    plan = done.out.split("applied:")[0]
    assert f"2 pods of 8 GPUs ({A100}), PARALLEL=hsdp" in plan
    assert (
        "an-owner/GLM-4.5-Air: LORA_RANK=16 on attention,mlp, in bfloat16" in plan and "n/a" in plan
    )
    assert "1,336,248,320" not in plan  # that would be another model's
    assert "make stop RUN_NAME=air (saves and stops; make finetune-k8s then goes on" in done.out
    sent = cluster.get("Job", "pure-transformer-8xa100")
    assert sent["spec"]["template"]["spec"]["containers"][0]["command"] == [*TRAIN, "finetune"]
    (policy,) = cluster.objects("NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.slow
def test_the_same_targets_look_after_it(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 1.0)  # its pods find no node here
    lacking = user.launch("finetune", RUN_NAME="air", **AIR)
    assert (
        lacking.code == 64 and "GPU_PRODUCTS=NVIDIA-H200: no node has any of these" in lacking.err
    )
    assert user.launch("finetune", RUN_NAME="air", **HERE).code == 0
    again = user.launch("finetune", RUN_NAME="air", **HERE)
    assert again.code == 0 and "applied:" not in again.out
    said = user.call(lambda: jobs.main(["restart"]), {"RUN_NAME": "air", "PRESET": "tiny"})
    assert (
        said.code == 64
        and "was sent by make finetune-k8s, and these settings have no MODEL" in said.err
    )
    said = user.call(lambda: jobs.main(["status"]), {"RUN_NAME": "air"})
    assert "pure-transformer-8xa100" in said.out  # stop is tried in test_finetune_end_to_end.py
