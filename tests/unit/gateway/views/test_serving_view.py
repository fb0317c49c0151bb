"""What a ready gateway says of the devices and pools behind it."""

from __future__ import annotations

from services.gateway.context_limit import ContextLimit
from services.gateway.openai_schema.models import ServingDevice, ServingPool
from services.gateway.views.serving_view import serving_view
from shared.messages.pools import HIDDEN
from shared.messages.status import CellStatus, PoolStatus, StorageBudget, WorkerStatus
from shared.messages.worker_events import DeviceFacts
from tests.unit.gateway.running_gateway import running_gateway, says
from tests.unit.gateway.scripted_cell import cell_status
from tests.waiting import until

MIB = 2**20


def pool(owner: str, tier: str, pages: int) -> PoolStatus:
    return PoolStatus(owner=owner, tier=tier, total=pages, free=pages, cached=0, leased=0)  # type: ignore[arg-type]


def status(**changes: object) -> CellStatus:
    """A cell with a GPU, pages of 1 MiB for 16 tokens, and a storage with everything below."""
    fields: dict[str, object] = {
        "max_context": 160, "dtype": "bfloat16", "page_bytes": MIB,
        "workers": (
            WorkerStatus(
                worker_id="w", incarnation="i", running=0, waiting=0, device=DeviceFacts(kind="cuda", name="H", ranks=2)
            ),
        ),
        "pools": (pool("w", "device", 10), pool("s", "host", 20), pool("s", HIDDEN, 5)),
        "budgets": (StorageBudget(storage_id="s", host=20 * MIB, disk=100 * MIB, has_remote=True),),
    }  # fmt: skip
    return cell_status(**(fields | changes))


def test_devices_pools_and_context_are_told() -> None:
    """Pools in tokens and bytes; a disk about, an object store without bound."""
    found = serving_view(status(), ContextLimit(4096, 160, 16, MIB))

    assert found.devices == [ServingDevice(worker_id="w", kind="cuda", name="H", ranks=2)]
    assert (found.dtype, found.context_tokens, found.model_context_tokens) == ("bfloat16", 160, 4096)
    assert found.pools == [
        ServingPool(tier="device", owner="w", tokens=160, bytes=10 * MIB),
        ServingPool(tier="host", owner="s", tokens=320, bytes=20 * MIB),
        ServingPool(tier="hidden", owner="s", tokens=80, bytes=None),
        ServingPool(tier="disk", owner="s", tokens=1600, bytes=100 * MIB),
        ServingPool(tier="remote", owner="s", tokens=None, bytes=None),
    ]


def test_the_type_of_the_model_and_that_of_kv_are_told_apart() -> None:
    """KV of eight bits is computed in a wider type, which workers of an earlier release do not name."""
    device = DeviceFacts(kind="cpu", dtype="float32")
    worker = WorkerStatus(worker_id="w", incarnation="i", running=0, waiting=0, device=device)

    found = serving_view(status(workers=(worker,), dtype="float8_e4m3fn"), ContextLimit(160))
    earlier = serving_view(status(), ContextLimit(160))

    assert (found.dtype, found.kv_dtype) == ("float32", "float8_e4m3fn")
    assert (earlier.dtype, earlier.kv_dtype) == ("bfloat16", "bfloat16")


def test_a_host_pool_that_is_being_made_is_told() -> None:
    """With the size that it will have."""
    budget = StorageBudget(storage_id="s", host=20 * MIB, awaits_pool=True)
    found = serving_view(status(pools=(pool("w", "device", 10),), budgets=(budget,)), ContextLimit(160))

    assert found.pools[1:] == [ServingPool(tier="host", owner="s", tokens=320, bytes=20 * MIB, is_ready=False)]


def test_a_worker_of_an_earlier_release_has_no_device_to_tell() -> None:
    """Nor has a cell without workers a size of pages."""
    worker = WorkerStatus(worker_id="w", incarnation="i", running=0, waiting=0)
    found = serving_view(status(workers=(worker,), page_bytes=0), ContextLimit(160))

    assert found.devices == []
    assert [pool.tokens for pool in found.pools if pool.tier == "disk"] == [None]


async def test_readiness_carries_it() -> None:
    """For people and for ``thermocline up``."""
    async with running_gateway(says("yes")) as harness:
        await harness.cell.announce(dtype="float16", page_bytes=MIB, pools=(pool("worker-0", "device", 2),))
        gateway = harness.gateway
        await until(lambda: gateway.cell.status is not None and gateway.cell.status.dtype == "float16")
        answer = await harness.client.get("/health/ready")

    assert answer.json()["serving"]["pools"] == [
        {"tier": "device", "owner": "worker-0", "tokens": 32, "bytes": 2 * MIB, "is_ready": True}
    ]
