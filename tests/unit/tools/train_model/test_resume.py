"""Training: repeatable from a seed, and a resumed run equals an uninterrupted one."""

import random
from pathlib import Path

import pytest
import torch

from tools.train_model.checkpoint import Run, load_run, pool_heads, save_run
from tools.train_model.init import build_model
from tools.train_model.model import ModelConfig
from tools.train_model.optimiser import MuonAdamW, orthogonalise
from tools.train_model.schedule import FROM_SCRATCH, Schedule, Stage
from tools.train_model.tokenizer import PieceEncoder
from tools.train_model.train import Budget, train, training_steps

SHORT = Schedule(
    stages=(Stage(0.5, 64), Stage(1.0, 128)),
    replay=0.3,
    warm_fraction=0.1,
    constant_until=0.5,
    tokens=256,
)


def tiny_run(encoder: PieceEncoder, seed: int = 0) -> Run:
    vocabulary = encoder.tokenizer.get_vocab()
    config = ModelConfig(vocabulary=len(vocabulary), hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=64)
    model = build_model(config, vocabulary, seed)
    generator = torch.Generator().manual_seed(seed)
    return Run(model, MuonAdamW(model), random.Random(seed), generator)


def test_a_resumed_run_equals_an_uninterrupted_one(encoder: PieceEncoder, tmp_path: Path) -> None:
    """Two steps, a save, a load and two steps give the weights that four steps give."""
    whole = tiny_run(encoder)
    list(training_steps(whole, SHORT, encoder, Budget(steps=4)))

    first = tiny_run(encoder)
    steps = training_steps(first, SHORT, encoder, Budget(steps=4))
    next(steps), next(steps)
    save_run(first, tmp_path / "run.pt")
    second = tiny_run(encoder, seed=1)
    load_run(second, tmp_path / "run.pt")
    list(training_steps(second, SHORT, encoder, Budget(steps=4)))

    assert second.step == whole.step == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_a_run_of_other_sizes_is_refused(encoder: PieceEncoder, tmp_path: Path) -> None:
    """Loading a run into a model of other sizes says so."""
    save_run(tiny_run(encoder), tmp_path / "run.pt")
    other = tiny_run(encoder)
    other.model.config = ModelConfig()

    with pytest.raises(ValueError, match="other sizes"):
        load_run(other, tmp_path / "run.pt")


def test_training_lowers_the_loss_and_saves(encoder: PieceEncoder, tmp_path: Path) -> None:
    """A few steps of the real loop lower the answer loss and leave a state to resume from."""
    run = tiny_run(encoder)
    losses = list(training_steps(run, SHORT, encoder, Budget(steps=12)))
    train(run, SHORT, encoder, Budget(steps=13), tmp_path / "run.pt")

    assert losses[-1] < losses[0]
    assert run.step == 13
    assert (tmp_path / "run.pt").exists()


def test_the_schedule_grows_rows_and_lowers_the_rate() -> None:
    """Rows grow to 2,048 tokens; the rate rises from zero, stays, and ends at the floor."""
    rng = random.Random(0)
    lengths = [max(FROM_SCRATCH.row_tokens(p, rng) for _ in range(20)) for p in (0, 0.3, 0.99)]

    assert lengths == [64, 512, 2048]
    assert FROM_SCRATCH.rate_scale(0) == 0
    assert FROM_SCRATCH.rate_scale(0.3) == 1
    assert FROM_SCRATCH.rate_scale(1) == FROM_SCRATCH.floor


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    """Muon's update direction is nearly orthogonal whatever the gradient's spectrum."""
    matrices = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))

    singular = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < singular.min() < singular.max() < 1.5


def test_pooled_heads_are_group_means() -> None:
    """Six heads pooled to three are the means of neighbouring pairs."""
    weight = torch.arange(6.0).repeat_interleave(2)[:, None].expand(12, 5)

    pooled = pool_heads(weight, kv_heads=3, head_size=2)
    assert pooled[:, 0].tolist() == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5]
