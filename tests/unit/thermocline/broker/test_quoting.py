"""Texts in the server's configuration language, judged by the server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nats
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nats_server import NatsServer
from thermocline.broker.quoting import nats_quoted
from thermocline.supervisor.nats_program import find_nats_program

AWKWARD = [
    "données/Größe/資料/😀",
    'a "b" \\c\\',
    "tab\t, lines\r\n, bell\x07 and delete\x7f",
    "$HOME, #no comment, {no: map} [1, 2], 'single'",
    "\u0085\u2028\ufeff",
]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=50))
@settings(max_examples=10)
def test_the_server_accepts_any_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    """Control characters, quotes and characters of any script, as passwords: names may not have spaces."""
    config = tmp_path_factory.mktemp("quoted") / "nats.conf"
    users = [f"{{user: u{number}, password: {nats_quoted('x' + text)}}}" for number, text in enumerate(texts)]
    config.write_text(f"authorization {{ users: [{', '.join(users)}] }}\n", encoding="utf-8")

    done = subprocess.run([find_nats_program().path, "-t", "-c", config], capture_output=True, timeout=120)

    assert done.returncode == 0, (done.stderr, texts)


async def test_the_server_reads_what_was_written(tmp_path: Path) -> None:
    """Each text is a password with which a user gets in."""
    users = [f"{{user: u{number}, password: {nats_quoted(text)}}}" for number, text in enumerate(AWKWARD)]
    with NatsServer(tmp_path, config=f"authorization {{ users: [{', '.join(users)}] }}") as server:
        for number, text in enumerate(AWKWARD):
            client = await nats.connect(server.url, user=f"u{number}", password=text, allow_reconnect=False)
            await client.close()
