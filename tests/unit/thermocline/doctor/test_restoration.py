"""What restoring costs is shown with what follows for the layers of a prefix."""

from __future__ import annotations

import msgspec
import pytest

from services.worker.restore.figures import RestorationFigure, RestorationProfile
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from thermocline.doctor.restoration import measure_model, table

MHA = KvGeometry(layers=4, kv_heads=4, head_dim=16, page_size=16, dtype="float32")
# Of a token in a layer: 256 bytes of hidden state, 512 of KV.
FIGURES = tuple(
    RestorationFigure(tokens=tokens, io_hidden_s=1e-7, io_kv_s=2e-7, compute_hidden_s=1e-6, compute_token_s=1e-4)
    for tokens in (256, 1024)
)
PROFILE = RestorationProfile(geometry=MHA, hidden=64, device="cpu", figures=FIGURES, architecture="Some", threads=2)


def rows(profile: RestorationProfile, disk_bytes_per_s: float = 0.0) -> dict[str, list[str]]:
    """Cells of the second table, by bandwidth."""
    lines = [line.split() for line in table(profile, disk_bytes_per_s)]
    return {line[0]: line[2:] for line in lines if line[1:2] == ["GB/s"]}


def test_a_slow_disk_brings_hidden_states_and_a_fast_one_kv() -> None:
    """Layers, then milliseconds: what is best, all as KV, all computed. 4,096 tokens of 2,048 bytes are 8.4 MB."""
    shown = rows(PROFILE, 3e9)

    assert shown["0.10"][0] == "1/3/0"  # The first layer needs its K and V alone, and no copy.
    assert shown["0.10"][1:] == ["31.5", "83.9", "2179.1"]
    assert shown["5.00"][0] == "0/0/4"
    assert shown["3.00"][-2:] == ["this", "disk"]


def test_where_hidden_states_save_nothing_it_is_said() -> None:
    """Grouped queries, or a model that is not restored from them: no layer comes from hidden states."""
    grouped = msgspec.structs.replace(PROFILE, geometry=msgspec.structs.replace(MHA, kv_heads=1))
    without = msgspec.structs.replace(PROFILE, hidden=0)

    for profile, said in ((grouped, "with grouped queries it saves nothing"), (without, "cannot be restored from")):
        assert {cells[0].split("/")[1] for cells in rows(profile).values()} == {"0"}
        assert said in "\n".join(table(profile))
    assert "saves nothing" not in "\n".join(table(PROFILE))


def test_lengths_are_numbers() -> None:
    """Anything else is refused before a process is started."""
    with pytest.raises(ConfigError, match="--prefix-lengths some"):
        measure_model(
            None,  # type: ignore[arg-type]
            MHA,
            device="cpu",
            dtype="auto",
            threads=1,
            lengths="some",
            rounds=1,
            shm_bytes=0,
            said=lambda line: None,
        )
