"""settings/rules.py: settings that do not go together, and those that follow from others."""

import itertools
from pathlib import Path

import pytest

from settings.config import Config
from settings.declare import SettingsError
from tests.settings.test_settings import problems, root

__all__ = ["root"]  # a fixture


def test_all_problems_are_reported_at_once(root: Path) -> None:
    found = problems(
        root,
        "N_LAYERS=3\nDTYPE='x'\nGRAD_CLIP=nan\n",
        SEED="x",
        N_HEAD="3",
        N_EMBD="100",
        BATCH_TOKENS="1000",
        NO_SUCH="1",
        MAKE_SETTINGS="NO_SUCH",
        DATA_MIX="a:1,a:2",
    )
    starts = [
        "NO_SUCH",
        f"{root}/.env line 2: DTYPE",
        "N_LAYERS",
        "SEED=x",
        "GRAD_CLIP=nan",
        "N_EMBD=100 must be",
        "BATCH_TOKENS=1000 is not",
        "DATA_MIX=a:1,a:2 names",
    ]
    assert [next((s for s in starts if p.startswith(s)), p) for p in found] == starts
    with pytest.raises(SettingsError, match=r"^8 problems in the settings:\n(  .*\n?){8}"):
        Config.load(
            {
                "SEED": "x",
                "N_HEAD": "3",
                "N_EMBD": "100",
                "BATCH_TOKENS": "1000",
                "NO_SUCH": "1",
                "MAKE_SETTINGS": "NO_SUCH",
                "DATA_MIX": "a:1,a:2",
            },
            root,
        )


def test_a_refused_value_starts_no_complaint_about_what_it_goes_with(root: Path) -> None:
    """N_EMBD=100 would not go with the default of 4 heads, nor BATCH_TOKENS=48 with that of 256 tokens."""
    assert len(problems(root, N_EMBD="98", N_HEAD="x")) == 1
    assert len(problems(root, BATCH_TOKENS="48", SEQ_LEN="x")) == 1


@pytest.mark.fault(25)
def test_the_nearest_batch_is_the_nearest_and_is_good(root: Path) -> None:
    for seq_len, micro, processes, batch in itertools.product(
        (64, 96), (1, 4), (1, 2, 3), (2, 100, 333, 1000, 2048)
    ):
        windows = seq_len * processes  # of one sequence in each process
        good = [k * windows for k in range(1, 200) if k <= micro or k % micro == 0]
        environ = {"SEQ_LEN": str(seq_len), "MICRO_BATCH_SIZE": str(micro), "NPROC": str(processes)}
        found = problems(root, BATCH_TOKENS=str(batch), **environ)
        if batch in good:
            assert found == []
            continue
        assert len(found) == 1 and found[0].startswith(
            f"BATCH_TOKENS={batch} is not a multiple of "
        )
        assert f"{seq_len} * {processes} = " in found[0]
        nearest = int(found[0].split("nearest: BATCH_TOKENS=")[1])
        assert abs(nearest - batch) == min(abs(g - batch) for g in good), found[0]
        assert problems(root, BATCH_TOKENS=str(nearest), **environ) == []


SITES = {
    "SYNC": "diloco",
    "NODES": "4",
    "SITES": "2",
    "MASTER_ADDR": "a",
    "PARALLEL": "fsdp",
    "BATCH_TOKENS": "49152",
}


@pytest.mark.parametrize(
    ("environ", "rule"),
    [
        ({"N_EMBD": "256", "N_HEAD": "5"}, "N_EMBD=256 must be an even multiple of N_HEAD=5"),
        ({"N_EMBD": "12", "N_HEAD": "4"}, "N_EMBD=12 must be an even multiple of N_HEAD=4"),
        ({"N_EMBD": "64", "N_HEAD": "128"}, "N_EMBD=64 must be an even multiple of N_HEAD=128"),
        ({"N_HEAD": "4", "N_KV_HEAD": "3"}, "N_HEAD=4 must be a multiple of N_KV_HEAD=3"),
        ({"N_HEAD": "4", "N_KV_HEAD": "8"}, "N_HEAD=4 must be a multiple of N_KV_HEAD=8"),
        ({"MIN_LEARNING_RATE": "2e-3"}, "MIN_LEARNING_RATE=0.002 is above LEARNING_RATE=0.001"),
        ({"TRAIN_TOKENS": "100"}, "TRAIN_TOKENS=100 is less than one step of BATCH_TOKENS=8192"),
        (
            {"WARMUP_TOKENS": "10000000"},
            "WARMUP_TOKENS=10000000 must be less than TRAIN_TOKENS=10000000",
        ),
        ({"NODES": "2"}, "NODES=2 needs MASTER_ADDR"),
        ({"GRACE_PERIOD_S": "120"}, "SHUTDOWN_TIMEOUT_S=120 must be less than GRACE_PERIOD_S=120"),
        (SITES | {"SITES": "3"}, "SITES=3: NODES=4 cannot be spread evenly over them"),
        (SITES | {"MIN_SITES": "3"}, "MIN_SITES=3 is more than SITES=2"),
        (
            SITES | {"SYNC_FRAGMENTS": "30", "SYNC_EVERY": "60"},
            "SYNC_FRAGMENTS=30: there are only N_LAYER=",
        ),
        (SITES | {"SYNC_FRAGMENTS": "4"}, "SYNC_EVERY=30 is not a multiple of SYNC_FRAGMENTS=4"),
        (
            SITES | {"SYNC_FRAGMENTS": "2", "SYNC_DELAY": "15"},
            "SYNC_DELAY=15: an exchange must end before the next begins, 15 steps later",
        ),
        ({"LIGHTHOUSE": "a:65535"}, "LIGHTHOUSE=a:65535: the port must be from 1024 to 65534"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_go_together_are_named_with_one_that_does(
    root: Path, environ: dict, rule: str
) -> None:
    (found,) = problems(root, **environ)
    assert found.startswith(rule)
    name, _, value = found.split("for example ")[1].rpartition("=")
    assert (
        problems(root, **environ | ({name: value} if name else {"LIGHTHOUSE": f"a:{value}"})) == []
    )


def test_an_odd_width_is_told_to_be_even(root: Path) -> None:
    (found,) = problems(root, N_EMBD="257", N_HEAD="1")
    assert "make N_EMBD even" in found


def test_defaults_that_follow_from_others_follow_them(root: Path) -> None:
    config = Config.load(
        {
            "N_HEAD": "6",
            "N_EMBD": "768",
            "LEARNING_RATE": "6e-4",
            "BATCH_TOKENS": "4096",
            "TRAIN_TOKENS": "10000",
        },
        root,
    )
    assert config.n_kv_head == 6 and config.head_dim == 128 and config.run_name == "tiny"
    assert config.mlp_dim == 2048  # 8/3 of 768
    assert config.min_learning_rate == pytest.approx(6e-5)
    assert config.last_step == 3 and config.batch_windows == 16
    assert (
        Config.load({"N_EMBD": "100", "N_HEAD": "2"}, root).mlp_dim == 320
    )  # 266.7, up to a multiple of 64


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"NODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
            ["NODE_RANK=2 with NODES=2", "the last is NODE_RANK=1"],
        ),
        ({"SHARD_RANKS": "2"}, ["SHARD_RANKS=2: PARALLEL=ddp", "set PARALLEL=hsdp"]),
        (
            {"GRAD_SYNC": "micro-batch"},
            ["PARALLEL=ddp reduces once a step", "GRAD_SYNC=step, or PARALLEL=fsdp"],
        ),
        (
            {"OPTIMIZER": "muon", "PARALLEL": "hsdp"},
            ["PARALLEL=hsdp splits", "OPTIMIZER=adamw, or PARALLEL=ddp"],
        ),
        (SITES | {"SITES": "1"}, ["SYNC=diloco with SITES=1", "SITES=4, or leave SYNC out"]),
        (
            SITES | {"PARALLEL": "ddp"},
            ["PARALLEL=ddp with SYNC=diloco", "set PARALLEL=fsdp", "or one process a site"],
        ),
        (
            SITES | {"MASTER_ADDR": ""},
            ["NODES=4 at SITES=2 needs MASTER_ADDR, the site's first node's"],
        ),
    ],
    ids=["node", "groups", "micro-batch", "muon", "one site", "whole weights", "no first node"],
)
def test_what_has_no_meaning_beside_another_is_refused_with_both_ways_out(
    root: Path, environ: dict, words: list[str]
) -> None:
    (found,) = problems(root, **environ)
    assert all(word in found for word in words), found


@pytest.mark.fault(25)
def test_the_batch_must_divide_over_the_processes_of_all_nodes(root: Path) -> None:
    nodes = {"MASTER_ADDR": "a", "SEQ_LEN": "64", "BATCH_TOKENS": "384", "NPROC": "2"}
    assert problems(root, NODES="3", **nodes) == []
    (found,) = problems(root, NODES="2", **nodes)
    assert "BATCH_TOKENS=384 is not a multiple of SEQ_LEN * processes = 64 * 4 = 256" in found


def test_a_site_is_a_run_of_its_own_nodes(root: Path) -> None:
    c = [Config.load(SITES | {"NODE_RANK": str(rank), "RUN_NAME": "r"}, root) for rank in range(4)]
    assert [(one.site_rank, one.rank_in_site) for one in c] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.run_folder.rpartition("runs/")[2] for one in c] == [
        "r",
        "r",
        "r/site_1",
        "r/site_1",
    ]
    assert {(one.replicas, one.site_nodes) for one in c} == {(2, 2)}
    ddp = Config.load(SITES | {"SYNC": "ddp", "NODE_RANK": "3"}, root)
    assert (ddp.replicas, ddp.site_nodes, ddp.site_rank, ddp.rank_in_site) == (1, 4, 0, 3)


def test_weights_of_others_come_with_their_own_tokenizer(root: Path) -> None:
    (found,) = problems(root, INIT_FROM="models/qwen3/")
    assert found.startswith("INIT_FROM=models/qwen3/: ") and found.endswith(
        "TOKENIZER=models/qwen3/tokenizer.json"
    )
    assert problems(root, INIT_FROM="models/qwen3", TOKENIZER="models/qwen3/tokenizer.json") == []
