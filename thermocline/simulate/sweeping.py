"""Run a sweep's simulations in processes of their own, at most one per core, and return a row for each.

A row is flat: the settings, then every figure but the wall time, so that the same sweep gives the same rows with any
number of processes.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from shared.errors import ConfigError, InternalError, InvalidRequest, OperatorError
from shared.lifecycle import die_with_parent
from thermocline.simulate.__main__ import GC_THRESHOLDS, described, parse, prepare
from thermocline.simulate.axes import ERROR, INTERRUPTED, Axis, Row, Run, read_axes, runs_of

Progress = Callable[[int, int], None]
"""Called with the number of finished simulations, and of all."""


class SweepFailed(InternalError):
    """Some simulations of a sweep failed. ``rows`` are all rows; those of the failed ones have the reason as ERROR."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        """Take the sentence that names each failed combination, and the rows."""
        super().__init__(message)
        self.rows = rows


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a sweep. ``rows`` are all rows; those of unfinished simulations have INTERRUPTED as ERROR."""

    def __init__(self, rows: list[Row]) -> None:
        """Take the rows."""
        super().__init__()
        self.rows = rows


def sweep(assignments: Iterable[str], arguments: Sequence[str] = (), *, jobs: int | None = None) -> list[Row]:
    """Simulate every combination of ``KEY=A,B`` texts; ``arguments`` are other flags of ``thermocline simulate``.

    Programs that call this need the guard ``if __name__ == "__main__"``, because processes import them; notebooks
    don't. Raises ConfigError or InvalidRequest for invalid settings, profiles or traces, SweepFailed, with the rows of
    the others, where simulations failed, and SweepInterrupted likewise by Ctrl-C.
    """
    options = parse([*arguments, *(["--jobs", str(jobs)] if jobs is not None else []), "--sweep", *assignments])
    return sweep_rows(options, read_axes(options.sweep))


def sweep_rows(
    options: argparse.Namespace,
    axes: Sequence[Axis],
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda warning: None,
) -> list[Row]:
    """Run every combination; return rows in the order of :func:`runs_of`, all with the same keys.

    ``warn`` is called once with each warning about the workload. Raises what :func:`sweep` does.
    """
    runs = runs_of(options, axes)
    abouts = _check(runs)
    outcomes = _in_processes(runs, processes(options.jobs, len(runs)), progress or (lambda over, of: None))
    for warning in dict.fromkeys(outcome.warning for outcome in outcomes if outcome.warning is not None):
        warn(warning)
    rows = [
        {**run.settings, **about, **outcome.figures, **run.settings}
        for run, about, outcome in zip(runs, abouts, outcomes, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    rows = [{name: row.get(name) for name in names} for row in rows]
    if any(row.get(ERROR) == INTERRUPTED for row in rows):
        raise SweepInterrupted(rows)
    faults = [f"with {run}: {row[ERROR]}" for run, row in zip(runs, rows, strict=True) if row.get(ERROR) is not None]
    if faults:
        raise SweepFailed("; ".join(faults), rows)
    return rows


def processes(asked: int | None, runs: int) -> int:
    """Return the number of processes: at most ``asked``, the cores, and ``runs``; at least 1."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, runs, cores if asked is None else asked))


def _check(runs: Sequence[Run]) -> list[Row]:
    """Return each simulation's description. Raise ConfigError with each fault and its first combination."""
    faults: dict[str, Run] = {}
    abouts: list[Row] = []
    for run in runs:
        about: Row = {}
        try:
            about = described(run.options, prepare(run.options))
        except ConfigError as error:
            faults.setdefault(error.message, run)
        except Exception:  # noqa: S110  A policy of other people's; its simulation meets the error and reports it.
            pass
        abouts.append(about)
    if faults:
        raise ConfigError("; ".join(f"with {run}: {message}" for message, run in faults.items()))
    return abouts


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Figures of one simulation, or only ERROR where it failed, and a warning about its workload."""

    figures: Row
    warning: str | None = None


_DIED = "a process of the sweep died, perhaps for lack of memory: try fewer --jobs"


def _in_processes(runs: Sequence[Run], count: int, progress: Progress) -> list[_Outcome]:
    """Return outcomes in the order of the runs. A run whose input is invalid ends the others, and so does Ctrl-C."""
    before = set(multiprocessing.active_children())
    # Not forked: this process may have threads, such as that of the progress line.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))
    futures: list[Future[_Outcome]] = []
    try:
        futures += (pool.submit(_simulated, run) for run in runs)
        waiting: set[Future[_Outcome]] = set(futures)
        progress(0, len(runs))
        while waiting:
            over, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in over:
                _raise_invalid(future, runs[futures.index(future)])
            progress(len(runs) - len(waiting), len(runs))
        return [_ended(future) for future in futures]
    except KeyboardInterrupt:
        done = [_ended(future) if future.done() else _Outcome({ERROR: INTERRUPTED}) for future in futures]
        _stop(pool, before)
        return done + [_Outcome({ERROR: INTERRUPTED})] * (len(runs) - len(done))
    except BaseException:
        _stop(pool, before)
        raise
    finally:
        pool.shutdown()


def _stop(pool: ProcessPoolExecutor, before: set[BaseProcess]) -> None:
    """End the simulations that have not ended, with the processes that were not there before."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in set(multiprocessing.active_children()) - before:
        process.terminate()


def _ended(future: Future[_Outcome]) -> _Outcome:
    """Return the outcome of a simulation whose process ended, or died."""
    return _Outcome({ERROR: _DIED}) if future.exception() else future.result()


def _raise_invalid(future: Future[_Outcome], run: Run) -> None:
    error = future.exception()
    if isinstance(error, OperatorError | InvalidRequest):
        raise type(error)(f"with {run}: {error.message}") from error
    if error is not None and not isinstance(error, BrokenProcessPool):
        raise error


def _begin(parent: int) -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent does."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(*GC_THRESHOLDS)


def _simulated(run: Run) -> _Outcome:
    """Simulate one combination, in a process of the pool. Raises OperatorError or InvalidRequest for its input."""
    try:
        simulation = prepare(run.options)
        simulation.run()
    except (OperatorError, InvalidRequest):
        raise
    except Exception as error:  # Policies may be of other people, and raise anything.
        return _Outcome({ERROR: _told(error)})
    figures = simulation.figures()
    if not figures["requests"]:
        raise InvalidRequest("the workload holds no request")
    return _Outcome(_flat(figures), simulation.warning)


def _told(error: Exception) -> str:
    """Return one line about an error: its type, its text, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Row:
    """Return nested figures under joined names, such as ``ttft_ms_p50``."""
    row: Row = {}
    for name, value in figures.items():
        row |= _flat(value, f"{prefix}{name}_") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return row
