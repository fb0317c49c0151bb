"""Standbys whose folds differ from the active one's notice, say so and begin anew; equal ones never complain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.scheduler import cell_metrics, core
from services.scheduler.divergence import CALM_NS, TOLD_NS, Divergence
from services.scheduler.leadership import Claim
from services.scheduler.output_chain import Mark, OutputChain
from shared import subjects
from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.messages.status import Heartbeat
from tests.scripted_cell import scripted_cell, submit, worker_joined
from tests.unit.scheduler.test_shell_standby import Cell, Process
from tests.waiting import until


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.follower.RETRY_S", 0.01)


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    async with Cell() as made:
        yield made


def claim(said: Mark) -> Claim:
    return Claim(holder="h", scheduler_id="active", epoch=1, lead_ms=700, release="r", said=said)


def differences() -> float:
    return float(cell_metrics.DIVERGED._value.get())


def fold_of(process: Process) -> core.CellState:
    return process.shell._follower.fold.state


def bytes_of(process: Process) -> bytes:
    return core.encode_state(fold_of(process))


async def test_standby_with_a_corrupted_state_notices_and_recovers(cell: Cell) -> None:
    """The next output tells, at the next renewal; it restores from a snapshot, and its heartbeat says so."""
    beats: list[Heartbeat] = []

    async def hear(delivery: Delivery) -> None:
        beats.append(decode(delivery.data, Heartbeat))

    await cell.bus.subscribe(subjects.heartbeat("scheduler", "second"), hear)
    active, standby = await cell.active(), await cell.standby()
    await cell.put(worker_joined(), submit("one", [1] * 20))
    taken = await cell.snapshot()
    await until(lambda: standby.position == active.position)
    before = differences()
    fold_of(standby).workers["w1"].number += 1  # A flipped bit.

    await cell.put(submit("two", [2] * 20))

    await until(lambda: differences() == before + 1)
    await until(lambda: standby.stands_by and standby.position == active.position)
    restored = standby.shell._follower.restored
    assert restored is not None
    assert restored.seq == taken.seq
    assert bytes_of(standby) == bytes_of(active)
    await until(lambda: bool(beats and beats[-1].degraded))
    (told,) = beats[-1].degraded
    assert (told.component, told.what) == ("second", "fold")
    assert active.is_live


async def test_equal_schedulers_never_complain(cell: Cell) -> None:
    """Wherever they began: at the stream's beginning, at snapshots, behind a take-over."""
    before = differences()
    script = [message.data for message in scripted_cell(30).messages]
    first, second = await cell.active("first"), await cell.standby("second")
    seq = 0

    async def put(data: list[bytes]) -> None:
        nonlocal seq
        for one in data:
            seq = await cell.bus.append("tc.in.cell", one)
        await cell.folded(seq)

    await put(script[:40])
    await cell.snapshot()
    third = await cell.standby("third")
    await put(script[40:70])
    await first.kill()
    await second.take_over()
    await put(script[70:100])
    await cell.snapshot()
    fourth = await cell.standby("fourth")
    await put(script[100:])

    await until(lambda: len({p.shell._outbox.chain.latest for p in (second, third, fourth)}) == 1)
    assert fourth.shell._follower.restored is not None
    assert fourth.shell._follower.restored.seq > 40
    assert second.shell._outbox.chain.latest.digest
    assert differences() == before


# -- what is compared -------------------------------------------------------------------------------------------


def chain(inputs: int) -> OutputChain:
    made = OutputChain(Mark())
    for seq in range(1, inputs + 1):
        made.add(seq, [bytes([seq])])
    return made


def test_a_claim_is_compared_once_the_standby_has_come_to_it() -> None:
    """Later claims wait for that one, or a standby that is behind would never compare any."""
    divergence = Divergence("s", lambda: 0)
    good = chain(9).latest

    assert not divergence.is_found(chain(5), claim(Mark(7, 1)))
    assert not divergence.is_found(chain(6), claim(good))
    assert divergence.is_found(chain(7), claim(good))


def test_equal_digests_and_unknown_ones_are_no_difference() -> None:
    """Nor is a claim of 0.1, which says none, or of an input before the fold's beginning."""
    divergence = Divergence("s", lambda: 0)
    begun = OutputChain(Mark(6, 1))
    begun.add(7, [b"x"])

    found = [
        divergence.is_found(chain(9), claim(chain(8).latest)),
        divergence.is_found(chain(9), claim(Mark())),
        divergence.is_found(begun, claim(Mark(5, 99))),
    ]

    assert found == [False, False, False]
    assert list(divergence.degraded()) == []


def test_after_a_difference_it_is_calm_for_a_while() -> None:
    """One restoration in that time tells enough; what happened is told for longer."""
    now_ns = 10**9
    divergence = Divergence("s", lambda: now_ns)
    found = []
    for at_ns in (now_ns, now_ns + CALM_NS - 1, now_ns + CALM_NS):
        now_ns = at_ns
        found.append(divergence.is_found(chain(9), claim(Mark(3, 99))))

    assert found == [True, False, True]
    assert "up to input 3" in next(divergence.degraded()).reason
    now_ns += TOLD_NS
    assert list(divergence.degraded()) == []


def test_records_of_releases_that_do_not_know_the_digest_are_read_and_read_ours() -> None:
    """A field more is ignored there, a field less is its default here."""

    class OldClaim(msgspec.Struct, frozen=True, kw_only=True):
        holder: str
        scheduler_id: str
        epoch: int
        duration_ms: int
        release: str
        folded_from: int | None = None

    ours = claim(Mark(5, 2**64 - 1))
    fields: dict[str, Any] = {name: getattr(ours, name) for name in OldClaim.__struct_fields__}

    assert msgspec.json.decode(msgspec.json.encode(ours), type=OldClaim) == OldClaim(**fields)
    assert msgspec.json.decode(msgspec.json.encode(OldClaim(**fields)), type=Claim).said == Mark()
    assert msgspec.json.decode(msgspec.json.encode(ours), type=Claim) == ours
