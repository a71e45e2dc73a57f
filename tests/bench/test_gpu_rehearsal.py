"""bench/gpu_rehearsal: its cases, where it cannot run, and that it finds faults which are planted."""

import itertools
import json
import subprocess
import sys

import pytest

from bench.gpu_rehearsal.cases import (
    CARDS,
    CASES,
    COLUMNS,
    COMPILED,
    MODELS,
    PAIRS,
    PRESETS,
    TUNING,
    config_of,
)
from plan.fleet import fleet_of
from settings import SettingsError
from tests.running import ROOT

FOUND = {
    "none": "",
    "tensor on the CPU": "tensors to be on the same device",
    "weights in bfloat16": "Untrue: type of embed_tokens.weight: expected torch.float32",
    "no enable_gqa": "RuntimeError: 12 heads of query and 4 of key",
    "second read": "Untrue: reads of the GPU in a step: expected 1, found 2",
    "cache in float32": "query is torch.bfloat16 on cuda:0, and key or value torch.float32",
    "mask on the host": "attn_mask is torch.bool on cpu",
    "moments in bfloat16": "Untrue: type of exp_avg of embed_tokens.weight: expected torch.float32",
    "larger chunks of logits": "Untrue: memory as planned",
    "graph break": "graph break",
    "waits that are not timed": "whether collectives are timed: expected True, found False",
    "view in the cache": "Cannot view a tensor",
}


def python(*arguments, **options):
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, **options)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(COLUMNS, 2)))
def test_each_word_meets_each_word_of_another_column(one, other):
    cases = [set(case.split()) for case in PAIRS]
    for pair in itertools.product(COLUMNS[one], COLUMNS[other]):
        assert any(case.issuperset(pair) for case in cases), pair


def test_each_model_is_fine_tuned_whole_and_with_adapters():
    assert {tuple(case.split()[1:3]) for case in TUNING} == set(
        itertools.product(MODELS, ("all", "lora"))
    )


def test_each_card_has_a_compiled_case():
    assert sorted(case.split()[0] for case in COMPILED) == sorted(CARDS)
    assert all(config_of(case.split()).compile == "1" for case in COMPILED)


@pytest.mark.parametrize("case", [*CASES, *PRESETS])
def test_a_case_is_a_run_of_several_micro_batches(case):
    config = config_of(case.split())
    processes = fleet_of(config).processes
    assert config.batch_windows // processes // config.micro_batch(processes) == 2


@pytest.mark.parametrize(
    "words", ["h200", "h100 a100", "h100 d16-2xh100", "--all h100", "llama gqa"]
)
def test_unknown_words_are_refused(words):
    with pytest.raises(SettingsError, match="CASE="):
        config_of(words.split())


@pytest.mark.parametrize(
    ("version", "path", "word"),
    [("2.14.0+cpu", "/usr/bin", "2.13.0"), ("2.13.0+cpu", "/nowhere", "g++")],
)
def test_it_ends_where_it_cannot_run(version, path, word):
    code = (
        f"import importlib.metadata as m; m.version = lambda name: {version!r}\n"
        "import bench.gpu_rehearsal.fake_cuda"
    )
    done = python("-c", code, env={"PATH": path})
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert word in done.stderr


@pytest.mark.slow
def test_planted_faults_are_found():
    done = python("-m", "tests.bench.planted_gpu_faults")
    assert done.returncode == 0, done.stderr
    for name, error in json.loads(done.stdout).items():
        assert FOUND[name] in error and bool(FOUND[name]) == bool(error), f"{name}: {error}"
