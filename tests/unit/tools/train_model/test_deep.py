"""Models of twelve layers: what they are trained on, and that one is made once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from thermocline.documents.grammar import Split
from tools.train_model.__main__ import main
from tools.train_model.init import build_model
from tools.train_model.model import VARIANTS
from tools.train_model.rows import Role, RowMix, make_row
from tools.train_model.schedule import DEEP
from tools.train_model.tokenizer import PieceEncoder


def test_rows_ask_about_linked_documents_over_the_whole_context(encoder: PieceEncoder) -> None:
    """Half of them after a fifth of the run; positions go up to 4,096 in rows that are shorter."""
    mix = RowMix(linked=1.0, gapped=1.0, context_tokens=DEEP.context_tokens)
    rows = [make_row(random.Random(seed), encoder, 512, mix, Split.TRAINING) for seed in range(8)]

    assert (DEEP.row_mix(0.1).linked, DEEP.row_mix(0.5).linked) == (0.0, 0.5)
    assert all(Role.ANSWER in roles for _, roles, _ in rows)
    assert 2048 < max(int(where.max()) for _, _, where in rows) < 4096


def test_the_stream_of_a_deep_model_grows_no_more_than_that_of_a_shallow_one(encoder: PieceEncoder) -> None:
    """Or training would begin with an attention that copies far more than what it reads."""
    vocabulary = {f"token{number}": number for number in range(VARIANTS["mha"].vocabulary)}
    norms = []
    for variant in ("mha", "deep-mha"):
        model = build_model(VARIANTS[variant], vocabulary, seed=1)
        layers = model.model.blocks()[2:]
        norms.append(torch.stack([layer.self_attn.o_proj.weight.norm() ** 2 for layer in layers]).sum())

    assert torch.isclose(norms[0], norms[1], rtol=0.01)


def test_a_model_in_the_cache_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says where it is, and by which digest results name it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "thermocline" / "models" / "deep-gqa"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")

    main(["--variant", "deep-gqa", "--steps", "10"])

    said = capsys.readouterr().out
    assert said.startswith(f"made before: {folder}, weights of SHA-256 ")
