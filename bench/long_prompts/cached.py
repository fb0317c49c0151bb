"""Prompts of which all but the end is on the device, and prompts seen for the first time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.long_prompts.asking import Asker, AskFailed, Messages, Sample
from bench.long_prompts.figures import of_samples, ratio
from bench.long_prompts.model import Texts
from bench.long_prompts.servers import BEFORE, NOW, VLLM
from bench.peers.processor_time import used_s
from bench.peers.rounds import turned

QUESTION_TOKENS = 24
PAUSE_S = 0.2
"""Between two questions: threads of the one before wait in a loop for a while."""

TTFT_MS, OVER_VLLM, FIRST_SEEN = 25.0, 8.0, 0.97
"""Targets: of the longest prompt, and of what a prompt seen for the first time cost before over what it costs now."""

NEW_AT_MOST = 1024
"""Tokens that a server may compute of a prompt that counts as cached: a question, and a block that is not full."""


def asking(document: str, question: str) -> Messages:
    """A document that is asked about."""
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


async def cached(
    askers: Mapping[str, Asker], texts: Texts, sizes: Sequence[int], rounds: int
) -> dict[str, dict[str, Any]]:
    """Figures by size; every server is asked once a round about the same document, in an order that turns."""
    found: dict[str, dict[str, Any]] = {}
    for size in sizes:
        document = texts.text(size)
        samples: dict[str, list[Sample]] = {name: [] for name in askers}
        for name in askers:
            for _ in range(2):  # The second finds out whether the document is there, and warms up.
                sample = await askers[name].ask(asking(document, texts.text(QUESTION_TOKENS)))
            print(f"{size}: {name} has it", flush=True)
        for number in range(rounds):
            question = texts.text(QUESTION_TOKENS)
            for name in turned(list(askers), number):
                await asyncio.sleep(PAUSE_S)
                sample = await askers[name].ask(asking(document, question))
                if sample.cached_tokens < sample.prompt_tokens - NEW_AT_MOST:
                    raise AskFailed(f"{name} had {sample.cached_tokens} of {sample.prompt_tokens} tokens")
                samples[name].append(sample)
        found[str(size)] = {name: of_samples(each) for name, each in samples.items()}
        print(size, {name: row["ttft_ms"] for name, row in found[str(size)].items()}, flush=True)
    longest = str(max(sizes))
    found[longest][NOW]["target_cached_ttft_p50_ms"] = TTFT_MS
    if VLLM in askers:
        medians = {name: found[longest][name]["ttft_ms"]["p50"] for name in (VLLM, NOW)}
        found[longest][f"TTFT of {longest} cached tokens, vLLM over ours"] = ratio(
            medians[VLLM], medians[NOW], OVER_VLLM
        )
    return found


async def first_seen(
    askers: Mapping[str, Asker], pids: Mapping[str, Sequence[int]], texts: Texts, size: int, rounds: int
) -> dict[str, Any]:
    """Prompts that nobody has asked before, of our own cells. ``pids`` are of all processes but the workers."""
    samples: dict[str, list[Sample]] = {name: [] for name in askers}
    processor_s = dict.fromkeys(askers, 0.0)
    for number in range(rounds):
        prompt = asking(texts.text(size), texts.text(QUESTION_TOKENS))
        for name in turned(list(askers), number):
            await asyncio.sleep(PAUSE_S)
            before_s = used_s(pids[name])
            samples[name].append(await askers[name].ask(prompt))
            await asyncio.sleep(PAUSE_S)
            processor_s[name] += used_s(pids[name]) - before_s
    found: dict[str, Any] = {
        name: of_samples(each) | {"processor_ms": round(processor_s[name] / rounds * 1e3, 2)}
        for name, each in samples.items()
    }
    if BEFORE in askers:
        times = {name: found[name]["ttft_ms"]["p50"] for name in (BEFORE, NOW)}
        found["TTFT of a prompt seen for the first time, before over now"] = ratio(
            times[BEFORE], times[NOW], FIRST_SEEN
        )
        found["processor_before_over_now"] = round(processor_s[BEFORE] / max(processor_s[NOW], 1e-9), 3)
    print("first seen", {name: found[name]["ttft_ms"] for name in askers}, flush=True)
    return found
