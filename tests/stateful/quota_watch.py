"""Watches that nobody's KV goes for a quota that is another's: every choice is checked against counts from scratch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import pytest

from services.scheduler.core.cache import heat
from services.scheduler.core.cache.candidates import Candidates
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, namespace_of, page_count
from services.scheduler.core.cache.residency import (
    is_device_evictable,
    is_host_evictable,
    is_left_bare,
    leaves_with_backup,
)
from services.scheduler.core.cache.victims import take_device_excess, take_device_victim, take_host_victim
from services.scheduler.core.queue import queueing
from services.scheduler.core.quotas import quota_owners
from services.scheduler.core.state import CellState, Worker
from services.scheduler.core.tiers import host_admission, promotion
from services.scheduler.core.tiers import making_room as tiers
from shared.messages.base import unpack_int32
from shared.messages.requests import CacheQuota, SubmitRequest

NOWHERE = -1


class QuotaWatch:
    """What each namespace may have is what an accepted request said of it last. One cell at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.quotas: dict[str, CacheQuota] = {}
        self.seen: dict[str, int] = {}  # How often a choice was checked, by kind.
        self._asks: tuple[int, int] = (0, 0)
        self._wrap(patch)

    def owners(self) -> dict[str, CacheQuota]:
        """Quotas by owner."""
        return {quota.owner: quota for quota in self.quotas.values()}

    def owner_of(self, state: CellState, node: Node) -> str:
        """Whose a node is, "" where nobody said."""
        quota = self.quotas.get(namespace_of(state.tree, node))
        return quota.owner if quota is not None else ""

    def _says(self, namespace: str, quota: CacheQuota | None) -> None:
        """What a request says counts for all that its owner has."""
        known = self.quotas.get(namespace)
        if quota is None and known is None:
            return
        now = quota or CacheQuota(owner=known.owner if known is not None else "")
        self.quotas[namespace] = now
        self.quotas = {name: now if its.owner == now.owner else its for name, its in self.quotas.items()}

    def device_pages(self, state: CellState, owner: str, worker_id: str) -> int:
        """What of an owner is on a device or loading, less what running backups will free."""
        pages = 0
        for node in self._nodes_of(state, owner):
            size = page_count(state.tree, node)
            pages += size * ((worker_id in node.device) + (worker_id in node.loading))
            if worker_id in node.device and worker_id not in node.locks and leaves_with_backup(state, node, worker_id):
                pages -= size
        return pages

    def host_pages(self, state: CellState, owner: str, storage_id: str) -> int:
        """What of an owner is in a host pool or on its way there."""
        pages = 0
        for node in self._nodes_of(state, owner):
            pages += page_count(state.tree, node) * (storage_id in node.host)
            if node.transfer and state.transfers[node.transfer].storage_id == storage_id:
                pages += len(node.backup_pages) // PAGE_NUMBER_BYTES
        for fetch in state.fetches.values():
            quota = self.quotas.get(fetch.namespace)
            if fetch.storage_id == storage_id and quota is not None and quota.owner == owner:
                pages += sum(page != NOWHERE for page in unpack_int32(fetch.pages))
        return pages

    def all_host_pages(self, state: CellState) -> dict[tuple[str, str], int]:
        """The same of every owner and pool."""
        pools = [name for name, storage in state.storages.items() if storage.pool is not None]
        return {(owner, name): self.host_pages(state, owner, name) for owner in self.owners() for name in pools}

    def most_host_pages(self, state: CellState, owner: str) -> int:
        """What a quota allows, or very much."""
        return _most(state, self.owners()[owner].host_bytes)

    def is_settled(self, state: CellState) -> bool:
        """Whether nobody is above its quota anywhere."""
        for owner, quota in self.owners().items():
            device, host = _most(state, quota.device_bytes), _most(state, quota.host_bytes)
            if any(self.device_pages(state, owner, name) > device for name in state.workers):
                return False
            if any(pages > host for (other, _), pages in self.all_host_pages(state).items() if other == owner):
                return False
        return True

    def _nodes_of(self, state: CellState, owner: str) -> list[Node]:
        return [node for node in state.tree.nodes.values() if node.parent and self.owner_of(state, node) == owner]

    def _wrap(self, patch: pytest.MonkeyPatch) -> None:
        take_excess, take_device, take_host = (
            take_device_excess,
            take_device_victim,
            take_host_victim,
        )

        def device_excess(state: CellState, worker_id: str, leaving: Mapping[int, int], **asks: int) -> object:
            self._asks = asks.get("owner", 0), asks.get("coming", 0)
            return take_excess(state, worker_id, leaving, **asks)

        def device_victim(state: CellState, worker_id: str, leaving: Mapping[int, int]) -> Node | None:
            self._check_device(state, worker_id, leaving)
            return take_device(state, worker_id, leaving)

        def host_victim(state: CellState, storage_id: str, behind: str = "") -> Node | None:
            self._check_host(state, storage_id)
            return take_host(state, storage_id, behind)

        remember = quota_owners.remember_quota

        def remember_quota(state: CellState, message: SubmitRequest) -> None:
            self._says(message.namespace, message.quota)
            remember(state, message)

        patch.setattr(queueing, "remember_quota", remember_quota)
        patch.setattr(tiers, "take_device_excess", device_excess)
        patch.setattr(tiers, "take_device_victim", device_victim)
        patch.setattr(host_admission, "take_host_victim", host_victim)
        displace, coldest = promotion._drop_colder, heat.coldest_together

        def drop_colder(state: CellState, worker: Worker, leaves: Candidates, root: Node, pages: int) -> int | None:
            if pages > 0:
                self._asks = 0, 0
                self._check_device(state, worker.worker_id, {})
            return displace(state, worker, leaves, root, pages)

        def coldest_together(
            state: CellState, index: Candidates, pages: int, *, spared: Container[int], **how: Any
        ) -> list[Node] | None:
            for storage_id in state.storages:
                self._check_host(state, storage_id, spared)
            return coldest(state, index, pages, spared=spared, **how)

        patch.setattr(promotion, "_drop_colder", drop_colder)
        patch.setattr(host_admission, "coldest_together", coldest_together)

    def _check_device(self, state: CellState, worker_id: str, leaving: Mapping[int, int]) -> None:
        """The policy may name anybody's node: nobody above its quota has one that could go, whoever asks included."""
        account = state.quotas.accounts.get(self._asks[0]) if state.quotas.accounts else None
        for owner, quota in self.owners().items():
            coming = self._asks[1] if account is not None and account.name == owner else 0
            if self.device_pages(state, owner, worker_id) + coming <= _most(state, quota.device_bytes):
                continue
            for node in self._nodes_of(state, owner):
                may_go = is_device_evictable(state, node, worker_id) or is_left_bare(node, worker_id, leaving)
                assert not may_go, f"node {node.id} of {owner}, which is above its quota, stays on {worker_id}"
            self._saw("device_choices_with_somebody_above")
        self._saw("device_choices")

    def _check_host(self, state: CellState, storage_id: str, spared: Container[int] = ()) -> None:
        for owner, quota in self.owners().items():
            if self.host_pages(state, owner, storage_id) <= _most(state, quota.host_bytes):
                continue
            for node in self._nodes_of(state, owner):
                may_go = is_host_evictable(state, node, storage_id) and node.id not in spared
                assert not may_go, f"node {node.id} of {owner}, which is above its quota, stays in {storage_id}"
        self._saw("host_choices")

    def _saw(self, kind: str) -> None:
        self.seen[kind] = self.seen.get(kind, 0) + 1


def _most(state: CellState, nbytes: int) -> int:
    return nbytes // state.geometry.page_bytes if nbytes and state.geometry is not None else 1 << 60
