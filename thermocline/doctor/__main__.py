"""``thermocline doctor``: its flags, and the table of checks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from shared.arguments import ArgumentParser
from shared.errors import ConfigError
from shared.guard import guarded
from shared.progress_line import shown
from thermocline.doctor import gpu
from thermocline.doctor.checks import Check, judge
from thermocline.doctor.facts import gather
from thermocline.doctor.profile import Wish, make_profile, report
from thermocline.doctor.restoration import LENGTHS
from thermocline.flags import add_json

_MARKS = {"ok": "ok", "note": "note", "bad": "BAD"}


def table(checks: Sequence[Check]) -> str:
    """Return one line per check, with advice below it, and a last line with the verdict."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.verdict]:<5} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<5} {'':<{width}}  -> {check.advice}")
    faults = [check.name for check in checks if check.verdict == "bad"]
    lines += ["", f"Not usable yet: {', '.join(faults)}." if faults else "This machine can run Thermocline."]
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline doctor", description="Check that this machine has what Thermocline needs.")
    add_json(made)
    made.add_argument(
        "--gpu", action="store_true", help="prove what a worker uses of CUDA on the first GPU, with speeds"
    )
    group = made.add_argument_group("profile")
    group.add_argument("--profile", action="store_true", help="measure movers, memory and disk, for workers to read")
    group.add_argument("--out", default="", metavar="FILE", help="write the profile to FILE, not to the user's cache")
    group.add_argument(
        "--model", default="", metavar="DIR", help="model folder: measure its KV and its restoration; also for --gpu"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where device pools and the model are")
    group.add_argument("--dtype", default="", metavar="NAME", help="data type of weights and KV, by default that of up")
    group.add_argument("--threads", type=int, default=0, metavar="N", help="threads of the model; 0 is one per core")
    group.add_argument("--disk-dir", default="", metavar="DIR", help="folder whose disk is measured; empty: none")
    group.add_argument("--profile-tokens", type=int, default=4096, metavar="N", help="tokens of the large transfer")
    group.add_argument("--page-sizes", default="1,16,32,64", metavar="N,…", help="page sizes to measure, in tokens")
    group.add_argument(
        "--prefix-lengths", default=LENGTHS, metavar="N,…", help="tokens of prefixes whose restoration is measured"
    )
    group.add_argument("--rounds", type=int, default=5, metavar="N", help="runs per figure; the median is kept")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the table, measure with ``--profile`` or prove with ``--gpu``; return 1 if anything failed, else 0."""
    options = parser().parse_args(argv)
    if options.gpu:
        return _gpu(options)
    if options.profile:
        return _profile(options)
    checks = judge(gather())
    print(json.dumps([asdict(check) for check in checks], indent=2) if options.json else table(checks))
    return 1 if any(check.verdict == "bad" for check in checks) else 0


def _gpu(options: argparse.Namespace) -> int:
    try:
        with shown("proving the GPU") as bar:
            table = gpu.prove(options.model, bar.say)
    except ConfigError as error:
        print(f"thermocline doctor: {error.message}", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(table)).decode() if options.json else gpu.report(table))
    return 0 if gpu.is_usable(table) else 1


def _profile(options: argparse.Namespace) -> int:
    try:
        wish = Wish(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            tokens=options.profile_tokens,
            page_sizes=options.page_sizes,
            prefix_lengths=options.prefix_lengths,
            rounds=options.rounds,
            disk_dir=options.disk_dir,
            out=options.out,
        )
        with shown("measuring") as bar:
            profile, path = make_profile(wish, lambda line: bar.say(f"measuring {line}"))
    except ConfigError as error:
        print(f"thermocline doctor: {error.message}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(profile).decode() if options.json else report(profile, path))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
