"""tests/mutants.toml: each fault can be planted, and names tests that exist."""

from collections import Counter

from settings import ROOT
from tests.plant_faults import file_of, read_faults

FAULTS = read_faults()


def test_the_text_of_each_fault_occurs_once_in_its_file() -> None:
    for fault in FAULTS:
        assert fault.is_in(ROOT), f"{fault.name}: {fault.file} must have this once: {fault.old}"
        assert fault.old != fault.new, fault.name


def test_each_fault_has_its_own_name_and_tests_that_exist() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert max(names.values()) == 1, names.most_common(1)
    for fault in FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            assert (ROOT / file_of(test)).exists(), f"{fault.name}: there is no {test}"
