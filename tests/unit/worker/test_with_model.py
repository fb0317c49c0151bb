"""The executor on the real model runner: mixed chunks, decode and host loads equal Hugging Face's generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.detokenizer import Vocabulary
from shared.ids import chain_page, chain_root, namespace_digest
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import PageLoad
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import SHM_PREFIX
from tests.unit.worker.runners import runners_of

PAGE_SIZE = 8
ANSWER = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), seed=3)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    made: torch.nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return made


@pytest.fixture
def made(checkpoint: Path) -> Iterator[Driven]:
    with runners_of(lambda _: checkpoint, SHM_PREFIX) as load:
        runner = load("", page_size=PAGE_SIZE, dtype="float32")
        driven = Driven(runner, Vocabulary.from_directory(checkpoint), submit=None)
        yield driven
        driven.close()


def greedy(reference: Any, prompt: list[int], count: int = ANSWER) -> list[int]:
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def prompt_of(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(6, VOCAB_SIZE, length).tolist()
    return tokens


def settings() -> SamplingParams:
    # Like generate with min_new_tokens: the end is not to be chosen.
    return SamplingParams(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0)


def test_mixed_steps_equal_generate(made: Driven, reference: torch.nn.Module) -> None:
    """Three prompts in unequal chunks on shuffled pages, joined while others decode."""
    pages = np.random.default_rng(5).permutation(128).tolist()
    prompts = {f"r{number}": prompt_of(length, number) for number, length in enumerate((37, 5, 61))}
    for name, prompt in prompts.items():
        needed = -(-(len(prompt) + ANSWER) // PAGE_SIZE)
        made.give(admit(prompt, pages[:needed], request_id=name, params=settings()))
        pages = pages[needed:]
    for chunks in (
        [chunk(0, 20, request_id="r0")],
        [chunk(20, 37, request_id="r0"), chunk(0, 3, request_id="r1")],
        [chunk(3, 5, request_id="r1"), chunk(0, 30, request_id="r2")],
        [chunk(30, 61, request_id="r2")],
    ):
        made.give(batch(*chunks))

    made.run()

    for name, prompt in prompts.items():
        assert made.tokens(name) == greedy(reference, prompt)


@pytest.mark.parametrize("fill_bubble", [False, True])
def test_a_prefix_loaded_from_the_host_pool_equals_a_computed_one(
    made: Driven, reference: torch.nn.Module, fill_bubble: bool
) -> None:
    """Four pages are backed up, loaded to other device pages while another request decodes, and continued."""
    prompt, other = prompt_of(43, 7), prompt_of(9, 8)
    made.give(admit(prompt, range(10), request_id="first", params=settings()), batch(chunk(0, 43, request_id="first")))
    made.run()
    host = made.host_pool(6)
    identity = chain_root(namespace_digest("model"))
    identities = []
    halves = made.runner.pool.bytes_view()
    for index, page in enumerate((4, 0, 5, 2)):
        identity = chain_page(identity, pack_int32(prompt[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]))
        identities.append(identity)
        host.pages[page] = np.concatenate((halves[:, 0, index], halves[:, 1, index]), axis=1)
        host.seal_page(page, identity)
    made.give(admit(other, range(40, 50), request_id="beside", params=settings()))
    made.give(batch(chunk(0, 9, request_id="beside")))
    made.run(most=3)

    made.give(
        admit(prompt, [77, 71, 99, 60, *range(100, 110)], request_id="second", cached=32, params=settings()),
        batch(
            chunk(32, 43, request_id="second"),
            fill_bubble=fill_bubble,
            loads=[
                PageLoad(
                    request_id="second",
                    attempt=1,
                    storage_id="s",
                    host_pages=pack_int32([4, 0, 5, 2]),
                    device_pages=pack_int32([77, 71, 99, 60]),
                    identities=b"".join(identities),
                )
            ],
        ),
    )
    made.run()

    assert made.done()[-1].failed == ()
    assert made.executor.counters.pages_loaded == 4
    assert made.tokens("second") == made.tokens("first") == greedy(reference, prompt)
    assert made.tokens("beside") == greedy(reference, other)


@pytest.mark.parametrize("slice_rows", [5, 1000])
def test_prompt_logprobs_are_those_of_the_whole_prompt(
    made: Driven, reference: torch.nn.Module, slice_rows: int
) -> None:
    """Over several chunks, and over pieces of a chunk where logits are bounded."""
    prompt = prompt_of(29, 9)
    made.executor._passes._computer._slice_rows = slice_rows
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=3, ignore_eos=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    made.give(admit(prompt, range(5), params=params), batch(chunk(0, 12)), batch(chunk(12, 29)))

    made.run()

    first, second = made.items()
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(prompt)
    for position, scored in enumerate(first.prompt_logprobs[1:], 1):
        assert scored is not None
        assert scored.token == prompt[position]
        assert scored.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-3)
        assert len(scored.top) == 3
        row = expected[position - 1]
        assert scored.rank == 1 + int((row > row[prompt[position]]).sum())
        assert scored.top[0][1] == pytest.approx(expected[position - 1].max().item(), abs=1e-3)
    assert first.logprobs[0].logprob == pytest.approx(expected[-1].max().item(), abs=1e-3)
    assert unpack_int32(made.finished()[0].output) == made.tokens()


@pytest.mark.parametrize("cut", [1, 9, 17])
def test_a_seeded_answer_resumes_alike(made: Driven, cut: int) -> None:
    """Sampled, with penalties and a seed: the answer cut anywhere and resumed is the answer uncut."""
    prompt = prompt_of(21, 11)
    params = SamplingParams(
        max_tokens=ANSWER, temperature=1.3, top_p=0.95, seed=1234, presence_penalty=0.5, ignore_eos=True
    )
    made.give(admit(prompt, range(8), request_id="whole", params=params), batch(chunk(0, 21, request_id="whole")))
    made.run()
    answer = made.tokens("whole")
    known = prompt + answer[:cut]

    made.give(admit(known, range(20, 28), attempt=2, prompt_tokens=21, params=params))
    made.give(batch(chunk(0, len(known), attempt=2)))
    made.run()

    assert made.tokens() == answer[cut:]
    assert unpack_int32(made.finished()[-1].output) == answer
