"""Questions and what is answered right, against one question at a time through the bare model."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from finetune import chat_eval, questions
from finetune.questions import Asked
from record.locks import RunFolderError
from settings.config import Config
from tests.conftest import SHARED
from tests.export.exported import LLAMA, Run, make_run
from tests.finetune.making import row, write_rows
from tests.running import ROOT, environment
from train.data.sources.source import CorpusError
from train.data.tokenizer import Vocabulary, load
from train.distributed.world import World
from train.generate import chat_format
from train.generate.chat_format import Message
from train.generate.load_run import Trained, open_trained
from train.model.model import Transformer

CPU = torch.device("cpu")
ALONE = World(0, 0, 0, 1, CPU, "CPU", "here")
WORDS = ["abcd", "efgh", "aabb", "ccdd", "hgfe", "dcba"]


@pytest.fixture
def run(tiny: Config, data: dict[str, str], tmp_path: Path) -> Run:
    """Of random weights that are far from equal choices."""
    made = make_run(
        tmp_path, dataclasses.replace(tiny, tokenizer=data["TOKENIZER"], seq_len=96, **LLAMA)
    )
    with torch.no_grad():
        for weight in made.models[3].parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    return made


@torch.no_grad()
def likeliest(model: Transformer, ids: list[int], size: int) -> torch.Tensor:
    """Log-probabilities of the next token of one text."""
    return model(torch.tensor([ids]))[0, -1, :size].double().log_softmax(-1)


def greedy(model: Transformer, v: Vocabulary, ids: list[int], count: int) -> str:
    """What the model writes, a whole pass for each token."""
    out: list[int] = []
    stops = {v.end_of_text, chat_format.end_of_message(v)}
    while (
        len(out) < count
        and (token := int(likeliest(model, [*ids, *out], v.size).argmax())) not in stops
    ):
        out.append(token)
    return v.decode(out)


def choices(count: int) -> list[dict[str, Any]]:
    return [
        {
            "question": f"{WORDS[i % 6]} {i} {' '.join(WORDS[: i % 5])}?",
            "answer_idx": "ABC"[i % 3],
            "options": dict(
                zip("ABC", (WORDS[i % 6], WORDS[(i + 1) % 6], WORDS[(i + 2) % 6]), strict=True)
            ),
            "answer": WORDS[(i + i % 3) % 6],
        }
        for i in range(count)
    ]


def config(run: Run, path: Path, **more: Any) -> Config:
    return dataclasses.replace(
        run.config, eval_data=str(path), eval_examples=0, micro_batch_size=4, **more
    )


def test_letters_and_written_answers_are_those_of_one_question_at_a_time(
    run: Run, tmp_path: Path
) -> None:
    model, v = run.models[3], load(Path(run.config.tokenizer))
    asks = [f"what {word} {i}" for i, word in enumerate(WORDS + WORDS[:3])]
    prompts = [chat_format.render(v, [Message("user", ask)]) for ask in asks]
    replies = [greedy(model, v, prompt, 5) for prompt in prompts]
    answers = [
        f" {reply.upper()}. " if i % 3 and reply.strip() else "abcd efgh no"
        for i, reply in enumerate(replies)
    ]
    path = write_rows(
        tmp_path / "q.jsonl",
        [
            *choices(31),
            *(
                {"question": ask, "answer": answer}
                for ask, answer in zip(asks, answers, strict=True)
            ),
        ],
    )
    c = config(run, path)
    sheet = questions.sheet_of(c)
    found = chat_eval.ask(Trained(c, Path("here"), {}, None, None, model, v), sheet, ALONE)

    right = 0
    for one in choices(31):
        text = "\n".join(
            [one["question"], *(f"{letter}. {word}" for letter, word in one["options"].items())]
        )
        ids = chat_format.render(v, [Message("user", text)])
        nats = []
        for letter, word in one["options"].items():
            line = v.tokenizer.encode(f"{letter}. {word}", add_special_tokens=False)
            assert (
                line.offsets[0][0] == 0 and line.offsets[1][0] > 0
            )  # the letter is in the first token
            nats.append(float(likeliest(model, ids, v.size)[line.ids[0]]))
        right += nats.index(max(nats)) == "ABC".index(one["answer_idx"])
    assert found["choice"] | {"interval": None} == {
        "right": right,
        "asked": 31,
        "too_long": 0,
        "accuracy": right / 31,
        "chance": pytest.approx(1 / 3),
        "interval": None,
    }
    assert 0 < right < 31
    expected = sum(
        questions.plain(greedy(model, v, prompt, len(v.encode(answer)) + 9))
        == questions.plain(answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    assert (found["written"]["right"], found["written"]["asked"]) == (expected, 9)


def test_processes_share_the_questions_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, v = run.models[3], load(Path(run.config.tokenizer))
    c = config(
        run, write_rows(tmp_path / "q.jsonl", [*choices(13), {"question": "Why?", "answer": "No"}])
    )
    trained, sheet, sums = (
        Trained(c, Path("here"), {}, None, None, model, v),
        questions.sheet_of(c),
        list[torch.Tensor](),
    )
    whole = chat_eval.ask(trained, sheet, ALONE)

    def keep(values: torch.Tensor) -> torch.Tensor:
        sums.append(values)
        return values

    monkeypatch.setattr(chat_eval, "sum_over_ranks", keep)
    for rank in range(3):
        chat_eval.ask(trained, sheet, dataclasses.replace(ALONE, rank=rank, size=3))
    assert len(sums) == 3  # one all-reduce each
    total = torch.stack(sums).sum(0).tolist()
    assert total[:2] == [whole["choice"]["right"], 13] and total[5:7] == [
        whole["written"]["right"],
        1,
    ]


def test_a_fixed_part_is_asked_whatever_the_order_of_the_rows(run: Run, tmp_path: Path) -> None:
    rows = choices(40)
    paths = [
        write_rows(tmp_path / name, own)
        for name, own in (("x.jsonl", rows), ("y.jsonl", rows[::-1]))
    ]
    parts = [
        {
            one.messages[0].text
            for one in questions.sheet_of(
                dataclasses.replace(config(run, path), eval_examples=9)
            ).asked
        }
        for path in paths
    ]
    assert len(parts[0]) == 9 and parts[0] == parts[1]
    other = questions.sheet_of(
        dataclasses.replace(config(run, paths[0]), eval_examples=9, seed=4)
    ).asked
    assert {one.messages[0].text for one in other} != parts[0]


def test_what_does_not_fit_is_left_out_counted_and_named(run: Run, tmp_path: Path) -> None:
    v = load(Path(run.config.tokenizer))
    long = choices(1)[0] | {"question": "why " * 300}
    said: list[str] = []
    sheet = questions.sheet_of(config(run, write_rows(tmp_path / "q.jsonl", [*choices(4), long])))
    assert questions.fitting(sheet, v, 96, said.append) == 4
    assert said == [
        f"EVAL_DATA: 1 of 5 questions do not fit into SEQ_LEN=96 tokens and are left out "
        f"({tmp_path / 'q.jsonl'}:5)"
    ]
    found = chat_eval.ask(
        Trained(config(run, tmp_path), Path("here"), {}, None, None, run.models[3], v), sheet, ALONE
    )
    assert (found["choice"]["asked"], found["choice"]["too_long"]) == (4, 1)
    with pytest.raises(CorpusError, match="none of its 5 questions fits into SEQ_LEN=4 tokens"):
        questions.fitting(sheet, v, 4)


@pytest.mark.parametrize(
    ("written", "answer", "same"),
    [
        ("Nine", "nine.", True),
        (" the  cat\n", "The cat", True),
        ("nine!", "Nine", True),
        ("nine nine", "nine", False),
        ("", "nine", False),
        ("29", "2 9", False),
    ],
)
def test_written_answers_are_compared_but_for_case_blanks_and_stops(
    written: str, answer: str, same: bool
) -> None:
    assert questions.is_same(written, answer) == same


def test_the_last_answer_of_a_talk_is_what_is_asked_for(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", [row("One?", "Yes.", "Two?", "No.")])
    assert questions.sheet_of(config(run, path)).asked == [
        Asked(
            [Message("user", "One?"), Message("assistant", "Yes."), Message("user", "Two?")],
            "No.",
            (),
            f"{path}:1",
        )
    ]


def test_as_a_command_it_writes_the_run_s_file(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", choices(9))
    env = environment(tmp_path, {}) | {
        "RUN_NAME": "a-run",
        "EVAL_DATA": str(path),
        "DATA_DIR": str(tmp_path / "data"),
        "SEQ_LEN": "96",
        "BATCH_TOKENS": "768",
        "TOKENIZER": run.config.tokenizer,
        "N_KV_HEAD": "2",
    }
    done = subprocess.run(
        ["scripts/launch.sh", "finetune.chat_eval"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((run.folder / "eval" / "chat_step_0000003.json").read_text())
    assert facts["choice"]["asked"] == facts["rows"] == 9 and facts["choice"][
        "chance"
    ] == pytest.approx(1 / 3)
    assert facts["written"] == {
        "right": 0,
        "asked": 0,
        "too_long": 0,
        "accuracy": None,
        "interval": None,
        "chance": None,
    }
    assert f"of 9, guessing {1 / 3:.1%}" in done.stdout
    env |= {"EVAL_DATA": ""}
    done = subprocess.run(
        [sys.executable, "-m", "finetune.chat_eval"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64 and "EVAL_DATA is not set" in done.stdout


def test_a_run_that_has_fine_tuned_is_read_by_its_export_of_the_newest_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, given = run.config, {"RUN_NAME", "TOKENIZER"}
    with monkeypatch.context() as patch:
        assert run.command(patch) == 0
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["MODEL"] = "base"
    (run.folder / "config.json").write_text(json.dumps(facts))
    (run.export / "export.json").unlink()
    with pytest.raises(
        RunFolderError, match="has fine-tuned MODEL=base, and its step 3 has not been exported yet"
    ):
        open_trained(c, ALONE, given=given)
    (run.export / "export.json").write_text(json.dumps({"step": 2}))
    with pytest.raises(
        RunFolderError,
        match=r"its step 3 has not been exported yet\. Run make export RUNS_DIR=\S+ RUN_NAME=a-run",
    ):
        open_trained(c, ALONE, given=given)
    (run.export / "export.json").write_text(json.dumps({"step": 3}))
    opened = open_trained(dataclasses.replace(c, tokenizer="gone.json"), ALONE, given=given)
    exported = load(run.export / "tokenizer.json")
    assert opened.vocabulary.sha256 == exported.sha256 and opened.config.seq_len == 96
    with safe_open(run.export / "model.safetensors", framework="pt") as file:
        assert torch.equal(
            opened.model.layers[0].mlp.up_proj.weight,
            file.get_tensor("model.layers.0.mlp.up_proj.weight"),
        )
    assert chat_eval.name_of(opened) == "chat_step_0000003"


def test_questions_as_medqa_has_them(run: Run) -> None:
    found = sorted((SHARED / "medical").glob("medqa*.jsonl"))
    if not found:
        pytest.skip("no MedQA rows beside the repository (shared/data/medical)")
    rows = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines()]
    sheet = questions.sheet_of(config(run, found[0]))
    assert sheet.rows == len(rows) and sheet.chance == pytest.approx(0.25)
    by_question = {entry["question"]: entry for entry in rows}
    for one in sheet.asked:
        entry = by_question[one.messages[0].text.rpartition("\nA. ")[0]]
        assert one.answer == f"{entry['answer_idx']}. {entry['options'][entry['answer_idx']]}"
        assert len(one.options) == 4
