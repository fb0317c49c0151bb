"""Workloads that policies are developed with, and those that are held out: a third of all families and seeds.

Two of the ten families are held out whole, the two of the new ones whose names have the least SHA-256, and of the other
eight every sixth seed: 2/10 + 8/10 * 1/6 = 1/3. The split was committed before any policy was changed by what these
workloads showed. :func:`requests_of` refuses what is held out unless it is told that this is the report.

What was reported is spent: seeds 1, 2, 6, 12, 18, 24, 48, 54 and 60 were published pool by pool, and a report on 30,
36 and 42 was seen in part, so :func:`requests_of` refuses them in a report as well, and the next one is on
REPORT_SEEDS. Of ``tenants`` and ``drift`` it is known from those reports how the default policy did with the spent
seeds; of their other seeds nothing is.

``few-shot``, ``documents`` and ``chat`` are older: seed 1 of each, with their default options, was used to tune the
default policy before. Here their options follow from the seed, too.
"""

from __future__ import annotations

from random import Random

import msgspec

from bench.block_workloads import blocks_in_time
from bench.blocks import BlockRequest
from thermocline.simulate.workloads import WORKLOADS, make_workload
from thermocline.simulate.workloads.chat import ChatOptions
from thermocline.simulate.workloads.documents import DocumentOptions
from thermocline.simulate.workloads.few_shot import FewShotOptions
from thermocline.simulate.workloads.open_loop import between, whole_between

HELD_OUT_FAMILIES = ("tenants", "drift")
HELD_OUT_SEEDS = 6
"""A seed that this divides is held out."""

SPENT_SEEDS = (1, 2, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60)
"""Held-out workloads of these seeds were reported one by one already."""
REPORT_SEEDS = (66, 72, 78)
"""The next report is on these, with all ten families. Chosen before the policy was changed again."""

BLOCK_TOKENS = 128


class HeldOutError(Exception):
    """Development asked for a workload that is held out for the report, or the report for one that is spent."""


def is_held_out(family: str, seed: int) -> bool:
    """Whether policies may not be developed with this workload."""
    return family in HELD_OUT_FAMILIES or seed % HELD_OUT_SEEDS == 0


def requests_of(family: str, seed: int, *, is_report: bool = False) -> list[BlockRequest]:
    """The requests in blocks of BLOCK_TOKENS. Raises HeldOutError unless they are for development, or the report."""
    if is_held_out(family, seed) and not is_report:
        raise HeldOutError(f"{family} with seed {seed} is held out: policies must not be developed with it")
    if is_report and seed in SPENT_SEEDS:
        raise HeldOutError(f"{family} with seed {seed} was reported before: a report takes seeds of {REPORT_SEEDS}")
    workload = make_workload(family, options_of(family, seed), seed)
    return blocks_in_time(workload, seed, BLOCK_TOKENS)


def options_of(family: str, seed: int) -> msgspec.Struct:
    """What the seed draws: the new families draw for themselves, for the older ones it is done here."""
    rng = Random(seed)
    if family == "few-shot":
        return FewShotOptions(
            dataset=rng.choice(("mmlu", "bbh", "ceval", "hellaswag")),
            questions=2500,
            prompt_tokens=whole_between(rng, 0, 600, 3000),
            skew=between(rng, 0, 1.5, 40),
        )
    if family == "documents":
        return DocumentOptions(
            distance=rng.choice(("min", "shuffled", "shuffled", "max")),
            contexts=whole_between(rng, 0, 20, 150),
            queries=800,
            prompt_tokens=whole_between(rng, 0, 2000, 10_000),
        )
    if family == "chat":
        return ChatOptions(
            sessions=500,
            turns=between(rng, 0, 2, 8),
            system_prompts=whole_between(rng, 0, 2, 40),
            system_tokens=whole_between(rng, 0, 90, 2000),
            question_tokens=whole_between(rng, 0, 40, 600),
            think_s=between(rng, 0, 10, 200),
        )
    return WORKLOADS[family][0]()
