"""Direct saving writes what two-stage saving keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.direct_saving import DirectSaver
from services.worker.restore.saving_step import SavedRows
from tests.checkpoints import make_checkpoint
from tests.engine_driver import Request, random_prompt, run_step
from tests.run_name import shm_prefix
from tests.unit.worker.restore.saved import saving, shape_of
from tests.unit.worker.runners import LoadRunner, runners_of


@pytest.fixture
def load_runner(tmp_path: Path) -> Iterator[LoadRunner]:
    with runners_of(lambda family: make_checkpoint(family, tmp_path / family), shm_prefix("restore")) as load:
        yield load


@pytest.mark.parametrize("past_page_cache", [False, True])
def test_both_ways_save_the_same(past_page_cache: bool, load_runner: LoadRunner, tmp_path: Path) -> None:
    """Every row of every layer lies where its token and layer say."""
    runner = load_runner("llama")
    table = np.arange(10, dtype=np.int32)
    direct = DirectSaver(shape_of(runner), tmp_path, max_tokens=80, past_page_cache=past_page_cache)
    with saving(runner) as at:
        one = Request(random_prompt(60, seed=1), table)
        at.saver.begin("r", 0)
        for count in (40, 1, 19):
            rows = [SavedRows("r", 0, count, one.computed)]
            direct.set_rows(rows)
            with at.saver.step() as step, step.around(rows, at.inputs), at.inputs.given_to(direct):
                run_step(runner, [(one, count)])
        at.saver.end("r")
    direct.close()

    (piece,) = at.shelf.pieces
    for layer in range(runner.geometry.layers):
        kept = torch.from_numpy(piece.layer_rows(layer)).view(torch.float32)
        assert torch.equal(direct.read("r", layer, 0, 60), kept)
