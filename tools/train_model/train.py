"""The training loop: draw a batch, weigh its loss, step, log, save.

A run is a function of its seed and its number of steps.  With a budget in minutes the schedule
follows the clock instead, so two runs differ as the machine does.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_model.checkpoint import Run, save_run
from tools.train_model.probe import probe
from tools.train_model.rows import Role, make_batch
from tools.train_model.schedule import Schedule
from tools.train_model.tokenizer import PieceEncoder

LOG_EVERY_S = 120.0
CONTEXT_WEIGHT = 0.1
REPEATED_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: exactly one of the two is set."""

    steps: int | None = None
    minutes: float | None = None

    def progress(self, run: Run) -> float:
        """From 0 at the start to 1 (or more) at the end."""
        if self.steps is not None:
            return run.step / self.steps
        assert self.minutes is not None
        return run.elapsed_s / (60 * self.minutes)


def loss_weights(roles: Tensor, targets: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The weight of each target, ``[B, T]``: answers 1, a random ``share`` of the context little.

    Context weights are divided by ``share``, so the expected loss does not depend on it.
    """
    drawn = (torch.rand(roles.shape, generator=generator) < share).to(roles.device)
    context = (roles == Role.CONTEXT) & (targets != 0) & drawn
    repeated = (roles == Role.REPEATED) & drawn
    return (
        (roles == Role.ANSWER).float() + context.float() * (CONTEXT_WEIGHT / share) + repeated.float() * REPEATED_WEIGHT
    )


def batch_loss(run: Run, batch: tuple[Tensor, Tensor, Tensor], context_share: float) -> tuple[Tensor, float]:
    """The weighted loss of a batch, and the plain loss of its answer tokens."""
    ids, roles, positions = batch
    targets, target_roles = ids[:, 1:], roles[:, 1:]
    weights = loss_weights(target_roles, targets, context_share, run.generator).flatten()
    chosen = weights.nonzero()[:, 0]
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = run.model.hidden(ids[:, :-1], positions[:, :-1])
        logits = run.model.project(hidden.flatten(0, 1)[chosen])
    losses = functional.cross_entropy(logits.float(), targets.flatten()[chosen], reduction="none")
    weights = weights[chosen]
    is_answer = (target_roles.flatten()[chosen] == Role.ANSWER).float()
    answer_loss = (losses.detach() * is_answer).sum() / is_answer.sum().clamp(min=1)
    return (losses * weights).sum() / weights.sum(), float(answer_loss)


def train_step(run: Run, schedule: Schedule, encoder: PieceEncoder, progress: float) -> float:
    """Take one step and return the loss of its answer tokens."""
    device = run.model.model.embed_tokens.weight.device
    length = schedule.row_tokens(progress, run.rng)
    rows = max(1, schedule.step_tokens(progress) // length)
    arrays = make_batch(run.rng, encoder, rows, length, schedule.row_mix(progress))
    ids, roles, positions = (torch.from_numpy(array).to(device) for array in arrays)
    loss, answer_loss = batch_loss(run, (ids, roles, positions), schedule.context_loss_share(progress))
    torch.autograd.backward(loss)
    run.optimiser.step(schedule.rate_scale(progress))
    run.step += 1
    run.tokens += rows * length
    return answer_loss


def training_steps(
    run: Run,
    schedule: Schedule,
    encoder: PieceEncoder,
    budget: Budget,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[float]:
    """Train until the budget is spent, yielding each step's answer loss."""
    while (progress := budget.progress(run)) < 1:
        began = clock()
        answer_loss = train_step(run, schedule, encoder, progress)
        run.elapsed_s += clock() - began
        yield answer_loss


def train(
    run: Run,
    schedule: Schedule,
    encoder: PieceEncoder,
    budget: Budget,
    state_path: Path,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train to the end of the budget, printing a line and saving the run every LOG_EVERY_S."""
    smooth: float | None = None
    logged = clock()
    for answer_loss in training_steps(run, schedule, encoder, budget, clock):
        smooth = answer_loss if smooth is None else 0.97 * smooth + 0.03 * answer_loss
        if clock() - logged < LOG_EVERY_S:
            continue
        save_run(run, state_path)
        line = {
            "minutes": round(run.elapsed_s / 60, 2),
            "step": run.step,
            "million_tokens": round(run.tokens / 1e6, 2),
            "tokens_per_s": round(run.tokens / run.elapsed_s),
            "answer_loss": round(smooth, 3),
            "probe": {n: round(probe(run.model, encoder, n), 3) for n in (128, 512, 1024, 2048)},
            "hard": round(probe(run.model, encoder, 512, easy=0.0), 3),
        }
        print(json.dumps(line), flush=True)
        logged = clock()
    save_run(run, state_path)
