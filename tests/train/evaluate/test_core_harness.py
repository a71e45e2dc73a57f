"""Tasks of CORE in EleutherAI's lm-evaluation-harness and in ours: one model, the same documents, every choice.

The harness and what it needs beyond .venv are installed into a folder in /tmp, once: 15 MB.
"""

import json
import sys
from typing import Any

import pytest
import torch

from finetune.benchmarks import PINS
from tests.extra_packages import install_apart
from tests.train.evaluate.test_core_score import CPU, Parts, bundle, parts  # noqa: F401 (fixtures)
from tests.train.model.test_model import hugging_face
from train.data.data_paths import tokenizer_path
from train.evaluate.core.prompts import questions, texts_of
from train.evaluate.core.score import is_right, score_choices
from train.evaluate.core.tasks import LANGUAGE, SCHEMA, shots_of
from train.model.model import build


@pytest.fixture(scope="module")
def harness():
    """The package lm_eval. Skips the test where there is no package index."""
    folder = install_apart(
        "lm-eval", PINS, lambda folder: ["--python", sys.executable, "--target", folder]
    )
    sys.path.append(str(folder))
    import lm_eval
    import lm_eval.models.huggingface

    yield lm_eval
    sys.path.remove(str(folder))


def harness_task(task, path):
    """The harness's own form of such a task (arc_easy; lambada_openai; wsc273), over documents in a file."""
    of_kind: dict[str, Any] = {"doc_to_text": "{{text}}", "doc_to_target": "{{gold}}"}
    if task.kind == LANGUAGE:
        of_kind |= {"doc_to_target": "{{answer}}", "target_delimiter": ""}
    elif task.kind == SCHEMA:
        of_kind = {
            "doc_to_text": lambda document: document["gold"],
            "doc_to_target": lambda document: document["answer"],
        }
    if task.kind != LANGUAGE:
        of_kind["doc_to_choice"] = lambda document: document["options"]
    return of_kind | {
        "task": task.label,
        "output_type": "loglikelihood" if task.kind == LANGUAGE else "multiple_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(path.parent)},
        "test_split": "test",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}],
    }


def document(task, example, shots):
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


def own_examples(task, examples):
    """The examples as both understand them: contexts of a schema end in different tokens."""
    if task.kind == SCHEMA:
        for example in examples:
            first, second = example["context_options"]
            example["context_options"] = [f"{first} A", f"{second} B"]
    return examples


def test_each_choice_is_as_likely_as_the_harness_finds_it(
    parts,  # noqa: F811
    harness,
    tmp_path,
):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    config, _, v, bundle = parts  # noqa: F811
    config = config.replace(seq_len=512)
    model = build(config, CPU)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    examples = {task.label: own_examples(task, bundle.examples(task)) for task in bundle.tasks}
    theirs = []
    for task in bundle.tasks:
        path = tmp_path / f"{task.label}.jsonl"
        with open(path, "w") as file:
            for number, example in enumerate(examples[task.label]):
                shots = shots_of(task, examples[task.label], number)
                file.write(json.dumps(document(task, example, shots)) + "\n")
        theirs.append(harness_task(task, path))

    end_of_text = v.tokenizer.id_to_token(v.end_of_text)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_path(config)), bos_token=end_of_text, eos_token=end_of_text
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end_of_text} $A", special_tokens=[(end_of_text, v.end_of_text)]
    )
    lm = harness.models.huggingface.HFLM(
        pretrained=hugging_face(model, config),
        tokenizer=tokenizer,
        batch_size=16,
        add_bos_token=True,
        device="cpu",
    )
    found = harness.simple_evaluate(
        model=lm, tasks=theirs, bootstrap_iters=0, log_samples=True, cache_requests=False
    )
    for task in bundle.tasks:
        samples = sorted(found["samples"][task.label], key=lambda sample: sample["doc_id"])
        numbers = range(len(samples))
        ours = list(questions(task, examples[task.label], numbers, v, config.seq_len))
        rights = []
        of_choices = score_choices(model, ours, CPU)
        for question, scores, sample in zip(ours, of_choices, samples, strict=True):
            likely = torch.tensor([response[0] for response in sample["filtered_resps"]]).double()
            nats = torch.tensor([score.nats for score in scores]).double()
            if task.kind == LANGUAGE:
                rights.append(is_right(task, question, scores))
            else:
                # It scores the tokens of a beginning that all answers have in common too, alike for
                # each, and it compares sums where we compare means.
                likely = likely - (likely + nats).mean()
                rights.append(int(nats.argmin()) == question.gold)
            torch.testing.assert_close(-nats, likely, rtol=0, atol=1e-3)
            assert rights[-1] == bool(sample["acc"])
        assert 0 < found["results"][task.label]["acc,none"] < 1 or task.kind == LANGUAGE
        assert found["results"][task.label]["acc,none"] == pytest.approx(sum(rights) / len(rights))
