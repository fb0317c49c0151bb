"""Settings of every process are checked before one is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import services.scheduler.policies  # noqa: F401  Those that a cell can name.
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.core.cache.heat import parse
from services.scheduler.core.hidden.hidden_form import parse_form
from services.worker.checks import check as check_worker
from services.worker.config import WorkerConfig
from shared.errors import ConfigError
from tests.unit.thermocline.supervisor.test_commands import make_cell
from thermocline.supervisor.commands import service_children
from thermocline.supervisor.config import SupervisorConfig, bundled_model
from thermocline.supervisor.preflight import CONFIGS, faults_of


def faults(config: SupervisorConfig, file: str = "", model: Path | None = None, **environ: str) -> list[str]:
    """Of a cell with the bundled model, unless told otherwise; ``file`` is its settings file."""
    cell = make_cell(config, model=model or bundled_model(), config_file=Path(file) if file else None)
    return faults_of(service_children(cell, {}), environ)


def test_good_settings_have_no_fault() -> None:
    """Of any of the processes."""
    assert faults(SupervisorConfig(workers=2, schedulers=2)) == []


def test_each_fault_is_told_once_with_the_service_that_has_it() -> None:
    """However many workers would say it, and what two services say of one folder."""
    found = faults(SupervisorConfig(workers=3, device="CUDA"), model=Path("/nowhere"))

    assert len(found) == 2
    assert found[0] == "worker: --device: 'CUDA' is none of auto, cpu, cuda; did you mean cuda?"
    assert found[1] == "worker: --model /nowhere: there is no such folder"


def test_what_the_environment_and_the_file_say_counts(tmp_path: Path) -> None:
    """As the processes will read them: sections of the file, and variables of any."""
    file = tmp_path / "cell.toml"
    file.write_text('[scheduler]\nschedule = "first"\n[storage]\nremote = "ftp://x"\n')

    found = faults(SupervisorConfig(), str(file), THERMOCLINE_HOTNESS_EXPRESSION="heat", THERMOCLINE_MOVER="fast")

    text = "\n".join(found)
    assert "scheduler: --schedule: 'first' is none of balanced, fcfs, lpm" in text
    assert "storage: --remote begins with ftp" in text
    assert "worker: THERMOCLINE_MOVER: 'fast' is none of auto, per_page, batched, gpu_assisted" in text


def test_rules_beyond_types_are_the_services_own(tmp_path: Path) -> None:
    """Expressions, layer mixes, files of keys, tenants and certificates, directories, gates."""
    file = tmp_path / "f"
    file.write_text("not what it should be")
    config = SupervisorConfig(
        hidden_form="most",
        disk_dir=(str(file / "below"),),
        tls_cert=str(file),
        tls_key=str(file),
        importance="gated",
        importance_gate=str(file),
    )

    text = "\n".join(
        faults(
            config,
            THERMOCLINE_EVICTION_EXPRESSION="clock -",
            THERMOCLINE_KEYS=str(file),
            THERMOCLINE_TENANTS=str(file),
        )
    )

    for part in (
        "scheduler: --hidden-form: 'most'",
        "scheduler: --eviction-expression: expression 'clock -', column 7",
        f"storage: --disk-dir {file}/below: {file} is not a directory",
        f"storage: --keys {file}",
        f"gateway: --tenants {file}",
        f"gateway: --tls-cert {file}",
        f"gateway: {file} is no quality gate",
    ):
        assert part in text


def test_files_of_the_brokers_secrets_are_looked_at(tmp_path: Path) -> None:
    """Before a process would wait for a broker that it can never speak to."""
    missing = str(tmp_path / "none.pem")

    found = faults(SupervisorConfig(), THERMOCLINE_NATS_CA=missing)

    assert found
    assert all(f"--nats-ca {missing}" in fault for fault in found)


@pytest.mark.parametrize(
    ("ranks", "fault"), [(1, ""), (2, ""), (4, "6 attention heads, 6 KV heads"), (5, "intermediate_size = 512")]
)
def test_ranks_must_divide_the_model(ranks: int, fault: str) -> None:
    """As its configuration says."""
    found = faults(SupervisorConfig(tensor_parallel=ranks))

    assert (fault in "\n".join(found)) if fault else found == []


def test_ranks_take_quantised_weights(tmp_path: Path) -> None:
    """Each dequantises its part."""
    model = bundled_model()
    assert model is not None
    copy = shutil.copytree(model, tmp_path / "quantised")
    described = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    (copy / "config.json").write_text(json.dumps(described | {"quantization_config": awq}), encoding="utf-8")

    assert faults(SupervisorConfig(tensor_parallel=2), model=copy) == []


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the driver says, without PyTorch; fewer than the ranks need, too."""
    config = WorkerConfig(model=str(bundled_model()), device="cuda", tensor_parallel=2)

    for gpus, fault in ((0, "there is no GPU here"), (1, "--tensor-parallel 2: there are 1 GPUs here")):
        monkeypatch.setattr("services.worker.checks.gpus_here", lambda gpus=gpus: gpus)
        with pytest.raises(ConfigError, match=fault):
            check_worker(config)
    monkeypatch.setattr("services.worker.checks.gpus_here", lambda: 2)
    check_worker(config)
    with pytest.raises(ConfigError, match="--workers 2: they need 4 GPUs of their own, and there are 2 here"):
        check_worker(WorkerConfig(model=str(bundled_model()), device="cuda", tensor_parallel=2, node_workers=2))


def test_an_incomplete_model_is_refused(tmp_path: Path) -> None:
    """Without a tokenizer, without weights, or without a vocabulary in its configuration."""
    model = bundled_model()
    assert model is not None
    for absent, fault in (("tokenizer.json", "it has no tokenizer"), ("model.safetensors", "holds no weights")):
        copy = tmp_path / absent
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns(absent))
        assert fault in "\n".join(faults(SupervisorConfig(), model=copy))
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "names no vocab_size" in "\n".join(faults(SupervisorConfig(), model=bare))


def test_defaults_that_are_not_looked_at_are_right() -> None:
    """The scheduler's check leaves them out because it would have to import the core."""
    config = SchedulerConfig()

    assert config.policy in POLICIES
    for text in (config.eviction_expression, config.hotness_expression):
        parse(text)
    parse_form(config.hidden_form)


def test_every_service_of_a_cell_has_a_check() -> None:
    """None is started with settings that nobody looked at."""
    started = {child.argv[3].removeprefix("services.") for child in service_children(make_cell(SupervisorConfig()), {})}

    assert started == set(CONFIGS)


def test_pytorch_is_not_imported_to_check() -> None:
    """Nor transformers: together they take seconds."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from thermocline.supervisor.__main__ import main\n"
        "assert main(['--policy', 'nonsense', '--dtype', 'float7', '--port', '0']) == 2\n"
        "print(*sorted({'torch', 'transformers', 'uvicorn', 'nats'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.stdout.strip() == "", done.stderr
    assert "2 settings are wrong, and nothing was started" in done.stderr
