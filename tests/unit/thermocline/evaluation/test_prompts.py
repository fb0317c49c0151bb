"""Texts of a task as tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.gateway.tokenizer import Tokenizer
from shared.errors import ConfigError
from tests.checkpoints import make_checkpoint
from thermocline.evaluation.prompts import PromptMaker
from thermocline.evaluation.task_file import Example, Group, Question, Task

MODEL = Path(__file__).parents[4] / "models" / "thermocline-mha"
EXAMPLE = Example(question="What is the code of Ann?", answer="17")
CHOICES = Question(question="What is the code of Bob?", answer="23", choices=("17", "23", "5"))


def task_of(prefix: str | tuple[str | Example, ...], **changes: str) -> Task:
    group = Group(shared_prefix=prefix, questions=(CHOICES, Question(question="Who?", answer="ivory")))
    return Task(name="t", kind="multiple_choice", groups=(group,), **changes)  # type: ignore[arg-type]


@pytest.fixture
def maker() -> Iterator[PromptMaker]:
    made = PromptMaker(MODEL)
    yield made
    made.close()


@contextlib.contextmanager
def maker_with(folder: Path, change: Callable[[str], str | None]) -> Iterator[PromptMaker]:
    """A maker for a model whose chat template is what ``change`` makes of it."""
    path = make_checkpoint("llama", folder / "model")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = change(settings["chat_template"])
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.closing(PromptMaker(path)) as made:
        yield made


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer(MODEL)
    yield made
    made.close()


@pytest.mark.parametrize("prefix", ["A document.", ("A document.", "Another."), (EXAMPLE, EXAMPLE), ("One.", EXAMPLE)])
def test_a_chat_prompt_is_what_the_gateway_makes(
    prefix: str | tuple[str | Example, ...], maker: PromptMaker, tokenizer: Tokenizer
) -> None:
    """Prefix and question together are the tokens of the conversation, whatever the prefix consists of."""
    parts = (prefix,) if isinstance(prefix, str) else prefix
    documents = [part for part in parts if isinstance(part, str)]
    messages = [{"role": "system", "content": "\n\n".join(documents)}] if documents else []
    for part in parts:
        if isinstance(part, Example):
            messages += [{"role": "user", "content": part.question}, {"role": "assistant", "content": part.answer}]
    messages.append({"role": "user", "content": CHOICES.question})

    (prompts,) = maker.prompts(task_of(prefix))

    text = tokenizer.render(messages, add_generation_prompt=True)
    assert [*prompts.prefix, *prompts.asked[0].question] == tokenizer.encode_now(text, add_special_tokens=False)


def test_an_answer_ends_as_the_model_ends_it(maker: PromptMaker, tokenizer: Tokenizer) -> None:
    """Every choice is scored with the token that ends a message, so that none wins by being the start of another."""
    (prompts,) = maker.prompts(task_of("A document."))

    assert [tokenizer.decode(answer) for answer in prompts.asked[0].answers] == ["17<|end|>", "23<|end|>", "5<|end|>"]
    assert [tokenizer.decode(answer) for answer in prompts.asked[1].answers] == ["ivory<|end|>"]
    assert prompts.right == (1, 0)


def test_what_a_template_puts_behind_the_end_is_not_scored(tmp_path: Path) -> None:
    """A line break after the end of a message is the template's, not the model's."""
    with maker_with(tmp_path, lambda template: template.replace("'<|end|>'", "'<|end|>\n'")) as maker:
        (prompts,) = maker.prompts(task_of("A document."))

    assert [answer[-1] for answer in prompts.asked[0].answers] == [2, 2, 2]


def test_a_text_prompt_is_the_texts_themselves(maker: PromptMaker, tokenizer: Tokenizer) -> None:
    """Nothing is added but what ends an answer, and what separates documents."""
    examples, documents = (
        maker.prompts(task_of(prefix, layout="text", ends_with=".\n"))[0]
        for prefix in ((EXAMPLE, EXAMPLE), ("One.", "Two."))
    )

    assert tokenizer.decode(examples.prefix) == "What is the code of Ann?17.\n" * 2
    assert tokenizer.decode(documents.prefix) == "One.\n\nTwo."
    assert tokenizer.decode(examples.asked[0].question) == CHOICES.question
    assert [tokenizer.decode(answer) for answer in examples.asked[0].answers] == ["17.\n", "23.\n", "5.\n"]


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    """A prefix cannot be shared if the next message changes it."""
    with (
        maker_with(tmp_path, lambda template: "{{ messages | length }}" + template) as maker,
        pytest.raises(ConfigError, match="rewrites earlier messages"),
    ):
        maker.prompts(task_of("A document."))


def test_a_model_without_a_template_needs_the_other_layout(tmp_path: Path) -> None:
    """The message says which."""
    with maker_with(tmp_path, lambda _: None) as maker, pytest.raises(ConfigError, match='"layout": "text"'):
        maker.prompts(task_of("A document."))
