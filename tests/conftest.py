"""Fixtures for every test: a quiet, offline process and a real NATS server."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before any library that reads them is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# What a process plans with does not depend on how fast this machine happens to be.
os.environ["THERMOCLINE_MEASURE_AT_START"] = "false"

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.guard import Guard, processes_of, remove_segments, segments_of
from tests.nats_server import NatsServer
from tests.run_name import RUN, RUN_VARIABLE
from tests.whole_parses import parse_whole_everywhere
from thermocline.supervisor.records import runs_dir

# How long an example takes is the machine's business, and the same commit passes or fails always. Other examples than
# these are looked for with `./task test:explore`.
settings.register_profile("explore", derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", parent=settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")

ENDING_S = 60.0
"""Time for processes that were told to end at the very last."""

_guards: list[Guard] = []


def pytest_configure(config: pytest.Config) -> None:
    """What collecting imports and finds lives until the end: the collector need not look through it again and again."""
    gc.disable()
    # All that tests talk to is on this machine, where no proxy of the environment finds it.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        os.environ.pop(name, None)
        os.environ.pop(name.lower(), None)
    # A script's background job ignores Ctrl-C, and so would all processes that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A process that only hands tests to others has none of its own to guard.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        os.environ[RUN_VARIABLE] = RUN
        _guards.append(Guard.start(RUN_VARIABLE, RUN))


def pytest_runtest_logstart(nodeid: str) -> None:
    """The guard names the test that it ends, or that ended the process."""
    for guard in _guards:
        guard.tell("test", nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A test that hangs or eats memory ends its process, and is not tried in the others too."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.crashed_tests import EachTestOnce

    return EachTestOnce(config, log)


def pytest_unconfigure() -> None:
    """From here on nothing is left to clear up."""
    while _guards:
        _guards.pop().dismiss()


def pytest_collection_finish() -> None:
    """Nor often while tests run. It is not frozen: Triton would call what is never looked at leaked."""
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _own_folder_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cells of this process write themselves down in a folder of its own: a start clears up after every dead cell
    that it finds, and those of another test process are not its to find.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        for guard in _guards:
            guard.tell("runs", str(runs_dir()))
        yield
        _check_that_nothing_stays()


def _check_that_nothing_stays() -> None:
    """Fail for processes and shared memory that tests of this process have left, and clear them up."""
    deadline = time.monotonic() + ENDING_S
    while (living := _left_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    segments = segments_of(RUN, {os.getpid(), *living})
    remove_segments(segments)
    assert not living, f"tests left processes behind: {living}"
    assert not segments, f"tests left segments in /dev/shm: {segments}"


def _left_processes() -> dict[int, str]:
    """Processes that tests have started, without the one that Python keeps to fork others from."""
    found = processes_of(RUN_VARIABLE, RUN)
    return {pid: command for pid, command in found.items() if "multiprocessing.forkserver" not in command}


@pytest.fixture(autouse=True, scope="session")
def _whole_parses() -> Iterator[None]:
    """What one test leaves to the collector does not break another that parses."""
    with pytest.MonkeyPatch.context() as patch:
        parse_whole_everywhere(patch)
        yield


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a nats-server with JetStream that all tests of this run share, streams included."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server of this test's own, with no streams yet, which the test may kill and start again."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls may set up logging for the process, into a stream that is closed behind the test."""
    before = structlog.get_config()
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
