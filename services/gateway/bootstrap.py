"""The composition root: from settings to a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from services.gateway import metrics
from services.gateway.adapter_start import StartAdapters, start_adapters
from services.gateway.app import build_app
from services.gateway.callers import Callers
from services.gateway.cell import CellView
from services.gateway.cell_reports import CellReports
from services.gateway.checks import check, check_defaults
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.explaining import Explainer
from services.gateway.fidelity import FidelityRules
from services.gateway.gateway import Gateway
from services.gateway.grammars.checking import GrammarChecks
from services.gateway.host_names import only_own_names
from services.gateway.http_server import bind, make_server, raise_file_limit
from services.gateway.importance_gate import read_importance_gate
from services.gateway.kept_entries import KeptEntries
from services.gateway.key_file import read_api_keys
from services.gateway.keys import tenant_id
from services.gateway.known_prompts import MOST_BYTES
from services.gateway.kv_gate import read_kv_gate
from services.gateway.messages_api.said import SaidArguments
from services.gateway.messages_api.threads import KeptThreads
from services.gateway.model_facts import ModelFacts, read_model_facts
from services.gateway.openai_schema.cell import CellTenant
from services.gateway.pending import PendingTable, Slots
from services.gateway.recent_requests import RecentRequests
from services.gateway.replies.choosing import choose_formats
from services.gateway.responses.kept import KeptResponses
from services.gateway.shell import GatewayShell
from services.gateway.tenant_metrics import TenantCollector
from services.gateway.tls import ServerTls
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns import measures
from services.gateway.turns.answer_store import AnswerStore
from services.gateway.turns.front_hash import HashedTexts
from services.gateway.turns.memory import AnswerMemory
from services.gateway.turns.spliced_texts import SplicedTexts
from services.gateway.turns.turns import Turns
from services.gateway.views.tenant_view import tenant_view
from shared import logs, progress, subjects, tracing
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.lifecycle import Lifecycle
from shared.loopback import is_loopback
from shared.metrics import REGISTRY
from shared.metrics import serve as serve_metrics
from shared.quality_gate import UNMEASURED, require
from shared.tracing import Tracer

TEXTS_SHARE = 4
"""One part in so many of the memory for answers holds texts of recent conversations, and another their tokens."""

SWITCH_S = 0.001
"""How long a thread that renders or scans a long prompt keeps the event loop waiting; Python's default is 5 ms."""

COLLECTOR_THRESHOLDS = (5_000, 2, 2_000)
"""Python's two younger garbage collector generations are smaller here than in other services: scanning 60,000 objects
of a large request took 10 to 20 ms, in which no thread runs. The oldest is scanned as rarely as theirs.
"""

_log = logs.get_logger("gateway")


def fidelity_rules(config: GatewayConfig, model: str) -> FidelityRules:
    """Return what this deployment of the model with this fingerprint allows.

    Raises ConfigError for a gate that cannot be read, is of another model, or does not allow a default.
    """
    gate = None
    if config.importance == "gated":
        gate = read_importance_gate(
            Path(config.importance_gate).expanduser(),
            model=model,
            probe_heads=config.importance_probe_heads,
            alpha=config.importance_alpha,
        )
        check_defaults(gate, config)
    return FidelityRules(
        mode=config.importance,
        gate=gate,
        default_ratio=config.importance_ratio,
        ratio_by_tenant={tenant_id(key.encode()): ratio for key, ratio in config.ratio_by_key.items()},
        probe_heads=config.importance_probe_heads,
    )


def check_kv(config: GatewayConfig, model: str) -> None:
    """Raise ConfigError where KV of eight bits was not measured with this model, by fingerprint, or lost too much."""
    if config.kv_dtype == "auto":
        return
    if config.kv_gate == UNMEASURED:
        _log.warning("kv_is_unmeasured", kv_dtype=config.kv_dtype, advice="thermocline eval --kv-dtype fp8")
        return
    require(read_kv_gate(Path(config.kv_gate).expanduser()), model=model, ratio=1.0)


def callers_of(config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> Callers:
    """Return the accounts that the settings admit.

    Raises ConfigError for a file of tenants that is missing or faulty.
    """
    return Callers(
        api_keys=(*config.api_keys, *read_api_keys(config.api_keys_file)),
        admin_key=config.admin_key,
        tenants_file=config.tenants,
        max_priority=config.max_priority,
        max_leased_tokens=config.max_leased_tokens,
        names_tenants=config.tenant_metrics,
        clock=clock,
    )


def turns_of(config: GatewayConfig, bus: Bus, tokenizer: Tokenizer) -> Turns:
    """Return the memory that keeps answers' token ids between turns, as configured."""
    memory = store = texts = fronts = None
    if config.answer_memory_bytes:
        for_texts = config.answer_memory_bytes // TEXTS_SHARE
        memory = AnswerMemory(config.answer_memory_bytes - 2 * for_texts, measures.MEMORY_BYTES.set)
        texts = HashedTexts(for_texts, measures.TEXT_BYTES.set)
        fronts = SplicedTexts(for_texts, measures.FRONT_BYTES.set)
    if memory is not None and config.answer_lookup_ms:
        store = AnswerStore(bus, config.answer_lookup_ms / 1000, time.monotonic)
    return Turns(tokenizer, memory, store, texts, fronts)


def compose(
    config: GatewayConfig,
    bus: Bus,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    incarnation: str,
    fidelity: FidelityRules,
    callers: Callers,
    adapters: StartAdapters | None = None,
    tracer: Tracer | None = None,
    tls: ServerTls | None = None,
) -> Gateway:
    """Build the parts of one gateway.

    Its id on the bus contains the incarnation: notices are numbered per id, and requests of an earlier life must be
    cancelled as a lost gateway's even when its successor has the same name.
    """
    gateway_id = f"{config.id}-{incarnation}"
    cell, recent = CellView(facts.fingerprint, facts.kernels), RecentRequests(time.monotonic)
    subject = subjects.request_input(gateway_id)
    # A setting that keeps no texts keeps no prompts either.
    known_bytes = min(MOST_BYTES, config.known_text_bytes)
    dispatcher = Dispatcher(bus, subject, gateway_id, PendingTable(), cell.takes_bases, known_bytes, cell.takes_compact)
    reports = None
    if config.cell:
        told = ((facts.name,), facts.answer_fingerprint)
        reports = CellReports(bus, config.cell, gateway_id, incarnation, *told, cell, time.monotonic)
    entries = KeptEntries(bus)
    return Gateway(
        config=config,
        gateway_id=gateway_id,
        facts=facts,
        tokenizer=tokenizer,
        bus=bus,
        dispatcher=dispatcher,
        slots=Slots(config.max_inflight, metrics.IN_FLIGHT.set),
        bodies=config.bodies(),
        cell=cell,
        fidelity=fidelity,
        callers=callers,
        recent=recent,
        explainer=Explainer(bus, recent, tokenizer, callers),
        replies=choose_formats(tokenizer, config.tool_parser, config.reasoning_parser),
        entries=entries,
        kept=KeptResponses(entries, tokenizer.run),
        threads=KeptThreads(entries, tokenizer.run),
        said=SaidArguments(),
        grammars=GrammarChecks(tokenizer.definition, facts.vocab_size, facts.eos_token_ids),
        turns=turns_of(config, bus, tokenizer),
        adapters=adapters or StartAdapters(),
        tracer=tracer,
        tls=tls,
        reports=reports,
    )


async def run(config: GatewayConfig, life: Lifecycle) -> None:
    """Serve until ``life`` stops. Raises OperatorError when the gateway cannot start as configured."""
    check(config)
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    async with tracing.running(config.traces, "gateway", config.id) as tracer:
        await _serve(config, life, tracer)


async def _serve(config: GatewayConfig, life: Lifecycle, tracer: Tracer | None) -> None:
    raise_file_limit()
    sock = bind(config.host, config.port)
    incarnation = secrets.token_hex(4)
    try:
        tls = config.server_tls()
        callers = callers_of(config)
        if not callers.has_keys and not is_loopback(config.host):
            _log.warning(
                "api_is_open",
                host=config.host,
                advice="every client that reaches it is let in: --tenants or --api-keys-file",
            )
        facts = await life.in_thread(
            read_model_facts,
            config.model_dir,
            served_name=config.served_model_name,
            max_context_tokens=config.max_context_tokens,
            is_exact=config.exact,
            kv_dtype=config.kv_dtype,
            cache_dir=config.cache_dir,
        )
        await life.in_thread(check_kv, config, facts.fingerprint)
        fidelity = await life.in_thread(fidelity_rules, config, facts.fingerprint)
        adapters = await life.in_thread(start_adapters, config.adapter, facts.name)
        with progress.phase("loading the tokenizer"):
            plain = config.special_tokens_in_content == "text"
            tokenizer = await life.in_thread(
                Tokenizer,
                config.model_dir,
                threads=config.threads,
                plain_content=plain,
                known_bytes=config.known_text_bytes,
            )
        bus = await connect_with(config, f"gateway {config.id}")
        try:
            gateway = compose(config, bus, facts, tokenizer, incarnation, fidelity, callers, adapters, tracer, tls)
            with _measured(gateway), contextlib.closing(gateway.grammars):
                serve_metrics(config.metrics_port, config.metrics_host)
                if config.tenants:
                    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, callers.look_now)
                _log.info(
                    "gateway_composed", model=facts.name, fingerprint=facts.fingerprint, importance=config.importance
                )
                app = build_app(gateway)
                if not callers.has_keys:
                    app = only_own_names(app, config.host, config.cors_origins)
                server = make_server(app, config.connections(), tls)
                await GatewayShell(gateway, incarnation).serve(server, sock, life)
        finally:
            await bus.close()
            tokenizer.close()
    finally:
        sock.close()


@contextlib.contextmanager
def _measured(gateway: Gateway) -> Iterator[None]:
    """Within the block, let scrapes on either port read the values that are not counted as they change."""

    def tenants() -> list[CellTenant]:
        status = gateway.cell.fresh_status(gateway.clock())
        owners = gateway.callers.owners if gateway.config.tenant_metrics else {}
        return tenant_view(status, owners) if status is not None else []

    collector = TenantCollector(tenants)
    REGISTRY.register(collector)
    metrics.OUTBOX_WAITING.set_function(lambda: len(gateway.dispatcher.outbox))
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
