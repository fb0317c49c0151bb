"""The bundled tokenizer and its chat template, and exact bytes of single tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from services.gateway.prompt_weight import INLINE_CHARACTERS, LONG_CHARACTERS
from services.gateway.token_text import TokenTexts, byte_level_alphabet
from services.gateway.tokenizer import (
    PIECE_CHARACTERS,
    PIECE_TOKENS,
    Tokenizer,
    chat_templates_of,
    load_tokenizer,
    template_variables,
)
from shared.errors import ContextTooLong, InvalidRequest, OperatorError
from shared.library_versions import installed
from tests.unit.gateway.running_gateway import MODEL_DIR, tokenizer

REFERENCE = AutoTokenizer.from_pretrained(str(MODEL_DIR))


@given(text=st.text(max_size=200))
def test_encoding_equals_transformers_own(text: str) -> None:
    """Going to the Rust tokenizer directly changes nothing."""
    assert tokenizer().encode_now(text, add_special_tokens=True) == REFERENCE(text)["input_ids"]


@pytest.mark.parametrize("piece_tokens", [PIECE_TOKENS, 999])
async def test_a_long_text_is_encoded_in_a_thread_to_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, piece_tokens: int
) -> None:
    """Where it is done, and in how many pieces its ids are packed, makes no difference."""
    monkeypatch.setattr("services.gateway.tokenizer.PIECE_TOKENS", piece_tokens)
    text = "hello world " * 5_000

    assert await tokenizer().encode([text], add_special_tokens=False) == [REFERENCE(text)["input_ids"]]


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    """Equal to what transformers makes of it."""
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]

    assert tokenizer().encode_chat(messages) == REFERENCE.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def copied(folder: Path, **fields: Any) -> Path:
    """The bundled tokenizer without its template, and with these fields in its configuration."""
    told = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told | fields))
    shutil.copy(MODEL_DIR / "tokenizer.json", folder)
    return folder


def test_a_processor_may_have_several_templates(tmp_path: Path) -> None:
    """By name in a list, as ``tokenizer_config.json`` may have them."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    path = copied(tmp_path)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": named}))

    assert chat_templates_of(load_tokenizer(path)) == ("plain", "with tools")


@pytest.mark.parametrize("code", [["tokenization_own.OwnTokenizer", None], "tokenization_own.OwnTokenizer"])
def test_a_tokenizer_that_is_code_is_refused_by_name(code: object, tmp_path: Path) -> None:
    """In one line, without the library's advice to trust it."""
    path = copied(tmp_path, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": code})

    with pytest.raises(OperatorError, match=r"it is code in the folder \(tokenization_own.OwnTokenizer\)"):
        Tokenizer(path)


@pytest.mark.skipif(installed("transformers").startswith("5.17."), reason="Transformers 5.17 itself imports torch")
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_the_generic_class_needs_no_torch(name: str, tmp_path: Path) -> None:
    """Under the name that the library saves today, too: importing torch takes seconds and hundreds of megabytes."""
    code = (
        "import pathlib, sys; from services.gateway.tokenizer import load_tokenizer\n"
        "load_tokenizer(pathlib.Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    path = copied(tmp_path, tokenizer_class=name)

    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False"]


async def test_encoding_is_left_to_the_call_that_lets_go_of_the_interpreter() -> None:
    """``encode`` would keep every stream waiting, whichever thread it is called in."""

    class Backend:
        def __init__(self, backend: Any) -> None:
            self.encode_batch_fast = backend.encode_batch_fast

    made = Tokenizer(MODEL_DIR)
    made._backend = Backend(made._backend)

    assert await made.encode(["hi", "hello " * 2_000], add_special_tokens=True) == [
        REFERENCE("hi")["input_ids"],
        REFERENCE("hello " * 2_000)["input_ids"],
    ]
    made.close()


def test_long_texts_are_decoded_as_short_ones_are() -> None:
    """By another call, which must not change a character."""
    ids = [*range(2000)] * 2

    for skip in (False, True):
        assert tokenizer().decode(ids, skip_special_tokens=skip) == REFERENCE.decode(ids, skip_special_tokens=skip)
    assert tokenizer()._decodes_in_rust


def test_a_suspect_text_is_tokenised_no_further_than_it_fits() -> None:
    """And one that fits all the same is tokenised as a whole, so that its tokens are the same as ever."""
    calls: list[int] = []

    class Backend:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            calls.append(len(texts[0]))
            return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    made = Tokenizer(MODEL_DIR)
    made._backend = Backend(made._backend)
    fits = "<|assistant|>" * 40_000
    tokens = made.encode_now(fits, add_special_tokens=True)
    context = len(tokens)
    calls.clear()

    with pytest.raises(ContextTooLong, match="the first 100000 of 8000000 characters have more") as long:
        made.encode_now("a b c d " * 1_000_000, add_special_tokens=True, most=1000)
    refused = calls.copy()
    with pytest.raises(ContextTooLong, match="a prompt of 8000 characters has more") as short:
        made.encode_rendered("a b c d " * 1_000, most=1000)
    calls.clear()
    found = made.encode_now(fits, add_special_tokens=True, most=context)
    made.close()

    assert refused == [PIECE_CHARACTERS]
    assert (long.value.param, short.value.param) == ("prompt", "messages")
    assert found == tokens
    assert calls == [*[PIECE_CHARACTERS] * 5, len(fits) % PIECE_CHARACTERS, len(fits)]


@pytest.mark.parametrize(
    ("characters", "thread"),
    [
        (INLINE_CHARACTERS, "MainThread"),
        (INLINE_CHARACTERS + 1, "tokenise_0"),
        (LONG_CHARACTERS, "tokenise_0"),
        (LONG_CHARACTERS + 1, "tokenise-long_0"),
    ],
)
async def test_long_texts_have_threads_of_their_own(characters: int, thread: str) -> None:
    """A short prompt never waits for a book."""
    assert await tokenizer().run(lambda: threading.current_thread().name, characters) == thread


def test_what_the_template_refuses_is_an_invalid_request() -> None:
    """Not an error of ours."""
    with pytest.raises(InvalidRequest) as refusal:
        tokenizer().render([{"role": "user", "content": None}])

    assert refusal.value.param == "messages"


@given(text=st.text(max_size=100))
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    """Even where a token holds only a part of a character."""
    ids = tokenizer().encode_now(text, add_special_tokens=False)

    assert b"".join(tokenizer().texts.bytes(token) for token in ids) == text.encode()


def test_bytes_of_special_and_unknown_tokens() -> None:
    """A special token's bytes are its name; an id beyond the vocabulary has none."""
    assert tokenizer().texts.bytes(2) == b"<|end|>"
    assert tokenizer().texts.bytes(2047 + 10_000) == b""


def test_byte_fallback_tokens_are_single_bytes() -> None:
    """Vocabularies without byte level name bytes as <0xE5>."""
    pieces = {0: "<0xE5>", 1: "▁the"}
    texts = TokenTexts(
        decode=lambda token: "�" if token == 0 else "the", piece=pieces.get, byte_level=False, special=set()
    )

    assert texts.bytes(0) == b"\xe5"
    assert texts.bytes(1) == b"the"


def test_the_byte_level_alphabet_covers_every_byte_once() -> None:
    """256 characters for 256 bytes."""
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_template_variables_are_those_from_outside() -> None:
    """Loop variables are not; a template that does not parse is searched as text."""
    assert template_variables("{% for m in messages %}{{ m }}{% endfor %}{{ tools }}") == {"messages", "tools"}
    assert template_variables("{% generation %}{{ tools }}") == {"tools"}
    assert template_variables("") == frozenset()
