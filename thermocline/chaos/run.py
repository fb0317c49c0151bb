"""One run: a cell, its right answers, then rounds of load and faults, with a check at rest after each."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import httpx

from shared.errors import ThermoclineError
from thermocline.chaos import at_rest, expectations, log_events, processes
from thermocline.chaos.cell import ChaosCell
from thermocline.chaos.health import Health
from thermocline.chaos.injection import inject
from thermocline.chaos.journal import Journal
from thermocline.chaos.load import Load, Tally
from thermocline.chaos.outcome import Outcome
from thermocline.chaos.plan import DISK_KINDS, PROCESS_KINDS, Fault, draw_plan, group_of
from thermocline.chaos.settings import HEARTBEAT_LOST_S, ChaosSettings
from thermocline.chaos.verdicts import Window, Windows
from thermocline.chaos.workload import Conversation, draw_scripts
from thermocline.demo.workload import TokenCounter
from thermocline.supervisor.records import runs_dir
from thermocline.supervisor.supervisor import Death

LEAST_RECOVERY_S = 60.0
RECOVERY_BY_START = 4.0
"""A target must serve again within a minute after the fault, or four times the start of the whole cell if that is
longer: on busy cores loading PyTorch alone can take a minute.
"""

_AT_ONCE = 3
_SAMPLE_S = 2.0
_MAX_SAMPLES = 4096


class Run:
    """One run and its state. Make it on the event loop, and call :meth:`go` once."""

    def __init__(self, settings: ChaosSettings, folder: Path, journal: Journal) -> None:
        """Resolve the cell, with its data and logs in ``folder``; nothing is started before :meth:`go`.

        ``journal`` is closed by the caller. Raises ConfigError for settings with which no cell can start.
        """
        self._settings = settings
        self._folder = folder
        self._journal = journal
        self._cell = ChaosCell(settings.cell(folder), runs_dir(), self._on_death)
        self._health = Health(self._cell.base_url, self._cell.nats_url)
        self._windows = Windows()
        self._expected_deaths: dict[str, int] = {}
        self._dead_groups: set[int] = set()
        self._targets: dict[str, asyncio.Lock] = {}
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        # At least one worker is spared; on slow machines none would otherwise run long enough to answer a request.
        self._workers_at_once = asyncio.Semaphore(max(1, settings.workers - 1))
        self._load: Load | None = None
        self._recovery_s = LEAST_RECOVERY_S
        self.outcome = Outcome(settings, Tally(), self._windows)

    async def go(self) -> Outcome:
        """Run and return the results, violations in the journal. Raises ThermoclineError if the cell cannot start."""
        sampler: asyncio.Task[None] | None = None
        try:
            self._journal.say(f"Starting the cell (logs: {self._cell.logs})")
            began_s = time.monotonic()
            await self._cell.start()
            self._recovery_s = max(LEAST_RECOVERY_S, RECOVERY_BY_START * (time.monotonic() - began_s))
            await self._health.start()
            self._targets = {name: asyncio.Lock() for name in self._cell.names}
            conversations = await self._right_answers()
            self._journal.origin_s = self.outcome.origin_s = time.monotonic()
            sampler = asyncio.create_task(self._sample_memory())
            await self._all_rounds(conversations)
        finally:
            if sampler is not None:
                sampler.cancel()
            if self._health.status is not None:
                self.outcome.counters = dict(self._health.status.counters)
                self.outcome.epoch = self._health.status.epoch
            await self._health.close()
            await self._cell.stop()
            self._look_after_the_end()
        return self.outcome

    async def _right_answers(self) -> list[Conversation]:
        scripts = draw_scripts(
            self._settings.seed, self._settings.questions, TokenCounter(self._cell.model / "tokenizer.json")
        )
        started_s = time.monotonic()
        async with httpx.AsyncClient(base_url=self._cell.base_url, timeout=120, trust_env=False) as client:
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            known = await expectations.known_answers(client, model, scripts)
        self.outcome.requests_known = known.known
        self._journal.say(
            f"{known.known} requests and their answers, asked twice in {time.monotonic() - started_s:.0f} s; "
            f"left out as undecided: {known.close} greedy, {known.differing} drawn"
        )
        return known.conversations

    async def _all_rounds(self, conversations: list[Conversation]) -> None:
        plan = draw_plan(
            self._settings.seed,
            self._settings.faults,
            self._cell.names,
            heartbeat_lost_s=HEARTBEAT_LOST_S,
            pause_s=self._settings.pause_s,
        )
        load = self._load = Load(
            self._cell.base_url,
            conversations,
            self._windows,
            self._journal.complain,
            seed=self._settings.seed,
            requests_per_s=self._settings.requests_per_s,
            max_in_flight=self._settings.max_in_flight,
            workers=self._settings.workers,
            origin_s=self._journal.origin_s,
        )
        self.outcome.tally = load.tally
        end_s = self._settings.minutes * 60 if self._settings.minutes is not None else float("inf")
        size = self._settings.round_faults
        for start in range(0, max(1, len(plan)), size):
            await self._round(load, plan[start : start + size], start, end_s, is_last=start + size >= len(plan))
            if self._journal.now_s >= end_s or self._is_beyond_help():
                break
        self.outcome.seconds = self._journal.now_s

    async def _round(self, load: Load, faults: tuple[Fault, ...], start: int, end_s: float, *, is_last: bool) -> None:
        """Run load and some faults, then stop the load and check that the cell comes to rest."""
        stop = asyncio.Event()
        asking = asyncio.create_task(load.run(stop))
        try:
            began_s = self._journal.now_s
            offset_s = faults[0].at_s - self._settings.pause_s if faults else 0.0
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    await asyncio.sleep(max(0.0, began_s + fault.at_s - offset_s - self._journal.now_s))
                    if self._journal.now_s >= end_s or self._is_beyond_help():
                        break
                    await self._at_once.acquire()
                    group.create_task(self._hit(fault))
            if is_last and self._settings.minutes is not None and not self._is_beyond_help():
                await asyncio.sleep(max(0.0, end_s - self._journal.now_s))
        finally:
            stop.set()
            await asking
        wrong = await at_rest.leftovers(self._cell, self._health, self._dead_groups, timeout_s=self._recovery_s)
        for each in wrong:
            self._journal.complain("not at rest", each)
        self.outcome.rests += 1
        found = "; ".join(wrong) or "nothing is left over"
        self._journal.say(f"At rest after {start + len(faults)} faults: {found}")

    async def _hit(self, fault: Fault) -> None:
        """Inject one fault and wait until its target serves again."""
        try:
            async with self._targets[fault.target], self._spared(fault):
                await self._hit_alone(fault)
        finally:
            self._at_once.release()

    def _spared(self, fault: Fault) -> AbstractAsyncContextManager[object]:
        """Return a context to hold during ``fault``; it keeps one worker running."""
        takes_worker = fault.kind in PROCESS_KINDS and group_of(fault.target) == "worker"
        return self._workers_at_once if takes_worker else nullcontext()

    async def _hit_alone(self, fault: Fault) -> None:
        journal = self._journal
        was = self._health.incarnation(fault.target)
        window = self._windows.open(fault, journal.now_s)
        journal.last_fault = max(journal.last_fault, fault.index)
        journal.write("fault", index=fault.index, fault=str(fault))
        self.outcome.faults.append(fault)
        if fault.kind in ("kill", "restart"):
            self._expected_deaths[fault.target] = self._cell.pids().get(fault.target, 0)
        try:
            detail = await inject(self._cell, fault, back_s=self._recovery_s)
            if fault.kind not in DISK_KINDS:
                is_new = fault.kind in ("kill", "restart")
                async with asyncio.timeout(self._recovery_s):
                    await self._health.until_serving(
                        fault.target, time.monotonic(), not_incarnation=was if is_new else ""
                    )
        except TimeoutError:
            journal.complain("not recovered", f"{fault}: not serving {self._recovery_s:.0f} s later")
            detail = "not recovered"
        except (ThermoclineError, OSError) as error:
            journal.complain("fault failed", f"{fault}: {error}")
            detail = str(error)
        window.end_s = journal.now_s
        self._note_recovery(window, detail)

    def _note_recovery(self, window: Window, detail: str) -> None:
        fault, took_s = window.fault, window.end_s - window.start_s
        self.outcome.recovery_s.setdefault(f"{fault.kind} {group_of(fault.target)}", []).append(took_s)
        self._journal.write("over", index=fault.index, took_s=round(took_s, 3), detail=detail)
        load = self._load
        answered = load.tally.endings["answered"] if load else 0
        self._journal.say(
            f"[{fault.index + 1:4}/{self._settings.faults}] {window.start_s:7.1f} s  {fault}"
            f"{f' ({detail})' if detail else ''}: recovered after {took_s:.1f} s; {answered} answered, "
            f"{load.tally.retries if load else 0} retried, {load.in_flight if load else 0} open"
        )

    def _on_death(self, death: Death) -> None:
        self._dead_groups.add(death.pid)
        is_ours = self._expected_deaths.get(death.name) == death.pid
        self._journal.write("death", name=death.name, pid=death.pid, exit_code=death.exit_code, asked=is_ours)
        if is_ours:
            return
        self.outcome.own_ends[f"{group_of(death.name)} exit {death.exit_code}"] += 1
        if death.exit_code < 0:
            self._journal.complain("crash", f"{death.name} ended by signal {-death.exit_code}")

    def _is_beyond_help(self) -> bool:
        reason = self._cell.gave_up()
        if reason is not None and not any(v.what == "beyond help" for v in self._journal.violations):
            self._journal.complain("beyond help", reason)
        return reason is not None

    async def _sample_memory(self) -> None:
        """Record the private memory of each process every _SAMPLE_S; beyond _MAX_SAMPLES drop every other sample."""
        while True:
            now_s = self._journal.now_s
            for name, pid in self._cell.pids().items():
                size = processes.private_bytes(pid)
                samples = self.outcome.memory.setdefault((name, pid), [])
                if size is not None:
                    samples.append((now_s, size))
                if len(samples) > _MAX_SAMPLES:
                    del samples[::2]
            await asyncio.sleep(_SAMPLE_S)

    def _look_after_the_end(self) -> None:
        """Check, after all processes ended, their logs and that no segment or process is left behind."""
        self.outcome.logged = log_events.look_through(self._cell.logs.glob("*.log"))
        for defect in self.outcome.logged.defects[:20]:
            self._journal.complain("defect in a log", defect)
        for name in processes.segments(self._cell.shm_prefix):
            self._journal.complain("left behind", f"shared segment {name}")
        for pid in processes.survivors(self._dead_groups, ()):
            self._journal.complain("left behind", f"process {pid}")
        self._cell.clean_up()


def run(settings: ChaosSettings, folder: Path, journal: Journal) -> Outcome:
    """Run chaos to its end.

    Raises ThermoclineError if the cell cannot start, httpx.HTTPError if it cannot answer, and KeyboardInterrupt on
    SIGINT or SIGTERM, once the cell is stopped.
    """

    async def body() -> Outcome:
        # As asyncio does for SIGINT: the run is cancelled, and takes the cell down on its way out.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
        return await Run(settings, folder, journal).go()

    return asyncio.run(body())
