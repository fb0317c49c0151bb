"""The command line of every program here: one style of help, one line for an error, and old names that still work.

An error is one line on stderr and exit code 2, with the flag or the word that may have been meant. Help states each
default that tells something, and lists choices.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from shared.spelling import fault_of_choice, nearest

EXIT_USAGE = 2

_USAGE_COLUMNS = 72
_USAGE_BREAK = "\n         "
JSON_HELP = "print one JSON object"

_SAYS_NOTHING: tuple[object, ...] = (None, argparse.SUPPRESS, "", (), [])


class Secret(str):
    """A default that help does not show, such as a key from the environment."""

    __slots__ = ()


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that adds each flag's default where that tells something, and keeps paragraphs apart."""

    def __init__(
        self, prog: str, indent_increment: int = 2, max_help_position: int = 28, width: int | None = None
    ) -> None:
        """Let descriptions begin as far right as column 28; argparse's own limit is 24."""
        super().__init__(prog, indent_increment, max_help_position, width)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        says_nothing = action.default is False or action.default in _SAYS_NOTHING or isinstance(action.default, Secret)
        if "default" in text or says_nothing or action.nargs == 0:
            return text
        return f"{text} (default: %(default)s)".lstrip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join("\n".join(f"{indent}{line}" for line in self._split_lines(part, width)) for part in parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # A name or a path that is broken cannot be copied.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser without abbreviations, and with one line for an error instead of the usage."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Take argparse's arguments; ``formatter_class`` and ``allow_abbrev`` have other defaults here."""
        named.setdefault("formatter_class", HelpFormatter)
        named.setdefault("allow_abbrev", False)
        super().__init__(*args, **named)

    def format_help(self) -> str:
        """Return the help; its usage names only required flags and arguments."""
        self.usage = self.usage or self._usage()
        return super().format_help()

    def _usage(self) -> str:
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        grouped = {action for group in groups for action in group._group_actions}
        parts = [f"{self.prog.replace('%', '%%')} [flags]"]
        parts += [_spelt(action) for action in self._actions if action.option_strings and action.required]
        for group in groups:
            choices = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            parts.append(f"({' | '.join(map(_spelt, choices))})")
        for action in self._actions:
            if not action.option_strings and action not in grouped:
                parts.append(f"[{_spelt(action)}]" if action.nargs == "?" else _spelt(action))
        return _USAGE_BREAK.join(parts) if len(" ".join(parts)) > _USAGE_COLUMNS else " ".join(parts)

    def parse_args(  # type: ignore[override]  # A namespace of another type is never given.
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the whole line; an unknown flag is an error that names the nearest one."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            known = sorted({flag for flag in _flags_of(self) if flag.startswith("--")})
            self.error(
                "; ".join(_stray(word, known) for word in rest if word.startswith("-")) or _stray(rest[0], known)
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the error in one line to stderr and exit with code 2."""
        told = message.removeprefix("argument ")
        told = re.sub(r"invalid int value: ('.*')$", r"\1 is not a whole number", told)
        told = re.sub(r"invalid float value: ('.*')$", r"\1 is not a number", told)
        self.exit(EXIT_USAGE, f"{self.prog}: {told} ({self.prog} --help lists the flags)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, fault_of_choice(value, [str(choice) for choice in action.choices]))


def _spelt(action: argparse.Action) -> str:
    shown = action.metavar if isinstance(action.metavar, str) else "|".join(map(str, action.choices or [action.dest]))
    return f"{action.option_strings[0]} {shown}" if action.option_strings else shown


def _stray(word: str, known: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many"
    flag = word.partition("=")[0]
    return f"{flag} is not a flag{nearest(flag, known)}"


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _flags_of(verb)


class _OldName(argparse.Action):
    """A flag's name in an earlier release: it does what the new one does, and names that on stderr."""

    def __init__(self, *args: Any, new: argparse.Action, **named: Any) -> None:
        super().__init__(*args, **named)
        self._new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        say_renamed(parser.prog, option_string or "", self._new.option_strings[0])
        self._new.required = False
        self._new(parser, namespace, values, option_string)


def add_old_name(to: argparse._ActionsContainer, old: str, new: argparse.Action) -> None:
    """Accept ``old``, the name of the flag ``new`` in an earlier release. Help does not show it."""
    to.add_argument(
        old,
        dest=new.dest,
        action=_OldName,
        new=new,
        nargs=new.nargs,
        type=new.type or str,
        choices=new.choices,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def with_new_json(argv: Sequence[str], prog: str) -> list[str]:
    """Return the command line with ``--json FILE`` of earlier releases replaced by ``--out FILE``.

    Only for commands without positional arguments, because a word behind the switch might be one.
    """
    new: list[str] = []
    for place, word in enumerate(argv):
        is_file_next = word == "--json" and place + 1 < len(argv) and not argv[place + 1].startswith("-")
        if is_file_next or word.startswith("--json="):
            say_renamed(prog, "--json FILE", "--out FILE")
            word = word.replace("--json", "--out", 1)
        new.append(word)
    return new


def say_renamed(prog: str, old: str, new: str) -> None:
    """Print to stderr that something has another name now."""
    print(f"{prog}: {old} is called {new} now; the old name works until the next release", file=sys.stderr)


def whole_number(most: int, least: int = 1) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``, which raises ArgumentTypeError for others."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Return a finite number above 0. Raises ArgumentTypeError for other text."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def not_negative(text: str) -> float:
    """Return a finite number of at least 0. Raises ArgumentTypeError for other text."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
