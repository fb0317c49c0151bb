"""What templates write around answers is found out by rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.turns.template_shape import TemplateShape
from tests.unit.gateway.turns.chats import CHATML, HEADERS, INST, PLAIN, make_tokenizer


@pytest.mark.parametrize(
    ("template", "shape"),
    [
        (CHATML, TemplateShape("<|im_start|>assistant\n", "<|im_end|>")),
        (HEADERS, TemplateShape("<|head|>assistant<|end_head|>\n\n", "<|eot|>")),
        (INST, TemplateShape(" [/INST]", "</s>")),
        (PLAIN, TemplateShape("assistant: ", "\n")),
        ("{{ raise_exception('no') }}", TemplateShape()),
    ],
    ids=["chatml", "headers", "inst", "plain", "refuses"],
)
def test_opening_and_closing(tmp_path: Path, template: str, shape: TemplateShape) -> None:
    """Also of templates that always ask for an answer; a template that refuses has no shape."""
    tokenizer = make_tokenizer(tmp_path, template)

    assert tokenizer.shape({}) == shape
    assert tokenizer.shape({"enable_thinking": False}) == shape


def test_shapes_of_texts_are_remembered_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of another namespace does not learn that the same texts were given; switches tell nothing."""
    made = make_tokenizer(tmp_path, CHATML)
    rendered: list[object] = []
    render = made.render

    def noted(*given: Any, **named: Any) -> str:
        rendered.append(named["template_arguments"])
        return render(*given, **named)

    monkeypatch.setattr(made, "render", noted)
    counts = []
    for arguments, namespace in (
        ({"effort": "low", "thinks": True}, "a"), ({"effort": "low", "thinks": True}, "b"),
        ({"documents": ["secret"]}, "a"), ({"documents": ["secret"]}, "a"), ({"documents": ["secret"]}, "b"),
        ({"note": "a text of some length"}, "a"), ({"note": "a text of some length"}, "b"),
    ):  # fmt: skip
        before = len(rendered)
        made.shape(arguments, namespace)
        counts.append(len(rendered) > before)

    assert counts == [True, False, True, False, True, True, True]
