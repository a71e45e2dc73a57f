"""docs/faults.md: every fault that is promised something for has tests that inject it, and the page lists them.

python -m tests.faults.test_plan          writes the page's last column anew
"""

import ast
import re
import sys
from collections import defaultdict

from tests.running import ROOT

PAGE = ROOT / "docs" / "faults.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.*) \|$")
ROWS = 46


def marked():
    """Row -> tests that carry its number, as file::test, by reading: collecting them would import everything."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if (
                        isinstance(decorator, ast.Call)
                        and ast.unparse(decorator.func) == "pytest.mark.fault"
                    ):
                        for number in decorator.args:
                            found[ast.literal_eval(number)].append(
                                f"{path.relative_to(ROOT / 'tests')}::{node.name}"
                            )
    return found


def cell(tests):
    """What the page says of a row's tests: file, and how many of it."""
    files: dict[str, int] = {}
    for test in tests:
        file = test.split("::")[0]
        files[file] = files.get(file, 0) + 1
    return ", ".join(
        f"`{file}`" + (f" ({count})" if count > 1 else "") for file, count in files.items()
    )


def test_every_fault_of_the_plan_is_injected_by_a_test():
    found = marked()
    assert set(found) == set(range(1, ROWS + 1)), sorted(set(range(1, ROWS + 1)) ^ set(found))


def test_the_page_lists_the_tests_that_there_are():
    rows = {int(m[1]): m[4] for line in PAGE.read_text().splitlines() if (m := ROW.match(line))}
    expected = {number: cell(tests) for number, tests in marked().items()}
    assert rows == expected, "write it anew: python -m tests.faults.test_plan"


def write_page():
    found, lines = marked(), []
    for line in PAGE.read_text().splitlines():
        m = ROW.match(line)
        lines.append(f"| {m[1]} | {m[2]} | {m[3]} | {cell(found[int(m[1])])} |" if m else line)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_page()
    for row, names in sorted(marked().items()):
        sys.stdout.write(f"{row:2}  {'  '.join(names)}\n")
