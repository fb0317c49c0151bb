"""Any sequence of calls, faults and restarts: tiers agree with a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.storage.backends import ChunkKey
from shared.errors import CapacityError, TransportError
from tests.chunk_makers import aligned, make_chain
from tests.conformance.chunk_backends import KINDS, DiskTier, Tier

CHUNKS = make_chain(4, seed=41) + make_chain(2, seed=42, model="another model")
NBYTES = CHUNKS[0].blob.nbytes
NAMESPACES = ("", CHUNKS[0].key.namespace, CHUNKS[-1].key.namespace, "00" * 16)
TIMEOUT_S = 30.0

PLACES = st.integers(0, len(CHUNKS) - 1)


class ChunkTierMachine(RuleBasedStateMachine):
    """``model`` maps what the tier must hold to its bytes."""

    kind = ""

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tier-"))
        self.tier: Tier = KINDS[self.kind](self.folder)
        self.model: dict[ChunkKey, bytes] = {}
        self.is_full = False

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.mend()
            self.tier.close()
            shutil.rmtree(self.folder)

    def got(self, key: ChunkKey) -> bytes:
        into = aligned(NBYTES)
        return bytes(into[: self.tier.backend.get(key, into, timeout_s=TIMEOUT_S)])

    @rule(place=PLACES, stripe=st.integers(0, 5))
    def put(self, place: int, stripe: int) -> None:
        chunk = CHUNKS[place]
        is_known = chunk.key in self.model
        try:
            is_new = self.tier.backend.put(chunk.key, chunk.blob, stripe=stripe, timeout_s=TIMEOUT_S)
        except CapacityError:
            assert self.is_full
            assert not is_known
        else:
            assert is_new == (not is_known)
            assert is_known or not self.is_full
            self.model.setdefault(chunk.key, bytes(chunk.blob))

    @rule(place=PLACES, other=PLACES)
    def put_something_else_under_a_known_name(self, place: int, other: int) -> None:
        key = CHUNKS[place].key
        if key in self.model:
            assert not self.tier.backend.put(key, CHUNKS[other].blob, stripe=0, timeout_s=TIMEOUT_S)

    @rule(place=PLACES)
    def get(self, place: int) -> None:
        key = CHUNKS[place].key
        assert self.got(key) == self.model.get(key, b"")

    @rule(place=PLACES)
    def delete(self, place: int) -> None:
        key = CHUNKS[place].key
        is_gone = self.tier.backend.delete(key, timeout_s=TIMEOUT_S)
        assert is_gone == (self.model.pop(key, None) is not None)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def list_all(self, namespace: str) -> None:
        entries = sorted((entry.key, entry.nbytes) for entry in self.tier.backend.entries(namespace))
        assert entries == sorted((key, NBYTES) for key in self.model if namespace in ("", key.namespace))

    @rule()
    def fill(self) -> None:
        self.tier.fill()
        self.is_full = True

    @rule()
    def mend(self) -> None:
        self.tier.mend()
        self.is_full = False

    @rule(place=PLACES)
    def use_while_it_is_broken(self, place: int) -> None:
        chunk = CHUNKS[place]
        self.tier.break_down()
        try:
            if chunk.key in self.model:
                with pytest.raises(TransportError):
                    self.got(chunk.key)
                with pytest.raises(TransportError):
                    self.tier.backend.delete(chunk.key, timeout_s=TIMEOUT_S)
            else:
                with pytest.raises(TransportError):
                    self.tier.backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)
        finally:
            self.tier.mend()
            self.is_full = False

    @precondition(lambda self: isinstance(self.tier, DiskTier) and not self.is_full)
    @rule(place=PLACES, stripe=st.integers(0, 5), call=st.integers(0, 9))
    def put_with_one_failing_call(self, place: int, stripe: int, call: int) -> None:
        assert isinstance(self.tier, DiskTier)
        chunk = CHUNKS[place]
        self.tier.calls.fail_once_at = call
        try:
            self.tier.backend.put(chunk.key, chunk.blob, stripe=stripe, timeout_s=TIMEOUT_S)
        except TransportError:
            pass
        else:
            # It was there, needed fewer calls, or another directory took it.
            self.model.setdefault(chunk.key, bytes(chunk.blob))
        finally:
            self.tier.calls.fail_once_at = -1

    @precondition(lambda self: self.tier.is_durable and not self.is_full)
    @rule()
    def reopen(self) -> None:
        self.tier.reopen()

    @invariant()
    def the_tier_contains_what_the_model_does(self) -> None:
        if hasattr(self, "tier"):
            contained = {entry.key for entry in self.tier.backend.entries()}
            assert contained == set(self.model)

    @invariant()
    def no_file_is_left_over(self) -> None:
        if hasattr(self, "tier") and isinstance(self.tier, DiskTier):
            files = [file for path in self.tier.paths for file in Path(path).rglob("*") if file.is_file()]
            assert len(files) == len(self.model) + len(self.tier.paths)  # Each directory has its lock.


@pytest.mark.parametrize("kind", ["memory", "disk", "three_disks"])
def test_a_tier_agrees_with_a_dictionary(kind: str) -> None:
    """After any sequence of calls, faults and restarts each answer is the model's."""
    machine = type("Machine", (ChunkTierMachine,), {"kind": kind})

    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))
