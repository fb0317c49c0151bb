"""Commands that the documentation names exist: tasks of ``./task`` and verbs of ``thermocline``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from thermocline.commands import COMMANDS

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")])
# A changelog also names what is gone.
PRESENT = [str(page.relative_to(ROOT)) for page in PAGES if page.name != "CHANGELOG.md"]
SHELL = ("", "sh", "bash", "console")
TASK = re.compile(r"\./task ([a-z][a-z:-]*)")
VERB = re.compile(r"^(?:\$ |nohup )?(?:\.venv/bin/)?thermocline ([a-z][a-z-]*)", re.MULTILINE)


def code_of(page: str) -> list[str]:
    """Blocks of shell, and code within lines."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    blocks = [token.content for token in tokens if token.type == "fence" and token.info in SHELL]
    inline = [child.content for token in tokens for child in token.children or () if child.type == "code_inline"]
    return blocks + inline


@pytest.mark.parametrize("page", PRESENT)
def test_commands_of_a_page_exist(page: str) -> None:
    """No page tells its reader to type what there is not."""
    tasks = yaml.safe_load((ROOT / "Taskfile.yml").read_text(encoding="utf-8"))["tasks"]
    verbs = {command.name for command in COMMANDS}
    code = code_of(page)

    assert [name for part in code for name in TASK.findall(part) if name not in tasks] == []
    assert [name for part in code for name in VERB.findall(part) if name not in verbs] == []


def test_commands_are_found() -> None:
    """The quickstart has tasks and verbs, so the test above looks at something."""
    code = code_of("docs/quickstart.md")

    assert {"demo", "up"} <= {name for part in code for name in TASK.findall(part)}
    assert {"up", "record", "cache"} <= {name for part in code for name in VERB.findall(part)}


def test_the_file_of_tasks_is_understood() -> None:
    """By the program that runs it, which refuses all of it for one line that a reader of YAML lets pass."""
    program = Path(sys.executable).with_name("task")
    listing = [str(program), "--taskfile", str(ROOT / "Taskfile.yml"), "--list-all", "--color=false"]
    listed = subprocess.run(listing, capture_output=True, text=True, timeout=60, check=False)

    assert listed.returncode == 0, listed.stderr
    assert "* docs:" in listed.stdout
