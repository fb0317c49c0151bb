"""On a GPU the host launches step n+1 while step n runs, and reads nothing of the device but the tokens of a step.

A real model, its captured decode steps and the executor over fake CUDA tensors, which have no numbers: whatever read
one would fail. What the host reads, tokens that have come home, is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.step_kernels.counting import Counted, DeviceCounter, HostRead, counting
from bench.step_kernels.steps import runner_of
from services.worker import compute, kernels
from services.worker.engine import model_runner
from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.sampler import Sampled, SampleRow
from services.worker.engine.sampler import sample as choose
from services.worker.engine.unread_tokens import UnreadTokens
from shared.messages.requests import SamplingParams
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
PROMPT = list(range(5, 15))
OTHER = list(range(5, 12))
SAID = 20


class PlayedCapture:
    """Its graphs launch their kernels again, and ``note`` when they do."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def graph_of(self, run: Callable[[], None]) -> PlayedGraph:
        return PlayedGraph(run, self._note)

    def used_bytes(self) -> int:
        return 0


class PlayedGraph:
    def __init__(self, run: Callable[[], None], note: Callable[[str], None]) -> None:
        self._run, self._note = run, note

    def replay(self) -> None:
        self._note("launch")
        self._run()


class NotedEvent:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def synchronize(self) -> None:
        self._note("read")


class Host:
    """An executor whose runner lies on a fake GPU. ``done`` is what the host did, in its order."""

    def __init__(self, counter: DeviceCounter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.counter = counter
        runner = runner_of(AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16), "fused")
        # A check of logits reads them, which is done before anybody is served.
        monkeypatch.setattr(DecodeGraphs, "_check", lambda *_: None)
        graphs = DecodeGraphs(runner, 4, capture=PlayedCapture(self.done.append), kernels=kernels)
        monkeypatch.setattr(runner, "_graphs", graphs)
        monkeypatch.setattr(runner, "settle", lambda: self.done.append("settle"))
        monkeypatch.setattr(compute, "sample", self._choose)
        monkeypatch.setattr(model_runner, "send_home", self._send_home)
        self._watch_tables(monkeypatch)
        self.driven = Driven(runner)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """In the place of the one read: what is launched for it is real."""
        self.done.append("read")
        with pytest.raises(HostRead):
            choose(logits, rows)
        return [Sampled(SAID)] * len(rows)

    def _send_home(self, chosen: torch.Tensor) -> UnreadTokens:
        """Its copy and its event need CUDA; whoever waits for them gets the same tokens everywhere."""
        with pytest.raises(HostRead):
            torch.empty(chosen.shape, dtype=chosen.dtype).copy_(chosen)
        rows = chosen.shape[1]
        return UnreadTokens(chosen, torch.tensor([[SAID] * rows, [1] * rows]), NotedEvent(self.done.append))

    def _watch_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        build = ForwardMeta.build

        def noting(segments: Sequence[Segment], *others: object) -> ForwardMeta:
            self.done.append(f"tables of {' and '.join(str(segment.length) for segment in segments)}")
            return build(segments, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(ForwardMeta, "build", noting)

    def step(self) -> list[str]:
        """What the host does in one step."""
        self.done.clear()
        self.counter.counted = Counted()
        assert self.driven.executor.run_one_step()
        return list(self.done)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with counting() as counter:
        made = Host(counter, monkeypatch)
        yield made
        made.driven.close()


def give_two(host: Host, **params: Any) -> None:
    """Requests of 10 and 7 tokens, of the same parameters."""
    wanted = SamplingParams(**{"max_tokens": 8, "temperature": 0, **params})
    host.driven.give(admit(PROMPT, [7], params=wanted), admit(OTHER, [3], request_id="q", params=wanted))
    host.driven.give(batch(chunk(0, 10), chunk(0, 7, request_id="q")))
    host.step()


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(host: Host) -> None:
    """Its tables have been made by then, and those of the next are made before the host waits."""
    give_two(host)
    assert host.step() == [
        "tables of 11 and 8", "launch", "tables of 12 and 9", "launch", "tables of 13 and 10", "read",
    ]  # fmt: skip

    assert host.step() == ["launch", "tables of 14 and 11", "read"]
    assert host.step() == ["launch", "tables of 15 and 12", "read"]


def test_tables_of_the_next_step_are_made_while_this_one_runs(host: Host) -> None:
    """In the ordinary order, too: behind the launch of a step and before its tokens are read."""
    give_two(host, presence_penalty=1.0)
    assert host.step() == ["tables of 11 and 8", "launch", "tables of 12 and 9", "read", "settle"]

    assert host.step() == ["launch", "tables of 13 and 10", "read", "settle"]


@pytest.mark.parametrize(
    ("params", "drawn_with"),
    [({}, 0), ({"temperature": 0.7, "seed": 1, "top_p": 0.9}, 5), ({"temperature": 1.0, "top_k": 5, "min_p": 0.1}, 6)],
    ids=["greedy", "top-p", "top-k and min-p"],
)
def test_nothing_is_read_but_tokens_that_have_come_home(host: Host, params: dict[str, Any], drawn_with: int) -> None:
    """A read of a fake GPU fails, and the step would be taken in the ordinary order. What goes there are positions and
    what tokens are drawn with, each in one copy, and tables of the next step.
    """
    give_two(host, **params)
    for _ in range(2):
        host.step()

    assert host.step() == ["launch", "tables of 15 and 12", "read"]

    assert host.counter.counted.uploads.total() == 2 + drawn_with
    assert host.driven.executor.counters.steps == 4
    assert host.driven.executor.counters.steps_repeated == 0
    assert (host.driven.tokens(), host.driven.tokens("q")) == ([SAID] * 4, [SAID] * 4)


def test_a_row_less_costs_one_copy(host: Host) -> None:
    """Tokens of the others are gathered where they are."""
    host.driven.give(admit(PROMPT, [7], max_tokens=3), admit(OTHER, [3], request_id="q"))
    host.driven.give(batch(chunk(0, 10), chunk(0, 7, request_id="q")))
    host.step()
    assert host.step()[:4] == ["tables of 11 and 8", "launch", "tables of 12 and 9", "launch"]

    assert host.step() == ["tables of 10", "launch", "tables of 11", "read"]

    # Positions, the row's number, and two steps' tables.
    assert host.counter.counted.uploads.total() == 4
    assert host.driven.tokens() == [SAID] * 3


def test_a_read_in_a_captured_step_would_be_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails where one is put."""
    run = ModelRunner.run

    def reading(*args: object) -> torch.Tensor:
        logits = run(*args)  # type: ignore[arg-type]
        logits.any().item()
        return logits

    host.driven.give(admit(PROMPT, [7]), batch(chunk(0, 10)))
    host.step()
    monkeypatch.setattr(ModelRunner, "run", reading)

    host.step()

    assert [each.error for each in host.driven.finished() if each.error]
