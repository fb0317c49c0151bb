"""Record what a cell was asked, and see what another eviction policy would have made of it.

    thermocline up --device-kv-bytes 8MiB          # small, so that there is something to evict
    python examples/what_if_replay.py --url http://127.0.0.1:8000 --policy fifo

Some documents are asked about again and again among others that are asked about once. The cell's input stream is then
recorded, replayed as it was (every decision must come out the same), and simulated under the other policy.
`thermocline record` finds the cell that runs on this machine; where there are several, name its broker with --nats.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI

WORDS = ("tide", "ice", "pump", "north", "ledger", "amber", "wheel", "signal", "harbour", "lantern", "copper", "salt")
FIGURES = ("hit tokens, device", "hit tokens, host", "evicted pages, device", "TTFT mean, ms")


def document(seed: int) -> str:
    """A text of about 250 tokens that no other seed shares."""
    chance = random.Random(seed)
    return " ".join(chance.choices(WORDS, k=160))


def ask(client: OpenAI, requests: int) -> None:
    """Two of three requests go to four popular documents, every third to one that nobody asks about again."""
    model = client.models.list().data[0].id
    for number in range(requests):
        seed = 1_000 + number if number % 3 == 2 else number % 4
        client.completions.create(
            model=model, prompt=f"{document(seed)}\nQuestion {number}:", max_tokens=4, temperature=0
        )


def thermocline(*arguments: str) -> str:
    """What a command of Thermocline prints. Ends this program with the command's own complaint where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "thermocline", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"thermocline {arguments[0]} failed: {done.stderr or done.stdout}")
    return done.stdout


def show(answer: dict[str, Any], policy: str) -> None:
    """Recorded, simulated as recorded, and simulated under the other policy, side by side."""
    print(f"{answer['requests']} requests{'':14}{'recorded':>12}{'simulated':>12}{policy:>14}")
    for name in FIGURES:
        recorded = answer["recorded"].get(name)
        columns = ["" if recorded is None else f"{recorded:,.0f}"]
        columns += [f"{answer['baseline'][name]:,.0f}", f"{answer['changed_figures'][name]:,.0f}"]
        print(f"{name:<26}{columns[0]:>12}{columns[1]:>12}{columns[2]:>14}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--api-key", default="none", help="where the cell has tenants")
    parser.add_argument("--nats", help="the cell's broker, where several cells run on this machine")
    parser.add_argument("--policy", default="fifo", help="what to compare with")
    parser.add_argument("--requests", type=int, default=36)
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        ask(client, options.requests)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "run.tcrec"
        broker = ("--nats", options.nats) if options.nats else ()
        thermocline("record", "--out", str(recording), *broker)
        print(f"recorded: {recording.stat().st_size:,} bytes")
        same = json.loads(thermocline("replay", str(recording), "--json"))
        print(f"replayed: {same['inputs']} inputs, {same['outputs']} outputs, all as recorded")
        show(json.loads(thermocline("replay", str(recording), "--policy", options.policy, "--json")), options.policy)


if __name__ == "__main__":
    main()
