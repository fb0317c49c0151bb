"""Whether a request's prefix may be loaded in part, and how little of it. Pure; every refusal is a typed error.

Loading is exact unless the caller asked for less, or the operator made that the default of the deployment or of an API
key; and a deployment allows neither unless its operator configured it (``infra/adr/0015``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.config import ImportanceMode
from services.gateway.importance_gate import ImportanceGate
from services.gateway.openai_schema.sampling import CacheOptions
from shared.errors import InvalidRequest
from shared.importance import DEFAULT_METRIC, PROBE_HEADS
from shared.messages.requests import Importance


@dataclass(frozen=True, slots=True)
class FidelityRules:
    """The fidelities that a deployment allows. A ratio of 0 means exact; ``gate`` is set when ``mode`` is ``gated``.

    Default ratios are within what ``gate`` allows: ``bootstrap`` refuses to start otherwise.
    """

    mode: ImportanceMode = "off"
    gate: ImportanceGate | None = None
    default_ratio: float = 0.0
    ratio_by_tenant: Mapping[str, float] = field(default_factory=dict)
    probe_heads: int = PROBE_HEADS

    def importance(
        self, asked: CacheOptions, *, is_scored: bool, tenant: str, is_adapted: bool = False
    ) -> Importance | None:
        """Return what a request may load; None means everything. ``asked`` is consistent (``admission.check_cache``).

        ``is_scored``: the caller wants logprobs of the prompt, for which all of it is computed. ``is_adapted``: it asks
        for a LoRA adapter, whose queries importance does not support. Raises InvalidRequest when the caller asked for
        what is not allowed. A default that cannot be applied is ignored.
        """
        if asked.fidelity == "exact":
            return None
        default = self.ratio_by_tenant.get(tenant, self.default_ratio)
        if asked.fidelity is None:
            is_applied = default and asked.read and not is_scored and not is_adapted
            return self._with_ratio(default, asked) if is_applied else None
        if self.mode == "off":
            raise InvalidRequest(
                "this deployment loads prefixes exactly; its operator can allow loading by importance with "
                "--importance gated (or on)",
                param="cache.fidelity",
                code="importance_off",
            )
        if is_scored:
            raise InvalidRequest(
                "logprobs of the prompt are computed from all of it, so fidelity must be exact", param="cache.fidelity"
            )
        if is_adapted:
            raise InvalidRequest(
                "prefixes of an adapter are read whole, so fidelity must be exact", param="cache.fidelity"
            )
        ratio = asked.ratio if asked.ratio is not None else default
        if not ratio:
            raise InvalidRequest(
                "fidelity importance needs a ratio: this deployment has no default", param="cache.ratio"
            )
        wanted = self._with_ratio(ratio, asked)
        if self.gate is not None:
            self.gate.check(wanted)
        return wanted

    def _with_ratio(self, ratio: float, asked: CacheOptions) -> Importance:
        """Return the importance options; those that the caller left out are as when the gate was measured."""
        metric, first_tokens, recent_tokens = DEFAULT_METRIC, 0, 0
        if self.gate is not None:
            metric, measured = self.gate.metric, self.gate.measured
            first_tokens, recent_tokens = measured.first_tokens, measured.recent_tokens
        return Importance(
            ratio=ratio,
            metric=metric if asked.metric is None else asked.metric,
            first_tokens=first_tokens if asked.first_tokens is None else asked.first_tokens,
            recent_tokens=recent_tokens if asked.recent_tokens is None else asked.recent_tokens,
            probe_heads=self.probe_heads,
        )
