"""ARCHITECTURE names files that there are, and every module that a request runs."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from tools.structure import FOLDER, PACKAGE, PlainCell, calls_of

ROOT = Path(__file__).parents[3]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
FOLDERS = ("services", "shared", "thermocline", "tools", "bench", "tests", "infra")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

_FILE = re.compile(r"`([a-z0-9_/]+\.py)`")


def section(title: str) -> str:
    """What stands under one heading of ARCHITECTURE."""
    return ARCHITECTURE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("name", sorted(set(_FILE.findall(ARCHITECTURE))))
def test_a_file_that_is_named_is_there(name: str) -> None:
    """A path from the root, the end of one, or a bare name."""
    assert any(f"/{file}".endswith(f"/{name}") for file in FILES)


@pytest.mark.parametrize("name", sorted(set(_FILE.findall(section("Where a decision about caching is made")))))
def test_a_bare_name_is_one_file_of_the_scheduler(name: str) -> None:
    """A reader who looks for it in the scheduler finds one."""
    if not name.startswith(("shared/", "core/")):
        found = [file for file in FILES if file.startswith("services/scheduler/") and file.endswith(f"/{name}")]
        assert len(found) == 1


def test_every_module_that_a_plain_request_runs_is_named() -> None:
    """By its file, or by its package's folder; the walk leaves none out."""
    walk = section("One request, file by file")
    ran = {name.removeprefix(f"{PACKAGE}.").replace(".", "/") for name in calls_of(PlainCell().run)}

    unnamed = {
        name for name in ran if f"{Path(name).name}.py" not in walk and f"{Path(name).parent.name}/`" not in walk
    }

    assert unnamed == set()


def test_every_package_of_the_core_has_its_line() -> None:
    """One row each."""
    packages = {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()}

    assert packages == set(re.findall(r"^\| `([a-z]+)/` \|", section("The core in layers"), flags=re.MULTILINE))


def retired_words() -> list[str]:
    """What GLOSSARY marks as retired, but for what is only no field any more."""
    return [word for first in _firsts() if "as fields" not in first for word in re.findall(r"`(\w+)`", first)]


def words_retired_everywhere() -> list[str]:
    """Those of them that are retired outside the scheduler's core, too."""
    return [word for first in _firsts() if "everywhere" in first for word in re.findall(r"`(\w+)`", first)]


def _firsts() -> list[str]:
    rows = (ROOT / "GLOSSARY.md").read_text("utf-8").split("## Retired words", 1)[1].splitlines()
    return [row.split("|")[1] for row in rows if row.startswith("| `")]


@pytest.mark.parametrize("word", retired_words())
def test_a_retired_word_is_used_no_more(word: str) -> None:
    """Neither as a name in the scheduler's core nor as one of its files."""
    assert [path.name for path in FOLDER.rglob("*.py") if _used(path, {word})] == []


def test_words_that_are_retired_everywhere_are_used_nowhere() -> None:
    """Nor is a file called by one, in any folder of Python."""
    retired = set(words_retired_everywhere())

    assert retired
    assert {file: words for file in FILES if (words := _used(ROOT / file, retired))} == {}


def _used(path: Path, words: set[str]) -> set[str]:
    """By which of the words a file or something in its code is called; its prose does not count."""
    source = path.read_bytes()
    names = {path.stem}
    if any(word.encode() in source for word in words):
        tokens = tokenize.tokenize(io.BytesIO(source).readline)
        names |= {token.string for token in tokens if token.type == tokenize.NAME}
    return words & names
