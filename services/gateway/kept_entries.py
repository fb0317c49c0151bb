"""What gateways keep for callers in a bucket of the broker, so that any gateway of the cell can go on from it.

An entry's name contains its owner, which is the caller's tenant, and the digest of the request's salt: other callers'
names do not lead to it.
"""

from __future__ import annotations

from hashlib import blake2b

from services.gateway import metrics
from services.gateway.accounts import Account
from services.gateway.responses.shares import KeptShares
from shared import logs
from shared.bus.protocol import Bus
from shared.errors import PayloadTooLarge, ThermoclineError

LOOK_S = 0.5
"""Longest wait, before the end of an answer, for how full the bucket is."""

_log = logs.get_logger("gateway.kept")


class KeptEntries:
    """The bucket, by owner, salt and id. Each call is one round trip to the broker, and at most one look more."""

    def __init__(self, bus: Bus) -> None:
        """Keep entries over ``bus``."""
        self._bus = bus
        self._shares = KeptShares()

    async def keep(self, account: Account, salt: str | None, entry_id: str, data: bytes) -> bool:
        """Keep an entry under a fresh id; return False if it is too large, or the broker does not answer."""
        name = _name(account, salt, entry_id)
        try:
            await self._bus.keep(name, data)
        except ThermoclineError as error:
            reason = "too_large" if isinstance(error, PayloadTooLarge) else "unavailable"
            metrics.RESPONSES_NOT_KEPT.labels(reason).inc()
            _log.warning("response_not_kept", response_id=entry_id, reason=error.message)
            return False
        self._shares.note(_owner(account), name, len(data))
        await self._make_room()
        return True

    async def read(self, account: Account, salt: str | None, entry_id: str) -> bytes | None:
        """Return an entry, None if there is none. Raises Unavailable."""
        return await self._bus.kept(_name(account, salt, entry_id))

    async def erase(self, account: Account, salt: str | None, entry_id: str) -> bool:
        """Erase an entry; return whether there was one. Raises Unavailable."""
        name = _name(account, salt, entry_id)
        if not await self._bus.forget(name):
            return False
        self._shares.erased(_owner(account), name)
        return True

    async def erase_all(self, account: Account | None, salt: str | None) -> int:
        """Erase all entries of a caller, of a salt, or of both; return how many there were. Raises Unavailable."""
        return await self._bus.forget(f"{_owner(account) if account else '*'}.{_digest(salt) if salt else '*'}.*")

    async def _make_room(self) -> None:
        """Erase entries of the caller with the most where the bucket is nearly full."""
        if not self._shares.is_look_due:
            return
        try:
            for name in self._shares.looked(await self._bus.kept_room(timeout_s=LOOK_S)):
                await self._bus.forget(name)
        except ThermoclineError as error:
            self._shares.put_off()
            advice = "has the broker this release's permissions?"
            _log.warning("kept_responses_are_not_shared_out", reason=error.message, advice=advice)


def _name(account: Account, salt: str | None, entry_id: str) -> str:
    """Return an entry's name; its id has the form of ``responses.ids``, or it could name others' entries."""
    return f"{_owner(account)}.{_digest(salt or '')}.{entry_id}"


def _owner(account: Account) -> str:
    # With its salt: a tenant whose salt was changed loses its earlier responses, as it loses its cache.
    return _digest(f"{account.name}\0{account.tenant.salt}")


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
