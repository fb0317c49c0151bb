"""The lock files: what the committed ones must be, and what the check finds. No test here needs a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import lock
from tools.lock import DEV, RUNTIME

HASH = "    --hash=sha256:" + "0" * 64 + "\n"
PROJECT: dict[str, Any] = {
    "requires-python": ">=3.11,<3.13",
    "dependencies": ["one>=1,<2", "torch==2.*", "old>=1,<3; python_version < '3.12'"],
    "optional-dependencies": {"dev": ["two>=2,<3"]},
}


def locked(*lines: str) -> str:
    """A lock file of these entries, with a hash for each."""
    return lock.digest_line(PROJECT) + "\n" + "".join(f"{line} \\\n{HASH}" for line in lines)


RUN_LINES = ("one==1.5", "old==2.0 ; python_full_version < '3.12'")
GOOD = {RUNTIME: locked(*RUN_LINES), DEV: locked(*RUN_LINES, "two==2.1")}


def test_the_committed_files_agree_with_the_project() -> None:
    """For every Python and machine; ``./task lock`` mends what this finds."""
    assert list(lock.faults(lock.read_project(), lock.read())) == []


def test_what_is_locked_for_running_is_what_was_resolved_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions that uv leaves in its output file, where it finds those to keep, bind both resolutions."""
    constraints = []

    def compiled(home: Path, asked: str, *flags: str) -> str:
        if "--output-file" in flags:
            Path(flags[flags.index("--output-file") + 1]).write_text("one==1.5\ntorch==2.1\n", encoding="utf-8")
            return ""  # As uv does when it is to be quiet.
        constraints.append(Path(flags[flags.index("--constraints") + 1]).read_text(encoding="utf-8"))
        return f"one==1.5 \\\n{HASH}"

    monkeypatch.setattr(lock, "compile_requirements", compiled)
    found = lock.make(PROJECT, tmp_path, upgrade=True, root=tmp_path)

    assert sorted(found) == [DEV, RUNTIME]
    assert constraints == ["one==1.5\ntorch==2.1\n"] * 2


def test_good_files_have_no_fault() -> None:
    """PyTorch is not in them, and a requirement of some Pythons is there for those."""
    assert list(lock.faults(PROJECT, GOOD)) == []


@pytest.mark.parametrize(
    ("name", "was", "becomes", "fault"),
    [
        (RUNTIME, "one==1.5", "one==2.5", "has one 2.5, but <2,>=1 is asked for"),
        (DEV, "two==2.1", "three==2.1", "has 0 versions of two for Python 3.11.0 on x86_64"),
        (RUNTIME, " ; python_full_version < '3.12'", " ; python_full_version < '3.11.5'", "for Python 3.11.99 on"),
        (RUNTIME, HASH, "", "has no hash for one"),
        (RUNTIME, "one==1.5", "torch==2.13.0", "locks torch, which differs between PyTorch's builds"),
        (RUNTIME, "one==1.5", "nvidia-nccl-cu13==2.29", "locks nvidia-nccl-cu13"),
        (DEV, "one==1.5", "--find-links folder\none==1.5", "names a place to find packages"),
        (DEV, "one==1.5", "one @ https://example.org/one.whl", "names a place to find packages"),
        (DEV, "one==1.5", "one==1.6", f"does not hold one==1.5 as {RUNTIME} does"),
        (DEV, lock.digest_line(PROJECT), "# Requirements: 0", "was made from other requirements"),
    ],
)
def test_a_fault_is_named(name: str, was: str, becomes: str, fault: str) -> None:
    """Each thing that an edit by hand or a forgotten renewal leaves behind."""
    assert was in GOOD[name]
    found = list(lock.faults(PROJECT, {**GOOD, name: GOOD[name].replace(was, becomes)}))

    assert any(fault in each for each in found)


@pytest.mark.parametrize("field", ["requires-python", "dependencies", "optional-dependencies"])
def test_other_requirements_ask_for_another_lock(field: str) -> None:
    """Also where the versions that are locked would still fit."""
    changed: dict[str, Any] = {
        "requires-python": ">=3.11,<3.12",
        "dependencies": PROJECT["dependencies"][:-1],
        "optional-dependencies": {"dev": []},
    }

    found = list(lock.faults({**PROJECT, field: changed[field]}, GOOD))

    assert f"{RUNTIME} was made from other requirements than those of pyproject.toml: run ./task lock" in found


def test_a_missing_file_is_a_fault() -> None:
    """A lock that was not committed locks nothing."""
    assert list(lock.faults(PROJECT, {**GOOD, RUNTIME: ""})) != []
