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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from shared.errors import ConfigError, InvalidRequest, OperatorError
from shared.lifecycle import die_with_parent
from thermocline.simulate.__main__ import GC_THRESHOLDS, described, parse, prepare
from thermocline.simulate.axes import Axis, Row, Run, read_axes, runs_of

Progress = Callable[[int, int], None]
"""Called with the number of finished simulations, and of all."""


def sweep(assignments: Iterable[str], arguments: Sequence[str] = (), *, jobs: int | None = None) -> list[Row]:
    """Simulate every combination of ``KEY=A,B`` texts; ``arguments`` are other flags of ``thermocline simulate``.

    Programs that call this need the guard ``if __name__ == "__main__"``, because processes import them; notebooks
    don't. Raises ConfigError or InvalidRequest for invalid settings, profiles or traces.
    """
    options = parse([*arguments, *(["--jobs", str(jobs)] if jobs is not None else []), "--sweep", *assignments])
    return sweep_rows(options, read_axes(options.sweep))


def sweep_rows(options: argparse.Namespace, axes: Sequence[Axis], progress: Progress | None = None) -> list[Row]:
    """Run every combination; return rows in the order of :func:`runs_of`, all with the same keys."""
    runs = runs_of(options, axes)
    _check(runs)
    rows = _in_processes(runs, processes(options.jobs, len(runs)), progress or (lambda over, of: None))
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def processes(asked: int | None, runs: int) -> int:
    """Return the number of processes: at most ``asked``, the cores, and ``runs``; at least 1."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, runs, cores if asked is None else asked))


def _check(runs: Sequence[Run]) -> None:
    """Raise ConfigError with each fault and its first combination, before any simulation."""
    faults: dict[str, Run] = {}
    for run in runs:
        try:
            prepare(run.options)
        except ConfigError as error:
            faults.setdefault(error.message, run)
    if faults:
        raise ConfigError("; ".join(f"with {run}: {message}" for message, run in faults.items()))


def _in_processes(runs: Sequence[Run], count: int, progress: Progress) -> list[Row]:
    """Return rows in the order of the runs. The first run that fails ends the others."""
    before = set(multiprocessing.active_children())
    # Not forked: this process may have threads, such as that of the progress line.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))
    try:
        futures = [pool.submit(_row, run) for run in runs]
        waiting: set[Future[Row]] = set(futures)
        progress(0, len(runs))
        while waiting:
            over, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in over:
                _raise_failure(future, runs[futures.index(future)])
            progress(len(runs) - len(waiting), len(runs))
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown()


def _raise_failure(future: Future[Row], run: Run) -> None:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise OperatorError("a process of the sweep died, perhaps for lack of memory: try fewer --jobs") from error
    if isinstance(error, OperatorError | InvalidRequest):
        raise type(error)(f"with {run}: {error.message}") from error
    if error is not None:
        raise error


def _begin(parent: int) -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent does."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(*GC_THRESHOLDS)


def _row(run: Run) -> Row:
    """Simulate one combination, in a process of the pool."""
    simulation = prepare(run.options)
    simulation.run()
    figures = simulation.figures()
    if not figures["requests"]:
        raise InvalidRequest("the workload holds no request")
    return {**run.settings, **described(run.options, simulation), **_flat(figures), **run.settings}


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Row:
    """Return nested figures under joined names, such as ``ttft_ms_p50``."""
    row: Row = {}
    for name, value in figures.items():
        row |= _flat(value, f"{prefix}{name}_") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return row
