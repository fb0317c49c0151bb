"""The composed parts of one gateway, as its routes use them. Built by ``bootstrap``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.adapter_start import StartAdapters
from services.gateway.body import Bodies
from services.gateway.callers import Callers
from services.gateway.cell import CellView
from services.gateway.cell_reports import CellReports
from services.gateway.config import GatewayConfig
from services.gateway.context_limit import ContextLimit
from services.gateway.dispatcher import Dispatcher
from services.gateway.explaining import Explainer
from services.gateway.fidelity import FidelityRules
from services.gateway.grammars.checking import GrammarChecks
from services.gateway.kept_entries import KeptEntries
from services.gateway.messages_api.said import SaidArguments
from services.gateway.messages_api.threads import KeptThreads
from services.gateway.model_facts import ModelFacts
from services.gateway.pending import RETRY_AFTER_MS, Slots
from services.gateway.recent_requests import RecentRequests
from services.gateway.replies.choosing import ReplyFormats
from services.gateway.responses.kept import KeptResponses
from services.gateway.tenants import Tenant
from services.gateway.tls import ServerTls
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.turns import Turns
from shared.bus.protocol import Bus
from shared.errors import NotFound, Unavailable
from shared.ids import namespace_digest
from shared.messages.status import Degradation
from shared.tracing import Tracer

_NAMED = 8
"""Limit on the adapters that a refusal names."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a request: the base model, or a LoRA adapter on it, known by the digest of its files."""

    name: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Gateway:
    """All parts of one gateway. ``clock`` is monotonic, in seconds; ``wall_ns`` is the wall clock."""

    config: GatewayConfig
    gateway_id: str
    facts: ModelFacts
    tokenizer: Tokenizer
    bus: Bus
    dispatcher: Dispatcher
    slots: Slots
    bodies: Bodies
    cell: CellView
    fidelity: FidelityRules
    callers: Callers
    recent: RecentRequests
    explainer: Explainer
    replies: ReplyFormats
    entries: KeptEntries
    kept: KeptResponses
    threads: KeptThreads
    said: SaidArguments
    grammars: GrammarChecks
    turns: Turns
    adapters: StartAdapters
    clock: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    tracer: Tracer | None = None
    tls: ServerTls | None = None
    reports: CellReports | None = None

    def check_open(self) -> None:
        """Raise Unavailable while this gateway shuts down or has no broker, and TooManyConnections when it is full."""
        if self.cell.is_draining:
            raise Unavailable("this gateway is shutting down", retry_after_ms=RETRY_AFTER_MS)
        self.dispatcher.check_open()
        self.slots.check(1)

    def model(self, requested: str | None) -> ServedModel:
        """Return the model of this name; without a name, the base model. Raises NotFound."""
        if requested is None or requested == self.facts.name:
            return ServedModel(self.facts.name)
        adapter = self.cell.adapter(requested)
        if adapter is None:
            served = ", ".join(map(repr, self.model_names()[: 1 + _NAMED]))
            raise NotFound(
                f"The model {requested[:128]!r} does not exist here; this cell serves {served}.",
                param="model",
                code="model_not_found",
            )
        return ServedModel(requested, adapter.digest)

    def model_names(self) -> list[str]:
        """Return the names that callers may ask for: the base model, then the adapters that a worker has loaded."""
        return [self.facts.name, *(adapter.name for adapter in self.cell.adapters() if adapter.workers)]

    def namespace(self, tenant: Tenant, cache_salt: str | None, adapter: str = "") -> str:
        """Return the namespace digest of KV for this tenant, adapter and request salt."""
        return namespace_digest(self.facts.fingerprint, adapter=adapter, tenant_salt=tenant.salt, salt=cache_salt or "")

    @property
    def context_limit(self) -> ContextLimit:
        """The present bounds on a request's length."""
        return self.cell.context_limit(self.facts.max_context)

    @property
    def max_context(self) -> int:
        """Largest sum of prompt and answer, in tokens."""
        return self.context_limit.tokens

    def degraded(self) -> tuple[Degradation, ...]:
        """Return the configured features that the cell or this gateway lacks at present."""
        others = (each for each in self.cell.degraded(self.clock()) if each.component != self.gateway_id)
        adapters = (
            Degradation(component=self.gateway_id, what=f"adapter {name}", reason=fault, setting="load_lora_adapter")
            for name, fault in self.adapters.faults_of_others(self.cell)
        )
        return (*others, *self.own_degraded(), *adapters)

    def own_degraded(self) -> tuple[Degradation, ...]:
        """Return the configured features that this gateway lacks at present."""
        faults = [("tenants", self.callers.fault, "--tenants")]
        if self.tls is not None:
            faults.append(("certificate", self.tls.fault, "--tls-cert"))
        told = [(what, f"the earlier one is in force: {fault}", setting) for what, fault, setting in faults if fault]
        told += [(f"adapter {name}", fault, "--adapter") for name, fault in self.adapters.faults(self.cell)]
        told += [
            ("generation config", f"{name} of generation_config.json is not applied", "--model")
            for name in self.facts.unserved
        ]
        if self.turns.fault:
            told.append(
                ("answers", f"they are not shared with other gateways: {self.turns.fault}", "--answer-lookup-ms")
            )
        return tuple(
            Degradation(component=self.gateway_id, what=what, reason=reason, setting=setting)
            for what, reason, setting in told
        )

    def reasons_not_ready(self) -> list[str]:
        """Return why requests would not be answered now, those of ``--adapter`` included; empty when ready."""
        reasons = self.cell.reasons_not_ready(self.clock(), is_connected=self.bus.is_connected)
        return reasons + self.adapters.reasons_not_ready(self.cell)
