"""The methods that can be compared, by name. A name may say its metric after a colon: ``importance:h2o_pooled``."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.evaluation.methods.all_heads import AllHeads
from services.worker.evaluation.methods.probe_heads import VotedByProbes
from services.worker.evaluation.methods.random_tokens import RandomTokens
from services.worker.evaluation.methods.recent import Recent
from services.worker.evaluation.methods.static import Recorder, Static
from services.worker.evaluation.selection import Selection
from services.worker.importance.identification import ProbeHeads
from services.worker.importance.metrics import Metric, metric_named
from services.worker.importance.selection import Budget
from services.worker.importance.similarity import ALPHA
from shared.errors import ConfigError

METHODS = ("importance", "h2o", "static", "random", "recent")
DEFAULT_METRIC = "h2o"


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """Settings common to all methods, beside the ratio.

    ``first_tokens`` and ``recent_tokens`` are kept regardless and count towards the ratio; ``recent`` ignores both.
    """

    probes: ProbeHeads = field(default_factory=ProbeHeads)
    alpha: float = ALPHA
    first_tokens: int = 0
    recent_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """A method's parsed name: the method and its metric."""

    name: str
    kind: str
    metric: Metric

    @classmethod
    def named(cls, name: str) -> Method:
        """Return the method with this name. Raises ConfigError when there is no such method or metric."""
        kind, _, metric = name.partition(":")
        if kind not in METHODS:
            raise ConfigError(f"there is no method {kind!r}; there are {', '.join(METHODS)}")
        return cls(name, kind, metric_named(metric or DEFAULT_METRIC))

    @property
    def needs_record(self) -> bool:
        """Whether it has to see all questions about a prefix first."""
        return self.kind == "static"

    def recorder(self) -> Recorder:
        """Return a record of importance by this method's metric, for :meth:`at`."""
        return Recorder(self.metric)

    def at(self, ratio: float, settings: MethodSettings, recorded: Recorder | None = None) -> Selection:
        """Return the method keeping ``ratio`` of a prefix.

        Raises ConfigError for a bad ratio or without a needed record.
        """
        budget = Budget(ratio, settings.first_tokens, settings.recent_tokens)
        if self.kind == "importance":
            return VotedByProbes(budget, self.metric, settings.probes, settings.alpha)
        if self.kind == "h2o":
            return AllHeads(budget, self.metric)
        if self.kind == "random":
            return RandomTokens(budget, settings.seed)
        if self.kind == "recent":
            return Recent(budget)
        if recorded is None:
            raise ConfigError("static pre-identification needs a record of what was important to other questions")
        return Static(budget, recorded)
