"""What one turn of a conversation leaves in hidden pages is what the next turns are restored from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.projection import KvProjection
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import HiddenLease, RestoreChunk
from tests.engine_driver import page_tables, random_prompt
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.saved_hidden import hidden_lease, identities_of

LoadRunner = Callable[..., ModelRunner]

ANSWER, PAGE = 60, 16


class Conversation:
    """Turns on device pages that nobody had before, so that each has all of its context from hidden pages or tokens."""

    def __init__(self, runner: ModelRunner, words: Vocabulary, form: tuple[int, int]) -> None:
        self.driven = Driven(runner, words, submit=None, projection=KvProjection(runner))
        self.tables = page_tables(runner, [400] * 6, seed=3)
        geometry = hidden_geometry(runner.geometry, *form, int(runner.model.config.hidden_size))
        self.driven.host_pool(16, geometry=geometry)
        self.tokens: list[int] = []
        self.turns = 0

    def ask(self, prompt: list[int], table: np.ndarray, restored: int, lease: HiddenLease | None) -> list[int]:
        """The answer to ``prompt``, of which so many tokens are restored, a chunk of 64 a batch, and the rest computed
        in two chunks.
        """
        self.turns += 1
        name = f"turn {self.turns}"
        params = SamplingParams(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0)
        self.driven.give(admit(prompt, table.tolist(), request_id=name, params=params, hidden_lease=lease))
        for start in range(0, restored, 64):
            self.driven.give(batch(restores=[self._restore(name, prompt, start)]))
        middle = (restored + len(prompt)) // 2
        self.driven.give(batch(chunk(restored, middle, request_id=name)))
        self.driven.give(batch(chunk(middle, len(prompt), request_id=name)))
        self.driven.run()
        assert not any(done.failed for done in self.driven.done())
        return self.driven.tokens(name)

    def _restore(self, name: str, prompt: list[int], start: int) -> RestoreChunk:
        pages = range(start // PAGE, (start + 64) // PAGE)
        identities = identities_of(prompt, PAGE)
        return RestoreChunk(
            request_id=name,
            attempt=1,
            start=start,
            end=start + 64,
            storage_id="s",
            hidden_pages=pack_int32(pages),
            identities=b"".join(identities[page] for page in pages),
        )


@pytest.mark.parametrize(
    ("family", "form"), [("llama_mha", (0, 3)), ("llama_mha", (1, 0)), ("qwen3", (1, 2)), ("opt", (0, 2))]
)
def test_turns_of_a_conversation(
    family: str,
    form: tuple[int, int],
    load_runner: LoadRunner,
    checkpoint_of: Callable[[str], Path],
) -> None:
    """Three turns, each restored from what those before have saved, answer as if everything had been computed.

    In float32: what was decoded once and is prefilled in the cold turns rounds alike only there.
    """
    runner = load_runner(family, tokens=2560)
    words = Vocabulary.from_directory(checkpoint_of(family))
    talk = Conversation(runner, words, form)
    first, second, third = random_prompt(110, seed=4), random_prompt(40, seed=5), random_prompt(30, seed=6)

    leases = [hidden_lease(first, range(8), PAGE)]
    prompt = first
    answers = [talk.ask(prompt, talk.tables[0], 0, leases[0])]
    prompt = [*prompt, *answers[0], *second]
    # Of 169 tokens with KV two chunks were saved: the next turn saves from there on.
    leases.append(hidden_lease(prompt, range(8, 16), PAGE, depth=128, lease_id=2))
    answers.append(talk.ask(prompt, talk.tables[1], 128, leases[1]))
    prompt = [*prompt, *answers[1], *third]
    answers.append(talk.ask(prompt, talk.tables[2], 256, None))
    runner.pool.tensor.fill_(float("nan"))
    cold = [
        talk.ask(prompt[: len(prompt) - 30 - ANSWER], talk.tables[3], 0, None),
        talk.ask(prompt, talk.tables[4], 0, None),
    ]

    assert [(saved.lease_id, saved.chunks) for saved in talk.driven.hidden_saved()] == [(1, 2), (2, 2)]
    assert answers[1:] == cold
    assert talk.driven.executor.counters.tokens_restored == 128 + 256
    assert torch.isnan(runner.pool.tensor).any()
    talk.driven.close()
