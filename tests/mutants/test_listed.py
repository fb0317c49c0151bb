"""The list of mutants applies to the code as it is, and what it expects to survive is told."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.__main__ import ROOT, main
from tests.mutants.listed import Mutant, mutated, read


def test_every_mutant_applies() -> None:
    """Each old text occurs once, and what takes its place is another program that can be parsed."""
    for group in read():
        source = (ROOT / group.file).read_text(encoding="utf-8")
        for mutant in group.mutants:
            changed = ast.parse(mutated(source, mutant))
            assert ast.dump(changed) != ast.dump(ast.parse(source)), mutant.name


def test_names_are_unique_and_tests_exist() -> None:
    """A name chooses one mutant; a group without tests would kill none."""
    names = [mutant.name for group in read() for mutant in group.mutants]

    assert len(names) == len(set(names))
    assert all(group.tests and all((ROOT / test).is_file() for test in group.tests) for group in read())


def test_survivors_are_told() -> None:
    """CONTRIBUTING.md names each mutant that no test kills, and no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for group in read():
        for mutant in group.mutants:
            assert (f"`{mutant.name}`" in text) == bool(mutant.survives), mutant.name


@pytest.mark.parametrize("source", ["", "one two one"])
def test_a_list_that_has_rotted_is_refused(source: str) -> None:
    """An old text that is gone, or is there twice, is named."""
    with pytest.raises(ValueError, match=r"fault: its old text occurs [02] times"):
        mutated(source, Mutant(name="fault", old="one", new="three"))


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Else nothing would be tried, and the command would say that all is well."""
    with pytest.raises(SystemExit) as ended:
        main(["callers", "no-such-mutant"])

    assert ended.value.code == 2
    assert "called no-such-mutant" in capsys.readouterr().err
