"""An incremental scanner of one tool call in XML-like tags, as Qwen3-Coder writes it, with JSON as its output.

``<function=NAME>``, ``<parameter=KEY>`` TEXT ``</parameter>`` for each argument, ``</function>``. One line break at
each edge of a text belongs to the tags. A parameter that can only be a string is passed on as it arrives, others at
their end: their JSON type follows from the tool's schema, see :mod:`services.gateway.replies.parameter_types`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from services.gateway.replies.call_scanner import ScanState
from services.gateway.replies.markers import find_first, withheld
from services.gateway.replies.parameter_types import STRING, is_inside_string, json_value, parameter_types

FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
FUNCTION_END: Final = "</function>"

NAME_MOST: Final = 256
"""Longest name of a function or a parameter, in characters."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)


class TaggedScanner:
    """The scanner of one call behind :data:`FUNCTION`, with the interface of ``CallScanner``."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, known_names: Collection[str] | None = None) -> None:
        """``schemas`` are the tools' parameters by name. With ``known_names``, calls of other tools are not calls."""
        self.state = ScanState.RUNNING
        self.has_begun = False
        self.raw = ""
        self.name = ""
        self._schemas, self._known_names = schemas, known_names
        self._buffer = ""
        self._arguments: list[str] = []
        self._step: Callable[[], bool] = self._read_name
        self._keys = 0
        # State of the parameter that is being read.
        self._types = STRING
        self._value: list[str] = []  # Its text so far; empty for a string, which is passed on at once.
        self._is_fresh = False  # Its first character has not been read.

    def feed(self, text: str) -> str:
        """Scan characters of ``text``; return those behind the call."""
        self._buffer += text
        while self.state is ScanState.RUNNING and self._step():
            pass
        if self.state is ScanState.RUNNING:
            return ""
        rest, self._buffer = self._buffer, ""
        return rest

    def end(self) -> None:
        """Note the end of the answer: the text of a call that has not begun is in ``raw``."""
        if not self.has_begun:
            self.raw, self._buffer = self.raw + self._buffer, ""

    def take_arguments(self) -> str:
        """Return the arguments scanned since the last call, as JSON text."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def _read_name(self) -> bool:
        name, closing, _ = self._buffer.partition(">")
        if not closing and len(name) <= NAME_MOST and (not name or _NAME.fullmatch(name)):
            return False
        is_known = self._known_names is None or name in self._known_names
        if not closing or len(name) > NAME_MOST or not _NAME.fullmatch(name) or not is_known:
            self.state = ScanState.FAILED
            return False
        self.name = name
        self.raw = self._take(len(name) + 1)
        self._step = self._read_tag
        return True

    def _read_tag(self) -> bool:
        """Read the tag of the next parameter, or the end of the call."""
        rest = self._buffer.lstrip()
        tag = next((each for each in (PARAMETER, FUNCTION_END) if rest.startswith(each)), None)
        if tag is None:
            if any(each.startswith(rest) for each in (PARAMETER, FUNCTION_END)):
                return False
            return self._stop()
        if not self.has_begun:
            self.has_begun, self.raw = True, ""
            self._arguments.append("{")
        self._take(len(self._buffer) - len(rest) + len(tag))
        if tag == FUNCTION_END:
            return self._stop()
        self._step = self._read_key
        return True

    def _read_key(self) -> bool:
        key, closing, _ = self._buffer.partition(">")
        if not closing:
            return self._stop() if len(key) > NAME_MOST else False
        self._take(len(key) + 1)
        self._types = parameter_types(self._schemas.get(self.name, {}), key)
        self._arguments.append(", " * bool(self._keys) + json.dumps(key, ensure_ascii=False) + ": ")
        self._arguments.append('"' * self._is_string)
        self._keys += 1
        self._is_fresh = True
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        if self._is_fresh:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._is_fresh = False
        found = find_first(self._buffer, _VALUE_ENDS)
        if found is None:
            self._say(self._take(len(self._buffer) - withheld(self._buffer, _VALUE_ENDS)))
            return False
        place, end = found
        self._say(self._take(place))
        # Text that may be a string ends here in any case.
        if "string" not in self._types and is_inside_string("".join(self._value)):
            self._say(self._take(len(end)))
            return True
        self._take(len(end))
        self._arguments.append('"' if self._is_string else json_value("".join(self._value), self._types))
        self._value = []
        self._step = self._read_tag
        return True

    @property
    def _is_string(self) -> bool:
        return self._types == STRING

    def _say(self, text: str) -> None:
        if self._is_string:
            self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _stop(self) -> bool:
        """End the call; without a begun call, fail. Return False: there is no next step."""
        self.state = ScanState.DONE if self.has_begun else ScanState.FAILED
        if self.has_begun:
            self._arguments.append("}")
        return False

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken
