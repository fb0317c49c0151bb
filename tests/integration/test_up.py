"""``thermocline up`` with the bundled model: it serves, heals, stops without a trace, and refuses clearly.

That a service which refuses stops everything is in ``test_refused_models.py``, and that a folder which nobody named is
gone at the end in ``test_survival.py``.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

from services.worker.torch_gpus import TorchGpus
from shared.lifecycle import EXIT_FAILED
from shared.memory.segment import SHM_DIRECTORY
from tests.reference import Reference
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.process_identity import is_same_process, start_time
from thermocline.supervisor.records import CellRecord, runs_dir

pytestmark = pytest.mark.integration

SMALL = SupervisorConfig(port=0, threads=1, device_kv_bytes=16 * 2**20, host_kv_bytes=32 * 2**20, grace_s=6.0)
BUNDLED = Path(__file__).parents[2] / "models/thermocline-mha"
STREAMED_TOKENS = 150
CHILDREN = ["nats", "scheduler", "storage", "worker-0", "gateway"]


def ask(cell: RunningCell) -> str:
    """One greedy answer; raises if the cell does not give one."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=cell.base_url, timeout=60, trust_env=False) as client:
        body["model"] = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def segments(prefix: str) -> list[str]:
    """Names of the cell's shared segments."""
    return [path.name for path in SHM_DIRECTORY.iterdir() if path.name.startswith(prefix + ".")]


def run_up(*flags: str) -> subprocess.CompletedProcess[str]:
    """``thermocline up`` that is expected to end by itself."""
    command = [sys.executable, "-m", "thermocline", "up", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])


class Successor(msgspec.Struct, frozen=True):
    """A cell in the folder of one whose supervisor was killed: what that one had answered, and its last record."""

    cell: RunningCell
    answer: str
    record: CellRecord


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SupervisorConfig:
    """Settings with a folder for data."""
    return msgspec.structs.replace(SMALL, data_dir=str(tmp_path_factory.mktemp("cell") / "data"))


@pytest.fixture(scope="module")
def cell(config: SupervisorConfig) -> Iterator[RunningCell]:
    """A running cell that the tests share; each leaves it able to serve."""
    with running(config) as running_cell:
        yield running_cell


@pytest.fixture(scope="module")
def successor(cell: RunningCell, config: SupervisorConfig) -> Iterator[Successor]:
    """Kills the supervisor of the shared cell, whose processes have died and come back by now, waits until its children
    have followed it, and starts another cell in its folder.
    """
    answer, record = ask(cell), cell.record
    os.kill(cell.supervisor_pid, signal.SIGKILL)
    assert holds(lambda: not any(start_time(child.pid) == child.started for child in record.children))
    with running(config) as next_cell:
        yield Successor(next_cell, answer, record)


def test_it_serves(cell: RunningCell) -> None:
    """Once ready, the cell answers; the same question gets the same answer."""
    assert ask(cell) == ask(cell) != ""


def test_it_says_where_it_serves(cell: RunningCell) -> None:
    """The operator is told the URL, and given a command to try that works as printed."""
    command = next(line for line in cell.output.splitlines() if line.startswith("Try: "))

    done = subprocess.run(["sh", "-c", command.removeprefix("Try: ")], capture_output=True, text=True, timeout=120)

    assert f"Thermocline is ready at {cell.base_url}" in cell.output
    assert json.loads(done.stdout)["choices"], done.stderr


def test_it_says_what_it_serves_with(cell: RunningCell) -> None:
    """Device, data type, pools in tokens and bytes, and the context: 16 MiB hold 170 pages of 16 tokens."""
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in cell.output.splitlines()}

    assert re.fullmatch(r"cpu \(.+\); float32", lines["Device"])
    assert re.fullmatch(r"device 2,720 tokens \(15\.9 MiB\); host 5,\d\d\d tokens \(3\d\.\d MiB\)", lines["Pools"])
    assert lines["Context"] == (
        "2,720 tokens, all that the device pool of a worker holds; the model takes 4,096, with --device-kv-bytes 24MiB"
    )
    assert lines["API"] == f"{cell.base_url}/v1"
    assert lines["Page"].startswith(f"{cell.base_url}/ui#once=")


def test_a_request_too_long_for_the_pool_is_told_so(cell: RunningCell) -> None:
    """With the flag and the size; one that is too long for the model gets OpenAI's words."""

    def refusal(tokens: int) -> dict[str, str]:
        url = f"{cell.base_url}/v1/completions"
        body = {"prompt": [9] * tokens, "max_tokens": 1}
        response = httpx.post(url, json=body, timeout=60, trust_env=False)
        assert response.status_code == httpx.codes.BAD_REQUEST
        error: dict[str, str] = response.json()["error"]
        return error

    pool, model = refusal(2999), refusal(5000)
    assert pool["code"] == model["code"] == "context_length_exceeded"
    assert "3000 tokens of KV" in pool["message"]
    assert "--device-kv-bytes 18MiB" in pool["message"]
    assert model["message"].startswith("This model's maximum context length is 4096 tokens")


def test_the_handle_knows_every_child(cell: RunningCell) -> None:
    """Names, pids and logs of all processes are at hand."""
    assert list(cell.pids()) == CHILDREN
    assert all(cell.logs(name) for name in CHILDREN)
    assert segments(cell.shm_prefix)


@pytest.mark.parametrize("name", ["scheduler", "storage", "gateway", "nats"])
def test_whatever_is_killed_comes_back(cell: RunningCell, name: str) -> None:
    """Any one process may die; soon after the cell answers as before. The worker dies in the next test."""
    expected = ask(cell)
    killed = cell.kill(name, signal.SIGKILL)
    cell.wait_restarted(name, killed, timeout_s=120)

    def answers() -> bool:
        try:
            return is_ready(cell.base_url) and ask(cell) == expected
        except httpx.HTTPError:
            return False

    assert holds(answers), cell.logs(name, 20)


def test_a_stream_survives_the_death_of_its_worker(cell: RunningCell) -> None:
    """The client sees one stream without a gap, a repeat or a changed token; it only waits a while.

    The worker that takes over computes in one prefill what the dead one computed step by step, so logits differ in
    their last bits, which must decide no token.
    """
    prompt = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode("The password of the").ids
    seed = Reference(BUNDLED).decided_seed(prompt, STREAMED_TOKENS, temperature=0.5)

    def stream(interrupt: Callable[[], object] | None) -> str:
        model = httpx.get(f"{cell.base_url}/v1/models", trust_env=False).json()["data"][0]["id"]
        body = {"model": model, "prompt": prompt, "max_tokens": STREAMED_TOKENS, "stream": True}
        body |= {"temperature": 0.5, "seed": seed}
        parts: list[str] = []
        url = f"{cell.base_url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=180, trust_env=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "choices" in event, event
                    parts.append(event["choices"][0]["text"])
                    if interrupt is not None and len(parts) == 20:
                        interrupt()
        return "".join(parts)

    undisturbed = stream(None)
    killed = cell.pids()["worker-0"]

    resumed = stream(lambda: cell.kill("worker-0"))

    assert resumed == undisturbed
    assert cell.wait_restarted("worker-0", killed) != killed


@pytest.mark.skipif(TorchGpus().count > 0, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    """With the reason and what else there is to choose, before anything is started."""
    done = run_up("--port", "0", "--device", "cuda")

    assert done.returncode == 2
    assert "--device cuda: there is no GPU here that its driver lets us use; --device cpu needs none" in done.stderr
    assert "Starting" not in done.stdout


def test_a_data_folder_in_use_is_refused(cell: RunningCell) -> None:
    """Two cells never share one folder."""
    done = run_up("--port", "0", "--data-dir", str(cell.data_dir))

    assert done.returncode == 2
    assert "another cell runs in" in done.stderr
    assert is_ready(cell.base_url)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The message names the flag that helps, and not even a folder is made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_up("--port", str(taken.getsockname()[1]), "--data-dir", str(tmp_path / "data"))

    assert done.returncode == 2
    assert "choose another port with --port" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_killed_supervisor_leaves_no_orphans_and_its_streams_can_be_used_again(successor: Successor) -> None:
    """After SIGKILL nothing runs on; the next start with the same folder clears up and serves."""
    assert ask(successor.cell) == successor.answer
    assert successor.cell.shm_prefix != successor.record.shm_prefix
    assert segments(successor.record.shm_prefix) == []


def test_a_cell_whose_starter_is_gone_does_not_start() -> None:
    """The demo was ended by Ctrl-C a moment after it had started the cell: the kernel tells a later child nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(60)
    command = [sys.executable, "-m", "thermocline", "up", "--port", "0"]
    environ = {**os.environ, "THERMOCLINE_SUPERVISED": str(gone.pid)}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (EXIT_FAILED, b"", b"")


def test_a_stopped_cell_leaves_nothing(successor: Successor) -> None:
    """No process, no shared memory, no record and no port is left, and the exit code is 0."""
    children = successor.cell.children()
    record = successor.cell.record

    code = successor.cell.stop()

    assert code == 0
    assert not [child for child in children.values() if is_same_process(child.pid, child.started)]
    assert segments(record.shm_prefix) == []
    assert not (runs_dir() / f"{record.shm_prefix}.json").exists()
    with socket.create_server(("127.0.0.1", int(record.base_url.rpartition(":")[2]))):
        pass
