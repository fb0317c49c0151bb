"""Faults of a gateway's settings that their types do not show.

They are checked before it starts, and by ``thermocline up`` before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.config import GatewayConfig
from services.gateway.key_file import read_api_keys
from services.gateway.keys import key_hash
from services.gateway.model_facts import check_facts
from shared.errors import ConfigError, OperatorError
from shared.quality_gate import UNMEASURED

if TYPE_CHECKING:
    from services.gateway.importance_gate import ImportanceGate


def check(config: GatewayConfig) -> None:
    """Check the settings and the files that they name, but read no weights. Raises ConfigError with every fault."""
    faults = list(_faults(config))
    if faults:
        raise ConfigError.of(faults)


def _faults(config: GatewayConfig) -> Iterator[str]:
    parts: tuple[Callable[[GatewayConfig], object], ...]
    parts = (_model, GatewayConfig.server_tls, _tenants, _gate, _kv_gate)
    for part in parts:
        try:
            part(config)
        except ConfigError as error:
            yield from error.each()
        except OperatorError as error:
            yield error.message


def _model(config: GatewayConfig) -> None:
    check_facts(config.model_dir, config.max_context_tokens)


def _tenants(config: GatewayConfig) -> None:
    api_keys = (*config.api_keys, *read_api_keys(config.api_keys_file))
    if config.tenants:
        from services.gateway.tenant_file import read_distinct_tenants

        read_distinct_tenants(
            Path(config.tenants).expanduser(),
            admin_hash=key_hash(config.admin_key.encode()) if config.admin_key else "",
            own_hashes={key_hash(key.encode()) for key in api_keys},
        )


def _gate(config: GatewayConfig) -> None:
    if config.importance != "gated":
        return
    from services.gateway.importance_gate import read_served_gate

    gate = read_served_gate(
        Path(config.importance_gate).expanduser(),
        probe_heads=config.importance_probe_heads,
        alpha=config.importance_alpha,
    )
    check_defaults(gate, config)


def _kv_gate(config: GatewayConfig) -> None:
    from services.gateway.kv_gate import read_kv_gate

    if config.kv_dtype != "auto" and config.kv_gate != UNMEASURED:
        read_kv_gate(Path(config.kv_gate).expanduser())


def check_defaults(gate: ImportanceGate, config: GatewayConfig) -> None:
    """Raise ConfigError when ``gate`` does not allow a ratio that the settings make a default."""
    from services.gateway.importance_gate import check_default

    if config.importance_ratio:
        check_default(gate, config.importance_ratio, setting="--importance-ratio")
    for place, ratio in enumerate(config.ratio_by_key.values(), 1):
        if ratio:
            check_default(gate, ratio, setting=f"--importance-key-ratios: entry {place}")
