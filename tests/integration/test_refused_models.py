"""``thermocline up`` with models that cannot be served: one line, exit code 2, and nothing is tried twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import OpenAIGPTConfig

from tests.checkpoints import make_checkpoint, save_checkpoint, save_tokenizer
from tests.unit.worker.engine.test_model_loading import SMALL

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
HUB_ID = "Some-Org/Some-Model-8B"


def run_up(*flags: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``thermocline up`` that is expected to end by itself."""
    command = [sys.executable, "-m", "thermocline", "up", "--port", "0", "--threads", "1", *flags]
    env = {**os.environ, **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=env)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that an operator sees on standard error."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Thermocline is ready" not in done.stdout
    return lines[0]


def of_its_own(path: Path) -> Path:
    """A model that attends by code of its own and caches nothing, found by the worker's probe."""
    return save_checkpoint(OpenAIGPTConfig(**SMALL), path)


def without_weights(path: Path) -> Path:
    """A checkpoint whose index lacks a tensor, found while weights are loaded."""
    make_checkpoint("llama", path)
    for shard in sorted(path.glob("*.safetensors"))[1:]:
        shard.write_bytes(shard.read_bytes()[:1000])
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_its_own, "made 0 calls through the attention interface"),
        (without_weights, ".safetensors cannot be read: "),
    ],
)
def test_a_worker_refuses_once(make: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    """The reason is one line on the terminal, the worker was started once, and its log has the library's error."""
    data = tmp_path / "data"

    done = run_up("--model", str(make(tmp_path / "model")), "--data-dir", str(data))

    assert complaint(done).startswith("thermocline up: worker-0 refused to start: ")
    assert reason in complaint(done)
    events = [json.loads(line) for line in (data / "logs" / "worker-0.log").read_text().splitlines() if line[:1] == "{"]
    assert [event["event"] for event in events].count("refused_to_start") == 1
    assert "Traceback" not in done.stderr


def test_what_the_configuration_shows_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """No process is spawned, so none has a log. What is refused so is in ``tests/unit/shared/test_model_folder.py``."""
    model = tmp_path / "model"
    model.mkdir()
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **quantised}))
    (model / "model.safetensors").write_bytes(b"")
    save_tokenizer(model)

    done = run_up("--model", str(model), "--data-dir", str(tmp_path / "data"))

    assert "quantised with GPTQ, and codes of 3 bits are not served" in complaint(done)
    assert not (tmp_path / "data").exists()


def test_a_hub_id_says_how_to_fetch_it(tmp_path: Path) -> None:
    """Neither a folder nor in the hub's cache: the command that fetches it is in the message, and nothing is asked of
    the network.
    """
    done = run_up("--model", HUB_ID, environ={"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"})

    assert f"hf download {HUB_ID} --local-dir DIR" in complaint(done)
