"""How much of each earlier turn an agent's session finds again, whatever happens between two turns.

Sessions share their instructions and tools. Each turn sends the whole conversation again as text, as agents do, with
what the model said (sampled at temperature 1) and what a tool gave back. For every turn but a session's first,

    reused = cached tokens / (prompt tokens + output tokens of the turn before it)

Cases: ``steady``; ``workers``: two of them, and one after the other is killed (SIGKILL) after every fifth round of
turns, once nothing moves any more; ``killed``: so are all processes, the broker too, after every tenth round, and start
again over the same folders. ``workers at once`` and ``killed at once`` do not wait: what was still on its way to a
lower tier is lost, so they have no target. Device KV holds a tenth of all. Where workers are killed the scheduler has
``copies_at_rest`` on, which is off by default.

The model is the bundled one, whose positions are raised to as many as a session needs: what it says past those that it
was trained with has less sense, and the same form.

``python -m bench.agents_day [--sessions 10] [--turns 40] [--save]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import agents_simulated, results_file
from bench.agents_simulated import TARGET, simulated
from bench.emptying import rest
from services.gateway.cache_calls import CacheCalls
from shared.bus.nats_bus import connect
from shared.messages.status import CellStatus
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

INSTRUCTION_WORDS = 3_700
RESULT_WORDS = 45
ANSWER_TOKENS = 24
CONTEXT = 12_288
WORDS = (
    "the file has a list of all names and their times so read it again before you write what was found in the other "
    "folder where tests are run each day and say how many of them did not pass or were slow because a tool is old"
)
ALWAYS_FROM_DISK = {"THERMOCLINE_PREFETCH_WAIT": "full"}
"""With ``restoring`` kv: this model is so small that its KV is often computed sooner than it is read."""
COPIES_AT_REST = {"THERMOCLINE_COPIES_AT_REST": "true"}
"""Where single workers are killed: their devices take what has no copy with them."""
CASES = ("steady", "workers", "workers at once", "killed", "killed at once")
ALL_CASES = (*CASES, *agents_simulated.CASES)


@dataclass(slots=True)
class Turn:
    """What the server said of one turn. ``reused`` is None of a session's first."""

    session: int
    number: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reused: float | None

    @property
    def tokens(self) -> int:
        """Its prompt and its answer."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class Session:
    """One conversation, as its client keeps it."""

    number: int
    rng: random.Random
    messages: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)

    def say(self) -> list[dict[str, Any]]:
        """The conversation with what comes next: the task, or a tool's result."""
        self.messages.append({"role": "user", "content": words(self.rng, RESULT_WORDS)})
        return self.messages

    def hear(self, answer: dict[str, Any]) -> Turn:
        """Note an answer, and what was found of the turn before."""
        usage = answer["usage"]
        before = self.turns[-1] if self.turns else None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turn = Turn(
            session=self.number,
            number=len(self.turns),
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            cached_tokens=cached,
            reused=None if before is None else cached / before.tokens,
        )
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return turn


def words(rng: random.Random, count: int) -> str:
    """Text of about 1.5 tokens a word."""
    return " ".join(rng.choices(WORDS.split(), k=count))


def sessions_of(seed: int, count: int) -> list[Session]:
    """All begin with the same instructions."""
    instructions = words(random.Random(f"instructions-{seed}"), INSTRUCTION_WORDS)
    return [
        Session(number, random.Random(f"agent-{seed}-{number}"), [{"role": "system", "content": instructions}])
        for number in range(count)
    ]


def model_with_positions(folder: Path) -> Path:
    """The bundled model, for prompts of up to ``CONTEXT`` tokens."""
    source = bundled_model()
    assert source is not None, "a checkout has its model"
    made = shutil.copytree(source, folder / "model")
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((made / name).read_text(encoding="utf-8"))
        settings[key] = CONTEXT
        (made / name).write_text(json.dumps(settings), encoding="utf-8")
    return made


def copies_at_rest(case: str) -> bool:
    """Whether a case has the setting of this name on."""
    return case.startswith("workers")


class Day:
    """One case on cells of its own, in a folder of its own."""

    def __init__(self, case: str, options: argparse.Namespace, model: Path, folder: Path) -> None:
        self._case = case
        self._options = options
        shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = shape["num_key_value_heads"]
        head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        token_bytes = 2 * shape["num_hidden_layers"] * heads * head_dim * 4
        self._config = SupervisorConfig(
            model=str(model),
            port=0,
            workers=2 if case.startswith("workers") else 1,
            dtype="float32",
            device_kv_bytes=int(options.device_tokens * token_bytes),
            host_kv_bytes=options.host_mib * 2**20,
            disk_dir=(str(folder / "disk"),),
            restoring="kv",
            data_dir=str(folder / "data"),
            log_level="warning",
        )
        (folder / "disk").mkdir()
        self.sessions = sessions_of(options.seed, options.sessions)
        self.kills = 0

    def run(self) -> None:
        """All turns, one round of all sessions after the other. Raises CellNotReady, httpx.HTTPError."""
        rounds = iter(range(self._options.turns))
        is_over = False
        environ = ALWAYS_FROM_DISK | (COPIES_AT_REST if copies_at_rest(self._case) else {})
        while not is_over:
            with running(self._config, environ=environ) as cell:
                if self.kills and self._case.startswith("killed"):
                    asyncio.run(self._listed(cell.nats_url))
                is_over = self._serve(cell, rounds)
                if not is_over:
                    self._kill_all(cell)

    def _serve(self, cell: RunningCell, rounds: Iterator[int]) -> bool:
        """Ask until the next kill of everything; whether all was asked."""
        for number in rounds:
            asyncio.run(self._round(cell, number))
            done = number + 1
            if done == self._options.turns:
                break
            if self._case.startswith("workers") and done % 5 == 0:
                self._kill_worker(cell, done)
            if self._case.startswith("killed") and done % 10 == 0:
                return False
        return True

    async def _round(self, cell: RunningCell, number: int) -> None:
        """One turn of each session, ``--at-once`` under way at a time."""
        gate = asyncio.Semaphore(self._options.at_once)
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=300) as http:

            async def turn(session: Session) -> None:
                async with gate:
                    body = {
                        "messages": session.say(),
                        "max_tokens": ANSWER_TOKENS,
                        "temperature": 1.0,
                        "seed": self._options.seed * 1000 + number,
                    }
                    answer = await http.post("/v1/chat/completions", json=body)
                    answer.raise_for_status()
                    session.hear(answer.json())

            await asyncio.gather(*(turn(session) for session in self.sessions))

    def _rest(self, cell: RunningCell) -> None:
        if not self._case.endswith("at once"):
            asyncio.run(_rested(cell.nats_url))

    def _kill_worker(self, cell: RunningCell, done: int) -> None:
        self._rest(cell)
        name = f"worker-{done // 5 % 2}"
        old = cell.kill(name, signal.SIGKILL)
        cell.wait_restarted(name, old)
        self.kills += 1

    async def _listed(self, nats_url: str) -> None:
        """Wait until the scheduler has heard what is on the disk: a cell serves before."""
        chunks = -1
        while (status := await _status(nats_url)).chunks_in_all != chunks or not status.pools:
            chunks = status.chunks_in_all
            await asyncio.sleep(1.0)

    def _kill_all(self, cell: RunningCell) -> None:
        self._rest(cell)
        for pid in (cell.supervisor_pid, *cell.pids().values()):
            with contextlib.suppress(ProcessLookupError):  # The kernel ends them with their supervisor.
                os.kill(pid, signal.SIGKILL)
        self.kills += 1


async def _status(nats_url: str) -> CellStatus:
    bus = await connect(tuple(nats_url.split(",")), "bench")
    try:
        return await CacheCalls(bus).status()
    finally:
        await bus.close()


async def _rested(nats_url: str) -> None:
    bus = await connect(tuple(nats_url.split(",")), "bench")
    try:
        await rest(bus)
    finally:
        await bus.close()


def figures_of(sessions: Sequence[Session], *, kills: int) -> dict[str, Any]:
    """Of all turns but first ones; ``reused_of_all`` weighs them by their length."""
    pairs = [pair for session in sessions for pair in itertools.pairwise(session.turns)]
    later = sorted((turn for _, turn in pairs), key=lambda turn: turn.reused or 0.0)
    shares = [turn.reused or 0.0 for turn in later]
    return {
        "kills": kills,
        "turns": sum(len(session.turns) for session in sessions),
        "longest_prompt_tokens": max(session.turns[-1].prompt_tokens for session in sessions),
        "all_tokens": sum(session.turns[-1].prompt_tokens for session in sessions),
        "reused_least": shares[0],
        "reused_median": statistics.median(shares),
        "reused_of_all": sum(turn.cached_tokens for turn in later) / sum(before.tokens for before, _ in pairs),
        "turns_below_target": sum(share < TARGET for share in shares),
        "worst": [asdict(turn) for turn in later[:5]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1: a turn of a case found less than the target."""
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--cases", default=";".join(ALL_CASES), help="; ".join(ALL_CASES))
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=4, help="turns under way at a time")
    parser.add_argument("--device-tokens", type=int, default=10_240, help="KV on the device of each worker")
    parser.add_argument("--host-mib", type=int, default=1024)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for case in options.cases.split(";"):
            if case in agents_simulated.CASES:
                found[case] = simulated(case, options.seed)
                print(case, json.dumps(found[case], indent=1), flush=True)
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            day = Day(case, options, model_with_positions(folder), folder)
            day.run()
            found[case] = figures_of(day.sessions, kills=day.kills)
            print(case, json.dumps(found[case], indent=1), flush=True)
    least = {
        f"{case}, least part of the turn before that a turn found": {"ratio": each["reused_least"], "target": TARGET}
        for case, each in found.items()
        if not case.endswith("at once")
    }
    if options.save:
        results = {
            "sessions": options.sessions,
            "turns": options.turns,
            "device_tokens": options.device_tokens,
            "host_mib": options.host_mib,
            "copies_at_rest": [case for case in found if copies_at_rest(case)],
            "cases": found,
            "least": least,
        }
        print(results_file.write("agents_day", results, seed=options.seed))
    return 0 if all(each["ratio"] >= TARGET for each in least.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
