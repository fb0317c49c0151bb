"""Who is gone, and whose heartbeats have stopped."""

from __future__ import annotations

from services.scheduler import core
from services.scheduler.core import Stamped
from services.scheduler.liveness import Liveness
from shared.codec import Input
from shared.messages.cell_events import GatewayLost, StorageLost, WorkerLost
from shared.messages.status import Heartbeat
from shared.messages.storage_events import StorageJoined
from shared.messages.worker_events import WorkerLeft
from tests.scripted_cell import submit, worker_joined

SILENCE = 5_000
INTERVAL = 500


def beat(kind: str, member_id: str, incarnation: str, *, is_gone: bool = False) -> Heartbeat:
    return Heartbeat(kind=kind, id=member_id, incarnation=incarnation, is_gone=is_gone)  # type: ignore[arg-type]


def watching() -> Liveness:
    """One worker, one storage and one gateway, all heard of at 0."""
    liveness = Liveness(SILENCE)
    liveness.observe(worker_joined("w1", "one"), 0)
    liveness.observe(StorageJoined(storage_id="s1", incarnation="two", node="n", host_bytes=1), 0)
    liveness.observe(submit("r", [1]), 0)
    liveness.beat(beat("gateway", "gw", "three"), 0)
    return liveness


def checked(liveness: Liveness, to: int, *, since: int = INTERVAL, beats: tuple[Heartbeat, ...] = ()) -> list[object]:
    """Check at every interval up to ``to``, with these heartbeats before each; returns all that was lost."""
    lost: list[object] = []
    for now in range(since, to + 1, INTERVAL):
        for heartbeat in beats:
            liveness.beat(heartbeat, now)
        lost += [message for _, message in liveness.check(now, INTERVAL)]
    return lost


def test_silence_loses_every_kind_once() -> None:
    """At the end of the silence each member is reported, and never again for this incarnation."""
    liveness = watching()

    before = checked(liveness, SILENCE - INTERVAL)
    after = checked(liveness, 4 * SILENCE, since=SILENCE)

    assert before == []
    assert after == [
        WorkerLost(worker_id="w1", incarnation="one"),
        StorageLost(storage_id="s1", incarnation="two"),
        GatewayLost(gateway_id="gw"),
    ]


def test_heartbeats_keep_a_member() -> None:
    """Who beats is not lost."""
    beats = (beat("worker", "w1", "one"), beat("storage", "s1", "two"), beat("gateway", "gw", "three"))

    assert checked(watching(), 10 * SILENCE, beats=beats) == []


def test_beats_of_another_incarnation_do_not_keep_the_old_one() -> None:
    """A restarted process under the same name says nothing about the one that died."""
    lost = checked(watching(), SILENCE, beats=(beat("worker", "w1", "other"), beat("storage", "s1", "two")))

    assert WorkerLost(worker_id="w1", incarnation="one") in lost


def test_message_id_is_the_same_for_each_report_of_an_incarnation() -> None:
    """Two monitors that report the same death store one input."""
    reports = []
    for _ in range(2):
        liveness = watching()
        checked(liveness, SILENCE - INTERVAL)
        reports.append([message_id for message_id, _ in liveness.check(SILENCE, INTERVAL)])

    assert reports[0] == reports[1]
    assert len(set(reports[0])) == 3


def test_who_left_or_joined_anew_is_not_lost() -> None:
    """Leaving ends the watch; joining with a new incarnation starts it anew."""
    liveness = watching()
    liveness.observe(WorkerLeft(worker_id="w1", incarnation="one"), 1000)
    liveness.observe(StorageJoined(storage_id="s1", incarnation="new", node="n", host_bytes=1), 3000)

    lost = checked(liveness, SILENCE)

    assert lost == [GatewayLost(gateway_id="gw")]


def test_stale_farewell_does_not_end_the_watch() -> None:
    """A WorkerLost of the incarnation before is no word about the present one."""
    liveness = Liveness(SILENCE)
    liveness.observe(worker_joined("w1", "new"), 0)
    liveness.observe(WorkerLost(worker_id="w1", incarnation="old"), 0)

    assert checked(liveness, SILENCE) == [WorkerLost(worker_id="w1", incarnation="new")]


def test_own_standstill_is_held_against_nobody() -> None:
    """A check that comes very late excuses everybody: heartbeats could not be read meanwhile."""
    liveness = watching()
    checked(liveness, 1000)

    late = liveness.check(1000 + 3 * SILENCE, INTERVAL)
    soon_after = checked(liveness, 1000 + 4 * SILENCE - INTERVAL, since=1000 + 3 * SILENCE + INTERVAL)
    at_last = checked(liveness, 1000 + 4 * SILENCE, since=1000 + 4 * SILENCE)

    assert late == []
    assert soon_after == []
    assert len(at_last) == 3


def test_who_is_said_to_be_gone_is_lost_at_once_and_once() -> None:
    """Its silence need not last, the report says why, and hearing it again changes nothing."""
    liveness = watching()
    liveness.check(INTERVAL, INTERVAL)
    gone = beat("worker", "w1", "one", is_gone=True)

    liveness.beat(gone, INTERVAL + 1)
    lost = liveness.check(INTERVAL + 1, INTERVAL)
    liveness.beat(gone, INTERVAL + 2)

    assert lost == [("lost-worker-w1-one", WorkerLost(worker_id="w1", incarnation="one", reason="process_gone"))]
    assert liveness.check(INTERVAL + 2, INTERVAL) == []


def test_whoever_notices_an_end_reports_it_under_one_message_id() -> None:
    """One scheduler heard of the end, another of nothing: the stream stores one input."""
    told, silent = watching(), watching()
    told.beat(beat("worker", "w1", "one", is_gone=True), 1)

    [(told_id, _)] = told.check(1, INTERVAL)
    checked(silent, SILENCE - INTERVAL)

    assert told_id in [message_id for message_id, _ in silent.check(SILENCE, INTERVAL)]


def test_the_end_of_another_incarnation_is_no_end_of_this_one() -> None:
    """The word of a predecessor's death comes again after its successor has joined, and is no heartbeat either."""
    liveness = watching()
    liveness.observe(worker_joined("w1", "next"), 100)
    liveness.beat(beat("worker", "w1", "one", is_gone=True), 4_000)

    lost = checked(liveness, SILENCE, beats=(beat("storage", "s1", "two"), beat("gateway", "gw", "three")))

    assert lost == []
    assert checked(liveness, SILENCE + INTERVAL, since=SILENCE + INTERVAL) == [
        WorkerLost(worker_id="w1", incarnation="next")
    ]


def test_a_beat_from_before_its_end_revives_nobody() -> None:
    """Core messages may overtake one another."""
    liveness = watching()
    liveness.beat(beat("worker", "w1", "one", is_gone=True), 1)
    liveness.beat(beat("worker", "w1", "one"), 2)

    assert len(liveness.check(2, INTERVAL)) == 1


def test_who_is_gone_is_not_excused() -> None:
    """Not by an excuse, and not by a check that comes late."""
    liveness = watching()
    liveness.check(INTERVAL, INTERVAL)
    liveness.beat(beat("worker", "w1", "one", is_gone=True), INTERVAL)
    liveness.excuse(INTERVAL)

    lost = liveness.check(10 * SILENCE, INTERVAL)

    assert [type(message) for _, message in lost] == [WorkerLost]


def test_who_has_left_cannot_be_gone() -> None:
    """The word of an end that the fold knows already is about nobody."""
    liveness = watching()
    liveness.observe(WorkerLeft(worker_id="w1", incarnation="one"), 1)
    liveness.beat(beat("worker", "w1", "one", is_gone=True), 2)

    assert liveness.check(2, INTERVAL) == []


def test_restored_state_is_watched() -> None:
    """After a restart the members come from the state, and who stays silent is lost."""
    state = core.new_state()
    inputs: tuple[Input, ...] = (worker_joined("w9", "nine"), submit("r", [1, 2, 3]))
    for seq, message in enumerate(inputs, start=1):
        core.step(state, Stamped(seq, seq, message))
    liveness = Liveness(SILENCE)

    liveness.watch_state(state, 0)

    assert checked(liveness, SILENCE) == [
        WorkerLost(worker_id="w9", incarnation="nine"),
        GatewayLost(gateway_id="gw"),
    ]


def test_gateway_may_come_back() -> None:
    """A lost gateway that submits again is watched again."""
    liveness = watching()
    checked(liveness, SILENCE)
    liveness.observe(GatewayLost(gateway_id="gw"), SILENCE)
    liveness.observe(submit("r2", [1]), SILENCE)

    lost = checked(liveness, 2 * SILENCE, since=SILENCE + INTERVAL)

    assert lost == [GatewayLost(gateway_id="gw")]
