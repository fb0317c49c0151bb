"""The words of ``thermocline up`` once it is ready."""

from __future__ import annotations

import msgspec

from services.gateway.openai_schema.models import Serving, ServingDevice, ServingPool
from thermocline.supervisor.ready_lines import (
    ReadyFacts,
    context_line,
    device_lines,
    idle_gpu_lines,
    ready_lines,
    small_host_lines,
)

GIB = 2**30

CPU = ServingDevice(worker_id="worker-0", kind="cpu", name="Some Processor")
GPU = ServingDevice(worker_id="worker-0", kind="cuda", name="NVIDIA H200")
SERVING = Serving(
    devices=[CPU],
    dtype="float32",
    context_tokens=4096,
    model_context_tokens=4096,
    page_size=16,
    page_bytes=98_304,
    pools=[
        ServingPool(tier="device", owner="worker-0", tokens=32_768, bytes=192 * 2**20),
        ServingPool(tier="host", owner="storage", tokens=174_000, bytes=GIB),
    ],
)


def with_(**changes: object) -> Serving:
    return msgspec.structs.replace(SERVING, **changes)


def test_everything_that_a_newcomer_wants_to_know() -> None:
    """Address, device, data type, pools in tokens and bytes, context, API and page."""
    facts = ReadyFacts(
        base_url="http://127.0.0.1:8000", model="m", workers=1, page="Page: http://127.0.0.1:8000/ui", serving=SERVING
    )

    assert ready_lines(facts) == [
        "Thermocline is ready at http://127.0.0.1:8000 (model m, 1 worker)",
        "Device: cpu (Some Processor); float32",
        "Pools: device 32,768 tokens (192.0 MiB); host 174,000 tokens (1.0 GiB)",
        "Context: 4,096 tokens",
        "API: http://127.0.0.1:8000/v1",
        "Page: http://127.0.0.1:8000/ui",
    ]


def test_a_gateway_that_says_nothing_is_still_announced() -> None:
    """One of an earlier release, for example."""
    facts = ReadyFacts(base_url="http://h", model="m", workers=2, page="Page: http://h/ui", schedulers=3)

    assert ready_lines(facts) == [
        "Thermocline is ready at http://h (model m, 2 workers, 3 schedulers)",
        "API: http://h/v1",
        "Page: http://h/ui",
    ]


def test_lower_tiers_and_pools_under_way_are_named() -> None:
    """A disk with what it holds about, an object store without bound, a host pool that is being made."""
    pools = [
        ServingPool(tier="host", owner="s", tokens=1600, bytes=GIB, is_ready=False),
        ServingPool(tier="hidden", owner="s", tokens=480, bytes=None),
        ServingPool(tier="disk", owner="s", tokens=1_000_000, bytes=10 * GIB),
        ServingPool(tier="remote", owner="s", tokens=None, bytes=None),
    ]
    lines = ready_lines(ReadyFacts(base_url="u", model="m", workers=1, page="", serving=with_(pools=pools)))

    assert lines[2] == (
        "Pools: host 1,600 tokens (1.0 GiB) being made; hidden 480 tokens; disk 1,000,000 tokens (10.0 GiB); "
        "remote without bound"
    )


def test_equal_pools_and_devices_are_said_once() -> None:
    """Of several workers; unequal ones are all named."""
    device = SERVING.pools[0]
    other = msgspec.structs.replace(device, owner="worker-1")
    smaller = msgspec.structs.replace(other, tokens=16, bytes=98_304)

    def pools(*found: ServingPool) -> str:
        return ready_lines(ReadyFacts(base_url="u", model="m", workers=2, page="", serving=with_(pools=list(found))))[2]

    assert pools(device, other) == "Pools: device 32,768 tokens (192.0 MiB) of each worker"
    assert pools(device, smaller) == "Pools: device 32,768 tokens (192.0 MiB), 16 tokens (96.0 KiB)"
    assert device_lines(with_(devices=[CPU, CPU])) == ["Device: cpu (Some Processor); float32"]


def test_a_group_of_gpus_and_an_unused_one_are_named() -> None:
    """How many there are, and why one that is there is not used."""
    group = msgspec.structs.replace(GPU, ranks=4)
    unused = msgspec.structs.replace(CPU, note="GPU 0 (H200) is there but cannot be used: too old")

    assert device_lines(with_(devices=[group], dtype="bfloat16")) == ["Device: cuda (NVIDIA H200 and 3 more); bfloat16"]
    assert device_lines(with_(kv_dtype="float32"))[0].endswith("; float32")
    assert device_lines(with_(kv_dtype="float8_e4m3fn"))[0].endswith("; float32, KV float8_e4m3fn")
    assert device_lines(with_(devices=[unused]))[1] == "Note: GPU 0 (H200) is there but cannot be used: too old"


def test_a_context_that_the_pool_does_not_hold_is_said() -> None:
    """With the flag and the size that would hold it: 131,072 tokens in pages of 2 MiB."""
    line = context_line(with_(context_tokens=512, model_context_tokens=131_072, page_bytes=2 * 2**20))

    assert line == (
        "Context: 512 tokens, all that the device pool of a worker holds; the model takes 131,072, with "
        "--device-kv-bytes 16384MiB"
    )


def test_what_is_missing_follows_the_first_line() -> None:
    """The first line says that something is, too."""
    lines = ready_lines(ReadyFacts(base_url="u", model="m", workers=1, page="", degraded=["Degraded: no disk"]))

    assert lines[:2] == ["Thermocline is ready, degraded, at u (model m, 1 worker)", "Degraded: no disk"]


def test_on_a_gpu_no_flag_makes_the_pool_larger_than_the_gpu() -> None:
    """What the model takes in full is said with what would hold it."""
    line = context_line(with_(devices=[GPU], context_tokens=512, model_context_tokens=131_072, page_bytes=2 * 2**20))

    assert line == (
        "Context: 512 tokens, all that the device pool of a worker holds; the model takes 131,072, with a pool of "
        "16.0 GiB: a larger --tensor-parallel, or a GPU with more memory"
    )


def test_gpus_that_nobody_uses_are_said() -> None:
    """Where one more worker would find its GPUs; not on a machine without, nor where all are used."""
    pair = msgspec.structs.replace(GPU, ranks=2)

    assert idle_gpu_lines(with_(devices=[GPU]), 8) == ["Note: 1 of 8 GPUs are used; --workers 8 uses all"]
    assert idle_gpu_lines(with_(devices=[pair]), 8) == ["Note: 2 of 8 GPUs are used; --workers 4 uses all"]
    assert idle_gpu_lines(with_(devices=[pair]), 3) == []
    assert idle_gpu_lines(with_(devices=[GPU]), 1) == idle_gpu_lines(with_(devices=[CPU]), 8) == []


def test_a_host_pool_that_is_small_beside_the_devices_is_said() -> None:
    """As in a container whose /dev/shm has 64 MiB."""
    device = ServingPool(tier="device", owner="w", tokens=44_992, bytes=None)
    small, half = (ServingPool(tier="host", owner="s", tokens=tokens, bytes=None) for tokens in (384, 22_496))

    assert small_host_lines(with_(pools=[device, small])) == [
        "Note: host pools hold 384 tokens, few beside 44,992 on devices; --host-kv-bytes makes them larger where "
        "/dev/shm has room (docker run --shm-size)"
    ]
    assert small_host_lines(with_(pools=[device, half])) == small_host_lines(with_(pools=[device])) == []
