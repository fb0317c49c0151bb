"""Which input a number stands for: the same one, whichever numbers ran before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz.chunk_targets import chunk_targets
from tests.fuzz.message_targets import message_targets, pool_targets, state_targets
from tests.fuzz.mutations import mutate
from tests.fuzz.operator_files import operator_targets
from tests.fuzz.targets import Target


def all_targets() -> list[Target]:
    """Everything that is fuzzed from bytes."""
    return [*message_targets(), *state_targets(), *pool_targets(), *chunk_targets(), *operator_targets()]


class Inputs:
    """Targets take turns by their weights; chance comes from seed and number alone."""

    def __init__(self, seed: int, targets: Sequence[Target]) -> None:
        self._seed = seed
        self._wheel = [target for target in targets for _ in range(target.weight)]

    def at(self, number: int) -> tuple[Target, bytes]:
        """The input of this number, and what takes it."""
        target = self._wheel[number % len(self._wheel)]
        chance = random.Random(f"{self._seed}/{number}")
        data = mutate(target.samples, chance)
        if chance.random() < 0.6:
            target.reseal(data)
        return target, bytes(data)
