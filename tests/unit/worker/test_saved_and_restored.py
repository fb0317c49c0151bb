"""What one request's steps have saved, another one's KV is restored from, and its own steps go on saving behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.projection import KvProjection
from shared.chunks import chunk_pages
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import RestoreChunk
from tests.engine_driver import random_prompt
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.importance.conftest import checkpoint_of, load_runner
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.saved import kv_of
from tests.unit.worker.restore.saved_hidden import Witness, assert_saved, hidden_lease, identities_of

__all__ = ["checkpoint_of", "load_runner"]

GREEDY = SamplingParams(max_tokens=45, min_tokens=45, temperature=0, ignore_eos=True)


@pytest.fixture
def drive(load_runner: Callable[..., ModelRunner], checkpoint_of: Callable[[str], Path]) -> Iterator[object]:
    """An executor on a family, closed at the end of the test."""
    made: list[Driven] = []

    def start(family: str, page_size: int) -> Driven:
        runner = load_runner(family, page_size=page_size)
        words = Vocabulary.from_directory(checkpoint_of(family))
        made.append(Driven(runner, words, projection=KvProjection(runner)))
        return made[-1]

    yield start
    for driven in made:
        driven.close()


@pytest.mark.parametrize(
    ("family", "form", "page_size"),
    [("llama_mha", (1, 1), 16), ("llama_mha", (0, 3), 64), ("llama", (1, 0), 1), ("opt", (0, 2), 32)],
)
def test_a_saved_prefix_comes_back(
    drive: Callable[[str, int], Driven], family: str, form: tuple[int, int], page_size: int
) -> None:
    """The KV is the same bit by bit, so is the answer; the lease behind the restored run holds what was computed."""
    made = drive(family, page_size)
    runner = made.runner
    witness = Witness(runner)
    geometry = hidden_geometry(runner.geometry, *form, int(runner.model.config.hidden_size))
    per_chunk, tokens_a_page = chunk_pages(page_size), page_size
    host = made.host_pool(3 * per_chunk, geometry=geometry)
    pages = np.random.default_rng(2).permutation(3 * per_chunk).tolist()
    numbers = np.random.default_rng(3).permutation(runner.pool.pages).tolist()
    needed = -(-195 // tokens_a_page)
    first, second = numbers[:needed], numbers[needed : 2 * needed]
    prompt = random_prompt(150, seed=4)
    lease = hidden_lease(prompt, pages[: 2 * per_chunk], page_size)
    made.give(admit(prompt, first, request_id="first", params=GREEDY, hidden_lease=lease))
    made.give(batch(chunk(0, 70, request_id="first")), batch(chunk(70, 150, request_id="first")))
    made.run()
    (saved,) = made.hidden_saved()
    assert saved.chunks == 2

    behind = hidden_lease(prompt, pages[2 * per_chunk :], page_size, depth=128, lease_id=2)
    restores = [
        RestoreChunk(
            request_id="second",
            attempt=1,
            start=start,
            end=start + 64,
            storage_id="s",
            hidden_pages=pack_int32(pages[start // page_size : (start + 64) // page_size]),
            identities=b"".join(identities_of(prompt, page_size)[start // page_size : (start + 64) // page_size]),
            recomputed=geometry.absent,
        )
        for start in (0, 64)
    ]
    made.give(admit(prompt, second, request_id="second", params=GREEDY, hidden_lease=behind))
    made.give(*(batch(restores=[each]) for each in restores), batch(chunk(128, 150, request_id="second")))
    made.run()

    assert [done.failed for done in made.done()] == [()] * 5
    assert made.tokens("second") == made.tokens("first")
    assert torch.equal(kv_of(runner, np.array(first), 128), kv_of(runner, np.array(second), 128))
    _, again = made.hidden_saved()
    assert again.chunks == 1
    answered = prompt + made.tokens("second")
    assert_saved(host, again, behind, pages[2 * per_chunk :], answered, second, runner, witness)
