"""The flags of ``thermocline load``, and their check."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import httpx

from shared.arguments import ArgumentParser, add_old_name
from shared.errors import ConfigError
from thermocline.client.connecting import check_port
from thermocline.flags import DEFAULT_URL, add_json, add_url
from thermocline.load.dialect import APIS
from thermocline.load.workloads import WORKLOADS, options_of

MAX_REQUESTS = 100_000
"""A bound on memory: every gap between tokens is kept until the end."""

MAX_PLACES = 4096
DEFAULT_CLOSED_PLACES = 16


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline load",
        description="Send load to an OpenAI-compatible server, ours or another, and measure its answers.",
    )
    server = made.add_mutually_exclusive_group()
    add_url(server, f"the server (default: {DEFAULT_URL})", default=None)
    server.add_argument(
        "--null-server",
        type=float,
        nargs="?",
        const=0.0,
        metavar="ITL_MS",
        help="measure the client itself, against a server that computes nothing and sends a token every ITL_MS (0)",
    )
    server.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="compare files of --out with the first")
    made.add_argument("--model", metavar="NAME", help="model, as the server names it (default: the first it lists)")
    made.add_argument("--api", choices=APIS, help="how prompts are sent (default: the first of these that works)")
    made.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the API key")
    asked = made.add_argument_group("what is asked")
    one = asked.add_mutually_exclusive_group()
    one.add_argument("--workload", metavar="NAME", help=f"generator of requests: {', '.join(WORKLOADS)}")
    one.add_argument("--trace", type=Path, metavar="FILE", help="trace in the Mooncake format (JSON lines)")
    asked.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="option of the workload"
    )
    asked.add_argument(
        "--requests", type=int, default=200, metavar="N", help="requests to send; each turn of a conversation counts"
    )
    asked.add_argument("--seconds", type=float, metavar="S", help="send nothing after S seconds")
    asked.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="divide lengths in tokens by X")
    asked.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of prompts and arrivals; another seed shares no prompt"
    )
    asked.add_argument("--warmup", type=int, default=4, metavar="N", help="requests sent first and not measured")
    when = made.add_argument_group("when")
    when.add_argument("--rate", type=float, metavar="R", help="open loop: R requests (or conversations) a second")
    when.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson", help="times of arrival with --rate"
    )
    when.add_argument(
        "--concurrency", type=int, metavar="N", help="at most N requests at once; without --rate a closed loop"
    )
    scale = when.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="divide recorded times and think times by X"
    )
    add_old_name(when, "--scale", scale)
    patience = made.add_argument_group("patience")
    patience.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="S", help="longest wait for a whole answer, in seconds"
    )
    patience.add_argument(
        "--retries", type=int, default=0, metavar="N", help="tries again after 429, 503 or a connection that broke"
    )
    figures = made.add_argument_group("figures")
    figures.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="goodput counts answers with a TTFT up to MS")
    figures.add_argument(
        "--slo-itl-ms", type=float, metavar="MS", help="goodput counts answers with a mean time per token up to MS"
    )
    figures.add_argument("--label", default="", metavar="TEXT", help="name of the run in comparisons")
    add_json(figures)
    figures.add_argument("--out", type=Path, metavar="FILE", help="write all figures and a row per request to FILE")
    return made


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError that names every invalid flag."""
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
        for flag in ("rate", "time_scale", "length_scale", "seconds", "timeout_s", "slo_ttft_ms", "slo_itl_ms")
        # A comparison that NaN fails, too.
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
    faults += _url_faults(options.url)
    if faults:
        raise ConfigError("; ".join(faults))


def _url_faults(given: str | None) -> list[str]:
    if given is None:
        return []
    try:
        url = httpx.URL(given)
        check_port(url)
    except httpx.InvalidURL as error:
        return [f"--url {given!r}: {error}"]
    if url.scheme not in ("http", "https") or not url.host:
        return ["--url must begin with http:// or https:// and name a host"]
    if url.query or url.fragment:
        return ["--url must end with a path"]
    # The whole command line goes into the file of figures.
    return ["--url must hold no password; put a key into the environment"] if url.userinfo else []
