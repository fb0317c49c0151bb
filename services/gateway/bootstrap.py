"""The composition root: from settings to a running gateway."""

from __future__ import annotations

import asyncio
import secrets

from services.gateway import metrics
from services.gateway.app import build_app
from services.gateway.cell import CellView
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.gateway import Gateway
from services.gateway.http_server import bind, make_server, raise_file_limit
from services.gateway.model_facts import ModelFacts, read_model_facts
from services.gateway.pending import PendingTable, Slots
from services.gateway.shell import GatewayShell
from services.gateway.tokenizer import Tokenizer
from shared import logs, subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.lifecycle import Lifecycle
from shared.metrics import serve as serve_metrics

_log = logs.get_logger("gateway")


def compose(config: GatewayConfig, bus: Bus, facts: ModelFacts, tokenizer: Tokenizer, incarnation: str) -> Gateway:
    """The parts of one gateway.

    Its id on the bus carries the incarnation: notices are numbered per id, and requests of an earlier life must be
    cancelled as a lost gateway's even when its successor has the same name.
    """
    gateway_id = f"{config.id}-{incarnation}"
    dispatcher = Dispatcher(bus, subjects.request_input(gateway_id), gateway_id, PendingTable())
    return Gateway(
        config=config,
        gateway_id=gateway_id,
        facts=facts,
        tokenizer=tokenizer,
        bus=bus,
        dispatcher=dispatcher,
        slots=Slots(config.max_inflight, metrics.IN_FLIGHT.set),
        cell=CellView(facts.fingerprint),
    )


async def run(config: GatewayConfig, life: Lifecycle) -> None:
    """Serve until ``life`` stops. Raises OperatorError when the gateway cannot start as configured."""
    raise_file_limit()
    sock = bind(config.host, config.port)
    incarnation = secrets.token_hex(4)
    try:
        facts = await asyncio.to_thread(
            read_model_facts,
            config.model_dir,
            served_name=config.served_model_name,
            max_context_tokens=config.max_context_tokens,
            cache_dir=config.cache_dir,
        )
        tokenizer = await asyncio.to_thread(Tokenizer, config.model_dir, threads=config.threads)
        bus = await connect(config.nats, f"gateway {config.id}")
        try:
            gateway = compose(config, bus, facts, tokenizer, incarnation)
            serve_metrics(config.metrics_port)
            _log.info("gateway_composed", model=facts.name, fingerprint=facts.fingerprint)
            await GatewayShell(gateway, incarnation).serve(make_server(build_app(gateway)), sock, life)
        finally:
            await bus.close()
            tokenizer.close()
    finally:
        sock.close()
