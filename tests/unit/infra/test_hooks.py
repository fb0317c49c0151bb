"""Messages of commits are what CONTRIBUTING.md says, for those who let git check them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
HOOK = ROOT / "infra" / "hooks" / "commit-msg"
GOOD = "worker: one composition root makes every part\n\nThree places made some of them.\n"


def said(tmp_path: Path, message: str) -> list[str]:
    """What the hook says to a message; nothing if it lets it pass."""
    (tmp_path / "message").write_text(message, encoding="utf-8")
    ended = subprocess.run([HOOK, tmp_path / "message"], capture_output=True, text=True, timeout=60, check=False)
    lines = ended.stderr.splitlines()
    assert ended.returncode == bool(lines)
    return [line.removeprefix("commit-msg: ") for line in lines]


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        "\n" + GOOD,
        GOOD + "# Please enter the commit message for your changes.\n",
        "gateway, worker: x\n\nwhy\n",
        f"a: {'ü' * 69}\n\nwhy",
        "Merge branch 'main'\n",
        f'Revert "{GOOD.splitlines()[0]}"\n',
        f"fixup! {GOOD.splitlines()[0]}\n",
    ],
)
def test_a_message_that_says_where_what_and_why_passes(tmp_path: Path, message: str) -> None:
    """So do those that git itself writes."""
    assert said(tmp_path, message) == []


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ("Workers drain\n\nwhy\n", ["area: what"]),
        ("worker:drain\n\nwhy\n", ["area: what"]),
        (f"a: {'ü' * 70}\n\nwhy", ["73 characters"]),
        ("worker: drain\nwhy\n", ["second line", "says why"]),
        ("worker: drain\n", ["says why"]),
        ("worker: drain\n\n# why\n", ["says why"]),
        ("worker: drain\n# ------------------------ >8 ------------------------\n\ndiff --git a b\n", ["says why"]),
        ("# nothing\n", ["area: what", "says why"]),
    ],
)
def test_another_is_refused_with_every_fault(tmp_path: Path, message: str, faults: list[str]) -> None:
    """Comments and the diff that git shows below are no body; characters are counted, not bytes."""
    found = said(tmp_path, message)

    assert len(found) == len(faults)
    assert all(part in line for part, line in zip(faults, found, strict=True))


def test_git_asks_the_hook(tmp_path: Path) -> None:
    """With the setting that `./task hooks` makes, a bad message makes no commit."""
    (command,) = yaml.safe_load((ROOT / "Taskfile.yml").read_text(encoding="utf-8"))["tasks"]["hooks"]["cmds"]
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    (tmp_path / "infra").symlink_to(ROOT / "infra")

    def run(*line: str) -> int:
        return subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, timeout=60, check=False).returncode

    run("git", "init", "-q")
    run("sh", "-c", command)
    commit = ("git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m")

    assert run(*commit, "Drain") == 1
    assert run(*commit, GOOD) == 0


def test_pre_commit_runs_what_is_here() -> None:
    """Its hooks are this checkout's own commands, so that they need no network and no second list of checks."""
    configured = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    tasks = yaml.safe_load((ROOT / "Taskfile.yml").read_text(encoding="utf-8"))["tasks"]
    (repository,) = configured["repos"]
    lint, message = repository["hooks"]

    assert repository["repo"] == "local"
    assert lint["entry"].removeprefix("./task ") in tasks
    assert ROOT / message["entry"] == HOOK
