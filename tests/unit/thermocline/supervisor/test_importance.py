"""When an operator hears that loading by importance comes to nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.thermocline.supervisor.test_commands import make_cell
from thermocline.supervisor.commands import service_children
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.importance import importance_notice


def notice(config: SupervisorConfig, file: Path | None = None, **environ: str) -> str:
    return importance_notice(service_children(make_cell(config, config_file=file), {}), environ)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (SupervisorConfig(importance="on", disk_dir=("/d",)), "add --sparse true"),
        (SupervisorConfig(importance="on", disk_dir=("/d",), sparse=False), "add --sparse true"),
        (SupervisorConfig(importance="on", sparse=True), "add --disk-dir DIR and --sparse true"),
        (SupervisorConfig(importance="gated", importance_gate="/g.json"), "importance is gated"),
    ],
)
def test_importance_without_anything_to_read_is_told(config: SupervisorConfig, missing: str) -> None:
    """In one line that names what is missing."""
    line = notice(config)

    assert missing in line
    assert "\n" not in line


def test_hidden_states_in_the_place_of_kv_are_told() -> None:
    """Sparse copies are made of KV, and a form of layers saves none."""
    line = notice(SupervisorConfig(sparse=True, disk_dir=("/d",), hidden_form="0/4/0"))

    assert line.startswith("Note: with --hidden-form 0/4/0 no KV is saved")
    assert notice(SupervisorConfig(sparse=True, disk_dir=("/d",), hidden_form="off")) == ""


def test_a_form_that_the_model_cannot_have_is_not_taken_for_one(tmp_path: Path) -> None:
    """KV is saved then; ``up`` refuses such a form before."""
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")

    def told(form: str) -> str:
        config = SupervisorConfig(sparse=True, disk_dir=("/d",), hidden_form=form)
        return importance_notice(service_children(make_cell(config, model=tmp_path), {}), {})

    assert told("8/24/0") == told("0/0/4") == ""
    assert "no KV is saved" in told("0/4/0")


@pytest.mark.parametrize("restoring", ["kv", "hidden", "recompute"])
def test_ways_of_restoring_that_lose_nothing_are_told(restoring: str) -> None:
    """None of them reads a prefix in part, as in the core."""
    line = notice(SupervisorConfig(importance="on", sparse=True, disk_dir=("/d",), restoring=restoring))

    assert line == f"Note: with --restoring {restoring} no prefix is read in part; give --restoring planned"
    assert notice(SupervisorConfig(importance="on", sparse=True, disk_dir=("/d",), restoring="important")) == ""


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ('[scheduler]\ndisk_writes = "off"', "disk_writes is off"),
        ("[scheduler]\nprefix_caching = false", "--prefix-caching false"),
        ("[worker]\nsparse_buffer_bytes = 0", "sparse_buffer_bytes is 0"),
        ('[worker]\nkv_dtype = "fp8"', "--kv-dtype fp8"),
    ],
)
def test_settings_that_keep_parts_from_being_read_are_told(setting: str, named: str, tmp_path: Path) -> None:
    """One line, from the settings of the process that reads them."""
    file = tmp_path / "cell.toml"
    file.write_text(setting + "\n")

    line = notice(SupervisorConfig(importance="on", sparse=True, disk_dir=("/d",)), file)

    assert line.startswith("Note: ")
    assert named in line


def test_there_is_nothing_to_tell_otherwise() -> None:
    """Importance is off, or the form is kept."""
    assert notice(SupervisorConfig()) == ""
    assert notice(SupervisorConfig(sparse=True, disk_dir=("/d",))) == ""
    assert notice(SupervisorConfig(importance="on", sparse=True, disk_dir=("/d",))) == ""


def test_what_services_are_told_elsewhere_counts(tmp_path: Path) -> None:
    """Sections of a settings file and the environment, as the processes read them."""
    file = tmp_path / "cell.toml"
    file.write_text('[gateway]\nimportance = "on"\n[storage]\ndisk_dir = ["/d"]\n')

    assert "add --sparse true" in notice(SupervisorConfig(), file)
    assert notice(SupervisorConfig(), file, THERMOCLINE_SPARSE="true") == ""
