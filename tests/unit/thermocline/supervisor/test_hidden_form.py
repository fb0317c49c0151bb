"""``thermocline up`` refuses a form of prefixes that its model cannot have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.thermocline.supervisor.test_commands import make_cell
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.hidden_form import hidden_form_faults

MHA = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GQA = MHA | {"num_key_value_heads": 2}


def faults(folder: Path, model: dict[str, int], form: str, hidden_bytes: int = 2**20, **settings: object) -> list[str]:
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    config = SupervisorConfig(hidden_form=form, hidden_bytes=hidden_bytes, **{"disk_dir": ("/d",)} | settings)  # type: ignore[arg-type]
    return hidden_form_faults(make_cell(config, model=folder, hidden_bytes=hidden_bytes), {})


@pytest.mark.parametrize(
    ("model", "form"),
    [(MHA, "off"), (MHA, "auto"), (MHA, "0/4/0"), (MHA, "1/2/1"), (MHA, "0/0/4"), (GQA, "0/4/0"), (GQA, "1/0/3")],
)
def test_a_form_that_can_be_had_is_no_fault(model: dict[str, int], form: str, tmp_path: Path) -> None:
    """Layers add up, and a page does not mix widths."""
    assert faults(tmp_path, model, form) == []


@pytest.mark.parametrize(
    ("model", "form", "fault"),
    [
        (MHA, "8/24/0", "--hidden-form: 8/24/0 has 32 layers, and the model has 4"),
        (MHA, "0/0/0", "--hidden-form: 0/0/0 has 0 layers, and the model has 4"),
        (MHA, "4/0/0", "--hidden-form: it keeps nothing"),
        (GQA, "1/2/1", "--hidden-form: hidden states are not as wide as K, so one page cannot hold both"),
    ],
)
def test_other_forms_are_refused(model: dict[str, int], form: str, fault: str, tmp_path: Path) -> None:
    """With the reason."""
    assert faults(tmp_path, model, form) == [fault]


def test_a_form_without_memory_for_hidden_states_is_refused(tmp_path: Path) -> None:
    """All KV needs none, and without a disk there is nothing to keep."""
    assert faults(tmp_path, MHA, "0/4/0", hidden_bytes=0) == [
        "--hidden-form: 0/4/0 needs room for hidden states, and --hidden-bytes is 0"
    ]
    assert faults(tmp_path, MHA, "0/0/4", hidden_bytes=0) == []
    assert faults(tmp_path, MHA, "0/4/0", hidden_bytes=0, disk_dir=()) == []


def test_rounded_kv_has_no_hidden_states(tmp_path: Path) -> None:
    assert "not rounded to eight bits" in faults(tmp_path, MHA, "0/4/0", kv_dtype="fp8")[0]


def test_models_that_do_not_tell_their_shape_are_left_to_the_cell(tmp_path: Path) -> None:
    """So are forms that are none: the scheduler's own check refuses them."""
    assert faults(tmp_path, {}, "8/24/0") == []
    assert faults(tmp_path, MHA, "many") == []
