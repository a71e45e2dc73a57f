"""Tasks of CORE by EleutherAI's lm-evaluation-harness, beside ours: one model, the same documents, every choice.

Not among the packages of requirements/dev.txt, of which it would bring 40 more; to run this, install it where torch and
those are: pip install lm-eval[hf]==0.4.13. The documents are of the real bundle in ../shared.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from settings.config import Config
from tests.conftest import SHARED
from tests.train.model.test_model import hugging_face
from train.data import tokenizer
from train.evaluate.core.bundle import Bundle
from train.evaluate.core.prompts import questions, texts_of
from train.evaluate.core.score import is_right, score_choices
from train.evaluate.core.tasks import LANGUAGE, SCHEMA, Task, shots_of
from train.model.model import build

BUNDLE, GPT2 = SHARED / "eval" / "core_small", SHARED / "tokenizers" / "gpt2" / "tokenizer.json"
COUNT = 12
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is not installed: pip install lm-eval[hf]==0.4.13",
    ),
    pytest.mark.skipif(not BUNDLE.is_dir(), reason="the bundle of ../shared is not here"),
]


def harness_task(task: Task, path: Path) -> dict[str, Any]:
    """The harness's own form of such a task (hellaswag, arc_easy; lambada_openai; wsc273), over documents in a file."""
    common = {
        "task": task.label,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}],
    }
    if task.kind == LANGUAGE:
        return common | {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
        }
    if task.kind == SCHEMA:
        return common | {
            "output_type": "multiple_choice",
            "doc_to_text": lambda doc: doc["gold"],
            "doc_to_choice": lambda doc: doc["options"],
            "doc_to_target": lambda doc: doc["answer"],
        }
    return common | {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{gold}}",
    }


def document(task: Task, example: dict, shots: list[dict]) -> dict[str, Any]:
    """An example, with the shots in its text. A blank stands between a question and its answer: the harness's."""
    first = texts_of(task, example, shots)[0]
    if task.kind == LANGUAGE:
        return {"text": first, "answer": " " + example["continuation"]}
    if task.kind == SCHEMA:
        return {
            "options": example["context_options"],
            "answer": example["continuation"],
            "gold": example["gold"],
        }
    end = len(example["choices"][0]) + 1
    assert first[-end] == " "
    return {"text": first[:-end], "options": example["choices"], "gold": example["gold"]}


@pytest.mark.parametrize(
    ("label", "shots"),
    [
        ("hellaswag_zeroshot", 0),
        ("copa", 0),
        ("arc_easy", 0),
        ("arc_easy", 10),
        ("piqa", 3),
        ("boolq", 2),
        ("lambada_openai", 0),
        ("winograd", 0),
        ("bigbench_operators", 5),
    ],
)
def test_each_choice_is_as_likely_as_the_harness_finds_it(
    tiny: Config, tmp_path: Path, label: str, shots: int
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    v, bundle = tokenizer.load(GPT2), Bundle(BUNDLE)
    c = dataclasses.replace(
        tiny,
        vocab_size=50304,
        seq_len=2048,
        n_embd=64,
        mlp_dim=None,
        batch_tokens=2048,
        micro_batch_size=1,
    ).derived()
    model = build(c, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    task = dataclasses.replace(
        next(task for task in bundle.tasks if task.label == label), shots=shots
    )
    examples = bundle.examples(task)
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(
            json.dumps(document(task, examples[i], shots_of(task, examples, i))) + "\n"
            for i in range(COUNT)
        )
    )

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(GPT2), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", v.end_of_text)]
    )
    lm = HFLM(
        pretrained=hugging_face(model, c),
        tokenizer=theirs,
        batch_size=1,
        add_bos_token=True,
        device="cpu",
    )
    found = simple_evaluate(
        model=lm,
        tasks=[harness_task(task, path)],
        bootstrap_iters=0,
        log_samples=True,
        cache_requests=False,
    )
    samples = sorted(found["samples"][label], key=lambda sample: sample["doc_id"])
    assert len(samples) == COUNT

    ours = list(questions(task, examples, range(COUNT), v, c.seq_len))
    of_sums = []
    for question, scores, sample in zip(
        ours, score_choices(model, ours, torch.device("cpu")), samples, strict=True
    ):
        likely = torch.tensor(
            [response[0] for response in sample["filtered_resps"]], dtype=torch.float64
        )
        nats = torch.tensor([score[0] for score in scores], dtype=torch.float64)
        if task.kind == LANGUAGE:
            assert is_right(task, question, scores) == bool(sample["acc"])
        else:  # of a beginning that all answers have in common it scores the tokens too, alike for each
            shared = (likely + nats).mean()
            assert abs(shared) < 1e-3 or len({text[:1] for text in sample["doc"]["options"]}) == 1
            likely = likely - shared
            of_sums.append(
                float(int(nats.argmin()) == question.gold)
            )  # it compares sums where we compare means
            assert of_sums[-1] == sample["acc"]
        torch.testing.assert_close(-nats, likely, rtol=0, atol=1e-3)
    if of_sums:
        assert found["results"][label]["acc,none"] == pytest.approx(sum(of_sums) / COUNT)
