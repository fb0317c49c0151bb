"""Authentication: from the key in a request's headers to a tenant's account. Keys change when their file changes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from services.gateway import metrics, tenant_metrics
from services.gateway.accounts import OPEN, Account
from services.gateway.keys import KEY_HEADER, key_hash, key_id, tenant_id
from services.gateway.tenant_file import read_distinct_tenants
from services.gateway.tenants import Tenants
from shared import logs
from shared.errors import ConfigError, NotAuthenticated
from shared.ids import key_digest
from shared.secret_file import Version, look_at

CHECK_EVERY_S = 0.5
"""A changed file is read at the second look that finds it the same: until then it may not be wholly written."""

_log = logs.get_logger("gateway.tenants")


def caller_of(http: Request) -> Account:
    """Return the account that the boundary found for a request to the API."""
    account: Account = http.scope["state"]["account"]
    return account


class Callers:
    """Accounts by key. Without any configured key, all callers share the one account "".

    ``owners`` maps the names of the file's tenants to the owners of their KV in the cell; it is replaced, never
    changed. ``fault`` says why the file in its present form is not used.
    """

    def __init__(
        self,
        *,
        api_keys: Sequence[str] = (),
        admin_key: str = "",
        tenants_file: str = "",
        max_priority: int = 0,
        max_leased_tokens: int = 0,
        names_tenants: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tenants_file`` is a path or "".

        ``max_priority`` and ``max_leased_tokens`` hold for callers that are in no file. Metrics name tenants if
        ``names_tenants``. Raises ConfigError for a file that is missing or faulty.
        """
        self._names_tenants = names_tenants
        unlisted = msgspec.structs.replace(OPEN, max_priority=max_priority, max_leased_tokens=max_leased_tokens)
        self._clock = clock
        self.fault = ""
        self._admin_hash = key_hash(admin_key.encode()) if admin_key else ""
        self._path = Path(tenants_file).expanduser() if tenants_file else None
        self._open = None if api_keys or tenants_file else Account("", unlisted, clock)
        self._own = {key_hash(key.encode()): Account(tenant_id(key.encode()), unlisted, clock) for key in api_keys}
        self._accounts: dict[str, Account] = {}  # Of the file's tenants, by name.
        self.owners: dict[str, str] = {}
        self._by_key: dict[str, list[tuple[str, Account]]] = {}
        self._version: Version | None = None
        self._asked = asyncio.Event()
        self._use({})
        if self._path is not None:
            self._version, tenants = self._read(self._path)
            self._use(tenants)

    @property
    def has_keys(self) -> bool:
        """Whether keys are configured, so that callers without a valid one are refused."""
        return self._open is None

    def identify(self, headers: Headers) -> Account:
        """Return the account whose key these headers hold. Raises NotAuthenticated."""
        if self._open is not None:
            return self._open
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        # Where both are given, the bearer token counts.
        key = bearer if scheme.lower() == "bearer" else headers.get(KEY_HEADER, "")
        hashed = key_hash(key.strip(" \t").encode("latin-1")) if key else ""  # The bytes that were sent.
        # The few keys that share the digest's first digits are compared in constant time. How far a wrong key's digest
        # matches reveals nothing of a key: a digest cannot be chosen.
        found = [
            account for known, account in self._by_key.get(key_id(hashed), ()) if hmac.compare_digest(known, hashed)
        ]
        if not found:
            raise NotAuthenticated("a valid API key is required: Authorization: Bearer KEY, or X-API-Key: KEY")
        return found[0]

    def account(self, name: str) -> Account | None:
        """Return the account of one of the file's tenants, or None."""
        return self._accounts.get(name)

    def has_own_cache(self, name: str) -> bool:
        """Return whether a caller is a tenant of the file with a salt that no other shares.

        Such a caller finds only its own KV.
        """
        account = self._accounts.get(name)
        if account is None:
            return False
        return sum(each.tenant.salt == account.tenant.salt for each in self._accounts.values()) == 1

    def look_now(self) -> None:
        """Have :meth:`watch` read the file soon, changed or not; for SIGHUP."""
        self._asked.set()

    async def watch(self) -> None:
        """Check twice a second whether the file has changed, and reload it; never returns."""
        seen = self._version
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._asked.wait()
            if self._path is None:
                continue
            before, seen = seen, await look_at(self._path)
            if self._asked.is_set() or (seen != self._version and seen == before):
                self._asked.clear()
                await self.reload()

    async def reload(self) -> None:
        """Read the file now. A fault is logged and changes nothing."""
        if self._path is None:
            return
        self._version = await look_at(self._path)  # Also of a faulty file, so that each fault is logged once.
        try:
            # Reading thousands of tenants takes a second, during which answers continue.
            self._version, tenants = await asyncio.to_thread(self._read, self._path)
        except ConfigError as error:
            metrics.TENANT_FILE_FAULTS.inc()
            _log.error("tenants_file_refused", reason=error.message)
            self.fault = error.message
            return
        self.fault = ""
        self._use(tenants)
        _log.info("tenants_loaded", tenants=len(tenants), keys=sum(len(tenant.keys) for tenant in tenants.values()))

    def _read(self, path: Path) -> tuple[Version, Tenants]:
        return read_distinct_tenants(path, admin_hash=self._admin_hash, own_hashes=self._own)

    def _use(self, tenants: Tenants) -> None:
        accounts = {}
        for name, tenant in tenants.items():
            account = self._accounts.get(name)
            if account is None:
                account = Account(name, tenant, self._clock, is_listed=self._names_tenants)
                if self._names_tenants:
                    tenant_metrics.begin(name)
            else:
                account.change(tenant)
            accounts[name] = account
        for name, account in self._accounts.items():
            if name not in accounts and account.is_listed:
                account.is_listed = False  # Its requests in progress continue, and count as other callers' from here.
                tenant_metrics.forget(name)
        self._accounts = accounts
        self.owners = {name: key_digest(tenant.salt) for name, tenant in tenants.items()}
        self._by_key = {}
        for hashed, account in self._own.items():
            self._by_key.setdefault(key_id(hashed), []).append((hashed, account))
        for account in accounts.values():
            for hashed in account.tenant.keys:
                self._by_key.setdefault(key_id(hashed), []).append((hashed, account))
        metrics.TENANTS.set(len(accounts))
