"""``thermocline trace import``: a server's log as a trace to simulate, in memory that does not grow with the log.

Lines are in the order of writing; a bounded number of requests is held back to sort them by time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from shared.errors import ConfigError, InvalidRequest, OperatorError, reason_of
from shared.result_file import check_writable, result_file
from thermocline.trace.arrival_order import ordered
from thermocline.trace.block_names import BlockNames
from thermocline.trace.conversion import (
    Facts,
    Format,
    NamedBlocks,
    OpenAiLog,
    Timed,
    measured_bytes_per_token,
    read_tokenizer,
)
from thermocline.trace.format import BYTE_ORDER_MARK, TraceRequest, refuse_compressed
from thermocline.trace.openai_log import LogFault, LoggedRequest, read_line

FORMATS = ("openai-log", "mooncake", "qwen-bailian")
_BAILIAN_BLOCK_TOKENS, _BAILIAN_UNIT_MS = 16, 1e3
MOST_LINE_BYTES = 16 * 2**20
MEASURED_LINES = 10_000
"""Lines at the front of a log from which the size of a token is measured."""

ASSUMED_BYTES_PER_TOKEN = 4.0
LEAST_SALT_BYTES = 16
_NAMED_FAULTS = 5  # Faults in the message about a refused log.


@dataclass(frozen=True, slots=True)
class Import:
    """One import to run. Without a salt file, a salt is drawn and not kept."""

    log: Path
    format: str
    out: Path
    salt_file: Path | None = None
    tokenizer: Path | None = None
    bytes_per_token: float | None = None
    most_malformed: int = 100


class Report(msgspec.Struct):
    """The report of an import."""

    facts: Facts
    lines: int = 0
    malformed: list[tuple[int, str]] = []  # (line, reason); more than ``most_malformed`` end the import.
    out_of_order: int = 0  # Requests too late to be sorted; they get the time of the one before.
    seconds: float = 0.0  # Time from the first request to the last.
    bytes_per_token: float | None = None  # Mean size of a token of text, unless a tokenizer counts.
    bytes_per_token_source: str | None = None  # "given", "measured" or "assumed".


def import_log(asked: Import, progress: Callable[[int], None] | None = None) -> Report:
    """Write the trace atomically and return a report. ``progress`` is called with the bytes read so far.

    Raises ConfigError for settings, InvalidRequest for a log that is unreadable, has too many malformed lines or no
    request, and OperatorError for the output.
    """
    check_writable(asked.out)
    if os.path.exists(asked.out) and os.path.exists(asked.log) and os.path.samefile(asked.out, asked.log):
        raise ConfigError("--out is the log itself")
    report = Report(facts=Facts())
    made = _format(asked, report)
    report.facts = made.facts
    try:
        with result_file(asked.out) as out:
            for line in _trace_lines(_requests(asked, made, report, progress or (lambda read: None)), report):
                out.write(line)
            if not report.facts.requests:
                raise InvalidRequest(f"{asked.log} holds no request{_first_faults(report)}")
    except OSError as error:
        raise OperatorError(f"cannot write {asked.out}: {reason_of(error)}") from error
    return report


def _format(asked: Import, report: Report) -> Format:
    if asked.format != "openai-log":
        if asked.salt_file or asked.tokenizer or asked.bytes_per_token:
            raise ConfigError(
                f"a trace of {asked.format} has names and lengths already: no salt, tokenizer or bytes per token"
            )
        if asked.format == "qwen-bailian":
            return NamedBlocks(_BAILIAN_UNIT_MS, _BAILIAN_BLOCK_TOKENS)
        return NamedBlocks()
    names = BlockNames(_salt(asked.salt_file))
    if asked.tokenizer is not None:
        if asked.bytes_per_token is not None:
            raise ConfigError("with a tokenizer tokens are counted: give --tokenizer or --bytes-per-token")
        return OpenAiLog(names, ASSUMED_BYTES_PER_TOKEN, read_tokenizer(asked.tokenizer))
    given, source = asked.bytes_per_token, "given"
    if given is None:
        given, source = measured_bytes_per_token(_readable(asked.log)), "measured"
    if given is None:
        given, source = ASSUMED_BYTES_PER_TOKEN, "assumed"
    report.bytes_per_token, report.bytes_per_token_source = given, source
    return OpenAiLog(names, given)


def _salt(path: Path | None) -> bytes:
    if path is None:
        return secrets.token_bytes(32)
    try:
        given = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(given) < LEAST_SALT_BYTES:
        raise ConfigError(f"{path} holds {len(given)} bytes; a salt has {LEAST_SALT_BYTES} at least")
    return hashlib.sha256(given).digest()


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line) without blank lines; None stands for a line of more than MOST_LINE_BYTES.

    Raises InvalidRequest for a file that cannot be read, or is compressed.
    """
    try:
        with path.open("rb") as log:
            number = 0
            while line := log.readline(MOST_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    refuse_compressed(path, line)
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if len(line) <= MOST_LINE_BYTES or line.endswith(b"\n"):
                    if line.strip():
                        yield number, line
                    continue
                while line and not line.endswith(b"\n"):
                    line = log.readline(MOST_LINE_BYTES)
                yield number, None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _readable(path: Path) -> Iterator[LoggedRequest]:
    """Yield the requests among the first lines; malformed ones are reported later, when all are read."""
    for _, line in islice(_lines(path), MEASURED_LINES):
        try:
            if line is not None:
                yield read_line(line)
        except LogFault:
            continue


def _requests(asked: Import, made: Format, report: Report, progress: Callable[[int], None]) -> Iterator[Timed]:
    """Yield the requests of all lines, and record malformed ones. Raises InvalidRequest when they are too many."""
    read = 0
    for number, line in _lines(asked.log):
        report.lines += 1
        try:
            if line is None:
                raise LogFault(f"longer than {MOST_LINE_BYTES // 2**20} MiB")
            read += len(line)
            yield from made.requests(line)
        except LogFault as fault:
            report.malformed.append((number, str(fault)))
            if len(report.malformed) > asked.most_malformed:
                raise InvalidRequest(
                    f"{asked.log} has more than {asked.most_malformed} malformed lines{_first_faults(report)}"
                ) from fault
        progress(read)


def _first_faults(report: Report) -> str:
    """Return the first malformed lines as the end of a message; "" if there are none."""
    return "".join(f"; line {number}: {reason}" for number, reason in report.malformed[:_NAMED_FAULTS])


def _trace_lines(requests: Iterator[Timed], report: Report) -> Iterator[bytes]:
    """Yield lines of the trace in order of time, which begins at 0."""
    origin_ms: float | None = None
    latest = 0
    for request in ordered((each.time_ms, len(each.hash_ids), each) for each in requests):
        origin_ms = request.time_ms if origin_ms is None else origin_ms
        moment = round(request.time_ms - origin_ms)
        report.out_of_order += moment < latest
        latest = max(latest, moment)
        line = TraceRequest(
            latest, request.input_length, request.output_length, list(request.hash_ids), request.block_tokens
        )
        yield msgspec.json.encode(line) + b"\n"
    report.seconds = latest / 1e3
