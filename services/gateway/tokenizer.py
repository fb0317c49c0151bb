"""The model's tokenizer and chat template. Long texts are tokenised in threads, so that streams never wait.

Templates are rendered by transformers in a sandboxed Jinja environment; they are the model's own, never the caller's.
Encoding calls the Rust tokenizer directly, which many threads may use at once as long as its truncation and padding
are not changed. Its ``encode`` holds the interpreter's lock, so that a thread would not help: 0.8 s for 1 MiB.
``encode_batch_fast`` releases it and, because it records no offsets, takes half the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.meta
import jinja2.sandbox
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway import verbatim
from services.gateway.known_texts import measures
from services.gateway.known_texts.boundaries import links, prove
from services.gateway.known_texts.encoding import encode_known
from services.gateway.known_texts.fronts import Fronts
from services.gateway.known_texts.index import KnownTexts
from services.gateway.known_texts.room import Room, TooMuchNewText
from services.gateway.known_texts.special_ids import special_ids
from services.gateway.one_at_a_time import OneAtATime
from services.gateway.openai_schema.tokenization import TokenizerInfo
from services.gateway.plain_specials import PlainSpecials
from services.gateway.prompt_weight import INLINE_CHARACTERS, LIGHT_CHARACTERS, LONG_CHARACTERS
from services.gateway.token_text import TokenTexts
from services.gateway.turns.template_shape import TemplateShape, shape_of
from shared.errors import ContextTooLong, InvalidRequest, OperatorError
from shared.packed_tokens import PackedTokens

SUSPECT_CHARACTERS = 5
"""A text of more characters per token of the context may be too long; most texts have fewer per token."""

LONG_DECODING = 1_000
"""More tokens than this are decoded by the call that releases the interpreter's lock."""

PIECE_CHARACTERS = 100_000
"""Characters of a text that may be too long that are counted at a time."""

PIECE_TOKENS = 65_536
"""Ids packed at a time: the event loop waits meanwhile, for two milliseconds."""

SHARED_CHARACTERS = 16_384
"""More characters than this, in several texts, are split among threads, which cost 0.09 ms: too much for less text."""

FRONTS_SHARE = 4
"""One part in so many of the memory for known texts holds whole long texts."""

SWITCH_CHARACTERS = 16
"""Longest text of a template argument that tells nothing of a caller, such as an effort."""

KNOWN_SHAPES = 64
"""Limit on the template arguments for which the text around answers is remembered."""

NOTHING_AROUND = (PackedTokens(), PackedTokens())

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # One class; the library saves it by its later name.

T = TypeVar("T")


def load_tokenizer(model_dir: Path) -> Any:
    """Load the Hugging Face tokenizer of a folder, with the chat template of its processor where it has none itself."""
    tokenizer = _load(model_dir)
    of_processor = model_dir / "chat_template.json"
    if not getattr(tokenizer, "chat_template", None) and of_processor.is_file():
        found = json.loads(of_processor.read_text(encoding="utf-8"))["chat_template"]
        # Several are a list, from which the library makes this where they are in ``tokenizer_config.json``.
        tokenizer.chat_template = {one["name"]: one["template"] for one in found} if isinstance(found, list) else found
    return tokenizer


def _load(model_dir: Path) -> Any:
    """Load the tokenizer.

    AutoTokenizer imports torch, which takes seconds and hundreds of megabytes that a gateway does not need, so it is
    used only where the folder does not name the generic class itself.
    """
    try:
        declared = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        declared = {}
    if declared.get("tokenizer_class") in _GENERIC and (model_dir / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        own = declared.get("auto_map")
        code = own.get("AutoTokenizer") if isinstance(own, dict) else None
        if code is None:
            raise
        named = next(filter(None, code), None) if isinstance(code, list) else code
        raise OperatorError(f"it is code in the folder ({named}), which is not run here") from error


class Tokenizer:
    """Encoding, decoding and chat templates of one model."""

    def __init__(self, model_dir: Path, *, threads: int = 2, plain_content: bool = False, known_bytes: int = 0) -> None:
        """``plain_content``: special tokens in messages are text (:mod:`services.gateway.plain_specials`).

        ``known_bytes``: memory for tokens of known texts; 0 computes them each time. Raises OperatorError when the
        tokenizer cannot be loaded, or is of a kind that does not support ``plain_content``.
        """
        try:
            self._tokenizer: Any = load_tokenizer(model_dir)
        except Exception as error:
            raise OperatorError(f"cannot load the tokenizer of {model_dir}: {error}") from error
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._specials: PlainSpecials | None = None
        if plain_content:
            if self._backend is None:
                raise OperatorError("--special-tokens-in-content text needs a tokenizer with a tokenizer.json")
            self._specials = PlainSpecials(self._backend)
        told = json.loads(self._backend.to_str()) if self._backend is not None else {}
        self._known: KnownTexts | None = None
        if known_bytes and told:
            fronts = Fronts(known_bytes // FRONTS_SHARE, measures.FRONT_BYTES.set)
            self._known = KnownTexts(known_bytes - known_bytes // FRONTS_SHARE, measures.BYTES.set, fronts=fronts)
            self._boundaries, self._around = prove(told), special_ids(told["post_processor"])
        self._decodes_in_rust = (
            self._backend is not None
            and getattr(type(self._tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", 0)
            and not getattr(self._tokenizer, "clean_up_tokenization_spaces", True)
        )
        self._lock = threading.Lock()  # For tokenizers without a Rust backend.
        self._turn = OneAtATime()
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="tokenise-long")
        self._template, self._tool_template = chat_templates_of(self._tokenizer)
        self._special_texts: dict[str, str] = dict(self._tokenizer.special_tokens_map)
        own = getattr(type(self._tokenizer), "apply_chat_template", None)
        self._renders_by_jinja = own is PreTrainedTokenizerFast.apply_chat_template
        # Both, by which formats are chosen.
        self.template_source = "\n".join(dict.fromkeys((self._template, self._tool_template)))
        self.has_chat_template = bool(self._template)
        self.template_variables = template_variables(self._template) | template_variables(self._tool_template)
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab()
        self.longest_token_characters = max((len(piece) for piece in vocabulary), default=1)
        self.specials_by_text = specials_by_text(self._backend)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in added.items() if token.special
        }
        self._added_texts = tuple(token.content for token in added.values())
        self.can_splice = self._backend is not None
        self.joins_exactly = bool(told) and joins_exactly(told)
        self._shapes: dict[bytes, TemplateShape] = {}
        self._takes_parts = self.has_chat_template and not self._shows("text") and self._shows([_part("text")])
        self.texts = TokenTexts(
            decode=lambda token: self.decode([token]),
            piece=self._tokenizer.convert_ids_to_tokens,
            byte_level="ByteLevel" in repr(getattr(self._backend, "decoder", None)),
            special=set(self.special_ids | self.added_ids),
        )

    def info(self, max_context: int) -> TokenizerInfo:
        """Return the description for clients of a model with a context of ``max_context`` tokens."""
        special: Mapping[str, Any] = self._tokenizer.special_tokens_map
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return TokenizerInfo(
            tokenizer_class=type(self._tokenizer).__name__,
            model_max_length=max_context,
            chat_template=self._template or None,
            **{name: str(special[name]) if name in special else None for name in names},
        )

    def definition(self) -> str:
        """Return the whole tokenizer, as in ``tokenizer.json``. Raises InvalidRequest where it has no such form."""
        if self._backend is None:
            raise InvalidRequest("this model's tokenizer has no tokenizer.json, so grammars are not supported")
        return str(self._backend.to_str())

    def close(self) -> None:
        """Stop the threads; work that waits for one is dropped."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def encode_now(self, text: str, *, add_special_tokens: bool, most: int = 0) -> list[int]:
        """Return the token ids of ``text`` as a list, as :meth:`packed` computes them."""
        return self.packed(text, add_special_tokens=add_special_tokens, most=most).tolist()

    def packed(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        most: int = 0,
        known_in: str | None = None,
        room: Room | None = None,
        param: str = "prompt",
    ) -> PackedTokens:
        """Return the token ids of ``text``.

        With ``known_in``, a namespace, ids of texts encoded in it before are not computed again, and those of this text
        are kept.

        Raises ContextTooLong for a text of so many characters that it may have more than ``most`` tokens, if its
        pieces, counted without tokenising all of it, do; 0 is no bound. ``param`` is the field that the text came from.
        With ``room``, raises TooMuchNewText for more text without known ids than it has left.
        """
        if most and len(text) > SUSPECT_CHARACTERS * most:
            if room is not None:
                room.take(len(text))
            self._count(text, most, param)
        if self._backend is None:
            if room is not None:
                room.take(len(text))
            with self._lock:
                return PackedTokens.of(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if known_in is not None and self._known is not None and len(text) > self._boundaries.least_characters:
            around = self._around if add_special_tokens else NOTHING_AROUND
            if around is not None:
                encode = partial(self._encode_all, room=room)
                tokens = encode_known(text, known_in, self._boundaries, self._known, encode)
                return PackedTokens.joined([around[0], tokens, around[1]]) if add_special_tokens else tokens
        (whole,) = self._encode_all([text], add_special_tokens=add_special_tokens, room=room)
        return whole

    def _encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, room: Room | None = None
    ) -> list[PackedTokens]:
        if room is not None:
            room.take(sum(map(len, texts)))
        encode = partial(self._backend.encode_batch_fast, add_special_tokens=add_special_tokens)
        with self._turn.let_go():
            if sum(map(len, texts)) > SHARED_CHARACTERS:
                encodings = encode(texts)
            else:
                encodings = [encoding for text in texts for encoding in encode([text])]
        return [_packed(encoding.ids) for encoding in encodings]

    def _count(self, text: str, most: int, param: str) -> None:
        found = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            end = min(start + PIECE_CHARACTERS, len(text))
            piece = text[start:end]
            # A token cut in two may become one for each of its characters.
            found += len(self.packed(piece, add_special_tokens=False)) - self.longest_token_characters
            if found > most:
                counted = f"the first {end} of {len(text)} characters have"
                if end == len(text):
                    counted = f"a prompt of {end} characters has"
                raise ContextTooLong(
                    f"This model's maximum context length is {most} tokens; {counted} more.", param=param
                )

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, most: int = 0, known_in: str | None = None
    ) -> list[PackedTokens]:
        """Return the token ids of each text without blocking the event loop; otherwise as :meth:`packed`."""
        encode = partial(self.packed, add_special_tokens=add_special_tokens, most=most, known_in=known_in)

        def work(room: Room | None = None) -> list[PackedTokens]:
            return [encode(text, room=room) for text in texts]

        characters = sum(map(len, texts))
        return await self.run_light(work, characters, is_light=characters <= LIGHT_CHARACTERS)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``tokens``; ids beyond the vocabulary have none."""
        if self._decodes_in_rust and len(tokens) > LONG_DECODING:
            # The same text, without holding the interpreter's lock.
            (text,) = self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
            return str(text)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render the conversation and return its token ids. Raises InvalidRequest when the template refuses it."""
        return self.encode_rendered(self.render(messages)).tolist()

    def encode_rendered(
        self, text: str, *, most: int = 0, known_in: str | None = None, room: Room | None = None
    ) -> PackedTokens:
        """Return the token ids of text from :meth:`render`, or of a piece of it; otherwise as :meth:`packed`."""
        encode = partial(
            self.packed, add_special_tokens=False, most=most, known_in=known_in, room=room, param="messages"
        )
        return encode(text) if self._specials is None else self._specials.encode(text, encode)

    def decode_exactly(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` as a worker streams it, special tokens included. Needs a Rust backend."""
        (text,) = self._backend.decode_batch([list(tokens)], skip_special_tokens=False)
        return str(text)

    def rendered_text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's ``tokens`` as :meth:`render` writes it in a message."""
        text = self.decode_exactly(tokens)
        return text if self._specials is None else str(self._specials.marked(text))

    def shape(self, template_arguments: Mapping[str, Any], namespace: str = "") -> TemplateShape:
        """Return the text that the template writes around answers, with these arguments.

        It is remembered for all callers where the arguments are switches, and otherwise for the ``namespace``: to
        others a faster answer would show that the same texts were given before.
        """
        known_in = "" if all(map(_is_switch, template_arguments.values())) else namespace
        told = repr((known_in, sorted(template_arguments.items())))
        known = hashlib.blake2b(told.encode("utf-8", "replace")).digest()
        found = self._shapes.get(known)
        if found is None:

            def small(messages: Sequence[Mapping[str, Any]], asks: bool) -> str:
                return self.render(messages, add_generation_prompt=asks, template_arguments=template_arguments)

            found = shape_of(small, self._added_texts)
            if len(self._shapes) >= KNOWN_SHAPES:
                self._shapes = {}
            self._shapes[known] = found
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the model's template makes of ``messages``.

        Raises InvalidRequest when it refuses them, or the model has none.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", code="no_chat_template")
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            said, texts = verbatim.hidden(messages)
            rendered = self._apply(
                self._marked(said),
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_arguments or {}),
            )
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error
        return verbatim.shown(rendered, texts, self._marked)

    def _apply(self, messages: list[Any], **arguments: Any) -> str:
        if self._renders_by_jinja or any("content" in message and message["content"] is None for message in messages):
            # ``apply_chat_template`` copies every message once more, and leaves out null content, by which some
            # templates know a message with calls.
            arguments = {**self._special_texts, **arguments}
            template = self._tool_template if arguments.get("tools") else self._template
            texts, _ = render_jinja_template([messages], chat_template=template, **arguments)
            return str(texts[0])
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    def _shows(self, content: Any) -> bool:
        """Return whether the template writes the content of a user's message."""
        try:
            return "text" in self._apply([{"role": "user", "content": content}], add_generation_prompt=False)
        except Exception:  # A template may raise anything.
            return False

    def _marked(self, said: T) -> T:
        """Return callers' texts, with special tokens marked where they count as text."""
        return said if self._specials is None else self._specials.marked(said)

    async def run_light(self, work: Callable[[Room | None], T], characters: int, *, is_light: bool) -> T:
        """Do ``work`` on a text of about so many characters; where it ``is_light``, at once if little text is new.

        ``work`` may be called twice: with room for new text, in which it raises TooMuchNewText, and then without.
        """
        if is_light and characters > INLINE_CHARACTERS:
            with contextlib.suppress(TooMuchNewText):
                return work(Room(INLINE_CHARACTERS))
        return await self.run(lambda: work(None), characters)

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Do ``work`` on a text of about so many characters: at once when it is small, in a thread when it is not.

        Only one thread with a long text runs Python code at a time: several would pass the interpreter's lock to one
        another, and the event loop would wait for it through all of their turns.
        """
        if characters <= INLINE_CHARACTERS:
            return work()
        loop = asyncio.get_running_loop()
        if characters <= LONG_CHARACTERS:
            return await loop.run_in_executor(self._short, work)
        return await loop.run_in_executor(self._long, self._turn.done, work)


def _packed(ids: Sequence[int]) -> PackedTokens:
    if len(ids) <= PIECE_TOKENS:
        return PackedTokens.of(ids)
    return PackedTokens.joined(ids[start : start + PIECE_TOKENS] for start in range(0, len(ids), PIECE_TOKENS))


def specials_by_text(backend: Any) -> dict[str, int]:
    """Return the ids of special tokens, which decoding leaves out, by text; empty without a Rust tokenizer."""
    added = backend.get_added_tokens_decoder() if backend is not None else {}
    return {token.content: number for number, token in added.items() if token.special}


def joins_exactly(told: Mapping[str, Any]) -> bool:
    """Return whether texts tokenised apart decode to the two joined: a byte-level vocabulary without added spaces.

    ``told`` is the parsed ``tokenizer.json``.
    """
    steps = links(told.get("pre_tokenizer"), "pretokenizers")
    puts_spaces = any(step["type"] == "Metaspace" or step.get("add_prefix_space") for step in steps)
    takes_bytes = any(step["type"] == "ByteLevel" for step in steps)
    changes = {step["type"] for step in links(told.get("normalizer"), "normalizers")} - {"NFC"}
    decoders = [step["type"] for step in links(told.get("decoder"), "decoders")]
    return takes_bytes and decoders == ["ByteLevel"] and not puts_spaces and not changes


def chat_templates_of(tokenizer: Any) -> tuple[str, str]:
    """Return the sources of the chat template and of the one for requests with tools; "" if none.

    Where there are several, these are named ``default`` and ``tool_use``.
    """
    named = getattr(tokenizer, "chat_template", None)
    if not isinstance(named, dict):
        named = {"default": named}
    template = named.get("default")
    template = template if isinstance(template, str) else ""
    with_tools = named.get("tool_use")
    return template, with_tools if isinstance(with_tools, str) else template


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part, for templates that look for parts and write no text besides."""
    content = message.get("content")
    return {**message, "content": [_part(content)]} if isinstance(content, str) else dict(message)


def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template takes from outside, such as ``tools``.

    A template that does not parse gives at most ``tools``.
    """
    try:
        tree = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        # transformers has a tag of its own ({% generation %}), which does not parse here: search the text instead.
        return frozenset({"tools"}) if "tools" in template else frozenset()
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def _is_switch(value: object) -> bool:
    return (
        value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= SWITCH_CHARACTERS)
    )
