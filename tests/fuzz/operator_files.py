"""Files that operators write: settings, keys, tenants, gates, profiles, tasks, traces."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.importance_gate import read_importance_gate
from services.gateway.tenant_file import read_tenants
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.storage.key_ring import KeyRing
from services.worker.config import WorkerConfig
from services.worker.kv.profile import Machine, MoverFigure, Profile, read_profile
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from shared.config import load, misspelt
from shared.errors import ConfigError, InvalidRequest
from shared.messages.pools import KvGeometry
from shared.quality_gate import GatedRatio, QualityGate
from tests.fuzz.scratch import through_file
from tests.fuzz.targets import Target
from thermocline.evaluation.task_file import load_task
from thermocline.simulate.profiles.files import load_hardware, load_model
from thermocline.supervisor.config import SupervisorConfig
from thermocline.trace.block_names import BlockNames
from thermocline.trace.conversion import OpenAiLog
from thermocline.trace.format import BLOCK_TOKENS, read_trace
from thermocline.trace.openai_log import LogFault

_PROFILES = Path(__file__).resolve().parents[2] / "thermocline" / "simulate" / "profiles"
_KEY = base64.b64encode(b"k" * 32).decode()
_MACHINE = Machine(processor="one", cores=2, memory_gib=4)
_GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=16, dtype="float32")

_FLAT = b'model = "m"\nport = 8000\nnats = ["nats://127.0.0.1:4222"]\nlog_level = "info"\n[gateway]\n'
_KEYS = (
    f'default = "{_KEY}"\n[salts]\nalice = "{_KEY}"\n'.encode(),
    json.dumps({"default": _KEY, "salts": {"bob": _KEY}}).encode(),
)
_TENANTS = "".join(
    f'[tenants.{name}]\nsalt = "{name}-has-a-long-salt"\nkeys = ["sha256:{digit * 64}"]\nmax_queued = 5\n'
    for name, digit in (("alice", "a"), ("bob", "b"))
).encode()
_GATE = QualityGate(
    model="m", dtype="float32", task="t", task_digest="d", questions=3, method="importance:h2o", probe_heads=1,
    alpha=0.5, first_tokens=4, recent_tokens=4, max_drop_points=1.0,
    ratios=(GatedRatio(ratio=0.5, drop_points=0.1, standard_error_points=0.1, passed=True),),
)  # fmt: skip
_PROFILE = Profile(
    made="2026-01-01", machine=_MACHINE, software={"torch": "2"}, geometry=_GEOMETRY, tokens=16,
    memcpy_bytes_per_s=1.0, checksum_bytes_per_s=1.0, matmul_flops_per_s=1.0,
    movers=(
        MoverFigure(
            mover="per_page", device="cpu", dtype="float32", page_size=16, transfer_bytes=1, bytes_per_s=1.0,
            verified_bytes_per_s=1.0,
        ),
    ),
    restorations=(
        RestorationProfile(
            geometry=_GEOMETRY, hidden=4, device="cpu",
            figures=(
                RestorationFigure(
                    tokens=16, io_hidden_s=1.0, io_kv_s=1.0, compute_hidden_s=1.0, compute_token_s=1.0
                ),
            ),
        ),
    ),
)  # fmt: skip
_QUESTIONS = [{"question": "Which?", "answer": "a", "choices": ["a", "b"]}]
_TASK = json.dumps(
    {"name": "t", "kind": "multiple_choice", "shared_prefix": "A text.", "questions": _QUESTIONS}
).encode()
_TASK_GROUPS = json.dumps(
    {
        "name": "t", "kind": "multiple_choice", "layout": "text",
        "groups": [{"shared_prefix": "A text.", "questions": _QUESTIONS}],
    }
).encode()  # fmt: skip
_LOG = b"".join(
    json.dumps({"time": 1767225600, "request": request, "response": response}).encode() + b"\n"
    for request, response in (
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"choices": [{"text": "b"}]},
        ),
        ({"prompt": ["a", "b"], "max_tokens": 3}, {"usage": {"prompt_tokens": 2, "completion_tokens": 4}}),
        ({"prompt": [1, 2, 3]}, {"choices": [{"message": {"content": "b", "tool_calls": [{}]}}]}),
    )
)
_TRACE = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 3


def operator_targets() -> list[Target]:
    """Files that people write. A slip of the pen is a ConfigError, never a traceback."""
    settings = b"".join(
        b"[%s]\n" % section.encode() + lines
        for section, lines in (
            ("up", b'model = "m"\nport = 8000\nworkers = 2\n'),
            ("gateway", b'port = 8000\napi_keys = ["a", "b"]\nbody_timeout_ms = 5\nmax_body_bytes = "1MiB"\n'),
            ("scheduler", b"max_batch_tokens = 256\nhost_tier = false\n"),
            ("worker", b'kv_bytes = "64MiB"\nid = "worker-0"\nthreads = 1\n'),
            ("storage", b'host_kv_bytes = "1.5GiB"\ndisk_kv_bytes = "2MiB"\n'),
        )
    )
    kinds: dict[str, type[msgspec.Struct]] = {
        "up": SupervisorConfig,
        "gateway": GatewayConfig,
        "scheduler": SchedulerConfig,
        "worker": WorkerConfig,
    }
    services: dict[str, type[msgspec.Struct]] = {**kinds, "storage": StorageConfig}
    simulated = {
        name: tuple(path.read_bytes() for path in sorted((_PROFILES / name).glob("*.toml")))
        for name in ("hardware", "models")
    }
    return [
        Target("settings", through_file(_settings(services)), (ConfigError,), (settings, _FLAT), weight=8),
        Target("keys", through_file(_keys), (ConfigError,), _KEYS, weight=5),
        Target("tenants", through_file(read_tenants), (ConfigError,), (_TENANTS,), weight=5),
        Target("importance_gate", through_file(_gate), (ConfigError,), (msgspec.json.encode(_GATE),), weight=5),
        Target("profile", through_file(_profile), (ConfigError,), (msgspec.json.encode(_PROFILE),), weight=5),
        Target(
            "restoration", RestorationProfile.from_json, (ConfigError,), (_PROFILE.restorations[0].to_json(),), weight=3
        ),
        Target("task", through_file(load_task), (ConfigError,), (_TASK, _TASK_GROUPS), weight=4),
        Target("trace", through_file(_trace), (InvalidRequest,), (_TRACE,), weight=4),
        Target("log", _log, (LogFault,), (_LOG,), weight=4),
        Target("hardware", through_file(lambda path: load_hardware(str(path))), (ConfigError,), simulated["hardware"]),
        Target("model", through_file(lambda path: load_model(str(path))), (ConfigError,), simulated["models"]),
    ]


def _settings(services: Mapping[str, type[msgspec.Struct]]) -> Callable[[Path], None]:
    """The file as each service reads it, and as the supervisor looks for misspelt names."""

    def read(path: Path) -> None:
        misspelt(services, file=path, environ={})
        for section, kind in services.items():
            try:
                load(kind, section, file=path, environ={}, flags={})
            except ConfigError:
                continue

    return read


def _keys(path: Path) -> None:
    KeyRing(str(path), environ={}, now_s=0.0)


def _gate(path: Path) -> None:
    read_importance_gate(path, model=_GATE.model, probe_heads=_GATE.probe_heads, alpha=_GATE.alpha)


def _profile(path: Path) -> None:
    costs_of_all = read_profile(path, _MACHINE).restorations
    assert isinstance(costs_of_all, tuple)


def _log(data: bytes) -> None:
    log = OpenAiLog(BlockNames(b"salt"), 4.0)
    for line in data.splitlines():
        for request in log.requests(line):
            assert request.input_length > 0
            assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)


def _trace(path: Path) -> None:
    for _ in read_trace(path, limit=1000):
        pass
