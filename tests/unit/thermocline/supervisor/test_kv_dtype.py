"""``thermocline up`` refuses what KV of eight bits would have it ignore."""

from __future__ import annotations

import pytest

from shared import logs
from tests.unit.thermocline.supervisor.test_commands import make_cell
from thermocline.supervisor.__main__ import main
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.kv_dtype import kv_dtype_faults


def faults(environ: dict[str, str] | None = None, **settings: str) -> list[str]:
    return kv_dtype_faults(make_cell(SupervisorConfig(**settings)), environ or {})  # type: ignore[arg-type]


def test_ways_of_restoring_that_rounded_kv_has_not_are_refused() -> None:
    """By a flag or a variable; the others go with it, and with other KV all of them."""
    assert faults(restoring="hidden", kv_dtype="fp8") == [
        "--restoring hidden: KV of eight bits cannot be restored from hidden states, so not with --kv-dtype fp8"
    ]
    assert "cannot be loaded in part" in faults({"THERMOCLINE_RESTORING": "important"}, kv_dtype="fp8")[0]
    for restoring in ("planned", "kv", "recompute"):
        assert faults(restoring=restoring, kv_dtype="fp8") == []
    assert faults(restoring="hidden") == []
    assert faults(restoring="most", kv_dtype="fp8") == []


def test_the_command_refuses_them_before_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 2."""
    monkeypatch.setattr(
        logs, "configure", lambda *_, **__: None
    )  # It is for the whole process, which runs other tests.
    flags = ["--kv-dtype", "fp8", "--kv-gate", "unmeasured", "--restoring", "hidden"]

    assert main(["--port", "0", *flags]) == 2
    assert "--restoring hidden: KV of eight bits" in capsys.readouterr().err
