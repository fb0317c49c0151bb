"""Tenants in a TOML file: parsed and checked; errors list all faults and never show a secret.

::

    [tenants.acme]
    salt = "4f…"                       # keeps its KV apart; tenants with one salt share KV
    keys = ["sha256:9b…"]              # digests, see ``keys.key_hash``; none admits no caller
    requests_per_minute = 600          # limits; 0 or left out is no limit
    tokens_per_minute = 200_000
    max_concurrent = 32
    max_queued = 64
    max_priority = 10                  # highest priority of its requests, 0 where left out
    max_leased_tokens = 262_144        # tokens that its leases may keep in the cell, 0 where left out
    device_bytes = 8_589_934_592       # quotas of its KV: on each device,
    host_bytes = 34_359_738_368        # in each node's host memory,
    disk_bytes = 214_748_364_800       # on each node's disk
    remote_bytes = 1_099_511_627_776   # and in the object store

``thermocline keys`` writes it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.keys import is_key_hash, key_id
from services.gateway.openai_schema.sampling import MAX_PRIORITY
from shared.errors import ConfigError
from shared.ids import key_digest
from shared.messages.requests import CacheQuota
from shared.text_patterns import END
from shared.undecodable import UNPARSABLE

MAX_TENANTS = 4096
MAX_KEYS = 64
MIN_SALT_CHARACTERS = 16
MAX_BYTES = 2**60
RESERVED = "operator"
"""Tenant of the administration's own requests."""
OTHER = "other"
"""Label in metrics of all callers that are no tenants of the file."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_AN_API_KEY = re.compile(r"[0-9a-f]{16}")

Limit = Annotated[int, Meta(ge=0, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Salt = Annotated[str, Meta(pattern=rf"^[\x21\x23-\x5b\x5d-\x7e]+{END}", min_length=MIN_SALT_CHARACTERS, max_length=256)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of the file.

    Limits hold at each gateway by itself, except ``max_queued`` and ``max_leased_tokens``, which hold in the whole
    cell.

    Bytes are of cached KV, in each pool by itself; tenants with one salt have one cache and must have the same bytes.
    """

    salt: Salt
    keys: Annotated[tuple[str, ...], Meta(max_length=MAX_KEYS)] = ()
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0  # Prompts at their submission, answers at their end.
    max_concurrent: Limit = 0  # Choices in progress.
    max_queued: Limit = 0  # Choices that wait in the cell's queue.
    max_priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 0  # Highest priority of its requests.
    max_leased_tokens: Limit = 0  # Tokens that its leases keep in the cell; 0 is none.
    device_bytes: Bytes = 0
    host_bytes: Bytes = 0
    disk_bytes: Bytes = 0
    remote_bytes: Bytes = 0

    def quota(self) -> CacheQuota | None:
        """Return the quota that the cell gets with each request, bounded or not: it counts the tenant's bytes.

        None where the KV has no owner.
        """
        if not self.salt:
            return None
        return CacheQuota(
            owner=key_digest(self.salt),
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            remote_bytes=self.remote_bytes,
        )


Tenants = Mapping[str, Tenant]

QUOTAS = ("device_bytes", "host_bytes", "disk_bytes", "remote_bytes")
LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "max_queued",
    "max_priority",
    "max_leased_tokens",
    *QUOTAS,
)


def name_fault(name: str) -> str:
    """Return why a tenant may not have this name, or ""."""
    if not _NAME.fullmatch(name):
        return "a name has 1 to 64 letters, digits, - or _"
    if name == RESERVED:
        return f"the name {RESERVED} is reserved for the administration"
    if name == OTHER:
        return f"the name {OTHER} stands for all other callers"
    if _OF_AN_API_KEY.fullmatch(name):
        return "names of 16 hex digits are those of --api-keys"
    return ""


def parse_tenants(text: str, source: str) -> dict[str, Tenant]:
    """Parse the tenants in ``text``, by name and in its order. ``source`` names the text in the ConfigError.

    Faults name tenants and fields, and never quote a value: it may be a salt, or a key where its digest should be.
    """
    try:
        table = tomllib.loads(text)
    except UNPARSABLE as error:
        # Only the line's number: the parser's message may quote the line, and so would a chained cause.
        place = re.search(r"line (\d+)", str(error))
        raise ConfigError(f"{source} is not TOML{f' (line {place[1]})' if place else ''}") from None
    faults = []
    if set(table) - {"tenants"}:
        faults.append(f"{source}: only [tenants.NAME] is known")
    entries = table.get("tenants", {})
    if not isinstance(entries, dict) or len(entries) > MAX_TENANTS:
        raise ConfigError("; ".join([*faults, f"{source}: tenants must be at most {MAX_TENANTS} tables"]))
    tenants: dict[str, Tenant] = {}
    holders: dict[str, str] = {}
    for place_of, (name, entry) in enumerate(entries.items(), 1):
        fault = name_fault(name)
        if fault:
            faults.append(f"{source}: tenant number {place_of}: {fault}")
            continue
        try:
            tenants[name] = _tenant(entry)
        except ConfigError as error:
            faults.append(f"{source}: tenant {name}: {error.message}")
            continue
        for hashed in tenants[name].keys:
            if hashed in holders:
                faults.append(f"{source}: tenant {name}: key {key_id(hashed)} is given to {holders[hashed]} already")
            holders[hashed] = name
    faults += [f"{source}: {fault}" for fault in _quota_faults(tenants)]
    if faults:
        raise ConfigError("; ".join(faults))
    return tenants


def _quota_faults(tenants: Tenants) -> list[str]:
    """Return a fault for each tenant that shares a cache and has other quotas for it."""
    first: dict[str, str] = {}
    faults = []
    for name, tenant in tenants.items():
        other = first.setdefault(tenant.salt, name)
        if tenant.quota() != tenants[other].quota():
            faults.append(f"tenant {name}: its salt is that of {other}, so its {', '.join(QUOTAS)} must be too")
    return faults


def _tenant(entry: Any) -> Tenant:
    try:
        tenant = msgspec.convert(entry, Tenant)
    except msgspec.ValidationError as error:
        raise ConfigError(_without_values(str(error))) from None
    for place, hashed in enumerate(tenant.keys, 1):
        if not is_key_hash(hashed):
            raise ConfigError(f"number {place} of keys is not sha256: and 64 hex digits (a key itself never goes here)")
    return tenant


def _without_values(message: str) -> str:
    # The name of an unknown field is the file's only text in msgspec's messages, and a slip can put anything there.
    return re.sub(r"unknown field `.*`", "an unknown field", message, flags=re.DOTALL)


def render_tenants(tenants: Tenants) -> str:
    """Return the file's text; :func:`parse_tenants` gives the same tenants back."""
    lines = ["# Tenants of Thermocline. Written by `thermocline keys`, which keeps no comments."]
    for name, tenant in tenants.items():
        lines += ["", f"[tenants.{name}]", f'salt = "{tenant.salt}"', "keys = ["]
        lines += [f'    "{hashed}",' for hashed in tenant.keys]
        lines.append("]")
        lines += [f"{limit} = {getattr(tenant, limit)}" for limit in LIMITS if getattr(tenant, limit)]
    return "\n".join(lines) + "\n"
