"""A worker measures what restoring costs at its first start, so that hidden states are kept without a manual step."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from msgspec import structs

from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers.choice import machine_here
from services.worker.restore import first_measure
from services.worker.restore.figures import RestorationProfile
from services.worker.restore.first_measure import FILE_NAME, cache_path, first_costs
from services.worker.restore.measured_costs import costs_of_first_start, measured_costs, prove_projection
from shared.errors import ConfigError
from tests.unit.worker.restore.test_measured_costs import FIGURE, HERE, IMPOSSIBLE, MEASURED

LoadRunner = Callable[..., ModelRunner]

MACHINE = machine_here()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's user is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class _Measuring:
    """Returns what it is told to, and counts."""

    def __init__(self, found: RestorationProfile | Exception = MEASURED) -> None:
        self.count = 0
        self._found = found

    def __call__(self, said: Callable[[str], None]) -> RestorationProfile:
        self.count += 1
        said("a prefix")
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@pytest.mark.parametrize("family", ["llama_mha", "opt"])
def test_a_first_start_measures_and_the_next_one_remembers(family: str, load_runner: LoadRunner) -> None:
    """For real, with a model of multi-head attention: no profile is there, and costs are."""
    runner = load_runner(family)
    projection = prove_projection(runner)
    assert measured_costs(None, runner, projection, threads=1) is None

    first = costs_of_first_start(runner, projection, threads=1)
    again = costs_of_first_start(runner, projection, threads=1)

    assert first is not None
    assert projection is not None
    assert first.hidden == projection.shape.hidden
    assert min(first.hidden_us, first.link_bytes_per_us) > 0
    assert again == first
    assert [path.name for path in cache_path().parent.glob("*.json")] == [FILE_NAME]


def test_models_whose_hidden_states_save_nothing_are_not_measured(load_runner: LoadRunner) -> None:
    """Under grouped queries, or where KV does not follow from hidden states."""
    runner = load_runner("llama")

    assert costs_of_first_start(runner, prove_projection(runner), threads=1) is None
    assert costs_of_first_start(load_runner("llama_mha"), None, threads=1) is None
    assert not cache_path().exists()


def test_what_is_remembered_holds_for_this_model_on_this_machine() -> None:
    """Another is measured, and forgets nothing."""
    other = structs.replace(MEASURED, model_bytes=2000)
    measure, measure_other, elsewhere = _Measuring(), _Measuring(other), _Measuring()

    assert first_costs(HERE, MACHINE, measure) is not None
    assert first_costs(structs.replace(other, figures=()), MACHINE, measure_other) is not None
    assert first_costs(HERE, MACHINE, measure) is not None
    assert first_costs(HERE, structs.replace(MACHINE, cores=999), elsewhere) is not None

    assert (measure.count, measure_other.count, elsewhere.count) == (1, 1, 1)


@pytest.mark.parametrize("content", ["", "{}", '{"version": 3, "machine": null}'])
def test_a_damaged_memory_is_measured_anew(content: str) -> None:
    """Whatever stands in the file."""
    cache_path().parent.mkdir(parents=True)
    cache_path().write_text(content)
    measure = _Measuring()

    assert first_costs(HERE, MACHINE, measure) is not None
    assert first_costs(HERE, MACHINE, measure) is not None
    assert measure.count == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"figures": ()},
        *({"figures": (structs.replace(FIGURE, **{name: value}),)} for name, value in IMPOSSIBLE),
    ],
)
def test_a_damaged_entry_is_measured_again(damage: dict[str, Any]) -> None:
    """The log names the file, and the entry is replaced."""
    first_costs(HERE, MACHINE, _Measuring())
    whole = cache_path().read_bytes()
    file = msgspec.json.decode(whole)
    file["restorations"] = [msgspec.to_builtins(structs.replace(MEASURED, **damage))]
    cache_path().write_bytes(msgspec.json.encode(file))
    measure = _Measuring()

    with structlog.testing.capture_logs() as lines:
        costs = first_costs(HERE, MACHINE, measure)

    assert costs is not None
    assert measure.count == 1
    assert cache_path().read_bytes() == whole
    assert [line["path"] for line in lines if line["event"] == "restoration_forgotten"] == [str(cache_path())]


def test_a_measurement_that_gives_no_costs_is_not_remembered() -> None:
    """The worker serves without them."""
    with structlog.testing.capture_logs() as lines:
        costs = first_costs(HERE, MACHINE, _Measuring(structs.replace(MEASURED, figures=())))

    assert costs is None
    assert [line["event"] for line in lines] == ["restoration_not_measured"]
    assert not cache_path().exists()


@pytest.mark.parametrize("error", [ConfigError("no room"), RuntimeError("CUDA out of memory")])
def test_a_model_that_cannot_be_measured_is_served_all_the_same(error: Exception) -> None:
    """Without costs, and with the reason in the log; nothing is remembered."""
    with structlog.testing.capture_logs() as lines:
        assert first_costs(HERE, MACHINE, _Measuring(error)) is None

    (line,) = [line for line in lines if line["event"] == "restoration_not_measured"]
    assert str(error) in line["reason"]
    assert not cache_path().exists()


def test_a_cache_that_cannot_be_written_costs_another_measurement(tmp_path: Path) -> None:
    """Its folder is a file."""
    (tmp_path / "file").write_text("")
    measure = _Measuring()

    for _ in range(2):
        assert first_costs(HERE, MACHINE, measure, path=tmp_path / "file" / "x.json") is not None

    assert measure.count == 2


def test_workers_that_start_together_measure_once(tmp_path: Path) -> None:
    """The second one waits until the first has measured, and takes what it found."""
    path = tmp_path / "x.json"
    gate, measures = threading.Event(), [_Measuring(), _Measuring()]

    def slow(said: Callable[[str], None]) -> RestorationProfile:
        assert gate.wait(30.0)
        return measures[0](said)

    threads = [threading.Thread(target=first_costs, args=(HERE, MACHINE, slow), kwargs={"path": path})]
    threads[0].start()
    while not path.with_suffix(".lock").exists() or _is_free(path.with_suffix(".lock")):
        pass
    threads.append(threading.Thread(target=first_costs, args=(HERE, MACHINE, measures[1]), kwargs={"path": path}))
    threads[1].start()
    gate.set()
    for thread in threads:
        thread.join()

    assert [measure.count for measure in measures] == [1, 0]


def test_a_worker_that_measures_for_ever_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded."""
    monkeypatch.setattr(first_measure, "WAIT_S", 0.0)
    lock = os.open(tmp_path / "x.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert first_costs(HERE, MACHINE, _Measuring(), path=tmp_path / "x.json") is not None
    finally:
        os.close(lock)


def _is_free(path: Path) -> bool:
    """Whether nobody has the lock; takes it for a moment."""
    lock = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
