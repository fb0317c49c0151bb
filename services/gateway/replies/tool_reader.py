"""A reader of tool calls in a model's text, for every syntax: calls in JSON, or in tags with a text in each.

The reader is a small state machine over a buffer. Text that turns out to be no call is returned as text, with its
markers; a call that has begun stays one. Blank space before the first call, between calls and behind the last one
belongs to the syntax, and is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from services.gateway.replies.call_scanner import CallScanner, ScanState
from services.gateway.replies.markers import find_first, withheld
from services.gateway.replies.parts import CallArguments, CallBegun, Text
from services.gateway.replies.stepped_reader import SteppedReader
from services.gateway.replies.tagged_scanner import FUNCTION, TaggedScanner

ARGUMENTS_MARKER = "[ARGS]"
ID_MARKER = "[CALL_ID]"

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_NAME_MOST = 256


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The syntax of calls."""

    opener: str = ""  # Begins calls anywhere in the text, or "".
    closer: str = ""  # Ends each call.
    is_bare: bool = False  # An answer that begins with the JSON of a known tool is a call, without an opener.
    has_lists: bool = False  # Calls may stand in ``[{...}, {...}]``.
    has_names: bool = False  # Calls may be ``name[ARGS]{...}`` behind the opener.
    is_tagged: bool = False  # ``<function=name>`` and a tag for each argument, with or without the opener.
    separators: str = ""  # Characters between calls without an opener of their own.
    joint: str = ""  # Blanks that templates write between text and the first call; not part of the text.

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the reader must see even where they are special tokens."""
        names = (ARGUMENTS_MARKER, ID_MARKER) if self.has_names else ()
        return tuple(marker for marker in (self.opener, self.closer, *names) if marker)

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts that may begin a call anywhere in the text."""
        return tuple(each for each in (self.opener, FUNCTION if self.is_tagged else "") if each)


class _At(Enum):
    START = auto()  # Only blank space was read.
    TEXT = auto()
    HEAD = auto()  # Behind an opener, or before bare JSON.
    CALL = auto()
    AFTER = auto()  # Behind a call.


class ToolReader(SteppedReader[_At]):
    """The reader of text and tool calls in one syntax. Implements ``ReplyReader``."""

    def __init__(
        self, syntax: ToolSyntax, *, schemas: Mapping[str, Mapping[str, Any]], new_id: Callable[[int], str]
    ) -> None:
        """``new_id`` returns the id of a call by its index, ``schemas`` are the tools' parameters by name.

        Text without an opener is a call only of one of these tools.
        """
        self._syntax = syntax
        self._schemas = schemas
        self._new_id = new_id
        self._openers = tuple(dict.fromkeys(joint + each for joint in (syntax.joint, "") for each in syntax.openers))
        self._head = ""  # Syntax before a call that has not begun; text if none begins.
        self._is_marked = False  # An opener stands before this call.
        self._is_in_list = False
        self._scanner: CallScanner | TaggedScanner | None = None
        self._calls = 0
        steps = {
            _At.START: self._start,
            _At.TEXT: self._text,
            _At.HEAD: self._read_head,
            _At.CALL: self._call,
            _At.AFTER: self._after,
        }
        super().__init__(_At.START, steps)

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            if self._is_final:
                self._say(self._take(len(self._buffer)))
            return False
        if self._syntax.is_bare and (rest[0] == "{" or (rest[0] == "[" and self._syntax.has_lists)):
            self._head = self._take(len(self._buffer) - len(rest))
            self._at = _At.HEAD
            return True
        if not self._is_final and any(len(rest) < len(each) and each.startswith(rest) for each in self._openers):
            return False
        if self._open_if_begun(rest):
            return True
        self._at = _At.TEXT
        return True

    def _text(self) -> bool:
        found = find_first(self._buffer, self._openers)
        if found is not None:
            place, opener = found
            self._say(self._take(place))
            self._open(0, opener)
            return True
        kept = 0 if self._is_final else withheld(self._buffer, self._openers)
        self._say(self._take(len(self._buffer) - kept))
        return False

    def _open_if_begun(self, rest: str) -> bool:
        """Open a call if an opener stands at the start of ``rest``, and return whether one does.

        ``rest`` is the buffer without the blanks at its start.
        """
        opener = next((each for each in self._syntax.openers if rest.startswith(each)), None)
        if opener is not None:
            self._open(len(self._buffer) - len(rest), opener)
        return opener is not None

    def _open(self, place: int, opener: str) -> None:
        self._is_marked = not (self._syntax.is_tagged and opener.endswith(FUNCTION))
        self._head = self._take(place + len(opener) - (0 if self._is_marked else len(FUNCTION)))
        self._at = _At.HEAD

    def _read_head(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return self._give_up() if self._is_final else False
        if self._syntax.is_tagged:
            return self._read_tag(rest)
        if rest[0] == "[" and self._syntax.has_lists and not self._is_in_list:
            self._head += self._take(len(self._buffer) - len(rest) + 1)
            self._is_in_list = True
            return True
        if rest[0] == "{":
            return self._scan(CallScanner(known_names=None if self._is_marked else self._schemas))
        if self._syntax.has_names and not self._is_in_list:
            return self._read_name(rest)
        return self._give_up()

    def _read_tag(self, rest: str) -> bool:
        if rest.startswith(FUNCTION):
            self._head += self._take(len(self._buffer) - len(rest) + len(FUNCTION))
            return self._scan(TaggedScanner(self._schemas, known_names=None if self._is_marked else self._schemas))
        return not (FUNCTION.startswith(rest) and not self._is_final) and self._give_up()

    def _read_name(self, rest: str) -> bool:
        """Read a name behind the opener: ``name[ARGS]{``, or ``name[CALL_ID]id[ARGS]{``, or ``name{``."""
        before = rest[: rest.find("{")] if "{" in rest else rest
        if len(before) > _NAME_MOST:
            return self._give_up()
        if "{" not in rest and not self._is_final:
            return False
        name, _, middle = before.partition("[")
        name, middle = name.strip(), "[" + middle.strip() if middle else ""
        is_known = middle in ("", ARGUMENTS_MARKER) or (
            middle.startswith(ID_MARKER) and middle.endswith(ARGUMENTS_MARKER)
        )
        if "{" not in rest or not _NAME.fullmatch(name) or not is_known:
            return self._give_up()
        self._head += self._take(len(self._buffer) - len(rest) + len(before))
        return self._scan(CallScanner(name=name))

    def _scan(self, scanner: CallScanner | TaggedScanner) -> bool:
        self._scanner = scanner
        self._at = _At.CALL
        return True

    def _call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None, "a call is being read"
        had_begun = scanner.has_begun
        self._buffer = scanner.feed(self._buffer)
        if self._is_final:
            scanner.end()
        if scanner.has_begun and not had_begun:
            self._head = ""
            self._parts.append(CallBegun(self._calls, self._new_id(self._calls), scanner.name))
            self._calls += 1
        if scanner.has_begun and (arguments := scanner.take_arguments()):
            self._parts.append(CallArguments(self._calls - 1, arguments))
        if scanner.state is ScanState.RUNNING and not self._is_final:
            return False
        if not scanner.has_begun:
            self._head += scanner.raw
            return self._give_up()
        self._at = _At.AFTER
        return True

    def _after(self) -> bool:
        rest = self._buffer.lstrip()
        closer = self._syntax.closer
        if not rest:
            if self._is_final:
                self._buffer = ""
            return False
        if self._is_in_list:
            return self._after_in_list(rest)
        if closer and rest.startswith(closer):
            self._buffer = rest[len(closer) :]
            return True
        if rest.startswith(self._syntax.openers):
            self._buffer = rest
            return self._open_if_begun(rest)
        if rest[0] in self._syntax.separators:
            behind = rest[1:].lstrip()
            if not behind and not self._is_final:
                return False
            if behind.startswith("{"):
                self._head = self._take(len(self._buffer) - len(behind))
                self._at = _At.HEAD
                return True
        elif rest[0] == "{" and (closer or self._syntax.separators) and not self._syntax.is_tagged:
            self._at = _At.HEAD
            return True
        if not self._is_final and any(each.startswith(rest) for each in (closer, *self._syntax.openers) if each):
            return False
        self._at = _At.TEXT
        return True

    def _after_in_list(self, rest: str) -> bool:
        if rest[0] == ",":
            self._head = self._take(len(self._buffer) - len(rest) + 1)
            self._at = _At.HEAD
            return True
        self._is_in_list = False
        if rest[0] == "]":
            self._buffer = rest[1:]
            return True
        self._at = _At.TEXT
        return True

    def _give_up(self) -> bool:
        """Return the text since the opener as text."""
        self._say(self._head)
        self._head, self._is_in_list, self._is_marked = "", False, False
        self._at = _At.TEXT
        return True

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))
