"""Questions about one prefix, each with all its answers, as one flattened batch.

Every answer follows the same question, so a question's rows are computed once and its answers branch off them: row
after row lies in the batch as a tree, not as one sequence for each answer. A row attends to the prefix, to its question
and to what is before it in its own answer. The last token of an answer needs no row, because nothing is predicted from
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens of a question, and those of each answer to be scored. None of them may be empty."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """Rows that the question with its answers takes in a batch."""
        return len(self.question) + sum(len(answer) - 1 for answer in self.answers)

    @property
    def length(self) -> int:
        """Tokens of the question with its longest answer."""
        return len(self.question) + max(len(answer) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class PackedQuestions:
    """``Q`` questions in ``T`` rows, none with more than ``R``. Build it with :func:`pack`.

    ids and positions int64 [T]; rows int64 [Q, R], the batch's row of each place of a question, padded with 0; valid
    bool [Q, R]; asking bool [Q, R], rows of the question itself; visible bool [Q, R, R], the places that a place
    attends to. ``predicting`` int64 [N]: rows whose logits are wanted; targets int64 [N] the token each predicts;
    ``answers`` has for each question and answer the range of its predictions.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor
    asking: torch.Tensor
    visible: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    answers: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(slots=True)
class _Tree:
    """One question under construction: parallel lists, and for every row the rows before it on its own path."""

    ids: list[int]
    depths: list[int]
    paths: list[list[int]]
    predicting: list[int]
    targets: list[int]
    answers: list[tuple[int, int]]


def pack(asked: Sequence[Asked], prefix_tokens: int, device: str | torch.device = "cpu") -> PackedQuestions:
    """Lay ``asked`` out behind a prefix of ``prefix_tokens`` tokens. Raises InvalidRequest for an empty text."""
    if not asked or any(not one.question or not one.answers or not all(one.answers) for one in asked):
        raise InvalidRequest("a question and each of its answers need at least one token")
    trees = [_tree(one) for one in asked]
    places = max(len(tree.ids) for tree in trees)
    rows = torch.zeros(len(trees), places, dtype=torch.int64)
    valid, asking = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    visible = torch.zeros(len(trees), places, places, dtype=torch.bool)
    predicting: list[int] = []
    targets: list[int] = []
    answers: list[tuple[tuple[int, int], ...]] = []
    first = 0
    for number, (tree, one) in enumerate(zip(trees, asked, strict=True)):
        count = len(tree.ids)
        rows[number, :count] = torch.arange(first, first + count)
        valid[number, :count] = True
        asking[number, : len(one.question)] = True
        for place, path in enumerate(tree.paths):
            visible[number, place, path] = True
        answers.append(tuple((start + len(targets), end + len(targets)) for start, end in tree.answers))
        predicting += [first + place for place in tree.predicting]
        targets += tree.targets
        first += count
    # A place that only pads attends to itself, so that no softmax is over nothing.
    diagonal = torch.arange(places)
    visible[:, diagonal, diagonal] = True
    return PackedQuestions(
        ids=torch.tensor([token for tree in trees for token in tree.ids], device=device),
        positions=torch.tensor([prefix_tokens + depth for tree in trees for depth in tree.depths], device=device),
        rows=rows.to(device),
        valid=valid.to(device),
        asking=asking.to(device),
        visible=visible.to(device),
        predicting=torch.tensor(predicting, device=device),
        targets=torch.tensor(targets, device=device),
        answers=tuple(answers),
    )


def _tree(asked: Asked) -> _Tree:
    asking = len(asked.question)
    stem = list(range(asking))
    tree = _Tree(list(asked.question), list(stem), [stem[: row + 1] for row in stem], [], [], [])
    for answer in asked.answers:
        begun = len(tree.targets)
        path, row = stem, asking - 1
        for depth, token in enumerate(answer):
            tree.predicting.append(row)
            tree.targets.append(token)
            if depth < len(answer) - 1:
                row = len(tree.ids)
                path = [*path, row]
                tree.ids.append(token)
                tree.depths.append(asking + depth)
                tree.paths.append(path)
        tree.answers.append((begun, len(tree.targets)))
    return tree
