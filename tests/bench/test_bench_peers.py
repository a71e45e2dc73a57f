"""Peers of the benchmark: given or said to be missing, all with the same work, each in a process as it should be.

Stubs have the interface that is used of a checkout. Those that are in peers/ take real steps.
"""

import dataclasses
import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import ours, peers, run
from doctor.gpu_probe.shapes import SHAPES
from settings import ROOT, SettingsError
from train import tune

TINY = SHAPES["tiny"]
BY_NAME = {peer.name: peer for peer in peers.PEERS}

# A model of one weight whose logits are all alike, so that its loss is log(512); it looks at what it is given.
MODEL = """
import os, types
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 if "MALLOC_TRIM_THRESHOLD_" in os.environ else 1))
    def init_weights(self): torch.nn.init.zeros_(self.weight)
    def init_states(self, buffer_device): self.init_weights()
    def logits(self, x): return torch.zeros(*x.shape, 512) + self.weight.sum()
    def loss(self, x, y):
        assert x.shape == y.shape == (4, 64) and torch.equal(x[:, 1:], y[:, :-1])
        return torch.nn.functional.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
"""
NANOGPT = {
    "model.py": MODEL
    + """
GPTConfig = types.SimpleNamespace
class GPT(Model):
    def __init__(self, c):
        super().__init__()
        assert (c.n_layer, c.n_embd, c.n_head, c.vocab_size, c.block_size, c.dropout) == (2, 64, 2, 512, 64, 0.0)
    def configure_optimizers(self, decay, rate, betas, device): return torch.optim.AdamW(self.parameters(), lr=rate)
    def forward(self, x, y):
        print("prints what is no JSON")
        return self.logits(x), self.loss(x, y)
"""
}
NANOCHAT = {
    "nanochat/__init__.py": "",
    "nanochat/common.py": """
import os, torch
COMPUTE_DTYPE = getattr(torch, os.environ.get('NANOCHAT_DTYPE', 'float32'))
""",
    "nanochat/gpt.py": MODEL
    + """
GPTConfig = types.SimpleNamespace
class GPT(Model):
    def __init__(self, c):
        super().__init__()
        assert (c.n_layer, c.n_embd, c.n_head, c.n_kv_head, c.vocab_size, c.sequence_len) == (2, 64, 2, 2, 512, 64)
        assert c.window_pattern == "L" and self.weight.device.type == "meta"
    def forward(self, x, y): return self.loss(x, y)
""",
}
TORCHTITAN = {
    "torchtitan/__init__.py": "",
    "torchtitan/models/__init__.py": "",
    "torchtitan/components/__init__.py": "",
    "torchtitan/components/loss.py": """
import torch
def cross_entropy_loss(pred, labels):
    return torch.nn.functional.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum")
""",
    "torchtitan/models/llama3/__init__.py": MODEL
    + """
class Llama(Model):
    def forward(self, x): return self.logits(x)
class Part:
    Config = types.SimpleNamespace
Embedding = RMSNorm = Linear = RoPE = Part
class Llama3Model:
    class Config(types.SimpleNamespace):
        def build(self):
            assert (self.dim, self.vocab_size, self.enable_weight_tying) == (64, 512, True)
            assert self.layers == 2 * [(64, 2, 192)]
            assert (self.rope.dim, self.rope.max_seq_len) == (32, 64)
            return Llama()
_EMBEDDING_SKIP_INIT = _NORM_INIT = {}
def _output_linear_init(dim): return {}
def _build_llama3_layers(*, n_layers, dim, n_heads, hidden_dim, fuse_qkv, attn_backend):
    assert attn_backend == "sdpa"
    return n_layers * [(dim, n_heads, hidden_dim)]
""",
}
STUBS = {"nanoGPT": NANOGPT, "nanochat": NANOCHAT, "torchtitan": TORCHTITAN}


def write(folder: Path, files: dict[str, str]) -> str:
    """A checkout."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a peer's set-up leaves in this process goes with the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("model", "nanochat", "torchtitan"):
            del sys.modules[name]


# ---- There, or not


def test_a_peer_that_is_missing_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CHECKOUTS", tmp_path)
    present, missing = peers.find_checkouts()
    assert [peer.name for peer in present] == ["HF Llama"] and list(missing) == list(STUBS)
    assert missing["nanoGPT"] == (
        "peers/nanoGPT is missing; git clone https://github.com/karpathy/nanoGPT peers/nanoGPT "
        "(tried with 3adf61e)"
    )
    path = write(tmp_path / "nanoGPT", NANOGPT)
    present, missing = peers.find_checkouts()
    assert present[BY_NAME["nanoGPT"]] == path and list(missing) == ["nanochat", "torchtitan"]


def test_folders_that_are_no_checkouts_are_all_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CHECKOUTS", tmp_path)
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanochat").write_text("")
    with pytest.raises(SettingsError) as refused:
        peers.find_checkouts()
    first, second = refused.value.problems
    assert f"{tmp_path}/nanoGPT is not a checkout of nanoGPT: it has no model.py" in first
    assert f"{tmp_path}/nanochat is not a checkout of nanochat" in second and "92d63d4" in second


def test_git_ignores_the_checkouts() -> None:
    done = subprocess.run(["git", "check-ignore", "peers/nanoGPT"], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_a_checkout_that_does_not_fit_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        TORCHTITAN | {"torchtitan/models/llama3/__init__.py": "import a_package_that_is_not_here"},
    )
    with pytest.raises(SettingsError) as refused:
        peers.fitting({BY_NAME["torchtitan"]: path})
    assert (
        f"{path}: this checkout of torchtitan cannot take a step here (ModuleNotFoundError: No "
        "module named 'a_package_that_is_not_here'). Check out the version that was tried, 963c20c"
    ) in str(refused.value)


def test_a_package_that_cannot_be_loaded_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no transformers here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    gpt = write(tmp_path / "gpt", NANOGPT)
    fit, absent = peers.fitting({BY_NAME["HF Llama"]: "", BY_NAME["nanoGPT"]: gpt})
    assert (fit, absent) == (
        {BY_NAME["nanoGPT"]: gpt},
        {"HF Llama": "ModuleNotFoundError: no transformers here"},
    )


def test_the_document_names_the_commits_that_were_tried() -> None:
    document = (ROOT / "BENCHMARKS.md").read_text()
    for peer in peers.PEERS:
        assert peer.tried.split(",")[0] in document


# ---- The same work


@pytest.mark.parametrize("name", STUBS)
def test_each_takes_the_step_of_the_shape(name: str, tmp_path: Path, checkout: None) -> None:
    """The stubs look at what they are given; their loss is that of even odds, whatever step was taken before."""
    module = importlib.import_module(f"bench.{BY_NAME[name].module}")
    step = module.set_up(TINY, "float32", False, write(tmp_path, STUBS[name]))
    assert step() == step() == pytest.approx(math.log(512), rel=1e-6)
    assert step.parameters == 1


def test_nanochat_is_not_measured_in_another_type_than_the_row_says(
    tmp_path: Path, checkout: None
) -> None:
    from bench import nanochat

    with pytest.raises(RuntimeError, match="NANOCHAT_DTYPE=bfloat16 had no effect"):
        nanochat.set_up(TINY, "bfloat16", False, write(tmp_path, NANOCHAT))
    assert BY_NAME["nanochat"].environment("bfloat16", allocator=True) == [
        "NANOCHAT_DTYPE=bfloat16"
    ]


def test_what_a_peer_has_of_our_allocator_is_what_training_has() -> None:
    environment: dict[str, str] = {}
    tune.keep_large_blocks(environment)
    assert tuple(environment) == peers.ALLOCATOR


@pytest.mark.slow
def test_a_peer_is_measured_with_and_without_our_allocator_and_one_that_fails_costs_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub has two weights where the allocator's variables are set, else one."""
    monkeypatch.setattr(run, "TURN_S", 0.05)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in (*peers.ALLOCATOR, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    beside = {
        BY_NAME["nanochat"]: write(tmp_path / "broken", {"nanochat/gpt.py": ""}),
        BY_NAME["nanoGPT"]: write(tmp_path / "gpt", NANOGPT),
    }
    cell = run.measure(TINY, "float32", "eager", beside, rounds=2, gpu=None)
    weights = {
        "ceiling": 0,
        "ours": ours.set_up(TINY, "float32", False).parameters,
        "nanoGPT": 1,
        "nanoGPT + allocator": 2,
    }
    assert cell["parameters"] == weights
    assert list(cell["failed"]) == ["nanochat", "nanochat + allocator"]
    assert [set(taken["tokens_per_s"]) for taken in cell["rounds"]] == 2 * [
        {"ceiling", "ours"}
    ] + 2 * [set(weights)]
    *lines, failed = run.rows(cell, {})
    assert [text.split(" | ")[3] for text in lines] == ["ours", "nanoGPT", "nanoGPT + allocator"]
    assert (
        "not run: nanochat: nanochat tiny float32 eager" in failed
        and "ended with exit code 1" in failed
    )
    notes = "\n".join(peers.notes([cell]))
    assert "\nnanoGPT: " in notes and "\n+ allocator: " in notes and "torchtitan" not in notes
    assert list(run.variants(BY_NAME["nanoGPT"], "x", "a GPU")) == ["nanoGPT"]


def test_a_peer_that_ends_between_its_turns_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        """Stands in for a worker: answers, or has ended."""

        first, steps = {"first_step_s": 1.0, "parameters": 5}, 1

        def __init__(self, ended: bool):
            self.ended, self.process = ended, type("process", (), {"pid": os.getpid()})

        def turn(self) -> dict:
            if self.ended:
                raise RuntimeError("gone")
            return {"seconds": [1.0], "peak_mib": 1.0, "loss": 2.0}

    cell: dict = {
        "gpu": None,
        "rounds": [],
        "failed": {},
        **{key: {} for key in ("steps_a_turn", "peak_mib", "loss", "first_step_s", "parameters")},
    }
    workers: dict = {"ceiling": Ended(False), "ours": Ended(False), "nanoGPT": Ended(True)}
    run.take_round(workers, cell, TINY)
    assert cell["failed"] == {"nanoGPT": "gone"} and list(workers) == ["ceiling", "ours"]
    assert cell["rounds"][0]["tokens_per_s"]["ours"] == 256.0 and list(cell["peak_mib"]) == [
        "ceiling",
        "ours",
    ]
    with pytest.raises(RuntimeError, match="gone"):
        run.take_round({"ceiling": Ended(False), "ours": Ended(True)}, cell, TINY)


# ---- Real ones


def llama_weights(L: int, C: int, V: int) -> int:
    """Tied table, two norms a block and one behind, SwiGLU of the next multiple of 64 above 8/3 C."""
    return V * C + L * (4 * C * C + 3 * C * (-(-8 * C // 3 // 64) * 64) + 2 * C) + C


WEIGHTS: dict[str, Callable[[int, int, int, int, int], int]] = {
    "nanoGPT": lambda L, C, V, T, H: V * C + T * C + L * (12 * C * C + 2 * C) + C,
    # three tables at two layers: tokens, the head, values of every second layer; gates, and scalars of layers
    "nanochat": lambda L, C, V, T, H: 3 * V * C + L * 12 * C * C + 12 * H + 24 + 2 * L + 2,
    "torchtitan": lambda L, C, V, T, H: llama_weights(L, C, V),
    "HF Llama": lambda L, C, V, T, H: llama_weights(L, C, V),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_real_peer_trains_in_both_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = BY_NAME[name]
    present, missing = peers.find_checkouts()
    if peer not in present:
        pytest.skip(missing[name])
    path = present[peer]
    if not path:
        pytest.importorskip("transformers")
    monkeypatch.setattr(run, "TURN_S", 0.05)
    losses = []
    for dtype in ("float32", "bfloat16"):
        worker = run.Worker(
            peer.module,
            TINY.name,
            dtype,
            "eager",
            *([path] if path else []),
            cache="/tmp",
            environment=peer.environment(dtype, allocator=False),
        )
        try:
            assert worker.first["parameters"] == WEIGHTS[name](
                TINY.n_layer, TINY.n_embd, TINY.vocab_size, TINY.seq_len, TINY.n_head
            )
            assert worker.turn()["loss"] < worker.first["loss"]
        finally:
            worker.close()
        losses.append(worker.first["loss"])
    assert (
        losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] > 6
    )  # ln 512 is 6.24; not trained yet


def test_weights_of_ours_are_counted_as_theirs() -> None:
    shape = dataclasses.replace(TINY, n_embd=128, n_layer=3)
    assert ours.set_up(shape, "float32", False).parameters == llama_weights(3, 128, 512)
