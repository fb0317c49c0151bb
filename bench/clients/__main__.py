"""``python -m bench.clients [--envs DIR] [--only openai,anthropic] [--save]``.

Brings up a cell with the bundled model, and runs each client's cases against it in an environment of the client's own,
which is made from the package index where DIR has none yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import results_file
from bench.clients.environments import CASES, CLIENTS, python_of, versions_of
from bench.clients.served_model import make_served_model
from thermocline.supervisor.api import running
from thermocline.supervisor.config import PACKAGE_ROOT, SupervisorConfig

CLIENT_S = 300.0
SERVED = "served"


def run_cases(name: str, python: Path, base_url: str, model: str) -> list[dict[str, Any]]:
    """What became of each case. A process that broke off is a case that fails."""
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_"))},
        "PYTHONPATH": str(PACKAGE_ROOT),
        "CLIENTS_BASE_URL": base_url,
        "CLIENTS_MODEL": model,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DO_NOT_TRACK": "1",
    }
    command = [str(python), "-P", str(CASES / CLIENTS[name].cases)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=CLIENT_S, check=False)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, errors, code = str(expired.stdout or ""), f"not over after {CLIENT_S:.0f} s", 1
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    if code or not rows:
        rows.append({"case": "all of them", "outcome": "fails", "detail": errors[-500:], "seconds": 0.0})
    elif any(row["outcome"] == "fails" for row in rows):
        print(errors, file=sys.stderr)
    return rows


def main() -> int:
    """Exit code 1: a case failed."""
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument(
        "--envs", type=Path, metavar="DIR", help="environments of clients; a temporary one unless given"
    )
    parser.add_argument("--only", default=",".join(CLIENTS), help=", ".join(CLIENTS))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        envs = options.envs.absolute() if options.envs else scratch / "envs"
        model = make_served_model(scratch / SERVED)
        cell = stack.enter_context(running(SupervisorConfig(model=str(model), port=0, log_level="warning")))
        for name in options.only.split(","):
            python = python_of(name, envs)
            rows = run_cases(name, python, cell.base_url, SERVED)
            found[name] = {"versions": versions_of(name, python), "cases": rows}
            for row in rows:
                print(f"{name:14} {row['outcome']:8} {row['case']}  {row['detail'][:160]}", flush=True)
    counts = {
        outcome: sum(row["outcome"] == outcome for each in found.values() for row in each["cases"])
        for outcome in ("works", "refused", "fails")
    }
    print(counts)
    if options.save:
        print(results_file.write("clients", {"clients": found, "counts": counts}, seed=0))
    return 1 if counts["fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
