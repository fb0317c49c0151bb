"""Sizes of pools that no setting gives: from what the machine has, and never more than that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.memory.machine_memory import MachineMemory
from shared.memory.pool_sizes import (
    GIB,
    MIB,
    ChosenSizes,
    ModelDemand,
    Node,
    PoolSizes,
    choose_sizes,
    on_cpu,
    room,
    wanted_on_cpu,
)

OPEN = PoolSizes()
LARGE = MachineMemory(memory_bytes=1024 * GIB, shm_bytes=512 * GIB)
EIGHT_BILLION = ModelDemand(weight_bytes=16 * GIB, token_bytes=128 * 1024, context_tokens=8192, kv_heads=8)
SMALL = ModelDemand(weight_bytes=10 * MIB, token_bytes=6144, context_tokens=4096, kv_heads=6)


@pytest.mark.parametrize(
    ("token_bytes", "context", "wanted"),
    [
        (6144, 4096, 8 * 4096 * 6144),  # Eight contexts.
        (64, 128, 64 * MIB),  # The least.
        (128 * 1024, 8192, GIB),  # The most,
        (128 * 1024, 131_072, 16 * GIB),  # but one context at least.
        (0, 0, GIB),  # Unknown.
    ],
)
def test_a_pool_on_a_cpu_is_made_for_some_contexts(token_bytes: int, context: int, wanted: int) -> None:
    """Within bounds, which one context may exceed."""
    assert wanted_on_cpu(token_bytes, context) == wanted


def test_a_machine_with_much_memory_gives_what_is_wanted() -> None:
    """The host pool is four times the device pools, the hidden pool its default."""
    node = Node(workers=2, has_lower_tiers=True)

    assert choose_sizes(OPEN, LARGE, EIGHT_BILLION, node) == ChosenSizes(GIB, 8 * GIB, 256 * MIB)


def test_little_shared_memory_is_divided() -> None:
    """With 64 MiB of it, as containers have, all device pools take 16 MiB, the host pool 32 and the hidden pool 8."""
    machine, node = MachineMemory(8 * GIB, 64 * MIB), Node(workers=2, has_lower_tiers=True)

    assert choose_sizes(OPEN, machine, SMALL, node) == ChosenSizes(8 * MIB, 32 * MIB, 8 * MIB)


def test_weights_and_processes_come_before_pools() -> None:
    """Of 20 GiB, two workers with weights of 8 GiB each leave 2.5 GiB: half a GiB for each process with a model, and
    for all others together.
    """
    model = ModelDemand(weight_bytes=8 * GIB, token_bytes=128 * 1024, context_tokens=8192)

    assert room(MachineMemory(20 * GIB, 64 * GIB), model, Node(workers=2)) == 20 * GIB - 16 * GIB - 3 * 512 * MIB


def test_workers_share_a_quarter() -> None:
    """Each gets its part of it, and less where its group holds pages more than once."""
    machine = MachineMemory(64 * GIB, 4 * GIB)

    assert [on_cpu(machine, EIGHT_BILLION, Node(workers=count, is_on_cpu=True)) for count in (1, 2)] == [GIB, GIB // 2]
    grouped = ModelDemand(token_bytes=128 * 1024, context_tokens=8192, kv_heads=2)
    assert on_cpu(machine, grouped, Node(ranks=4)) == GIB // 2


def test_what_was_asked_for_is_taken_as_it_is() -> None:
    """Sizes that somebody chose are never changed."""
    asked = PoolSizes(device=5 * MIB, host=7 * MIB, hidden=3 * MIB)

    assert choose_sizes(asked, LARGE, SMALL, Node(has_lower_tiers=True)) == ChosenSizes(5 * MIB, 7 * MIB, 3 * MIB)
    assert choose_sizes(asked, LARGE, SMALL, Node()) == ChosenSizes(5 * MIB, 7 * MIB, 0)


def test_the_host_pool_takes_no_more_than_a_chosen_device_pool_leaves() -> None:
    """A large device pool makes a small host pool, not a cell that does not fit."""
    sizes = choose_sizes(PoolSizes(device=7 * GIB), MachineMemory(64 * GIB, 8 * GIB), SMALL, Node(is_on_cpu=True))

    assert sizes == ChosenSizes(7 * GIB, GIB, 0)


def test_pools_of_gpus_take_no_memory_here() -> None:
    """A device pool larger than the machine's memory is right for a GPU; the host pool is half of memory."""
    machine = MachineMemory(32 * GIB, 24 * GIB)
    cuda, auto = Node(is_on_cpu=False), Node(sees_gpus=True)

    for node in (cuda, auto):
        assert choose_sizes(PoolSizes(device=100 * GIB), machine, SMALL, node).host // GIB == 15
    with pytest.raises(ConfigError, match="--device-kv-bytes"):
        choose_sizes(PoolSizes(device=100 * GIB), machine, SMALL, Node())


def test_what_does_not_fit_is_refused_with_figures() -> None:
    """Both memories are named, and the flags that help."""
    with pytest.raises(ConfigError, match=r"need 2048 MiB of shared memory and /dev/shm has 1024 MiB free.*--shm-size"):
        choose_sizes(PoolSizes(host=2 * GIB, device=MIB), MachineMemory(64 * GIB, GIB), SMALL, Node(is_on_cpu=False))
    with pytest.raises(ConfigError, match="the machine 1024 MiB of memory"):
        choose_sizes(PoolSizes(host=2 * GIB, device=MIB), MachineMemory(GIB, 64 * GIB), SMALL, Node())


def test_a_machine_without_room_is_told_what_to_choose() -> None:
    """Weights that leave nothing end the start before anything is loaded."""
    with pytest.raises(ConfigError, match="leave 0 MiB; free some, or choose --device-kv-bytes and --host-kv-bytes"):
        choose_sizes(OPEN, MachineMemory(16 * GIB, 64 * GIB), EIGHT_BILLION, Node())
    with pytest.raises(ConfigError, match=r"enlarge /dev/shm \(docker run --shm-size\), or choose"):
        choose_sizes(OPEN, MachineMemory(64 * GIB, MIB), SMALL, Node())


@given(
    memory=st.integers(0, 2**41),
    shm=st.integers(0, 2**41),
    model=st.builds(
        ModelDemand,
        weight_bytes=st.integers(0, 2**38),
        token_bytes=st.integers(0, 2**21),
        context_tokens=st.integers(0, 2**20),
        kv_heads=st.integers(0, 64),
    ),
    node=st.builds(
        Node,
        workers=st.integers(1, 16),
        ranks=st.integers(1, 8),
        is_on_cpu=st.sampled_from([True, None]),
        sees_gpus=st.booleans(),
        has_lower_tiers=st.booleans(),
    ),
    asked=st.builds(
        PoolSizes,
        device=st.none() | st.integers(1, 2**38),
        host=st.none() | st.integers(1, 2**38),
        hidden=st.none() | st.integers(0, 2**38),
    ),
)
def test_all_pools_together_never_exceed_the_machine(
    memory: int, shm: int, model: ModelDemand, node: Node, asked: PoolSizes
) -> None:
    """Whatever was asked for: all pools in shared memory fit in it and in memory, or the start is refused; what
    nothing asked for leaves room for the weights and the processes too.
    """
    machine = MachineMemory(memory, shm)
    try:
        sizes = choose_sizes(asked, machine, model, node)
    except ConfigError:
        return

    copies = max(1, -(-node.ranks // model.kv_heads)) if model.kv_heads else 1
    devices = sizes.device_on_cpu * node.workers * copies
    if asked.device is not None and node.sees_gpus and node.is_on_cpu is None:
        devices = 0  # It is the GPU's.
    assert devices + sizes.host + sizes.hidden <= min(memory, shm)
    if asked == OPEN and room(machine, model, node):
        assert devices + sizes.host + sizes.hidden <= room(machine, model, node)


def test_beside_gpus_the_host_pool_may_have_half_of_memory() -> None:
    """As far as shared memory goes, of which an eighth is left; at most 128 GiB for each GPU that workers take."""

    def host(memory: int, shm: int, *, workers: int = 1, ranks: int = 1) -> int:
        node = Node(workers=workers, ranks=ranks, is_on_cpu=False)
        return choose_sizes(OPEN, MachineMemory(memory * GIB, shm * GIB), SMALL, node).host // GIB

    assert host(65, 64) == 32
    assert host(65, 32) == 28
    assert host(2000, 1000) == 128
    assert host(2000, 1000, workers=2) == host(2000, 1000, ranks=2) == 256


def test_weights_that_only_a_gpu_could_hold_are_left_to_its_worker() -> None:
    """Where memory has no room for them and a GPU is seen, the worker says whether the GPU has."""
    machine = MachineMemory(16 * GIB, 8 * GIB)

    assert choose_sizes(OPEN, machine, EIGHT_BILLION, Node(sees_gpus=True)).host == 7 * GIB
    with pytest.raises(ConfigError, match="no memory is left"):
        choose_sizes(OPEN, machine, EIGHT_BILLION, Node())
