"""``kill -9`` at any point of writing to the disk tier: what was acknowledged is there, and nothing else is left."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.storage.backends.disk import DiskBackend
from services.storage.backends.disk_directory import LOCK_FILE
from services.storage.chunk_reading import verify_chunk
from tests.chunk_makers import SMALL, aligned
from tests.integration.disk_crash_writer import CHUNKS, DELETED, TIMEOUT_S

pytestmark = pytest.mark.integration

DIRECTORIES = 2
POINTS = 200
OUTPUT_POINTS = 60
SEED = 20

Run = Callable[[list[str], str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Let the writer run on directories and be killed."""
    command = [sys.executable, "-m", "tests.integration.disk_crash_writer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def ask(paths: list[str], how: str, at: int) -> dict[str, Any]:
            orders.write(json.dumps({"paths": paths, "how": how, "at": at}) + "\n")
            orders.flush()
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield ask
        orders.close()
    assert process.returncode == 0


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], list[str]]:
    """Empty directories, always the same."""

    def make() -> list[str]:
        shutil.rmtree(tmp_path)
        paths = [tmp_path / f"disk-{number}" for number in range(DIRECTORIES)]
        for path in paths:
            path.mkdir(parents=True)
        return [str(path) for path in paths]

    return make


def check_aftermath(paths: list[str], said: list[str]) -> int:
    """Open what a killed writer left; returns how many whole chunks it had not come to acknowledge."""
    acknowledged = {int(word[1:]) for word in said if word[0] == "P"}
    deleting, deleted = ({int(word[1:]) for word in said if word[0] == kind} for kind in "dD")
    backend = DiskBackend(paths)
    into = aligned(CHUNKS[0].blob.nbytes)
    served = set()
    for entry in backend.entries():
        nbytes = backend.get(entry.key, into, timeout_s=TIMEOUT_S)
        verify_chunk(into[:nbytes], entry.key, SMALL)
        served.add(entry.key)
    places = {place for place, chunk in enumerate(CHUNKS) if chunk.key in served}
    assert len(places) == len(served), "a chunk that nobody wrote"
    assert acknowledged - deleting <= places, "an acknowledged chunk is lost"
    assert not places & deleted, "a deleted chunk is back"
    files = {file for path in paths for file in Path(path).rglob("*") if file.is_file()}
    assert {file for file in files if file.name != LOCK_FILE and not file.name.endswith(".chunk")} == set()
    assert len(files) == len(served) + len(paths), "a file was leaked"
    assert backend.quarantined == 0
    backend.put(CHUNKS[0].key, CHUNKS[0].blob, stripe=0, timeout_s=TIMEOUT_S)
    assert backend.get(CHUNKS[0].key, into, timeout_s=TIMEOUT_S) == into.nbytes
    assert into == CHUNKS[0].blob
    backend.close()
    return len(places - acknowledged)


def test_a_writer_that_is_left_alone_acknowledges_everything(run: Run, fresh: Callable[[], list[str]]) -> None:
    """Without a kill all chunks are written, so that the points below lie in real work."""
    paths = fresh()

    answer = run(paths, "never", 0)

    assert (answer["signal"], answer["status"]) == (0, 0)
    assert answer["said"] == [
        word
        for place in range(len(CHUNKS))
        for word in [f"P{place}", *([f"d{place}", f"D{place}"] if place in DELETED else [])]
    ]
    assert check_aftermath(paths, answer["said"]) == 0


def test_a_writer_killed_at_any_system_call_loses_nothing(run: Run, fresh: Callable[[], list[str]]) -> None:
    """Before and after every call, and in the middle of every write, from opening the tier to the last of them."""
    calls = run(fresh(), "never", 0)["calls"]
    points = [(at, how) for at, call in enumerate(calls) for how in ("before", "after")]
    points += [(at, "within") for at, call in enumerate(calls) if call == "write"]
    assert len(points) + OUTPUT_POINTS >= POINTS
    unacknowledged = 0

    for at, how in points:
        paths = fresh()
        answer = run(paths, how, at)

        assert answer["signal"] == signal.SIGKILL, (at, how, answer)
        unacknowledged += check_aftermath(paths, answer["said"])
    assert unacknowledged, "no writer was killed between the new name and the answer"


def test_writers_killed_between_their_answers_lose_nothing(run: Run, fresh: Callable[[], list[str]]) -> None:
    """Several threads write when the kill comes from outside, after any number of bytes of their answers."""
    length = sum(len(word) + 1 for word in run(fresh(), "output", 10**6)["said"])
    chance = random.Random(SEED)
    killed = 0

    for _ in range(OUTPUT_POINTS):
        paths = fresh()
        answer = run(paths, "output", chance.randint(1, length - 1))

        killed += answer["signal"] == signal.SIGKILL
        check_aftermath(paths, answer["said"])
    assert killed > OUTPUT_POINTS // 2
