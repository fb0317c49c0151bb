"""Adapters come to a worker by orders: read beside its steps, served between two of them, and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.worker.adapter_loading import AdapterBounds, NoAdapters, WorkerAdapters
from services.worker.bootstrap import make_adapters
from services.worker.config import WorkerConfig
from services.worker.engine.model_runner import ModelRunner
from services.worker.inbox import Inbox
from shared.adapters import read_adapter
from shared.messages.worker_events import AdapterAttached
from shared.messages.worker_plans import AttachAdapter, DetachAdapter
from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.driven_executor import Driven, admit
from tests.unit.worker.fake_model import FakeRunner
from tests.unit.worker.runners import runners_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of rank 4."""
    return [make_adapter(checkpoint, tmp_path_factory.mktemp(f"adapter-{seed}"), seed=seed) for seed in range(3)]


@pytest.fixture
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    with runners_of(lambda family: checkpoint, shm_prefix("adapters")) as load:
        yield load("llama")


def order(folder: Path, number: int = 1) -> AttachAdapter:
    return AttachAdapter(attach_id=number, digest=read_adapter(folder).digest, path=str(folder))


class Held:
    """Work that runs when a test says so, as a thread of its own would."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.wakes = 0

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    def wake(self) -> None:
        self.wakes += 1


def adapters(runner: ModelRunner, held: Held, **bounds: int) -> WorkerAdapters:
    return WorkerAdapters(runner.adapters, AdapterBounds(**bounds), held.wake, held.submit)


def test_an_adapter_is_served_once_it_was_read(runner: ModelRunner, folders: list[Path]) -> None:
    """Nothing is said before, and the compute thread is woken for it."""
    held = Held()
    own, asked = adapters(runner, held), order(folders[0], 7)
    own.attach(asked)
    assert own.settle() == []
    assert not own.serves(asked.digest)

    held.run()

    assert (own.has_news, held.wakes) == (True, 1)
    (attached,) = own.settle()
    assert (attached.order.attach_id, attached.fault) == (7, "")
    assert own.serves(asked.digest)
    assert not own.has_news


def test_one_that_is_detached_while_it_is_read_is_never_served(runner: ModelRunner, folders: list[Path]) -> None:
    """Its order is answered no more; a later one for the same adapter is."""
    held = Held()
    own, first, second = adapters(runner, held), order(folders[0], 1), order(folders[0], 2)
    own.attach(first)
    own.detach(DetachAdapter(digest=first.digest))
    own.attach(second)

    held.run()

    assert [(each.order.attach_id, each.fault) for each in own.settle()] == [(2, "")]


def test_bounds_are_told(runner: ModelRunner, folders: list[Path]) -> None:
    """Of their number, their ranks and their bytes; what is detached makes room."""
    held = Held()
    nbytes = read_adapter(folders[0]).nbytes
    own = adapters(runner, held, most=2, most_bytes=3 * nbytes // 2)
    first, second, third = (order(folder, number) for number, folder in enumerate(folders))
    for each in (first, second):
        own.attach(each)
    held.run()
    assert [each.fault for each in own.settle()] == [
        "",
        f"it takes {nbytes} bytes, and {nbytes // 2} of {3 * nbytes // 2} are left (--adapter-bytes)",
    ]

    own.detach(DetachAdapter(digest=first.digest))
    own.attach(second)
    held.run()

    assert [each.fault for each in own.settle()] == [""]
    few = adapters(runner, held, most=0)
    few.attach(third)
    low = adapters(runner, held, most_rank=3)
    low.attach(third)
    held.run()
    assert [each.fault for each in few.settle()] == ["0 adapters are loaded already (--max-adapters)"]
    assert [each.fault for each in low.settle()] == ["its rank 4 is above 3 (--max-adapter-rank)"]


def test_what_lacks_room_is_told_from_what_never_fits(runner: ModelRunner, folders: list[Path]) -> None:
    """The scheduler orders the first again when another has left; the adapter that is replaced does not count."""
    held = Held()
    nbytes = read_adapter(folders[0]).nbytes
    own = adapters(runner, held, most=1)
    first, second = order(folders[0], 1), order(folders[1], 2)
    told = []
    for each in (first, second, msgspec.structs.replace(second, attach_id=3, replaces=first.digest)):
        own.attach(each)
        held.run()
        told += [(answer.order.attach_id, bool(answer.fault), answer.lacks_room) for answer in own.settle()]
    small = adapters(runner, held, most_bytes=nbytes - 1)
    small.attach(first)
    full = adapters(runner, held, most_bytes=3 * nbytes // 2)
    full.attach(first)
    held.run()
    full.settle()
    full.attach(msgspec.structs.replace(second, replaces=first.digest))
    held.run()

    assert told == [(1, False, False), (2, True, True), (3, False, False)]
    assert [(bool(each.fault), each.lacks_room) for each in small.settle()] == [(True, False)]
    assert [(bool(each.fault), each.lacks_room) for each in full.settle()] == [(True, True)]


def test_files_that_changed_are_refused(runner: ModelRunner, checkpoint: Path, tmp_path: Path) -> None:
    """What lies there now has another digest than what was asked for."""
    held = Held()
    own, folder = adapters(runner, held), make_adapter(checkpoint, tmp_path / "adapter")
    asked = order(folder)
    make_adapter(checkpoint, folder, seed=5)
    own.attach(asked)
    gone = AttachAdapter(attach_id=2, digest="0" * 32, path=str(tmp_path / "nowhere"))
    own.attach(gone)

    held.run()

    changed, missing = own.settle()
    assert "have changed since it was asked for" in changed.fault
    assert "holds no readable adapter_config.json" in missing.fault
    assert not own.serves(asked.digest)


def test_a_thread_of_its_own_reads(runner: ModelRunner, folders: list[Path]) -> None:
    """Orders return at once, and end when it ends."""
    held, asked = Held(), order(folders[0])
    own = WorkerAdapters(runner.adapters, AdapterBounds(), held.wake)
    own.attach(asked)
    assert own._thread is not None

    own._thread.shutdown(wait=True)

    assert [each.fault for each in own.settle()] == [""]
    own.close()


def test_a_worker_that_serves_none_says_why() -> None:
    """Every order is answered, unless it was taken back."""
    own = NoAdapters("it cannot")
    for number in (1, 2):
        own.attach(AttachAdapter(attach_id=number, digest=str(number) * 32, path="folder"))
    own.detach(DetachAdapter(digest="1" * 32))
    assert own.has_news

    assert [(each.order.attach_id, each.fault) for each in own.settle()] == [(2, "it cannot")]

    assert not own.serves("2" * 32)
    own.close()


def test_a_worker_without_adapters_answers_every_order() -> None:
    """An order is refused, and so is a request that names an adapter: it would get the base model's answer."""
    driven = Driven()
    driven.give(
        AttachAdapter(attach_id=3, digest="1" * 32, path="folder"),
        DetachAdapter(digest="2" * 32),
        msgspec.structs.replace(admit([20, 21], [0]), adapter="1" * 32),
    )

    driven.run()

    (attached,) = [event for event in driven.events if isinstance(event, AdapterAttached)]
    (ended,) = driven.finished()
    assert (attached.attach_id, attached.fault) == (3, "this worker serves no adapters")
    assert (ended.reason, ended.error) == ("error", f"adapter {'1' * 32} is not loaded")
    driven.close()


def test_a_group_and_exact_mode_say_why_they_serve_none(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their workers join all the same."""
    config, inbox = WorkerConfig(model="m"), Inbox()
    asked = AttachAdapter(attach_id=1, digest="1" * 32, path="folder")
    for made, reason in ((cast("Any", FakeRunner()), "a tensor-parallel group"), (runner, "--exact")):
        monkeypatch.setattr(ModelRunner, "is_exact", True)
        own = make_adapters(config, made, inbox)
        own.attach(asked)

        assert own.settle()[0].fault.startswith(reason)

        made.close()
