"""What the trainer does at each point of a run, as functions of progress from 0 to 1."""

import math
import random
from dataclasses import dataclass, replace

from tools.train_model.rows import RowMix


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of ``row_tokens`` are new until ``until`` of the run."""

    until: float
    row_tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Row lengths, learning rate and the mix of rows over a run."""

    stages: tuple[Stage, ...]
    replay: float
    """The chance that a step uses an earlier stage's length."""
    warm_fraction: float
    constant_until: float
    floor: float = 0.02
    from_scratch: bool = True
    tokens: int = 4096
    """Of one step; half as many early in a run from scratch, where more steps are worth more."""
    linked: float = 0.0
    """The chance that a row's questions take more than one sentence to answer, after a fifth of the run."""
    context_tokens: int = 2048

    def row_tokens(self, progress: float, rng: random.Random) -> int:
        """Draw a row length for one step."""
        last = len(self.stages) - 1
        index = next((i for i, s in enumerate(self.stages) if progress < s.until), last)
        if index and rng.random() < self.replay:
            index = rng.randrange(index)
        return self.stages[index].row_tokens

    def step_tokens(self, progress: float) -> int:
        """Tokens of one step."""
        return self.tokens // 2 if self.from_scratch and progress < 0.25 else self.tokens

    def rate_scale(self, progress: float) -> float:
        """The learning-rate multiplier: warm up, stay, fall along a cosine to the floor."""
        warm = min(1.0, progress / self.warm_fraction) if self.warm_fraction else 1.0
        if progress < self.constant_until:
            return warm
        fall = (progress - self.constant_until) / (1 - self.constant_until)
        return max(self.floor, 0.5 * (1 + math.cos(math.pi * min(1.0, fall))))

    def row_mix(self, progress: float) -> RowMix:
        """The mix of rows: many repetition rows early in a run from scratch."""
        if not self.from_scratch:
            return RowMix(easy=0.7, repetition=0.02)
        early = max(0.0, 1 - progress / 0.2)
        return RowMix(
            easy=0.8 if progress < 0.2 else 0.7,
            repetition=0.5 * early + 0.02,
            linked=0.0 if progress < 0.2 else self.linked,
            context_tokens=self.context_tokens,
        )

    def context_loss_share(self, progress: float) -> float:
        """The share of context tokens that enter the loss."""
        return 0.4 if self.from_scratch and progress < 0.2 else 0.1


FROM_SCRATCH = Schedule(
    stages=(
        Stage(0.05, 64),
        Stage(0.14, 128),
        Stage(0.28, 256),
        Stage(0.36, 512),
        Stage(0.60, 1024),
        Stage(1.00, 2048),
    ),
    replay=0.35,
    warm_fraction=0.01,
    constant_until=0.5,
)
DEEP = replace(
    FROM_SCRATCH,
    stages=(*FROM_SCRATCH.stages[:-1], Stage(0.90, 2048), Stage(1.00, 4096)),
    linked=0.5,
    context_tokens=4096,
)
CONTINUED = Schedule(
    stages=(Stage(0.0, 256), Stage(0.0, 512), Stage(0.7, 1024), Stage(1.0, 2048)),
    replay=0.5,
    warm_fraction=0.02,
    constant_until=0.3,
    from_scratch=False,
)
