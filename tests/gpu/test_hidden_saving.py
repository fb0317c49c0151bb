"""Hidden states saved on a GPU: rows leave by copies on a stream of their own, and pages hold the same bits as the
device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.projection import KvProjection
from services.worker.restore.snapshot_ring import Snapshot
from shared.hidden_forms import hidden_geometries
from shared.messages.requests import SamplingParams
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.engine_driver import random_prompt
from tests.run_name import shm_prefix
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.restore.saved_hidden import Witness, assert_saved, hidden_lease

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PAGE_SIZE = 16


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Every family."""
    return make_checkpoint(request.param, tmp_path)


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, checkpoint: Path) -> ModelRunner:
    """A runner on the GPU in every dtype; whoever drives it closes it."""
    return ModelRunner.load(
        checkpoint, dtype=request.param, device="cuda", page_size=PAGE_SIZE, device_kv_bytes=None, pages=64,
        threads=0, shm_prefix=shm_prefix("saving"),
    )  # fmt: skip


def test_pages_hold_what_the_device_holds(runner: ModelRunner, checkpoint: Path) -> None:
    """In every form, in chunks and decode steps beside another request: hidden states, K and V, bit by bit."""
    projection = KvProjection(runner)
    made = Driven(runner, Vocabulary.from_directory(checkpoint), projection=projection, hidden_submit=None)
    try:
        witness = Witness(runner)
        for number, form in enumerate(hidden_geometries(runner.geometry, projection.shape.hidden)):
            _save_one(made, witness, number, form)
    finally:
        made.close()


def test_copies_that_are_late_hold_what_their_layer_saw(
    runner: ModelRunner, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy link copies a layer's rows some ten milliseconds after the next layers were computed."""
    send = Snapshot._send

    def send_late(self: Snapshot, into: torch.Tensor, gathered: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        send(self, into, gathered)

    monkeypatch.setattr(Snapshot, "_send", send_late)
    test_pages_hold_what_the_device_holds(runner, checkpoint)


def _save_one(made: Driven, witness: Witness, number: int, form: object) -> None:
    runner = made.runner
    host = made.host_pool(12, geometry=form)  # type: ignore[arg-type]
    prompt, other = random_prompt(150, seed=number), random_prompt(60, seed=1000 + number)
    table, pages = list(range(20, 4, -1)), [3, 1, 2, 0, 11, 10, 9, 8, 7, 6, 5, 4]
    lease = hidden_lease(prompt, pages, PAGE_SIZE, lease_id=number)
    settings = SamplingParams(max_tokens=60, min_tokens=60, temperature=0, ignore_eos=True)
    name, beside = f"r{number}", f"b{number}"
    made.give(
        admit(other, range(40, 50), request_id=beside, params=settings),
        admit(prompt, table, request_id=name, params=settings, hidden_lease=lease),
        batch(chunk(0, 60, request_id=beside), chunk(0, 70, request_id=name)),
        batch(chunk(70, 150, request_id=name)),
    )

    made.run()
    made.saving.end_all()
    made.executor._post()

    saved = made.hidden_saved()[-1]
    assert (saved.lease_id, saved.chunks) == (number, 3)
    assert_saved(host, saved, lease, pages, prompt + made.tokens(name), table, runner, witness)
