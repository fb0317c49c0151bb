"""The flags of ``thermocline bench``, and what is wrong with a line."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import httpx

from shared.errors import ConfigError
from thermocline.bench.dialect import APIS
from thermocline.bench.workloads import WORKLOADS, options_of

MAX_REQUESTS = 100_000
"""Each gap between tokens is kept until the end."""

MAX_PLACES = 4096
DEFAULT_CLOSED_PLACES = 16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="thermocline bench",
        description="Measure an OpenAI-compatible server: ours or another.",
        allow_abbrev=False,
    )
    server = made.add_mutually_exclusive_group()
    server.add_argument("--base-url", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    server.add_argument(
        "--null-server",
        type=float,
        nargs="?",
        const=0.0,
        metavar="ITL_MS",
        help="one that computes nothing, with a token every ITL_MS (0): what is measured is the client itself",
    )
    server.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="results of --json, against the first")
    made.add_argument("--model", metavar="NAME", help="as the server names it (default: the first that it lists)")
    made.add_argument("--api", choices=APIS, help="how prompts are sent (default: the first of these that works)")
    made.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key")
    asked = made.add_argument_group("what is asked")
    one = asked.add_mutually_exclusive_group()
    one.add_argument("--workload", metavar="NAME", help=", ".join(WORKLOADS))
    one.add_argument("--trace", type=Path, metavar="PATH", help="a trace in the Mooncake format (JSON lines)")
    asked.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    asked.add_argument("--requests", type=int, default=200, metavar="N", help="turns of conversations count each")
    asked.add_argument("--seconds", type=float, metavar="S", help="send nothing after this time")
    asked.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="divide lengths in tokens by this")
    asked.add_argument("--seed", type=int, default=1, metavar="N", help="another seed shares no prompt with this one")
    asked.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before it that are not measured")
    when = made.add_argument_group("when")
    when.add_argument("--rate", type=float, metavar="R", help="open loop: requests (or conversations) a second")
    when.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="with --rate")
    when.add_argument("--concurrency", type=int, metavar="N", help="at most so many at once; alone: closed loop")
    when.add_argument("--scale", type=float, default=1.0, metavar="X", help="divide recorded and think times by this")
    patience = made.add_argument_group("patience")
    patience.add_argument("--timeout-s", type=float, default=300.0, metavar="S", help="for a whole answer")
    patience.add_argument("--retries", type=int, default=0, metavar="N", help="of what was refused for now")
    figures = made.add_argument_group("figures")
    figures.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="goodput counts answers within this")
    figures.add_argument("--slo-itl-ms", type=float, metavar="MS", help="the same for the mean time of later tokens")
    figures.add_argument("--label", default="", metavar="TEXT", help="names the run where it is compared")
    figures.add_argument("--json", type=Path, metavar="FILE", help="write all figures and each request there")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError naming every fault."""
    faults = [
        f"--{flag.replace('_', '-')} must be from {least:,} to {most:,}"
        for flag, least, most in (
            ("requests", 1, MAX_REQUESTS),
            ("warmup", 0, MAX_REQUESTS),
            ("concurrency", 1, MAX_PLACES),
            ("retries", 0, 100),
            ("seed", 0, 2**63 - 1),
        )
        if (value := getattr(options, flag)) is not None and not least <= value <= most
    ]
    faults += [
        f"--{flag.replace('_', '-')} must be a number above 0"
        for flag in ("rate", "scale", "length_scale", "seconds", "timeout_s", "slo_ttft_ms", "slo_itl_ms")
        # A comparison that a NaN fails too.
        if (value := getattr(options, flag)) is not None and not 0 < value < math.inf
    ]
    if options.null_server is not None and not 0 <= options.null_server < math.inf:
        faults.append("--null-server must be 0 or more")
    if options.workload is None and options.trace is None:
        faults.append(f"give --trace, or --workload with one of {', '.join(WORKLOADS)}")
    if options.trace is not None and options.settings:
        faults.append("--set is for workloads, and a trace has no options")
    if options.workload is not None:
        try:
            options_of(options.workload, options.settings)
        except ConfigError as error:
            faults.append(error.message)
    faults += _url_faults(options.base_url)
    if faults:
        raise ConfigError("; ".join(faults))


def _url_faults(base_url: str | None) -> list[str]:
    if base_url is None:
        return []
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        return [f"--base-url {base_url!r}: {error}"]
    if url.scheme not in ("http", "https") or not url.host:
        return ["--base-url must begin with http:// or https:// and name a host"]
    if url.query or url.fragment:
        return ["--base-url must end with a path"]
    # The whole line goes into the file of figures.
    return ["--base-url must hold no password; put a key into the environment"] if url.userinfo else []
