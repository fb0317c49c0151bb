"""The check of turns of phrase finds them, and the repository has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import ALLOWED, ROOT, checked_files, faults, find_turns


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "told to everybody",
        "whoever reads it",
        "pages of which the device has a copy",
        "requests of\nwhich some wait\nand blocks of which none is",
        "the limit and that for disks",
    ],
)
def test_a_turn_is_found(text: str) -> None:
    """In any case, and anywhere in a text."""
    assert list(find_turns(text))


def test_names_of_files_are_no_prose() -> None:
    """A link may lead to a record whose file is called so."""
    assert not list(find_turns("[ADR 30](infra/adr/0030-a-fatal-input-is-left-out-by-everybody.md)"))


def test_the_place_is_named(tmp_path: Path) -> None:
    """File and line, in documents and in shipped code alike; records stay as they were written."""
    for name in ("README.md", "shared/app.py", "infra/adr/0001-a.md", "CHANGELOG.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("One.\nNobody.\n")

    assert [fault.partition(": ")[0] for fault in faults(tmp_path)] == ["README.md:2", "shared/app.py:2"]


def test_the_repository_has_none() -> None:
    """Neither its documents nor what it ships."""
    assert not faults()


def test_every_exception_is_used() -> None:
    """What is allowed is still there."""
    names = {path.relative_to(ROOT).as_posix(): path for path in checked_files()}

    assert all(
        any(part in line and list(find_turns(line)) for line in names[file].read_text().splitlines())
        for file, part in ALLOWED
    )
