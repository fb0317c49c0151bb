"""Signs of life: whoever shows one is alive, and whoever watches it learns of the end."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from shared.errors import ConfigError
from shared.memory import SharedSegment, reap
from shared.memory.life import WATCHED_MOST, LifeSign, LifeWatch, Member
from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import new_segment_name

WORKER = Member("worker", "worker-0", "one")


@pytest.fixture
def watch(shm_prefix: str) -> Iterator[LifeWatch]:
    made = LifeWatch(shm_prefix)
    yield made
    made.close()


@contextmanager
def _living(prefix: str, *, after: str = "input()") -> Iterator[subprocess.Popen[str]]:
    """A process that shows the sign of WORKER, says "shown", and goes on with ``after``."""
    program = f"""
        import os, subprocess, sys
        from shared.memory.life import LifeSign
        sign = LifeSign.show({prefix!r}, "worker", "worker-0", "one")
        print("shown", flush=True)
        {after}
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "shown\n"
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def _kill(child: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
    child.send_signal(number)
    child.wait()


def _signs(prefix: str) -> list[str]:
    return [name for name in os.listdir(SHM_DIRECTORY) if name.startswith(f"{prefix}.")]


def test_a_killed_process_is_seen_to_end_once(shm_prefix: str, watch: LifeWatch) -> None:
    """Nobody has said a word, and the next look knows it."""
    with _living(shm_prefix) as child:
        before = watch.look() + watch.look()
        _kill(child)

    assert before == []
    assert watch.look() == [WORKER]
    assert watch.look() == []


def test_a_zombie_counts_as_ended(shm_prefix: str, watch: LifeWatch) -> None:
    """Its parent need not have taken notice for the lock to be gone."""
    with _living(shm_prefix) as child:
        watch.look()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert watch.look() == [WORKER]


def test_a_frozen_process_lives(shm_prefix: str, watch: LifeWatch) -> None:
    """Who stands still has not ended."""
    with _living(shm_prefix) as child:
        watch.look()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)

        assert watch.look() == []


def test_an_orderly_end_is_seen_too_and_leaves_nothing(shm_prefix: str, watch: LifeWatch) -> None:
    """The sign goes with its block, and ending it twice is fine."""
    with LifeSign.show(shm_prefix, "worker", "worker-0", "one") as sign:
        watch.look()
    sign.end()

    assert watch.look() == [WORKER]
    assert _signs(shm_prefix) == []


def test_who_died_before_the_first_look_is_nobodys_news(shm_prefix: str, watch: LifeWatch) -> None:
    """A watch that starts beside a leftover has never seen its owner alive."""
    with _living(shm_prefix) as child:
        _kill(child)

    assert watch.look() == []
    assert watch.look() == []


def test_a_sign_that_was_reaped_between_two_looks_is_of_the_dead(shm_prefix: str, watch: LifeWatch) -> None:
    """The next incarnation's start may be faster than the watch."""
    with _living(shm_prefix) as child:
        watch.look()
        _kill(child)
    reaped = reap(shm_prefix)

    assert len(reaped) == 1
    assert watch.look() == [WORKER]


def test_a_name_that_somebody_removed_is_no_death(shm_prefix: str, watch: LifeWatch) -> None:
    """The lock counts, and it is still held."""
    with LifeSign.show(shm_prefix, "worker", "worker-0", "one") as sign:
        watch.look()
        (SHM_DIRECTORY / sign.name).unlink()
        while_it_lives = watch.look()

    assert while_it_lives == []
    assert watch.look() == [WORKER]


def test_a_sign_of_the_living_is_not_reaped(shm_prefix: str) -> None:
    """Neither its own process nor another takes it for a leftover."""
    with LifeSign.show(shm_prefix, "worker", "worker-0", "one") as sign:
        assert reap(shm_prefix) == []
        assert _signs(shm_prefix) == [sign.name]


def test_two_watches_do_not_disturb_one_another(shm_prefix: str, watch: LifeWatch) -> None:
    """While one is in the middle of a look, another sees the end all the same."""
    with _living(shm_prefix) as child:
        watch.look()
        _kill(child)
    [name] = _signs(shm_prefix)
    other = os.open(SHM_DIRECTORY / name, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)

        assert watch.look() == [WORKER]
    finally:
        os.close(other)


def test_a_watch_holds_no_lock_after_a_look(shm_prefix: str, watch: LifeWatch) -> None:
    """What is left of the dead can be reaped."""
    with _living(shm_prefix) as child:
        watch.look()
        _kill(child)
    watch.look()

    assert len(reap(shm_prefix)) == 1


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("subprocess.Popen([sys.executable, '-c', 'input()']); input()", id="another program"),
        pytest.param("os.fork() or os.read(0, 1); input()", id="a fork"),
    ],
)
def test_a_child_that_lives_on_does_not_keep_the_sign(shm_prefix: str, watch: LifeWatch, after: str) -> None:
    """The sign is of the process that showed it, and of none that came out of it."""
    with _living(shm_prefix, after=f"{after}") as child:
        watch.look()
        _kill(child)

        # A child that was just made has the lock until it has become the other program.
        gone, give_up_s = watch.look(), time.monotonic() + 30
        while not gone and time.monotonic() < give_up_s:
            gone = watch.look()
        assert gone == [WORKER]


def test_a_child_that_ends_does_not_take_the_sign_down(shm_prefix: str, watch: LifeWatch) -> None:
    """Closing and ending in the child leave the parent's lock alone."""
    with LifeSign.show(shm_prefix, "worker", "worker-0", "one") as sign:
        watch.look()
        pid = os.fork()
        if pid == 0:
            sign.end()
            os._exit(0)
        os.waitpid(pid, 0)

        assert watch.look() == []
        assert _signs(shm_prefix) == [sign.name]


def test_other_prefixes_and_other_files_are_passed_over(shm_prefix: str, watch: LifeWatch) -> None:
    """Pools, drafts, nonsense, pipes and links under our prefix, and signs under another: nobody's end."""
    pool = SharedSegment.create(shm_prefix, "device", 4096)
    kinds = {"life-draft": b"", "life": b"nonsense"}
    files = []
    for kind, content in kinds.items():
        file = (SHM_DIRECTORY / str(new_segment_name(shm_prefix, kind))).open("wb")
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        files.append(file)
    os.mkfifo(SHM_DIRECTORY / str(new_segment_name(shm_prefix, "life")))
    os.symlink(SHM_DIRECTORY / pool.name, SHM_DIRECTORY / str(new_segment_name(shm_prefix, "life")))
    foreign = LifeSign.show(f"{shm_prefix}-2", "worker", "worker-0", "one")

    seen = watch.look()
    foreign.end()
    for file in files:
        file.close()
    pool.close()

    assert seen + watch.look() == []


@pytest.mark.parametrize("content", [b"", ("worker", "worker-0"), ("cat", "worker-0", "one"), ("worker", "a b", "one")])
def test_a_sign_that_cannot_be_read_is_not_there_yet(shm_prefix: str, watch: LifeWatch, content: object) -> None:
    """Until it says whose it is, it is nobody's; afterwards it counts."""
    path = SHM_DIRECTORY / str(new_segment_name(shm_prefix, "life"))
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content if isinstance(content, bytes) else msgspec.msgpack.encode(content))
        file.flush()
        early = watch.look()
        file.seek(0)
        file.truncate()
        file.write(msgspec.msgpack.encode(WORKER))
        file.flush()
        early += watch.look()

    assert early == []
    assert watch.look() == [WORKER]


def test_a_watch_is_bounded(shm_prefix: str, watch: LifeWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs beyond the bound wait until there is room, and the watch says so."""
    monkeypatch.setattr("shared.memory.life.WATCHED_MOST", 2)
    signs = [LifeSign.show(shm_prefix, "worker", f"worker-{number}", "one") for number in range(3)]
    watch.look()
    was_full = watch.is_full

    for sign in signs:
        sign.end()

    assert was_full
    assert WATCHED_MOST >= 256
    assert len(watch.look()) == 2
    assert not watch.is_full


def test_a_watch_without_the_directory_sees_nobody_new(
    shm_prefix: str, watch: LifeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is watched already needs no directory."""
    with LifeSign.show(shm_prefix, "worker", "worker-0", "one"):
        watch.look()
        monkeypatch.setattr("shared.memory.life.SHM_DIRECTORY", SHM_DIRECTORY / "missing")
        while_it_lives = watch.look()
        monkeypatch.undo()

    assert while_it_lives == []
    assert watch.look() == [WORKER]


def test_a_sign_that_cannot_be_shown_is_the_operators_fault(shm_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind, and the error says where it failed."""
    monkeypatch.setattr("shared.memory.life.SHM_DIRECTORY", SHM_DIRECTORY / "missing")

    with pytest.raises(ConfigError, match="missing"):
        LifeSign.show(shm_prefix, "worker", "worker-0", "one")

    assert _signs(shm_prefix) == []


def test_a_draft_that_is_reaped_in_the_making_is_made_again(shm_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaper in another PID namespace may come between the making and the lock."""
    lock = fcntl.flock
    reaped: list[Any] = []

    def reap_first(fd: int, operation: int) -> None:
        if not reaped:
            reaped.extend(_signs(shm_prefix))
            (SHM_DIRECTORY / reaped[0]).unlink()
        lock(fd, operation)

    monkeypatch.setattr("shared.memory.life.fcntl.flock", reap_first)

    with LifeSign.show(shm_prefix, "worker", "worker-0", "one") as sign:
        assert _signs(shm_prefix) == [sign.name]
    assert len(reaped) == 1
