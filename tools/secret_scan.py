"""Secrets in the tree: every file that git tracks, or would take with the next ``git add``.

    python -m tools.secret_scan

It looks for what has a shape of its own, such as private keys and the tokens of well-known services, and for passwords
that are written out. What only looks like a secret is named in ``ALLOWED``, with its reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST_BYTES = 4 * 2**20

SHAPES = {
    "private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{16}"),
    "AWS key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50,})"),
    "Slack token": re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{20,}"),
    "API key of a model's vendor": re.compile(r"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}"),
    "Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "Google key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "NATS seed": re.compile(r"\bS[UAO][A-Z2-7]{56}\b"),
    "password of this project's brokers": re.compile(r"\btc[0-9a-f]{48}\b"),
    "JWT": re.compile(r"\beyJ[A-Za-z0-9_-]{16,}\.eyJ[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    "password in a URL": re.compile(r"\b[a-z][a-z0-9+]*://[^\s:/@'\"{$<]+:(?![$<{])[A-Za-z0-9+/_-]{16,}@"),
    "secret that is written out": re.compile(
        r"(?i)\b(?:password|passwd|secret|token|api_?key|admin_?key)[\"']?\s*[:=]\s*[\"'](?=[^\"']*\d)[A-Za-z0-9+/_-]{24,}[\"']"
    ),
}

ALLOWED = {
    ("tests/unit/bus/test_nkeys.py", "NATS seed"): "an example that the documentation of NATS prints",
}
"""By file and kind: what is found there but opens nothing, and why."""


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Lines (from 1) and what is on them; never the secret itself, because this goes into logs."""
    for name, shape in SHAPES.items():
        for match in shape.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, name


def tree(root: Path) -> list[Path]:
    """The files of a checkout, without those that git ignores. Raises CalledProcessError outside of one."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True).stdout.decode()
    return [root / name for name in listed.split("\0") if name]


def scan(root: Path, paths: Iterable[Path]) -> list[str]:
    """``path:line: what`` for each finding that is not allowed. Binary and very large files are passed over."""
    found = []
    for path in paths:
        try:
            if path.stat().st_size > LARGEST_BYTES:
                continue
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # A link to nowhere, deleted but not yet told to git, or no text.
        name = path.relative_to(root).as_posix()
        found += [f"{name}:{line}: {what}" for line, what in sorted(findings(text)) if (name, what) not in ALLOWED]
    return found


def main() -> int:
    """Print every finding. Exit codes: 0 none, 1 some."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = scan(ROOT, tree(ROOT))
    print("\n".join(found) or "secret scan: nothing found")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
