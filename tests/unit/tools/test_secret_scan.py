"""The scan for secrets: that it finds them, and that this tree has none."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

import pytest

from tools import secret_scan

# Put together here, so that this file holds none of them.
SECRETS = {
    "private key": "-----BEGIN " + "PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIB\n",
    "AWS key": "AK" + "IA" + "ABCDEFGHIJKLMNOP",
    "GitHub token": "gh" + "p_" + "a1" * 18,
    "Slack token": "xo" + "xb-" + "1234567890-abcdefghij",
    "API key of a model's vendor": "s" + "k-ant-" + "a1" * 20,
    "Hugging Face token": "h" + "f_" + "aB" * 17,
    "Google key": "AI" + "za" + "a" * 35,
    "NATS seed": "S" + "U" + "A2" * 28,
    "password of this project's brokers": "t" + "c" + "0f" * 24,
    "JWT": ".".join(("e" + "yJhbGciOiJlZDI1NTE5", "e" + "yJqdGkiOiIxIiwiaWF0", "c2lnbmF0dXJlb2ZpdA")),
    "password in a URL": "https" + "://user:" + "abcdefgh12345678@host/",
    "secret that is written out": "pass" + 'word = "abcdefgh12345678ijklmnop"',
}


@pytest.mark.parametrize("kind", secret_scan.SHAPES)
def test_each_kind_is_found_where_it_stands(kind: str) -> None:
    """With its line, and without the secret itself."""
    found = list(secret_scan.findings(f"first line\n{SECRETS[kind]}\n"))

    assert (2, kind) in found


def test_what_only_talks_of_secrets_is_not_found() -> None:
    """Placeholders, variables, short passwords of tests, and digests."""
    text = "\n".join(
        [
            'password: "correct"',
            "THERMOCLINE_NATS_PASSWORD=change-me",
            "nats://user:$TC_NATS_PASSWORD@nats-1:4222",
            f"digest = '{secrets.token_hex(32)}'",
            'token = "the_name_of_a_setting_that_is_long"',
        ]
    )

    assert list(secret_scan.findings(text)) == []


def test_untracked_files_count_and_ignored_ones_do_not(tmp_path: Path) -> None:
    """What would go into the next commit is looked at before it is there."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("ignored.txt\n")
    for name in ("new.txt", "ignored.txt"):
        (tmp_path / name).write_text(SECRETS["AWS key"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" + SECRETS["AWS key"].encode())

    assert secret_scan.scan(tmp_path, secret_scan.tree(tmp_path)) == ["new.txt:1: AWS key"]


def test_this_tree_holds_no_secret() -> None:
    """Neither what git tracks nor what it would take."""
    assert secret_scan.scan(secret_scan.ROOT, secret_scan.tree(secret_scan.ROOT)) == []
