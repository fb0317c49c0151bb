"""The cost of restoring here, measured by a worker at its first start with a model, so that no user has to.

HCache finds it offline for each machine and model (4.1.2), and so does ``thermocline doctor --profile --model``, with
longer prefixes and more rounds, whose figures take precedence. Here it takes seconds, and is remembered in the user's
cache for later starts. Workers of one machine that start together measure one after the other, and a later one finds
the figures of the first.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.worker.kv.profile import MOST_RESTORATIONS, Machine, default_path
from services.worker.restore.costs import costs_of
from services.worker.restore.figures import RestorationProfile
from shared import logs, progress
from shared.errors import ConfigError
from shared.messages.worker_events import RestorationCosts
from shared.undecodable import UNDECODABLE

FILE_NAME = "restorations.json"
VERSION = 3

LENGTHS = (64, 256, 1024)
"""Tokens of the prefixes that are measured: none is begun that would presumably take more than ``ENOUGH_S`` in all."""
ROUNDS = 3
ENOUGH_S = 4.0

WAIT_S = 60.0
"""Longest wait for another worker that measures. Past it this one measures beside it."""
_POLL_S = 0.1

_log = logs.get_logger("worker")


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the cache. They hold on this machine alone; a cache may be on a disk that others see."""

    version: int = VERSION
    machine: Machine
    restorations: tuple[RestorationProfile, ...] = ()  # The latest measured last.


def cache_path() -> Path:
    """Return where figures of first starts are kept: beside the profile that the doctor writes."""
    return default_path().with_name(FILE_NAME)


def first_costs(
    here: RestorationProfile,
    machine: Machine,
    measure: Callable[[Callable[[str], None]], RestorationProfile],
    *,
    path: Path | None = None,
) -> RestorationCosts | None:
    """Return the cost of restoring the model that ``here`` describes, as remembered at ``path`` or else by ``measure``.

    ``measure`` reports its progress to its argument. None, with a line in the log, where it cannot be measured. What is
    remembered is measured again where no costs follow from it. Blocking, for seconds.
    """
    path = path or cache_path()
    with _alone(path):
        costs = _remembered(path, machine, here)
        if costs is None:
            try:
                with progress.phase("measuring what restoring costs", total=len(LENGTHS), unit="prefixes") as advance:
                    found = measure(lambda line: advance(1))
                costs = costs_of(found)
            except Exception as error:  # Errors of the device, too: serve without hidden states.
                _log.warning("restoration_not_measured", reason=f"{type(error).__name__}: {error}")
                return None
            _remember(path, machine, found)
    _log.info("restoration_costs", measured_at="a first start", **msgspec.structs.asdict(costs))
    return costs


def _remembered(path: Path, machine: Machine, here: RestorationProfile) -> RestorationCosts | None:
    """Return the costs of the model as remembered; None, with a line in the log for a damaged entry, without any."""
    found = [each for each in _read(path, machine) if not each.differences(here)]
    if not found:
        return None
    try:
        return costs_of(found[-1])
    except ConfigError as error:
        _log.warning("restoration_forgotten", path=str(path), reason=error.message)
        return None


def _read(path: Path, machine: Machine) -> tuple[RestorationProfile, ...]:
    """Return the figures remembered for this machine; none where the file is none of ours, or of another version."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_Remembered)
    except (OSError, *UNDECODABLE):
        return ()
    return file.restorations if (file.version, file.machine) == (VERSION, machine) else ()


def _remember(path: Path, machine: Machine, found: RestorationProfile) -> None:
    """Write the figures atomically.

    A cache that cannot be written means another measurement, and does not stop serving.
    """
    others = [each for each in _read(path, machine) if each.differences(found)]
    file = _Remembered(machine=machine, restorations=tuple([*others, found][-MOST_RESTORATIONS:]))
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
        scratch.replace(path)
    except OSError as error:
        _log.warning("restoration_not_remembered", path=str(path), reason=str(error))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of the machine at a time measure.

    There is no lock where the cache cannot be written, or after ``WAIT_S``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not _take(lock) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
