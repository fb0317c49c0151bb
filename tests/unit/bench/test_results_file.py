"""What is written beside a benchmark's figures."""

import subprocess
from pathlib import Path

import pytest

from bench.results_file import arguments, commit_of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With one commit of some code and a result."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "bench" / "results" / "one.json").write_text("{}")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_result_names_its_commit(repository: Path) -> None:
    """In twelve digits; results that were written meanwhile are no change of the code."""
    commit = commit_of(repository)
    (repository / "bench" / "results" / "one.json").write_text("{1}")
    (repository / "bench" / "results" / "other.json").write_text("{}")

    assert len(commit) == 12
    assert commit_of(repository) == commit


def test_code_that_was_changed_is_called_dirty(repository: Path) -> None:
    """Because nobody else can measure it."""
    commit = commit_of(repository)
    (repository / "code.py").write_text("2")

    assert commit_of(repository) == f"{commit}-dirty"


def test_without_a_repository_nothing_is_claimed(tmp_path: Path) -> None:
    """A package that was unpacked somewhere can be measured, too."""
    assert commit_of(tmp_path / "nowhere") == "unknown"


def test_a_command_line_has_the_flags_that_are_named() -> None:
    """And no other: what a benchmark does not save must not be asked for."""
    options = arguments("What is measured.", "--seed", "--out").parse_args(["--out", "found.json"])

    assert vars(options) == {"seed": 1, "out": Path("found.json")}
