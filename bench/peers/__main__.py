"""``python -m bench.peers documents --systems ours,vllm,lmcache --vllm-env DIR --rounds 3 --save``.

How to get the peers, and what is measured: docs/how-to/compare-with-peers.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from bench.make_model import TOKENIZER, make_model
from bench.peers.command_line import BUNDLED, GENERATED, faults, host_bytes, parser, shape_of
from bench.peers.llama import running_llama
from bench.peers.ours import running_ours
from bench.peers.processes import PeerFailed
from bench.peers.results import results_of, save
from bench.peers.rounds import Contest, Measured
from bench.peers.systems import Bounds, Server, Starts
from bench.peers.vllm import running_vllm
from shared.errors import ThermoclineError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main() -> int:
    """Exit code 0: all was measured. 1: a server failed, and rounds before it count. 2: a line that makes no sense."""
    options = parser().parse_args()
    if found := faults(options):
        print("\n".join(found), file=sys.stderr)
        return EXIT_USAGE
    # So that servers are stopped, too, when somebody ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_FAILED))
    try:
        with _folder(options.logs) as folder:
            _measure(options, folder)
    except (PeerFailed, ThermoclineError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


@contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    if logs is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
    else:
        logs.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(dir=logs.resolve()))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    model = _model(options.model, folder, options.seed)
    bounds = Bounds(
        model=model,
        shape=shape_of(model),
        threads=options.threads,
        device_tokens=options.device_tokens,
        host_bytes=host_bytes(options),
        max_running=options.max_running,
    )
    contest = Contest(bounds, seed=options.seed, share=options.share, say=partial(print, flush=True))

    def on_round(workload: str, measured: Measured) -> None:
        results = results_of(workload, measured, bounds, model=Path(options.model).name)
        for row in results["targets"]:
            print(f"  {row['says']}, {row['ours']} against {row['peer']}: {row['ratio']:.2f} of {row['target']:g}")
        if options.save and options.share == 1:
            print(save(workload, results, seed=options.seed), flush=True)

    systems = {name: _starts(name, options, folder) for name in options.systems}
    contest.run(options.workloads, systems, options.rounds, folder, on_round)


def _model(name: str, folder: Path, seed: int) -> Path:
    if name == GENERATED:
        return make_model(folder / GENERATED, seed=seed)
    return TOKENIZER if name == BUNDLED else Path(name).resolve()


def _starts(name: str, options: argparse.Namespace, folder: Path) -> Starts:
    """What brings a system up."""
    if name.startswith("ours"):
        return running_ours
    if name == "llama":
        return partial(_llama, server=options.llama_server.resolve(), weights=folder / "weights.gguf")
    # Not resolved: the interpreter of an environment is a link out of it.
    preloads = [path.resolve() for path in options.preload]
    return partial(running_vllm, env=options.vllm_env.absolute(), preloads=preloads)


def _llama(name: str, bounds: Bounds, folder: Path, *, server: Path, weights: Path) -> AbstractContextManager[Server]:
    try:
        from bench.peers.gguf_weights import write_gguf
    except ImportError as error:
        raise PeerFailed("llama.cpp's weights are written with the gguf package: pip install gguf") from error
    return running_llama(bounds, folder, server, write_gguf(bounds.model, weights))


if __name__ == "__main__":
    sys.exit(main())
