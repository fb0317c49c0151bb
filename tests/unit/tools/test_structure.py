"""The core's structure stays within its targets, and what measures it finds what is wrong."""

import ast
from graphlib import CycleError
from typing import Any

import pytest

from tools.structure import (
    PACKAGE,
    Measure,
    defined_twice,
    imports,
    lonely,
    longest_chain,
    main,
    measures,
    modules,
    named_twice,
)


@pytest.mark.parametrize("measure", measures(), ids=lambda measure: measure.name)
def test_the_core_keeps_to_its_targets(measure: Measure) -> None:
    """Modules, depth, what a request runs, and one word for one thing."""
    assert measure.is_met, measure.found


def test_a_target_that_is_missed_is_shown_with_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command then fails."""
    monkeypatch.setattr("sys.argv", ["structure"])
    monkeypatch.setattr("tools.structure.named_twice", lambda trees: ["machine"])

    assert main() == 1
    assert "missed\n    machine" in capsys.readouterr().out


def parsed(**sources: Any) -> dict[str, ast.Module]:
    """Modules of the core by their last names."""
    return {f"{PACKAGE}.{name.replace('__', '.')}": ast.parse(source) for name, source in sources.items()}


def test_types_alone_are_no_imports() -> None:
    """What stands under TYPE_CHECKING is imported by no process."""
    trees = parsed(
        a=f"from {PACKAGE} import b\nif TYPE_CHECKING:\n    from {PACKAGE}.c import X",
        b=f"from {PACKAGE}.c import X",
        c="",
    )

    assert imports(trees) == {f"{PACKAGE}.a": [f"{PACKAGE}.b"], f"{PACKAGE}.b": [f"{PACKAGE}.c"], f"{PACKAGE}.c": []}
    assert longest_chain(imports(trees)) == [f"{PACKAGE}.a", f"{PACKAGE}.b", f"{PACKAGE}.c"]


def test_a_ring_of_imports_is_an_error() -> None:
    """It has no longest chain."""
    with pytest.raises(CycleError):
        longest_chain(imports(parsed(a=f"from {PACKAGE} import b", b=f"from {PACKAGE} import a")))


def test_a_word_for_two_things_is_found() -> None:
    """Functions, classes and constants that are public, and files."""
    trees = parsed(one__a="LIMIT = 1\ndef f(): ...\n_own = 1", two__a="LIMIT: int = 2\nclass f: ...\n_own = 2", b="")

    assert defined_twice(trees) == ["LIMIT: one.a, two.a", "f: one.a, two.a"]
    assert named_twice(trees) == ["a"]


def test_every_module_is_counted() -> None:
    """Whatever lies in the folder and defines something."""
    trees = modules()

    assert f"{PACKAGE}.fold.main_loop" in trees
    assert not lonely(imports(trees))
