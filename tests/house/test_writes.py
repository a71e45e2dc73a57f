"""How files are written: none by a link that somebody else may have put where it goes."""

import ast
from pathlib import Path

from settings import ROOT

ROOMS = [
    "analysis",
    "doctor",
    "export",
    "finetune",
    "hardware",
    "k8s",
    "monitor",
    "plan",
    "record",
    "settings",
    "train",
]
# Into a folder that the same function has just made.
NEW_FOLDER = {
    "export/convert.py",
    "export/place.py",
    "export/weight_files.py",
    "finetune/merge.py",
    "k8s/cluster/render.py",
    "train/distributed/world.py",
}


def writing_calls(path: Path):
    """Yield (line, is_safe) for each call that writes a file by its name."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("write_text", "write_bytes"):
            yield call.lineno, str(path.relative_to(ROOT)) in NEW_FOLDER
        is_function = isinstance(call.func, ast.Name) and call.func.id == "open"
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
        modes = list(call.args[1 if is_function else 0 :][:1])
        modes += [word.value for word in call.keywords if word.arg == "mode"]
        if (is_function or is_method) and modes:
            is_plain = isinstance(modes[0], ast.Constant) and isinstance(modes[0].value, str)
            if is_method and not (is_plain and set(modes[0].value) <= set("rwxabt+")):
                continue  # of another class, or os.open
            mode = modes[0].value if is_plain else "w"
            if set(mode) & set("wax+"):
                openers = [word for word in call.keywords if word.arg == "opener"]
                is_descriptor = (
                    isinstance(call.args[0], ast.Name) and call.args[0].id == "descriptor"
                )
                yield call.lineno, "x" in mode or bool(openers) or is_descriptor


def test_a_file_is_new_or_opened_without_following_a_link():
    """record/durable.py writes new ones; `only_regular` of record/regular_file.py opens no link."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for line, is_safe in writing_calls(path):
                found.append((f"{path.relative_to(ROOT)}:{line}", is_safe))
    assert len(found) > 15
    assert not [place for place, is_safe in found if not is_safe]
