"""Orders that cannot be carried out are refused before a byte moves."""

import pytest

from services.storage.core.backup_check import check_backup
from shared.errors import InvalidRequest
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import BackupPages

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=4, page_size=1, dtype="float32")


def _handle(pages: int, geometry: KvGeometry = GEOMETRY) -> PoolHandle:
    return PoolHandle(kind="shm", layout="layer_first", name="", nbytes=0, pages=pages, geometry=geometry)


def _order(**change: object) -> BackupPages:
    fields = {
        "transfer_id": 1,
        "worker_id": "w0",
        "worker_incarnation": "i0",
        "device_pages": pack_int32([3, 0]),
        "host_pages": pack_int32([5, 1]),
        "identities": b"a" * 16 + b"b" * 16,
    } | change
    return BackupPages(**fields)  # type: ignore[arg-type]


def test_a_good_order_is_unpacked() -> None:
    """Pages and identities come out in the order of the lists."""
    transfer = check_backup(_order(), _handle(4), _handle(6))

    assert transfer.device_pages.tolist() == [3, 0]
    assert transfer.host_pages.tolist() == [5, 1]
    assert transfer.identities == (b"a" * 16, b"b" * 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_pages": pack_int32([3, 4])}, "device pages 3 to 4"),
        ({"device_pages": pack_int32([-1, 0])}, "device pages -1 to 0"),
        ({"host_pages": pack_int32([5, 6])}, "host pages 5 to 6"),
        ({"host_pages": pack_int32([5, 5])}, "named twice"),
        ({"host_pages": pack_int32([5])}, "do not belong together"),
        ({"identities": b"a" * 16}, "do not belong together"),
        ({"identities": b"a" * 16 + bytes(16)}, "all-zero"),
        ({"device_pages": b"", "host_pages": b"", "identities": b""}, "no list"),
        ({"device_pages": b"12345"}, "5 bytes are no list"),
    ],
)
def test_a_bad_order_says_what_is_wrong(change: dict[str, object], reason: str) -> None:
    """Pages out of range, lists that differ and identities of nothing are refused by name."""
    with pytest.raises(InvalidRequest, match=reason):
        check_backup(_order(**change), _handle(4), _handle(6))


def test_pools_of_different_geometry_exchange_nothing() -> None:
    """Even one differing size is refused."""
    other = KvGeometry(layers=1, kv_heads=1, head_dim=4, page_size=2, dtype="float32")

    with pytest.raises(InvalidRequest, match="differ in geometry"):
        check_backup(_order(), _handle(4, other), _handle(6))
