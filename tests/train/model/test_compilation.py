"""torch.compile: when it is used, that it changes no result, and that one compiled block serves all layers."""

import ctypes
import dataclasses
import functools
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from settings import SettingsError
from tests.train.test_parity import batches, train
from train.checkpoint import checkpoint
from train.data.manifest import DataError
from train.data.tokenizer import train as train_tokenizer
from train.model import compilation
from train.model.generate import continue_text
from train.model.loss import softmax_part
from train.model.model import Transformer, build

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU"
)
LONG = {"train_tokens": 10**12}  # a run that repays compiling on a CPU


@needs_compiler
def test_a_compiled_model_trains_as_the_written_one_and_is_compiled_once_for_all_layers(
    tiny, tmp_path
):
    c = dataclasses.replace(tiny, n_layer=3, n_kv_head=1, activation_checkpointing="selective")
    data = batches(c, 8)
    eager, _ = train(c, build(c, CPU), data, rate=lambda *_: 1e-2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(c, CPU)
    compilation.compile_model(model)
    compiled, optimizer = train(c, model, data, rate=lambda *_: 1e-2)
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert eager[-1] < eager[0] - 0.05
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2  # a block, and the softmax part of the loss
    assert not torch._dynamo.utils.counters["graph_break"]

    vocabulary = train_tokenizer(
        (f"word{i} " * 5 for i in range(200)), 300, tmp_path / "tokenizer.json"
    )
    continue_text(model, vocabulary, "word", 5, seed=1)  # five lengths, and nothing is compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    states = checkpoint.tensor_states(model, optimizer)
    assert set(states["model"]) == set(dict(build(c, CPU).named_parameters()))


def test_a_compiled_softmax_part_is_compiled_once_for_chunks_of_any_length():
    compiled = list[int]()

    def backend(graph, examples):
        compiled.append(len(examples))
        return graph

    torch._dynamo.reset()
    part = compilation.of_any_length(torch.compile(softmax_part, backend=backend))
    for rows in (7, 5, 64, 2 * compilation.ROWS_AT_ONCE + 3):
        logits, targets = torch.randn(rows, 40, requires_grad=True), torch.arange(rows) % 40
        expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        expected.backward()
        found = logits.detach().clone()
        total, factors = part(found, targets)
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(factors * found, logits.grad)
    assert len(compiled) == 1


def test_compiled_blocks_keep_less_for_backward_on_a_cpu_and_have_the_same_gradients(
    tiny, monkeypatch
):
    import torch._functorch.config as functorch

    # put back after the test
    monkeypatch.setattr(functorch, "ban_recompute_materialized_backward", True)
    # what is kept is decided before code is generated, for which there need be no compiler
    compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compile)
    (windows,) = batches(tiny, 1)

    def kept_and_gradients(prepare):
        torch._dynamo.reset()
        model = build(tiny, CPU)
        prepare(model)
        kept = dict[int, int]()

        def pack(tensor):
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total, _ = model(windows[:, :-1], windows[:, 1:])
        total.backward()
        for weight in model.parameters():
            kept.pop(weight.data_ptr(), None)
        return sum(kept.values()), [weight.grad for weight in model.parameters()]

    def by_torch(model):
        for layer in model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)

    all_that_it_would, expected = kept_and_gradients(by_torch)
    kept, found = kept_and_gradients(compilation.compile_model)
    assert kept < 0.9 * all_that_it_would
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


MISSING = "there is no C++ compiler: install g++"


@pytest.mark.parametrize(
    ("changes", "device", "system", "missing", "expected"),
    [
        ({}, "cpu", "linux", "", "compile=no (a run of"),
        (LONG, "cpu", "linux", "", "compile=yes, block by block (COMPILE=auto)"),
        ({}, "cuda", "linux", "", "compile=yes"),
        (LONG | {"compile": "0"}, "cuda", "linux", "", "compile=no (COMPILE=0)"),
        ({"compile": "1"}, "cpu", "linux", "", "compile=yes"),
        (LONG, "cpu", "darwin", "", "compile=no (COMPILE=1 tries it on this system)"),
        ({"compile": "1"}, "cpu", "darwin", "", "compile=yes"),
        (LONG, "cpu", "linux", MISSING, f"compile=no (it would pay, but {MISSING})"),
    ],
)
def test_what_is_compiled_and_why(
    tiny, monkeypatch, caplog, changes, device, system, missing, expected
):
    caplog.set_level("INFO")
    monkeypatch.setattr(compilation, "find_missing", lambda device: missing)
    monkeypatch.setattr(sys, "platform", system)
    c = dataclasses.replace(tiny, **changes)
    with torch.device("meta"):
        model = Transformer(c)
    is_wanted = compilation.wanted(c, torch.device(device), model)
    assert is_wanted == expected.startswith("compile=yes") and expected in caplog.text


def test_an_order_without_a_compiler_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(compilation, "find_missing", lambda device: MISSING)
    c = dataclasses.replace(tiny, compile="1")
    with pytest.raises(SettingsError, match=re.escape(f"COMPILE=1: {MISSING}, or set COMPILE=0")):
        compilation.wanted(c, CPU, build(c, CPU))


def test_what_compiling_needs_is_looked_for_where_torch_looks(
    monkeypatch,
):
    import torch._inductor.config as inductor

    gpu = torch.device("cuda", 0)
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    is_ready = has_headers and shutil.which("g++") is not None
    assert (compilation.find_missing(CPU) == "") == is_ready
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    assert compilation.find_missing(CPU) == "there is no C++ compiler: install g++"
    monkeypatch.setenv("PATH", "/nowhere")
    assert compilation.find_missing(gpu) == "there is no C compiler: install gcc"
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    for device in (CPU, gpu):
        assert compilation.find_missing(device) == "Python.h is missing: install python3-dev"


@pytest.mark.parametrize("left", [0, 100])
def test_a_kernel_that_a_power_failure_cut_short_is_named_with_the_remedy(
    tmp_path, monkeypatch, left
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "kernel.so"
    library.write_bytes(bytes(left))
    with (
        pytest.raises(DataError, match=rf"cache in {tmp_path} is damaged.*rm -r {tmp_path}"),
        compilation.refuse_damaged_cache(),
    ):
        ctypes.CDLL(str(library))
    with pytest.raises(OSError, match="cannot open"), compilation.refuse_damaged_cache():
        ctypes.CDLL(str(tmp_path / "absent.so"))
