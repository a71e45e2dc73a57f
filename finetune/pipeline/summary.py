"""What a base and the models that were fine-tuned from it have learned, read from their runs' eval/.

python -m finetune.pipeline.summary RUN...     folders of runs

A kind of question counts as learned if the 95% interval of what was right lies above guessing.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune.chat_eval import NAMES, show_result
from settings.terminal import say


def summarize(run: Path) -> Iterator[str]:
    """Yield what the newest evaluations of a run found, as lines."""
    yield f"{run.name}:"
    for evaluation in read_newest(run, "step"):
        core = evaluation.get("core") or {}
        for name, value in (
            ("bits per byte", evaluation.get("val_bpb")),
            ("CORE", core.get("core")),
        ):
            if value is not None:
                yield f"  {name}: {value:.4f}"
    for evaluation in read_newest(run, "chat_step"):
        for source, results in evaluation["by_source"].items():
            for kind, result in results.items():
                if result["asked"]:
                    yield f"  {Path(source).stem}, {NAMES[kind]}: {show_result(result)}: {judge(result)}"
    for evaluation in read_newest(run, "benchmarks_step"):
        for task, result in evaluation["results"].items():
            for name, value in result.items():
                if name.startswith(("acc,", "exact_match,")):
                    yield f"  {task}: {name} {value:.1%}"


def judge(result: dict[str, Any]) -> str:
    """Say whether more was right than guessing gets. result: of chat_eval.score."""
    low, _ = result["interval"]
    return "learned" if low > result["chance"] else "not above chance"


def read_newest(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the evaluation NAME_N.json of the latest step; [] if there is none."""
    paths = sorted((run / "eval").glob(f"{name}_[0-9]*.json"))
    return [json.loads(path.read_text()) for path in paths if "_until_" not in path.name][-1:]


def main(folders: Sequence[str]) -> int:
    for folder in folders:
        say("\n".join(summarize(Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
