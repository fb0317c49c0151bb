"""An incremental scanner of one tool call in JSON.

``{"name": "f", "arguments": {...}}``: keys in any order, ``parameters`` in place of ``arguments``, other keys are
skipped. Arguments are passed on verbatim, as soon as the name is known. They end where their brackets close; whether
they are valid JSON is left to the caller, as in OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from enum import Enum

ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"

_SPACE = " \t\r\n"
_SCALAR_END = ",}] \t\r\n"

Characters = Generator[None, str, str]
"""A generator that is sent characters and returns the first that it does not take."""


class ScanState(Enum):
    """The state of a scanner: within the call, at its end, or at text that is no call."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # The next character cannot be part of a call.


class _NotACall(Exception):
    """The characters so far are no call."""


class CallScanner:
    """The scanner of one call. Until ``has_begun`` its characters are in ``raw``, so that they can be given as text."""

    def __init__(self, *, known_names: Collection[str] | None = None, name: str = "") -> None:
        """With ``known_names``, calls of other tools are not calls. With a ``name``, only the arguments are read."""
        self.state = ScanState.RUNNING
        self.has_begun = False
        self.raw = ""
        self.name = name
        self._known_names = known_names
        self._arguments: list[str] = []
        self._has_arguments = False
        self._machine = self._only_arguments() if name else self._call()
        next(self._machine)

    def feed(self, text: str) -> str:
        """Scan characters of ``text``; return those behind the call."""
        taken: list[str] = []
        for character in text:
            try:
                self._machine.send(character)
            except _NotACall:
                self.state = ScanState.FAILED
                break
            except StopIteration:
                self.state = ScanState.DONE
                taken.append(character)
                break
            taken.append(character)
        if not self.has_begun:
            self.raw += "".join(taken)
            self._begin_if_known()
        return text[len(taken) :]

    def end(self) -> None:
        """Note the end of the answer. Does nothing: all characters are in ``raw`` or were passed on."""

    def take_arguments(self) -> str:
        """Return the arguments scanned since the last call."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def _begin_if_known(self) -> None:
        self.has_begun = bool(self.name) and (self._has_arguments or self.state is ScanState.DONE)
        if self.has_begun and not self._has_arguments:
            self._arguments = [NO_ARGUMENTS]

    def _only_arguments(self) -> Generator[None, str, None]:
        character = yield from _space((yield))
        if character != "{":
            raise _NotACall
        self._has_arguments = True
        yield from _nested(character, self._keep, closes=True)

    def _call(self) -> Generator[None, str, None]:
        character = yield from _space((yield))
        if character != "{":
            raise _NotACall
        character = yield from _space((yield))
        while character != "}":
            key, character = yield from _string(character)
            character = yield from _space(character)
            if character != ":":
                raise _NotACall
            character = yield from _space((yield))
            character = yield from self._member(key, character)
            character = yield from _space(character)
            if character == ",":
                character = yield from _space((yield))
                if character == "}":
                    raise _NotACall
            elif character != "}":
                raise _NotACall
        if not self.name:
            raise _NotACall

    def _member(self, key: str, character: str) -> Characters:
        if key == "name":
            if self.name:
                raise _NotACall
            name, character = yield from _string(character)
            if not name or (self._known_names is not None and name not in self._known_names):
                raise _NotACall
            self.name = name
            return character
        if key in ARGUMENT_KEYS:
            if self._has_arguments:
                raise _NotACall
            return (yield from self._arguments_value(character))
        return (yield from _value(character, lambda character: None))

    def _arguments_value(self, character: str) -> Characters:
        if character == "{":
            self._has_arguments = True
            return (yield from _nested(character, self._keep))
        if character == '"':  # Some models write the object into a string.
            text, character = yield from _string(character)
            self._has_arguments = True
            self._keep(text)
            return character
        text, character = yield from _scalar(character)
        if text != "null":
            raise _NotACall
        return character

    def _keep(self, text: str) -> None:
        self._arguments.append(text)


def _space(character: str) -> Characters:
    while character in _SPACE:
        character = yield
    return character


def _string(character: str) -> Generator[None, str, tuple[str, str]]:
    """Read a string; return its value and the character behind it."""
    if character != '"':
        raise _NotACall
    raw: list[str] = []
    behind = yield from _quoted(raw.append)
    try:
        value = json.loads("".join(raw), strict=False)
    except ValueError as error:
        raise _NotACall from error
    return value, behind


def _quoted(keep: Callable[[str], None], *, closes: bool = False) -> Characters:
    """Read the rest of a string whose opening quote was read."""
    keep('"')
    while True:
        character = yield
        keep(character)
        if character == "\\":
            keep((yield))
        elif character == '"':
            return "" if closes else (yield)


def _nested(character: str, keep: Callable[[str], None], *, closes: bool = False) -> Characters:
    """Read an object or list whose bracket was read.

    If ``closes``, end with its last bracket, not at the next character.
    """
    depth = 0
    while True:
        if character == '"':
            yield from _quoted(keep, closes=True)
        else:
            keep(character)
            depth += (character in "{[") - (character in "}]")
            if not depth:
                return "" if closes else (yield)
        character = yield


def _scalar(character: str) -> Generator[None, str, tuple[str, str]]:
    text = ""
    while character not in _SCALAR_END:
        text += character
        character = yield
    return text, character


def _value(character: str, keep: Callable[[str], None]) -> Characters:
    if character in "{[":
        return (yield from _nested(character, keep))
    if character == '"':
        return (yield from _quoted(keep))
    _, character = yield from _scalar(character)
    return character
