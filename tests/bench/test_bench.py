"""The benchmark: what it counts, what it leaves out, and one real cell of it."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import data_pipeline as bench_data
from bench import run
from doctor.gpu_probe import foreign_load
from doctor.gpu_probe.shapes import SHAPES
from settings import SettingsError
from settings.config import Config
from train.data.tokenizer import Vocabulary


def cell(loads: list[float | None], ours: list[float], peer: list[float] | None = None) -> dict:
    """A measured cell with these rounds."""
    speeds = [
        {"ours": a, "ceiling": 2 * a} | ({"nanoGPT": b} if peer else {})
        for a, b in zip(ours, peer or ours, strict=True)
    ]
    names = speeds[0].keys()
    return {
        "shape": "s4k",
        "dtype": "float32",
        "mode": "eager",
        "gpu": None,
        "failed": {},
        "peak_mib": dict.fromkeys(names, 1000.0),
        "first_step_s": dict.fromkeys(names, 3.0),
        "parameters": dict.fromkeys(names, 12_200_000),
        "rounds": [
            {"foreign_percent": f, "tokens_per_s": s} for f, s in zip(loads, speeds, strict=True)
        ],
    }


def test_flops_of_the_shapes_are_those_of_their_products() -> None:
    """Blocks of 4 C^2 + 8 C^2 weights: 187 and 80 million FLOPs a token for the shapes that others were measured on."""
    assert SHAPES["s50k"].flops_per_token == pytest.approx(187e6, rel=0.01)
    assert SHAPES["s4k"].flops_per_token == pytest.approx(80e6, rel=0.01)
    assert SHAPES["s50k"].tokens == 4096


def test_a_row_has_medians_and_spreads_of_ratios_within_a_round() -> None:
    ours, peer = run.rows(cell([0.0, 1.0, 2.0], [100.0, 200.0, 400.0], [100.0, 100.0, 100.0]), {})
    assert ours == (
        "| s4k | float32 | eager | ours | 12.2 | 200 (100-400) | n/a | 50 (50-50) | 1000 | 3.0 |  | 2 |"
    )
    assert peer == (
        "| s4k | float32 | eager | nanoGPT | 12.2 | 100 (100-100) | n/a | 25 (12-50) | 1000 | 3.0 "
        "| 2.00 (1.00-4.00) | 2 |"
    )
    columns = {line.count("|") for line in (*run.HEADER, ours, peer)}
    assert columns == {13}


def test_the_table_says_which_peers_are_not_in_it_and_why() -> None:
    alone = cell([None] * 3, [1.0, 2.0, 3.0]) | {
        "failed": {"HF Llama": "llama ended with exit code 1, see above"}
    }
    ours, others = run.rows(alone, {"nanoGPT": "peers/nanoGPT is missing"})
    assert ours.endswith("|  | n/a |")
    assert (
        others.startswith(
            "| s4k | float32 | eager | not run: HF Llama: llama ended with exit code 1, see above; "
            "nanoGPT: peers/nanoGPT is missing |"
        )
        and others.count("|") == 13
    )
    assert len(run.rows(cell([None] * 3, [1.0, 2.0, 3.0]), {})) == 1


def test_mfu_is_of_the_cards_peak() -> None:
    """s4k: 6 (6 x 12 x 384^2 + 4096 x 384) + 12 x 6 x 384 x 256 FLOPs a token; the H100's sheet has 989 TFLOP/s."""
    measured = cell([0.0] * 3, [1e6, 2e6, 3e6]) | {
        "gpu": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
    }
    flops = 6 * (6 * 12 * 384**2 + 4096 * 384) + 12 * 6 * 384 * 256
    low, middle, high = (f"{100 * rate * flops / 989e12:.1f}" for rate in (1e6, 2e6, 3e6))
    assert f"| {middle} ({low}-{high}) | 50 (50-50) |" in run.rows(measured, {})[0]


@pytest.mark.parametrize(("arguments", "rounds"), [([], 7), (["2"], 2)])
def test_there_are_as_many_rounds_as_asked_for_or_usual(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], rounds: int
) -> None:
    class Reached(Exception):
        pass

    def tables(c: Config, rounds: int) -> None:
        raise Reached(rounds)

    monkeypatch.setattr(run, "ROUNDS", 7)
    monkeypatch.setattr(run, "tables", tables)
    monkeypatch.setenv("BENCH_SHAPES", "logs")
    with pytest.raises(Reached, match=f"^{rounds}$"):
        run.main(arguments)


def test_disturbed_rounds_are_left_out_unless_too_few_remain() -> None:
    kept, quiet = run.chosen(cell([1.0, 50.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0]))
    assert quiet and [r["tokens_per_s"]["ours"] for r in kept] == [1.0, 3.0, 4.0]
    disturbed = cell([1.0, 50.0, 2.0, 60.0], [1.0, 2.0, 3.0, 4.0])
    assert run.chosen(disturbed) == (disturbed["rounds"], False)
    assert "(disturbed)" in run.rows(disturbed, {})[0]


def test_a_peers_rounds_are_those_that_it_was_in() -> None:
    both = cell([1.0] * 3, [10.0] * 3, [5.0] * 3)
    both["rounds"] += cell([50.0] * 3, [1.0] * 3)["rounds"]
    assert [r["tokens_per_s"]["nanoGPT"] for r in run.chosen(both, "nanoGPT")[0]] == [5.0] * 3
    assert "| 2.00 (2.00-2.00) | 1 |" in run.rows(both, {})[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_foreign_load_is_what_others_take_and_not_what_the_benchmark_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both looks are at the same moment, however busy the machine is: they differ by what the process itself says."""
    real = foreign_load.busy_s
    monkeypatch.setattr(foreign_load, "busy_s", lambda: busy)
    burn = (
        "import time\nwhile time.process_time() < 0.5: pass\n"
        "print(time.process_time(), flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdout=subprocess.PIPE, text=True
    ) as process:
        began, busy = time.monotonic(), real()
        ours, foreign = foreign_load.Foreign([process.pid], began), foreign_load.Foreign([], began)
        assert process.stdout
        burnt_s = float(process.stdout.readline())
        now, busy = time.monotonic(), real()
        with_it, without = ours.percent(now), foreign.percent(now)
        process.kill()
    assert with_it is not None and without is not None
    share = 100 * burnt_s / ((now - began) * (os.cpu_count() or 1))
    assert without - with_it == pytest.approx(share, rel=0.2) and with_it >= 0


def test_a_shape_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"BENCH_SHAPES=s4k,huge: huge is no shape; there are tiny, s4k, s50k"
    ):
        list(run.cells(Config(bench_shapes="s4k,huge"), on_gpu=False))
    modes = [
        (s.name, dtype, mode)
        for s, dtype, mode in run.cells(Config(bench_shapes="s4k"), on_gpu=False)
    ]
    assert modes == [("s4k", d, m) for d in ("float32", "bfloat16") for m in ("eager", "compiled")]
    some = list(run.cells(Config(bench_shapes="s4k-bfloat16-compiled,s50k-eager"), on_gpu=False))
    assert [(s.name, *cell) for s, *cell in some] == [
        ("s4k", "bfloat16", "compiled"),
        ("s50k", "float32", "eager"),
        ("s50k", "bfloat16", "eager"),
    ]
    for name in ("s4k-float16", "run-s4k-eager", "-eager", "s4k-float32-bfloat16"):
        with pytest.raises(
            SettingsError, match=f"{name} is no shape; .* -float32, .*-compiled behind a shape"
        ):
            list(run.cells(Config(bench_shapes=name), on_gpu=False))
    assert list(run.cells(Config(bench_shapes="checkpoint,data,run-d24"), on_gpu=False)) == []
    with pytest.raises(
        SettingsError, match=r"run-huge is no shape; .* xlarge, .*and run- before one"
    ):
        list(run.cells(Config(bench_shapes="run-s4k,run-huge"), on_gpu=False))
    assert [(d, m) for _, d, m in run.cells(Config(bench_shapes="s4k"), on_gpu=True)] == [
        ("bfloat16", "compiled")
    ]


def test_a_cell_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TURN_S", 0.2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = run.measure(SHAPES["tiny"], "float32", "eager", {}, rounds=2, gpu=None)
    for taken in found["rounds"]:
        speeds = taken["tokens_per_s"]
        assert (
            0 < speeds["ours"] < 20 * speeds["ceiling"]
        )  # each in its own turn, of a busy machine
    assert 0 < found["first_step_s"]["ours"] < 60
    assert (
        0 < found["loss"]["ours"] < 6.2
    )  # nats; 512 entries, and the same few windows at each step
    assert 100 < found["peak_mib"]["ours"] < 2000
    assert re.match(
        r"\| tiny \| float32 \| eager \| ours \| 0\.1 \| \d+ \(", run.rows(found, {})[0]
    )


def test_a_worker_that_fails_is_named() -> None:
    with pytest.raises(
        RuntimeError, match="ours no-such-shape float32 eager ended with exit code 1"
    ):
        run.Worker("ours", "no-such-shape", "float32", "eager", cache="/tmp")


# ---- Data


def test_opening_and_finding_samples_are_measured_over_holes_of_the_right_size() -> None:
    found = {part["part"]: part for part in bench_data.many(2, shards=100, shard_tokens=1_000_000)}
    assert list(found) == ["start", "sampler", "sampler, one of 8"]
    assert all(0 < taken["seconds"] < 60 for taken in found["start"]["rounds"])
    assert all(0 < taken["microseconds"] < 10_000 for taken in found["sampler"]["rounds"])
    rows = [bench_data.row(part, run.spread) for part in found.values()]
    assert re.match(r"\| opening 0 billion tokens in 100 shards, s \| 0\.\d{3} \(", rows[0])
    assert re.match(
        r"\| sampler, one of 8, microseconds a window \| \d+\.\d\d \(.*\| under 2 \|", rows[2]
    )


def test_holes_have_the_mixture_of_shards_and_take_no_room(tmp_path: Path) -> None:
    folders = bench_data.make_holes(tmp_path, {"web": 3, "papers": 2, "exams": 1}, 10_000_000)
    c = bench_data.recipe(2048, 2**19)
    loader = bench_data.open_loader(c, folders)
    assert [source.total("train", "tokens") for source in loader.sources] == [
        30_000_000,
        20_000_000,
        10_000_000,
    ]
    assert loader.mixture.weights == [65, 34, 1]
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.bin")) < 200_000


def test_the_loader_is_measured_on_whole_batches() -> None:
    (found,) = bench_data.loader(1, shard_tokens=200_000)
    assert 1e6 < found["rounds"][0]["tokens_per_s"] < 1e11
    assert bench_data.row(found, run.spread).startswith("| loader, M tokens/s on one core | ")


def test_text_is_the_same_each_time_and_of_documents_of_many_lengths(tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        (tmp_path / name).mkdir()
        paths = bench_data.write_text(tmp_path / name, 2_000_000)
        texts.append([json.loads(line) for path in paths for line in path.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert 2_000_000 <= sum(len(row["text"].encode()) for row in texts[0]) < 2_200_000
    assert len({row["id"] for row in texts[0]}) == len(texts[0]) > 80
    assert max(len(row["text"]) for row in texts[0]) > 4 * min(len(row["text"]) for row in texts[0])


def test_the_tokenizer_alone_encodes_all_the_text(
    tmp_path: Path, data: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary: Vocabulary = bench_data.tokenizer.load(Path(data["TOKENIZER"]))
    texts = ["abcd efgh", "\u00e9" * 10]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    bench_data.main("alone", data["TOKENIZER"], str(tmp_path / "text.jsonl"))
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["bytes"]) == (
        sum(len(vocabulary.encode(text)) for text in texts),
        29,
    )


def test_making_data_is_measured_beside_the_tokenizer_on_the_same_text(
    data: dict[str, str],
) -> None:
    (found,) = bench_data.prepare(1, data["TOKENIZER"], size=1_000_000)
    (taken,) = found["rounds"]
    assert taken["tokens"] == taken["alone_tokens"] + taken["documents"]  # each with its separator
    assert 0 < taken["ratio"] < 10 and taken["text_bytes_per_s"] > 1e4
    assert bench_data.row(found, run.spread).startswith("| make data, of encode_batch alone | ")


def test_making_data_of_many_files_is_measured_by_their_number() -> None:
    found = list(bench_data.files((40, 60)))
    assert [one["files"] for one in found] == [40, 60]
    rows = [bench_data.row(one, run.spread) for one in found]
    assert rows[0].startswith("| make data, 40 small files, s | ") and "ms a file" in rows[0]


def test_a_process_of_the_benchmark_that_fails_says_all_that_it_said() -> None:
    with pytest.raises(
        RuntimeError, match=r"(?s)train\.data\.prepare ended with exit code 64: .*VOCAB_SIZE=7"
    ):
        bench_data.run("train.data.prepare", VOCAB_SIZE="7")
