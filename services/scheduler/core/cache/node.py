"""A node of the radix tree: a span of tokens, and who holds its KV."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from services.scheduler.core.cache.holdings import EMPTY_MAP, shared_names
from services.scheduler.core.cache.node_record import NO_DIGESTS, digests_of, inserted, listed, run_at, taken
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from _collections_abc import dict_values

_SHORT_NAMES = {
    "id": "i",
    "parent": "p",
    "tokens": "t",
    "namespace": "n",
    "children": "c",
    "device": "d",
    "loading": "l",
    "host": "h",
    "record": "a",
    "locks": "k",
    "host_locks": "r",
    "below": "b",
    "last_use": "u",
    "hits": "x",
    "transfer": "f",
    "backup_pages": "g",
    "identities": "y",
    "quarantined": "q",
    "depth": "e",
    "rare": "v",
    "importance": "m",
    "owner": "o",
}


class Rare(msgspec.Struct, omit_defaults=True, rename=_SHORT_NAMES, gc=False, frozen=True):
    """What few nodes have. Nodes that have nothing of it share one, as do those that only have an owner."""

    namespace: str = ""
    host_locks: dict[str, int] = EMPTY_MAP
    identities: bytes = b""
    quarantined: tuple[str, ...] = ()
    importance: float = 1.0
    owner: int = 0


NOTHING_RARE = Rare()


@lru_cache(maxsize=4096)
def owned(owner: int) -> Rare:
    """What a node has whose pages count against somebody's quotas, and nothing else."""
    return Rare(owner=owner) if owner else NOTHING_RARE


class Node(msgspec.Struct, omit_defaults=True, rename=_SHORT_NAMES, gc=False):
    """A span of whole pages under one parent. Dictionaries are keyed by worker id or storage id.

    A pool has either all pages of a node or none. ``device``: workers on which its pages are valid. ``loading``:
    workers with device pages that a load on its way will fill. ``host``: storages in whose host pool they are valid.
    ``record`` has the numbers of those pages, see :meth:`device_pages`. ``locks``: running requests of a worker whose
    prefix includes this node. ``below``: children with ``device`` or ``loading`` pages on a worker. ``transfer`` is
    the backup that reads this node (0 is none) and ``backup_pages`` the host pages that it fills.

    Rarely there, and kept apart: ``namespace``, on roots only. ``host_locks``: loads that read the host copy.
    ``identities``: 16 bytes a page once they were needed. ``quarantined``: storages whose copy failed verification
    while another load reads it. ``importance``: what its tokens are worth beside those of others, as far as is known
    (see :mod:`shares`). ``owner``: whose quotas its pages count against, 0 is nobody's; that of its root (see
    :mod:`quotas`).

    Names, counts and depths are shared with other nodes (see :mod:`holdings`): replace them, do not change them.
    Snapshots leave out fields that have their default, so that a decoded node is as small as a new one. What a node's
    id stands for, the tokens from the root to the node's end, never changes while the node lives, and ids are not
    used again.
    """

    id: int
    parent: int
    tokens: bytes
    children: int | dict[int, int] = 0  # An only child, or ids by a hash of the first page; see :func:`child_of`.
    device: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    record: bytes = NO_DIGESTS  # Its digests, then page numbers of device, loading and host; see :mod:`node_record`.
    locks: dict[str, int] = EMPTY_MAP
    below: dict[str, int] = EMPTY_MAP
    last_use: int = 0  # Sequence number of the input that last used it.
    hits: int = 0
    transfer: int = 0
    backup_pages: bytes = b""
    depth: int = 0  # Tokens above this node's own span.
    rare: Rare = NOTHING_RARE

    @property
    def end(self) -> int:
        """Tokens from the root to the node's end."""
        return self.depth + len(self.tokens) // TOKEN_BYTES

    @property
    def digest(self) -> int:
        """What the node is remembered by: a hash from the root through its head (see HEAD_TOKENS)."""
        return digests_of(self.record)[0]

    @property
    def end_digest(self) -> int:
        """The same from the root to the node's end; digests of children go on from it."""
        return digests_of(self.record)[1]

    @property
    def child_ids(self) -> tuple[int, ...] | dict_values[int, int]:
        """Ids of its children, in the order in which they came. Does not copy many."""
        children = self.children
        if isinstance(children, int):
            return (children,) if children else ()
        return children.values()

    @property
    def namespace(self) -> str:
        return self.rare.namespace

    @property
    def host_locks(self) -> dict[str, int]:
        return self.rare.host_locks

    @property
    def identities(self) -> bytes:
        return self.rare.identities

    @property
    def quarantined(self) -> tuple[str, ...]:
        return self.rare.quarantined

    @property
    def importance(self) -> float:
        return self.rare.importance

    @property
    def owner(self) -> int:
        return self.rare.owner

    def set_rare(self, **changes: Any) -> None:
        """Give it other values of fields that few nodes have."""
        rare = msgspec.structs.replace(self.rare, **changes)
        common = owned(rare.owner)
        self.rare = common if rare == common else rare

    def device_pages(self, worker_id: str) -> bytes:
        """Numbers of its pages on a worker of ``device``, packed int32. Raises ValueError for another."""
        return self._listed(self.device.index(worker_id))

    def loading_pages(self, worker_id: str) -> bytes:
        """The same of a worker of ``loading``."""
        return self._listed(len(self.device) + self.loading.index(worker_id))

    def host_pages(self, storage_id: str) -> bytes:
        """The same of a storage of ``host``."""
        return self._listed(len(self.device) + len(self.loading) + self.host.index(storage_id))

    def put_on_device(self, worker_id: str, pages: bytes) -> None:
        """These pages of a worker that is not in ``device`` hold it from now on."""
        self._insert(len(self.device), pages)
        self.device = shared_names((*self.device, worker_id))

    def take_from_device(self, worker_id: str) -> bytes:
        """No pages of this worker hold it any more; returns those that did."""
        pages = self._take(self.device.index(worker_id))
        self.device = _without(self.device, worker_id)
        return pages

    def put_loading(self, worker_id: str, pages: bytes) -> None:
        """A load will fill these pages of a worker that is not in ``loading``."""
        self._insert(len(self.device) + len(self.loading), pages)
        self.loading = shared_names((*self.loading, worker_id))

    def take_loading(self, worker_id: str) -> bytes:
        """That load is over; returns the pages."""
        pages = self._take(len(self.device) + self.loading.index(worker_id))
        self.loading = _without(self.loading, worker_id)
        return pages

    def put_in_host(self, storage_id: str, pages: bytes) -> None:
        """These pages of a storage that is not in ``host`` hold it from now on."""
        self._insert(self.pools, pages)
        self.host = shared_names((*self.host, storage_id))

    def take_from_host(self, storage_id: str) -> bytes:
        """No pages of this storage hold it any more; returns those that did."""
        pages = self._take(len(self.device) + len(self.loading) + self.host.index(storage_id))
        self.host = _without(self.host, storage_id)
        return pages

    @property
    def pools(self) -> int:
        """Pools that hold it or are to."""
        return len(self.device) + len(self.loading) + len(self.host)

    def _listed(self, place: int) -> bytes:
        record = self.record
        return run_at(record, place) if len(record) & 3 else listed(record, self.pools, place)

    def _insert(self, place: int, pages: bytes) -> None:
        """To be called before the name is among the others, whose lists are as long."""
        self.record = inserted(self.record, self.pools, place, pages)

    def _take(self, place: int) -> bytes:
        """To be called before the name is gone."""
        pages = self._listed(place)
        self.record = taken(self.record, self.pools, place)
        return pages


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return shared_names(tuple(each for each in names if each != name)) if len(names) > 1 else ()
