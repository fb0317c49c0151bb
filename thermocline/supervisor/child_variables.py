"""Which of our own environment variables each child gets. Pure.

The environment of ``thermocline up`` has the settings of all processes, and with them the secrets of the whole cell. A
child gets those that its service reads, so that an attacker who takes over a worker has no admin key and no key of
chunks at rest. Variables that are neither ours nor a store's credentials are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import msgspec

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared import variables
from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE
from shared.renamed_settings import old_names

SERVICES: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "storage": StorageConfig, "worker": WorkerConfig}
)

_STORE = "storage"
_STORES_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
"""Beginnings of the variables with settings and credentials of object stores, which storages alone read."""

_BROKERS_PREFIX = "TC_NATS_"
"""Beginning of the variables with the passwords of a broker's users; only a server of the operator's own reads them."""

_KEY_DEFAULT = variables.PREFIX + "KEY_DEFAULT"


def is_passed(service: str, variable: str) -> bool:
    """Return whether a child of ``service`` gets ``variable``; "" is a program that is not ours."""
    name = variable.upper()
    if name.startswith(variables.PREFIX):
        return variable in _read_by(service)
    if name.startswith(_STORES_PREFIXES):
        return service == _STORE
    return not name.startswith(_BROKERS_PREFIX)


@cache
def _read_by(service: str) -> frozenset[str]:
    """Return the variables with our prefix that ``service`` reads, by their present and their old names."""
    if not service:
        return frozenset()
    settings = SERVICES[service].__struct_fields__
    names = (*settings, *(old for old, _ in old_names(settings)))
    others = {PASSWORD_VARIABLE, TOKEN_VARIABLE, *([_KEY_DEFAULT] if service == _STORE else [])}
    return frozenset(variables.PREFIX + name.upper() for name in names) | others
