"""The verdict on a run of the demo: faults, and notes. Pure.

Only broken promises are faults, at any size. That a prefix comes from a certain tier is required only where the sizes
force it under every order and policy: a document that is asked about may rightly still be on the device.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from shared.chunks import CHUNK_TOKENS
from thermocline.client import Answer
from thermocline.demo.report import Pass
from thermocline.demo.workload import Workload

STATED_ACCURACY = 0.9
"""Least share of such questions that the bundled model answers rightly, over documents of up to 1,024 tokens."""
ACCURATE_TOKENS = 1024
LEAST_CHANCE = 1e-9
"""So few right answers are a fault if they are less likely than this at the stated accuracy."""
ROUNDING = 1e-3
"""Two tokens whose logprobs differ by less may change places in a batch of another shape."""
WORTH_LOADING_TOKENS = 256
"""A shorter document may rightly be recomputed."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The results of a run: ``again`` answers, after the restart, the questions at the indexes ``firsts``.

    The device pool has room for ``device_tokens``, and the first cell had ``saved_chunks`` on its disk when it ended.
    ``is_bundled`` says whether the model is one whose accuracy is known.
    """

    cached: Pass
    plain: Pass
    again: Pass
    firsts: list[int]
    device_tokens: int
    saved_chunks: int
    concurrency: int
    is_bundled: bool


def faults(work: Workload, seen: Seen) -> list[str]:
    """Return a sentence for each fault; none if all is well."""
    found = []
    for name, answers, plain in _compared(seen):
        differing = sum(_differs(one, other) for one, other in zip(answers, plain, strict=True))
        if differing:
            found.append(f"{differing} answers differ {name}")
    if _must_be_right(work, seen):
        found += [
            f"{one.name}: only {one.accuracy:.0%} of the answers are right, which the model's {STATED_ACCURACY:.0%} "
            "does not explain"
            for one in (seen.cached, seen.plain)
            if _chance_of_so_few(sum(one.right), len(one.right)) < LEAST_CHANCE
        ]
    talk = seen.cached.answers[len(work.asks) :]
    if _must_hit_device(talk, seen.device_tokens) and not sum(a.device_tokens for a in talk):
        found.append("nothing of the conversation was reused from device memory")
    below = sum(a.host_tokens + a.disk_tokens for a in seen.cached.answers)
    if must_load(work, seen.device_tokens, seen.concurrency) and not below:
        found.append("nothing was loaded back to the device")
    if any(a.cached_tokens for a in seen.plain.answers):
        found.append("the pass without caching reports cached tokens")
    on_disk = [a for a in seen.again.answers if a.prompt_tokens > CHUNK_TOKENS]
    missing = sum(not a.disk_tokens for a in on_disk)
    if missing and (missing == len(on_disk) or seen.saved_chunks >= wanted_chunks(seen.cached.answers)):
        found.append(f"{missing} of {len(on_disk)} documents were not found on the disk after the restart")
    return found


def notes(seen: Seen) -> list[str]:
    """Return explanations of what may look odd, but is no fault."""
    found = []
    ties = sum(
        one.token_ids != other.token_ids and not _differs(one, other)
        for _, answers, plain in _compared(seen)
        for one, other in zip(answers, plain, strict=True)
    )
    if ties:
        found.append(f"{ties} answers differ from a token on whose two likeliest values are equal but for rounding")
    wanted = wanted_chunks(seen.cached.answers)
    if seen.saved_chunks < wanted:
        found.append(
            f"{seen.saved_chunks:,} of {wanted:,} chunks had been saved at the restart; saves give way to requests"
        )
    return found


def must_load(work: Workload, device_tokens: int, concurrency: int) -> bool:
    """Return whether a prefix must be loaded from below the device, in whatever order requests are served.

    The first half of the questions is answered before the last half is asked. The device then holds no more documents
    than fit; if both halves ask about twice as many, half of those are not on the device.
    """
    documents = [ask.document for ask in work.asks]
    size = work.document_tokens / max(1, len(set(documents)))
    half = max(0, len(documents) - concurrency) // 2
    both = set(documents[:half]) & set(documents[half + concurrency :])
    return size >= WORTH_LOADING_TOKENS and len(both) * size >= 2 * device_tokens


def wanted_chunks(answers: list[Answer]) -> int:
    """Return the number of distinct whole chunks in prompts and answers, without each answer's last token.

    The KV of that token is never computed.
    """
    chunks: set[bytes] = set()
    for answer in answers:
        tokens = array("q", [*answer.prompt_token_ids, *answer.token_ids[:-1]])
        prefix = blake2b()
        for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
            prefix.update(tokens[end - CHUNK_TOKENS : end])
            chunks.add(prefix.digest())
    return len(chunks)


def _compared(seen: Seen) -> list[tuple[str, list[Answer], list[Answer]]]:
    plain = seen.plain.answers
    return [
        ("between the pass with the cache and the one without", seen.cached.answers, plain),
        ("after the restart", seen.again.answers, [plain[place] for place in seen.firsts]),
    ]


def _differs(one: Answer, plain: Answer) -> bool:
    """Return whether the tokens differ, other than from a token that was equal to another but for rounding."""
    if one.token_ids == plain.token_ids:
        return False
    pairs = zip(one.token_ids, plain.token_ids, strict=False)
    parts = next((place for place, (token, other) in enumerate(pairs) if token != other), None)
    if parts is None:
        parts = min(len(one.token_ids), len(plain.token_ids))
    return parts >= len(plain.margins) or plain.margins[parts] >= ROUNDING


def _must_be_right(work: Workload, seen: Seen) -> bool:
    """Return whether the stated accuracy applies: to the bundled model, and to documents of up to that length."""
    documents = len({ask.document for ask in work.asks})
    return seen.is_bundled and work.document_tokens <= documents * ACCURATE_TOKENS * 1.1


def _chance_of_so_few(right: int, asked: int) -> float:
    """Return an upper bound (Hoeffding's) on the chance of ``right`` or fewer right answers at the stated accuracy."""
    short = max(0.0, STATED_ACCURACY - right / max(1, asked))
    return math.exp(-2 * asked * short**2)


def _must_hit_device(talk: list[Answer], device_tokens: int) -> bool:
    """Return whether a second turn must hit the device.

    It follows the first directly, so it must where the longest prompt is longer than a chunk and leaves the device
    half empty.
    """
    longest = max((a.prompt_tokens for a in talk), default=0)
    return len(talk) >= 2 and CHUNK_TOKENS < longest <= device_tokens // 2
