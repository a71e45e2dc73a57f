"""k8s/cluster/job_spec.py: the settings of a run in the cluster, what pods are told of them, and what is refused beforehand."""

import dataclasses
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.cluster import job_spec
from k8s.cluster.job_spec import (
    cluster_config,
    network_of,
    overlay_of,
    pod_cpus,
    pod_disk_gb,
    pod_environment,
    pod_memory_gb,
    shm_gb,
)
from record.tracker_settings import check_trackers
from settings import ROOT, SettingsError, load_config
from settings.config import SETTINGS, Config
from settings.init_from import SHAPE
from settings.resolve import resolve

FIELDS = SETTINGS

# What pods are not told, stated here a second time: secrets, this machine's own, and what the manifests say themselves.
OF_THIS_MACHINE = {
    "ENV_FILE",
    "NAME",
    "RUNS",
    "FIGURE",
    "DETACH",
    "NODE_RANK",
    "BENCH_SHAPES",
    "GPU_CHECK",
    "WHERE",
    "WAIT",
    "DRY_RUN",
    "GGUF",
    "HUB_REPO",
    "ONLY",
    "STEP",
    "CARDS",
    "WAN_GBIT",
    "WAN_LAB",
    "WAN_RTT_MS",
    "LAN_GBIT",
    "MFU",
    "PRICE_GPU_HOUR",
    "PRICE_KWH",
    "SWEEP",
    "JSON",
    "MORE",
    "CERTIFY",
    "CHECK",
    "PROBE",
    "REVIEW",
    "ONCE",
    "ALERT_CMD",
    "LOG_DIR",
    "PROMPT",
    "SAMPLES",
    "SAMPLE_TEMPERATURE",
    "SAMPLE_TOP_K",
    "SAMPLE_TOP_P",
    "MID_DATA",
    "SFT_DATA",
}
OF_THE_MANIFESTS = {
    "ENGINE",
    "SBATCH_ARGS",
    "EXCLUDE_NODES",
    "IMAGE",
    "NAMESPACE",
    "GPUS_PER_NODE",
    "GPU_PRODUCTS",
    "GPU_RESOURCE",
    "SITE",
    "STORAGE_CLASS",
    "VOLUME",
    "VOLUME_GB",
    "POD_CPUS",
    "POD_MEMORY_GB",
    "POD_PATCH",
    "TOLERATIONS",
    "PRIORITY_CLASS",
    "IMAGE_PULL_SECRET",
}
SECRETS = {"HF_TOKEN", "RUN_SECRET", "WANDB_API_KEY"}

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """cluster_config with these settings and those of an env file of its own, apart from the machine's."""

    def with_settings(env_file: str = "", **environ: str) -> Config:
        path = tmp_path / "own.env"
        path.write_text(env_file)
        return cluster_config({"ENV_FILE": str(path), **environ})[0]

    return with_settings


def as_a_pod(environment: dict[str, str], tmp_path: Path) -> Config:
    """The settings that a pod's own load_config gives: the presets of the repository, and no env file."""
    root = tmp_path / "app"
    root.mkdir(exist_ok=True)
    if not (root / "presets").exists():
        (root / "presets").symlink_to(ROOT / "presets")
    return load_config(environment, root)


# ---- The settings of the target


def test_a_job_is_four_pods_of_two_gpus_with_the_large_preset(load: Load) -> None:
    c = load()
    assert (c.preset, c.run_name, c.nodes, c.gpus_per_node, c.nproc, c.node_rank) == (
        "xlarge-8xa100",
        "xlarge-8xa100",
        4,
        2,
        2,
        0,
    )
    assert (c.master_addr, c.start_timeout_s) == (
        "pure-transformer-8xa100-0.pure-transformer-8xa100",
        1800,
    )


def test_one_pod_has_nobody_to_find(load: Load) -> None:
    assert load(NODES="1", GPUS_PER_NODE="8").master_addr == ""


def test_what_is_set_wins_over_the_defaults_of_the_target(load: Load) -> None:
    c = load(
        "NODES=2\nPRESET=tiny\nSTART_TIMEOUT_S=300\n",
        GPUS_PER_NODE="1",
        JOB_NAME="mine",
    )
    assert (c.nodes, c.nproc, c.preset, c.start_timeout_s) == (2, 1, "tiny", 300)
    assert c.master_addr == "mine-0.mine"
    seen = pod_environment(c)
    assert "START_TIMEOUT_S" not in seen  # what a pod takes by itself


def test_the_size_of_a_pod_follows_from_its_gpus(load: Load) -> None:
    usual, whole = load(), load(NODES="1", GPUS_PER_NODE="8")
    assert [(pod_cpus(c), pod_memory_gb(c), shm_gb(c), pod_disk_gb(c)) for c in (usual, whole)] == [
        (8, 96, 16, 50),
        (32, 384, 64, 50),
    ]
    by_hand = load(NODES="1", GPUS_PER_NODE="8", POD_CPUS="20", POD_MEMORY_GB="256")
    assert (pod_cpus(by_hand), pod_memory_gb(by_hand), shm_gb(by_hand)) == (20, 256, 42)
    assert pod_environment(by_hand)["OMP_NUM_THREADS"] == "2"
    small = load(PRESET="tiny", DEVICE="cpu", NODES="2")
    assert (pod_cpus(small), pod_memory_gb(small), pod_disk_gb(small), shm_gb(small)) == (
        2,
        6,
        10,
        1,
    )
    assert load(PRESET="tiny", DEVICE="cpu", NODES="2", POD_MEMORY_GB="12").pod_memory_gb == 12
    assert pod_cpus(load(PRESET="tiny", DEVICE="cpu", NODES="1", GPUS_PER_NODE="4")) == 4
    assert shm_gb(load(POD_MEMORY_GB="2")) == 1


@pytest.mark.parametrize(
    ("settings", "overlay", "network"),
    [
        ({}, "nrp", "wan"),
        ({"NODES": "2", "GPUS_PER_NODE": "4"}, "nrp", "wan"),
        ({"NODES": "1", "GPUS_PER_NODE": "8"}, "single-node", "site"),
        ({"NODES": "1", "GPUS_PER_NODE": "8", "SITE": "ucsd"}, "single-node", "site"),
        ({"SITE": "ucsd"}, "pinned-site", "site"),
        ({"SYNC": "diloco"}, "diloco", "site"),
        (
            {"SYNC": "diloco", "PRESET": "tiny", "OPTIMIZER": "adamw", "DEVICE": "cpu"},
            "cpu-smoke",
            "site",
        ),
        ({"PRESET": "tiny", "DEVICE": "cpu"}, "cpu-smoke", "wan"),
        ({"PRESET": "tiny", "DEVICE": "cpu", "NODES": "1"}, "cpu-smoke", "site"),
    ],
)
def test_the_overlay_and_the_network_follow_from_shape_and_site(
    load: Load, settings: dict[str, str], overlay: str, network: str
) -> None:
    c = load(**settings)
    assert (overlay_of(c), network_of(c)) == (overlay, network)
    assert pod_environment(c)["POD_NETWORK"] == network


# ---- What pods are told


def test_the_environment_of_a_pod(load: Load) -> None:
    assert pod_environment(load(HF_TOKEN="hf-not-to-be-seen", SITE="ucsd")) == {
        "BATCH_TOKENS": "524288",
        "DATA_DIR": "/volume/data",
        "DATA_MIX": "fineweb-edu:65,finepdfs:34,usmle:1",
        "DEVICE": "cuda",
        "DTYPE": "bfloat16",
        "EVAL_TOKENS": "4194304",
        "LEARNING_RATE": "0.0003",
        "MASTER_ADDR": "pure-transformer-8xa100-0.pure-transformer-8xa100",
        "MICRO_BATCH_SIZE": "8",
        "MIN_LEARNING_RATE": "3e-05",
        "MLP_DIM": "5632",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "4",
        "POD_NETWORK": "site",
        "NODES": "4",
        "NPROC": "2",
        "N_EMBD": "2048",
        "N_HEAD": "16",
        "N_KV_HEAD": "16",
        "MAX_RESTARTS": "10",
        "N_LAYER": "24",
        "OMP_NUM_THREADS": "4",
        "PRESET": "xlarge-8xa100",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "RUNS_DIR": "/volume/runs",
        "RUN_NAME": "xlarge-8xa100",
        "SAVE_EVERY": "1000",
        "SEQ_LEN": "2048",
        "START_TIMEOUT_S": "1800",
        "TOKENIZER": "openai-community/gpt2",
        "TRAIN_TOKENS": "100000000000",
        "VOCAB_SIZE": "50304",
        "WARMUP_TOKENS": "100000000",
    }


def test_pods_that_are_sites_are_told_so_and_where_their_lighthouse_is(load: Load) -> None:
    c = load(SYNC="diloco", SYNC_EVERY="100")
    told, before = pod_environment(c), pod_environment(load(SITE="ucsd"))
    assert {name: value for name, value in told.items() if before.get(name) != value} == {
        "SYNC": "diloco",
        "SITES": "4",
        "SYNC_EVERY": "100",
        "PARALLEL": "fsdp",
        "LIGHTHOUSE": "pure-transformer-8xa100-lighthouse:29510",
    }
    assert before.keys() - told.keys() == {"MASTER_ADDR"}
    one = load(SYNC="diloco", GPUS_PER_NODE="1", PARALLEL="")
    assert one.parallel == "ddp" and (one.sites, one.site_nodes) == (4, 1)
    assert load(SYNC="diloco", PARALLEL="fsdp", SITES="4").sites == 4
    assert pod_environment(load(SITES="4", SYNC_EVERY="7")) == pod_environment(
        load()
    )  # of no use to them


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"SYNC": "diloco", "SYNC_FRAGMENTS": "3", "SYNC_DELAY": "2", "MIN_SITES": "2"},
        {"PRESET": "tiny", "DEVICE": "cpu", "NODES": "1", "GPUS_PER_NODE": "1"},
        {
            "PRESET": "d24-2xh100",
            "NODES": "2",
            "GPUS_PER_NODE": "8",
            "SITE": "x",
            "LEARNING_RATE": "1.2345678901234e-4",
        },
        {
            "PRESET": "gpt2-124m",
            "NODES": "1",
            "GPUS_PER_NODE": "8",
            "LR_SCHEDULE": "wsd",
        },
    ],
    ids=str,
)
def test_a_pod_gives_every_setting_the_value_that_was_checked_here(
    load: Load, tmp_path: Path, settings: dict[str, str]
) -> None:
    c = load("SEED=5\nKEEP_EVERY=7\nSAVE_EVERY=0\nWANDB_ENTITY=us\n", **settings)
    there = as_a_pod(pod_environment(c), tmp_path)
    differ = {name for name in FIELDS if getattr(there, name.lower()) != getattr(c, name.lower())}
    assert differ <= OF_THIS_MACHINE | OF_THE_MANIFESTS | SECRETS | {
        "RUNS_DIR",
        "DATA_DIR",
        "POD_NETWORK",
    }
    assert (there.runs_dir, there.data_dir, there.seed) == ("/volume/runs", "/volume/data", 5)


def test_a_value_that_is_the_default_wins_over_the_preset_there_too(
    load: Load, tmp_path: Path
) -> None:
    assert Config().eval_every == 1000 and load_config({"PRESET": "tiny"}, ROOT).eval_every == 200
    c = load(PRESET="tiny", DEVICE="cpu", EVAL_EVERY="1000")
    assert as_a_pod(pod_environment(c), tmp_path).eval_every == 1000


def test_a_pod_is_not_told_what_is_of_this_machine_or_secret(load: Load) -> None:
    elsewhere = {
        "BENCH_SHAPES": "s4k",
        "DETACH": "1",
        "WAIT": "1",
        "DRY_RUN": "1",
        "STEP": "4",
        "IMAGE": "a.example/b:c",
        "VOLUME": "v",
        "TOLERATIONS": "a",
        "HF_TOKEN": "hf-not-to-be-seen",
        "RUN_SECRET": "secret-not-to-be-seen-0123456789abcdef",
        "WANDB_API_KEY": "key-not-to-be-seen",
        "WHERE": "cluster",
        "RUNS_DIR": "/home/me/runs",
        "DATA_DIR": "/home/me/data",
        "NODE_RANK": "2",
        "CARDS": "4xt4",
        "MFU": "30",
        "SITES": "2",
        "PROBE": "1",
    }
    told = pod_environment(load(**elsewhere))
    assert not told.keys() & (OF_THIS_MACHINE | OF_THE_MANIFESTS | SECRETS)
    assert not [value for value in told.values() if "not-to-be-seen" in value or "/home" in value]
    assert {name for name in FIELDS if name in job_spec.NOT_SENT} == (
        OF_THIS_MACHINE | OF_THE_MANIFESTS | SECRETS | {"PRESET"}
    )  # which is sent by itself


def test_pods_are_told_what_decides_whether_they_start(load: Load) -> None:
    told = pod_environment(
        load(TARGET_HOURS="300", TARGET_TOKENS_PER_S="9e4", ALLOW_FAIL="disk,target-hours")
    )
    assert [told[name] for name in ("TARGET_HOURS", "TARGET_TOKENS_PER_S", "ALLOW_FAIL")] == [
        "300",
        "90000",
        "disk,target-hours",
    ]


def test_threads_are_the_cores_of_the_pod_and_not_of_its_machine(load: Load) -> None:
    assert pod_environment(load(GPUS_PER_NODE="4", NODES="2"))["OMP_NUM_THREADS"] == "4"
    small = {"PRESET": "tiny", "DEVICE": "cpu", "NODES": "2"}
    assert pod_environment(load(**small))["OMP_NUM_THREADS"] == "1"
    assert pod_environment(load(**small, GPUS_PER_NODE="1"))["OMP_NUM_THREADS"] == "2"


def test_variables_of_nccl_reach_the_pods(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_FAMILY": "AF_INET6",
        "NCCL_SOCKET_IFNAME": "net1",
    }
    assert pod_environment(load())["NCCL_SOCKET_IFNAME"] == "eth0"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = pod_environment(load())
    assert {name: seen[name] for name in given} == given
    typed = {"MAKE_TARGET": "train-8xa100", "MAKE_GOALS": "train-8xa100"}
    load(**typed, MAKE_SETTINGS=" ".join(given), **given)


def test_the_variables_of_the_network_are_no_misspelt_settings(load: Load, tmp_path: Path) -> None:
    for site in ("ucsd", ""):
        environment = pod_environment(load(SITE=site))
        warnings = resolve(environment, ROOT, {"ENV_FILE": "none"}).check().warnings
        assert [text for text in warnings if not text.startswith("From the environment")] == []


def test_online_needs_no_key_here_since_the_secret_has_it(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    c = load(WANDB_MODE="online")
    assert c.wandb_api_key == "" and pod_environment(c)["WANDB_MODE"] == "online"
    assert job_spec.STAND_IN not in str(pod_environment(c)) + str(dataclasses.asdict(c))
    assert load(WANDB_MODE="online", WANDB_API_KEY="mine").wandb_api_key == "mine"
    with pytest.raises(SettingsError, match="there is no key"):
        check_trackers(
            load_config({"WANDB_MODE": "online", "ENV_FILE": str(tmp_path / "own.env")}, ROOT)
        )


# ---- What is refused here, since it would fail there


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"SYNC": "diloco", "SITE": "ucsd"},
            r"SYNC=diloco with SITE=ucsd: .* set SYNC=ddp, or leave SITE out",
        ),
        (
            {"SYNC": "diloco", "NODES": "1"},
            r"SYNC=diloco with NODES=1: .*; set NODES=4 and GPUS_PER_NODE=2, or SYNC=ddp",
        ),
        (
            {"SYNC": "diloco", "SITES": "2"},
            r"SITES=2 \(environment\): .*each of NODES=4 pods is a site; leave SITES out",
        ),
        (
            {"SYNC": "diloco", "LIGHTHOUSE": "10.0.0.5:29510"},
            r"LIGHTHOUSE=10.0.0.5:29510 .* is a pod .*; leave LIGHTHOUSE",
        ),
        (
            {"SYNC": "diloco", "PARALLEL": "ddp"},
            r"PARALLEL=ddp \(environment\): With SYNC=diloco.*: PARALLEL=fsdp",
        ),
        (
            {"SYNC": "diloco", "MIN_SITES": "5"},
            r"MIN_SITES=5 \(environment\): Must be at most SITES=4",
        ),
        (
            {"NODES": "3"},
            r"BATCH_TOKENS=524288 .*: Must be a multiple of .* 6\) = 98304. .*nearest is BATCH_TOKENS=491520",
        ),
        (
            {"GRACE_PERIOD_S": "60"},
            r"GRACE_PERIOD_S=60 .*from 61 to",
        ),
        (
            {"TOKENIZER": "my/tokenizer.json"},
            r"TOKENIZER=my/tokenizer.json is on this machine.*/volume/tokenizer.json",
        ),
        ({"TOKENIZER": "/volumes/t.json"}, r"TOKENIZER=/volumes/t.json is on this machine"),
        (
            {"INIT_FROM": "models/q"},
            r"INIT_FROM=models/q is on this machine, .*INIT_FROM=/volume/models/",
        ),
        ({"DATA_MIX": "fineweb-edo:1"}, r"DATA_MIX=fineweb-edo:1: .*fineweb-edu"),
        ({"JOB_NAME": "Upper"}, r"JOB_NAME=Upper .*a DNS label"),
        ({"JOB_NAME": "a" * 51}, r"JOB_NAME=a+ .*a DNS label of at most 50 characters"),
        ({"NPROC": "4"}, r"NPROC=4 \(environment\): .*GPUS_PER_NODE=2; .*GPUS_PER_NODE=4"),
        ({"ALLOW_FAIL": "disk,disc"}, r"there is no check disc; did you mean disk\?"),
        ({"GPUS_PER_NODE": "none"}, r"GPUS_PER_NODE=none .*an integer"),
    ],
)
def test_one_sentence_says_what_is_wrong_and_what_would_do(
    load: Load, settings: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load(**settings)
    assert len(error.value.problems) == 1
    assert re.search(said, error.value.problems[0])


def test_what_is_on_the_volume_or_in_the_image_is_good(load: Load) -> None:
    c = load(TOKENIZER="/volume/t.json", INIT_FROM="/volume/models/q")
    assert pod_environment(c)["INIT_FROM"] == "/volume/models/q"


def test_all_that_is_wrong_is_said_together(load: Load) -> None:
    with pytest.raises(SettingsError) as error:
        load("NODEZ=3\n", POD_MEMORY_GB="1", NODES="3", TOKENIZER="t.json", SEED="x")
    said = "\n".join(error.value.problems)
    assert [
        name
        for name in ("NODEZ", "POD_MEMORY_GB", "BATCH_TOKENS", "TOKENIZER", "SEED=x")
        if name not in said
    ] == []
    assert len(error.value.problems) == 5


def test_nproc_of_this_machine_does_not_count_but_of_the_command_line_is_answered(
    load: Load,
) -> None:
    assert load("NPROC=1\n").nproc == 2
    assert load(NPROC="2").nproc == 2
    with pytest.raises(SettingsError, match=r"NPROC=3 \(command line\)"):
        load(NPROC="3", MAKE_SETTINGS="NPROC")


def test_the_longest_job_name_leaves_room_for_index_and_suffix() -> None:
    pattern = FIELDS["JOB_NAME"].format.pattern
    longest = "a" * 50
    assert re.fullmatch(pattern, longest) and not re.fullmatch(pattern, longest + "a")
    last = FIELDS["NODES"].maximum - 1
    for name in (
        f"{longest}-{last}",
        f"{longest}-data-xxxxx",
        f"{longest}-reader",
        f"{longest}-lighthouse",
    ):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


# ---- What is not in the image, since it is not committed

REST = 'text = "text"\nvalidation_fraction = 0.001\n'  # of a source's declaration


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own with one committed source, in the place of ours."""
    root = tmp_path / "repository"
    (root / "sources").mkdir(parents=True)
    (root / "sources" / "web.toml").write_text('repository = "a/b"\n' + REST)
    (root / ".gitignore").write_text("sources/mine*\n")
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "web"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(job_spec, "ROOT", root)
    return root


def problem_with(mix: str) -> str:
    return job_spec.check_sources(dataclasses.replace(Config(), data_mix=mix)) or ""


def test_a_source_that_git_does_not_have_as_it_stands_is_not_in_the_image(repository: Path) -> None:
    text = (repository / "sources" / "web.toml").read_text()
    assert problem_with("web:1") == ""
    (repository / "sources" / "web.toml").write_text(text + "# changed\n")
    (repository / "sources" / "new.toml").write_text(text)
    (repository / "sources" / "mine.toml").write_text(text)  # ignored
    for name in ("web", "new", "mine"):
        assert problem_with(f"{name}:1") == (
            f"DATA_MIX={name}:1: sources/{name}.toml is not committed as it stands, "
            "and the image holds what is; commit it, then make image push"
        )


def test_a_source_of_files_on_this_machine_is_refused_and_of_the_volume_is_not(
    repository: Path,
) -> None:
    path = repository / "sources" / "web.toml"
    path.write_text('files = ["~/papers/*.jsonl"]\n' + REST)
    assert re.search(
        r"sources/web.toml, ~/papers/\*.jsonl, are on this machine.*\"/volume/web/\*\"",
        problem_with("web:1"),
    )
    path.write_text('files = ["/volume/papers/*.jsonl"]\n' + REST)
    assert "not committed" in problem_with("web:1")


def test_text_of_ones_own_must_be_where_pods_reach_it() -> None:
    def problem(data: str) -> str | None:
        return job_spec.check_sources(Config(preset="tiny", data=data).derived())

    assert problem("hf:roneneldan/TinyStories") is None
    assert problem("/volume/texts") is None
    for data in ("novel.txt", "~/papers", "/texts"):
        said = problem(data) or ""
        assert said.startswith(f"DATA={data}: Is on this machine, where pods do not reach it.")
        assert "DATA=/volume/text" in said and "DATA=hf:OWNER/NAME" in said


def test_where_there_is_no_repository_nobody_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "tiny.env").write_text("")
    monkeypatch.setattr(job_spec, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert job_spec.check_preset(Config()) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_spec.check_preset(Config()) is None


def test_pods_read_the_shape_of_init_from_where_it_is(load: Load) -> None:
    c = load(TOKENIZER="/volume/t.json", INIT_FROM="/volume/models/q")
    assert not set(SHAPE) & pod_environment(c).keys()
    typed = pod_environment(c.replace(n_layer=c.n_layer + 1))
    assert typed["N_LAYER"] == str(c.n_layer + 1)
