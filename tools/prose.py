"""Turns of phrase that this project does not use, in its documents and in the code that it ships.

    python -m tools.prose

Print each place and what to write in its stead, and exit with 1 where there is any. Records (``infra/adr/``,
``CHANGELOG.md``) stay as they were written. Pages that are made are checked by their templates.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

TURNS = {
    re.compile(r"\b[Nn]obody\b"): "name what does not: 'no process', 'no request', or the passive",
    re.compile(r"\b[Ee]verybody\b"): "name them: 'all callers', 'every process'",
    re.compile(r"\b[Ww]hom?ever\b"): "name them: 'the reader', 'a caller that', 'any process that'",
    re.compile(r"\b[Oo]f (?:which|whom)\b"): "'whose', 'with', or a sentence of its own",
    re.compile(r"\b[Tt]hat for\b"): "name it again",
}
"""A pattern, and what to write in its stead (CONTRIBUTING, "Words"). Names in capitals are constants of the code."""

LINK_TARGET = re.compile(r"\]\([^)]*\)")
"""A record keeps the name of its file."""

DOCUMENTS = (
    *("*.md", "docs/*.md", "docs/concepts/*.md", "docs/how-to/*.md", "docs/reference/*.md", "docs/templates/**/*.j2"),
    *("docs/results/what-did-not-work.md", "infra/*/*.md"),
)
RECORDS = ("CHANGELOG.md", "infra/adr/")
SHIPPED = ("services", "shared", "thermocline")
DATA = ("thermocline/documents/",)
"""Texts that models are trained and judged with."""
SUFFIXES = (".py", ".js", ".html", ".c", ".h", ".toml")

ALLOWED = {
    ("docs/how-to/install.md", "--user nobody"): "a user's name",
    ("CONTRIBUTING.md", "| "): "the list of sentences before and after",
    ("CONTRIBUTING.md", "**The subject comes first**"): "the rule",
    ("CONTRIBUTING.md", "**No chains of"): "the rule",
}
"""By file and a text of the line: what only looks like such a turn, and why."""


def checked_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield every file that is checked."""
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            if not path.relative_to(root).as_posix().startswith(RECORDS):
                yield path
    for folder in SHIPPED:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and not path.relative_to(root).as_posix().startswith(DATA):
                yield path


def find_turns(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (number of the line, the turn, what to write in its stead) for each turn in a text."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = LINK_TARGET.sub("]", line)
        for pattern, advice in TURNS.items():
            for found in pattern.finditer(words):
                yield number, found.group(), advice


def faults(root: Path = ROOT) -> list[str]:
    """Return one line for each turn in the checked files that is not allowed there."""
    found = []
    for path in checked_files(root):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        lines = text.splitlines()
        for number, turn, advice in find_turns(text):
            if not any(name == file and part in lines[number - 1] for file, part in ALLOWED):
                found.append(f"{name}:{number}: {turn!r}: {advice}")
    return found


def main() -> int:
    """Print the faults; return 1 where there are any."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = faults()
    print("\n".join(found) or "no forbidden turns of phrase")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
