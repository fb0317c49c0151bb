"""Ranks 1 and up: load a share, join the group, then carry out step after step until told to stop.

Such a process has no connection to the cell. When rank 0 has ended, for any reason, it ends at once, in the middle of
a collective if need be, and removes its shared memory.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import NoReturn, TypeVar

from services.worker.engine.gpu_room import RoomWish
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.device_pool import DevicePool
from services.worker.parallel.channel import Channel, ChannelClosed
from services.worker.parallel.choices import ToldChoices
from services.worker.parallel.collectives import join_store
from services.worker.parallel.gates import ToldGate
from services.worker.parallel.orders import (
    JoinGroup,
    LetGoHidden,
    MakePool,
    MeasureRoom,
    ProveHidden,
    RankFailed,
    RankLoaded,
    RankMeasured,
    RankOrder,
    RankProven,
    RankReady,
    RestoreRows,
    RunStep,
    StartRank,
    StopRank,
    step_meta,
    unpacked,
)
from services.worker.parallel.rank_model import RankModel
from services.worker.parallel.rank_restoring import RankRestoring
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared import logs
from shared.errors import InvariantViolated, OperatorError
from shared.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, die_with_parent

_log = logs.get_logger("worker")

Order = TypeVar("Order", JoinGroup, MakePool, StartRank)


class Rank:
    """One process of a group besides rank 0, from its first order to its last."""

    def __init__(self, channel: Channel) -> None:
        """Take orders from ``channel``, whose other end is rank 0's; it is not closed here."""
        self._channel = channel
        self._pool: DevicePool | None = None
        self._restoring: RankRestoring | None = None

    def run(self) -> int:
        """Run; return the exit code.

        The collectives are left to the end of the process: leaving them in order would wait for ranks that end at the
        same time.
        """
        self._end_with_rank_0()
        try:
            self._serve()
        except ChannelClosed:
            return EXIT_FAILED
        except Exception as error:
            return self._fail(error)
        finally:
            if self._pool is not None:
                self._pool.close()
        return EXIT_OK

    def _serve(self) -> None:
        start = self._next(StartRank)
        logs.configure("worker", f"{start.worker_id}/{start.rank}", level=start.log_level)
        model = RankModel(start)
        self._channel.timeout_s = start.timeout_ms / 1e3
        self._channel.send(RankLoaded(weight_bytes=model.weight_bytes, proofs=model.proofs))
        joining = self._next(JoinGroup)
        model.join(join_store(start.store_port, start.timeout_ms / 1e3), through_host=joining.through_host)
        order = self._channel.receive()
        if isinstance(order, MeasureRoom):
            wish = RoomWish(order.fraction, order.tokens, order.rows, order.reserve_bytes)
            self._channel.send(RankMeasured(pages=model.measure_room(wish)))
            order = self._channel.receive()
        order = _checked(order, MakePool)
        self._pool = pool = model.make_pool(order.pages)
        self._channel.send(RankReady(for_group=pool.handle(), for_cell=pool.handle()))
        model.expect(order.probe_tokens)
        self._run_steps(model, model.runner(pool, vocab_size=0))

    def _run_steps(self, model: RankModel, runner: ModelRunner) -> None:
        prefixes = model.prefixes(runner)
        while True:
            order = self._channel.receive()
            match order:
                case StopRank():
                    return
                case RunStep():
                    meta = step_meta(order, runner.geometry.page_size, runner.pool.device, self._gate(order))
                    choices = ToldChoices(order.number, self._channel.receive)
                    ids, positions, rows = (unpacked(each) for each in (order.ids, order.positions, order.last_rows))
                    prefixes.forward(order, ids, positions, meta, rows, choices.choose)
                case ProveHidden():
                    runner.vocab_size = order.vocab_size
                    self._channel.send(RankProven(fault=self._prove_hidden(model, runner, order.staging_bytes)))
                case RestoreRows() if self._restoring is not None:
                    self._restoring.run(order, self._gate(order))
                case LetGoHidden():
                    if self._restoring is not None:
                        self._restoring.let_go()
                case _:
                    raise InvariantViolated(f"{order} between steps")

    def _gate(self, order: RunStep | RestoreRows) -> ToldGate | None:
        return ToldGate(order.number, self._channel.receive) if order.waits else None

    def _prove_hidden(self, model: RankModel, runner: ModelRunner, staging_bytes: int) -> str:
        """Return why nothing is restored from hidden states here; "" if it is from now on."""
        try:
            self._restoring = model.restoring(runner, staging_bytes)
        except HiddenStatesUnsupported as error:
            return error.message
        return ""

    def _next(self, kind: type[Order]) -> Order:
        return _checked(self._channel.receive(), kind)

    def _fail(self, error: Exception) -> int:
        """Report to rank 0 why this rank ends; return the exit code."""
        is_refusal = isinstance(error, OperatorError)
        _log.error("rank_failed", error=repr(error), exc_info=None if is_refusal else error)
        try:
            self._channel.send(RankFailed(reason=f"{type(error).__name__}: {error}", is_refusal=is_refusal))
        except Exception as unsaid:  # Rank 0 notices the end of this process as well.
            _log.warning("rank_failure_unsaid", error=repr(unsaid))
        return EXIT_REFUSED if is_refusal else EXIT_FAILED

    def _end_with_rank_0(self) -> None:
        """End this process when rank 0 ends, even if the main thread is in a collective."""
        signal.signal(signal.SIGTERM, lambda *_: self._end_now())
        die_with_parent()
        threading.Thread(target=self._watch_rank_0, name="watch", daemon=True).start()

    def _watch_rank_0(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLRDHUP)
        poll.poll()
        self._end_now()

    def _end_now(self) -> NoReturn:
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            os._exit(EXIT_FAILED)


def _checked(order: RankOrder, kind: type[Order]) -> Order:
    """Return an order of the kind that is due. Raises ChannelClosed where the group ends instead."""
    if isinstance(order, StopRank):
        raise ChannelClosed("the group ends")
    if not isinstance(order, kind):
        raise InvariantViolated(f"{order} where {kind.__name__} was due")
    return order
