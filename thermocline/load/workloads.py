"""Workloads: the simulator's generators, and two that only a real server needs.

The generators are those of ``thermocline simulate``, with the same options, so that measured and simulated figures are
of the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import WORKLOADS as SIMULATED
from thermocline.simulate.workloads import Asked, Workload
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, name
from thermocline.simulate.workloads.lengths import around

Count = Annotated[int, Meta(ge=1)]


class UnsharedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the workload ``unshared``: mean lengths and the spread of a log-normal distribution."""

    prompt_tokens: Count = 1024
    answer_tokens: Count = 128
    spread: Annotated[float, Meta(ge=0)] = 0.25


@dataclass(frozen=True, slots=True)
class UnsharedWorkload(Workload):
    """Prompts without a shared prefix: they measure what a prefix cache costs when it cannot help."""

    options: UnsharedOptions
    seed: int

    def requests(self) -> Iterator[Asked]:
        """Yield requests without an end, with lengths drawn by the seed."""
        rng = Random(self.seed)
        number = 0
        while True:
            prompt = Span(name(QUESTION, number), around(rng, self.options.prompt_tokens, self.options.spread))
            answer = Span(name(OUTPUT, number), around(rng, self.options.answer_tokens, self.options.spread))
            yield Asked((prompt,), answer)
            number += 1


class BurstOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``size`` requests come at once on one new document; the next burst, on another, ``pause_s`` later."""

    size: Count = 32
    document_tokens: Count = 2000
    question_tokens: Count = 32
    answer_tokens: Count = 16
    pause_s: Annotated[float, Meta(ge=0)] = 10.0


@dataclass(frozen=True, slots=True)
class BurstWorkload(Workload):
    """Bursts of questions on a new document each, which arrive at once."""

    options: BurstOptions
    seed: int  # Lengths are fixed; the seed decides only the tokens.

    def requests(self) -> Iterator[Asked]:
        """Yield requests without an end, each with its time."""
        options, number = self.options, 0
        while True:
            burst = number // options.size
            document = Span(name(SHARED, burst), options.document_tokens)
            question = Span(name(QUESTION, number), options.question_tokens)
            answer = Span(name(OUTPUT, number), options.answer_tokens)
            yield Asked((document, question), answer, time_s=burst * options.pause_s)
            number += 1


WORKLOADS: dict[str, tuple[type[msgspec.Struct], Callable[[Any, int], Workload]]] = {
    **SIMULATED,
    "unshared": (UnsharedOptions, UnsharedWorkload),
    "burst": (BurstOptions, BurstWorkload),
}
"""By name: the struct of a generator's options, and its factory from them and a seed."""


def options_of(workload: str, assignments: Sequence[str]) -> msgspec.Struct:
    """Return the generator's options from ``KEY=VALUE`` texts. Raises ConfigError that names every fault."""
    if workload not in WORKLOADS:
        raise ConfigError(f"there is no workload {workload!r}; known are {', '.join(WORKLOADS)}")
    options, _ = WORKLOADS[workload]
    types = get_type_hints(options, include_extras=True)
    values: dict[str, Any] = {}
    faults: list[str] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in types:
            faults.append(f"--set {assignment}: must be KEY=VALUE; {workload} knows {', '.join(sorted(types))}")
            continue
        try:
            values[key] = msgspec.convert(text, types[key], strict=False)
        except msgspec.ValidationError as error:
            faults.append(f"--set {assignment}: {error}")
        else:
            if isinstance(values[key], float) and not values[key] < float("inf"):
                faults.append(f"--set {assignment}: must be a finite number")
    if faults:
        raise ConfigError("; ".join(faults))
    return options(**values)


def make_workload(workload: str, assignments: Sequence[str], seed: int) -> Workload:
    """Return a generator by its name. Raises ConfigError that names every fault."""
    options = options_of(workload, assignments)
    return WORKLOADS[workload][1](options, seed)
