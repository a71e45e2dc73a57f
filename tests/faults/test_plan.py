"""docs/faults.md: every fault that is promised something for has tests that inject it, and the page lists them.

python -m tests.faults.test_plan          writes the page's last column anew
"""

import ast
import re
from collections import Counter, defaultdict

from tests.running import ROOT

PAGE = ROOT / "docs" / "faults.md"
ROW = re.compile(r"^(\| (\d+) \| .+ \|) (.*) \|$", re.MULTILINE)
ROWS = 46


def count_tests():
    """Row -> file -> how many tests carry the row's number, by reading: collecting them would import everything."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.fault("):
                    for number in mark.args:
                        counts[number.value][str(path.relative_to(ROOT / "tests"))] += 1
    return counts


def page():
    """The page as it ought to be."""
    counts = count_tests()

    def fill(row):
        files = counts[int(row[2])].items()
        cells = [f"`{file}`" + (f" ({count})" if count > 1 else "") for file, count in files]
        return f"{row[1]} {', '.join(cells)} |"

    return ROW.sub(fill, PAGE.read_text())


def test_every_fault_of_the_plan_is_injected_by_a_test():
    assert sorted(count_tests()) == list(range(1, ROWS + 1))
    assert [int(row[2]) for row in ROW.finditer(PAGE.read_text())] == list(range(1, ROWS + 1))


def test_the_page_lists_the_tests_that_there_are():
    assert PAGE.read_text() == page(), "write it again: python -m tests.faults.test_plan"


if __name__ == "__main__":
    PAGE.write_text(page())
