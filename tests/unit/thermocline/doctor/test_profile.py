"""``thermocline doctor --profile`` writes what a worker of this machine accepts."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from services.worker.kv.profile import read_profile, this_machine
from shared.errors import ConfigError
from tests.checkpoints import make_checkpoint
from thermocline.doctor.__main__ import main
from thermocline.supervisor.model_demand import geometry_of

QUICK = ["--profile-tokens", "64", "--page-sizes", "16", "--rounds", "1"]


def measure_here(module: str, flags: Sequence[str], said: Callable[[str], None]) -> str:
    """The last line that ``python -m module`` prints, without the seconds in which another process imports torch."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert importlib.import_module(module).main(list(flags)) == 0
    *lines, last = printed.getvalue().splitlines()
    for line in lines:
        said(line)
    return last


def test_a_profile_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names every mover, and the file is this machine's."""
    path = tmp_path / "new" / "profile.json"

    code = main(["--profile", *QUICK, "--out", str(path)])

    shown = capsys.readouterr().out
    gpus = tuple(json.loads(path.read_bytes())["machine"]["gpus"])
    profile = read_profile(path, this_machine(gpus))
    assert code == 0
    assert "batched" in shown
    assert "per_page" in shown
    assert str(path) in shown
    assert {each.page_size for each in profile.movers} == {16}
    assert profile.disk is None


def test_a_model_is_measured_beside_the_movers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are shown, with what a planner makes of them, and a second model's do not take their place."""
    monkeypatch.setattr("thermocline.doctor.profile.run_measurement", measure_here)
    path = tmp_path / "profile.json"
    codes, shown = [], []
    for family in ("opt", "llama"):
        make_checkpoint(family, tmp_path / family)
        model = ["--model", str(tmp_path / family), "--dtype", "float32", "--threads", "1", "--prefix-lengths", "64"]

        codes.append(main(["--profile", *QUICK, *model, "--out", str(path)]))
        shown.append(capsys.readouterr())
        monkeypatch.setattr("thermocline.doctor.restoration.run_measurement", measure_here)

    gpus = tuple(json.loads(path.read_bytes())["machine"]["gpus"])
    restorations = read_profile(path, this_machine(gpus)).restorations
    assert codes == [0, 0]
    assert [each.architecture for each in restorations] == ["OPTForCausalLM", "LlamaForCausalLM"]
    assert [(each.threads, each.device, each.figures[0].tokens) for each in restorations] == [(1, "cpu", 64)] * 2
    assert "restoration of OPTForCausalLM, float32, cpu, 1 threads" in shown[0].out
    assert "A hidden state has" not in shown[0].out
    assert "with grouped queries it saves nothing" in shown[1].out
    assert [each.err for each in shown] == ["", ""]  # Progress is for terminals.


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory without a model, and one that is no directory: exit code 1, and no file is left."""
    monkeypatch.setattr("thermocline.doctor.profile.run_measurement", measure_here)
    for wrong in (["--model", str(tmp_path)], ["--disk-dir", str(tmp_path / "gone")]):
        assert main(["--profile", *QUICK, *wrong, "--out", str(tmp_path / "p.json")]) == 1
        assert str(tmp_path) in capsys.readouterr().err

    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_of_the_disk_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute of measuring is not spent, and lost, for a name that is wrong."""
    measured: list[str] = []
    monkeypatch.setattr("thermocline.doctor.profile.run_measurement", lambda module, *_: measured.append(module))

    assert main(["--profile", *QUICK, "--disk-dir", str(tmp_path / "gone")]) == 1
    assert f"--disk-dir {tmp_path / 'gone'}: there is no such folder" in capsys.readouterr().err
    assert measured == []


def test_the_shape_of_kv_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    """Grouped heads and a head size of their own, or what follows from the others."""
    config = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = geometry_of(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_key_value_heads": 4, "head_dim": 128, "dtype": "bfloat16"})
    )

    grouped = geometry_of(tmp_path)

    assert (plain.layers, plain.kv_heads, plain.head_dim, plain.dtype) == (12, 12, 64, "float32")
    assert (grouped.kv_heads, grouped.head_dim, grouped.dtype) == (4, 128, "bfloat16")
    assert geometry_of(tmp_path, "float16").dtype == "float16"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not tell"):
        geometry_of(tmp_path)
