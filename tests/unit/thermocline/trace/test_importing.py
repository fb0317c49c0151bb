"""``thermocline trace import``: whole logs become traces without their text, and no line is lost without a word."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, InvalidRequest, OperatorError
from thermocline.__main__ import main as thermocline
from thermocline.simulate.__main__ import main as simulate
from thermocline.trace import arrival_order, importing
from thermocline.trace.format import TraceRequest, read_trace
from thermocline.trace.importing import Import, Report, import_log

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "models/thermocline-mha"
SALT = "a salt that both imports use"
SYSTEM = "Confidential: the merger with Brackwater closes on Tuesday. " * 80
QUESTIONS = ("Who signs the papers?", "Where is the notary's office?")
ANSWER = "Ingrid Vantongeren signs."


def chat(time_s: float, *texts: str, **more: Any) -> dict[str, Any]:
    """A record of a conversation that texts of user and assistant make."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {
        "timestamp": time_s,
        "request": {"model": "m", "messages": messages},
        "response": {"choices": [{"message": {"content": ANSWER}}], "usage": {"completion_tokens": 7}},
    } | more


def log_of(folder: Path, records: Sequence[Any]) -> Path:
    """A log of records, and of lines that are text."""
    path = folder / "log.jsonl"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def imported(folder: Path, records: Sequence[Any], **options: Any) -> tuple[Report, list[TraceRequest]]:
    """What a log becomes."""
    out = folder / "trace.jsonl"
    report = import_log(Import(log_of(folder, records), "openai-log", out, **options))
    return report, list(read_trace(out))


def test_no_text_is_in_the_trace_nor_in_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a word of prompts and answers, those of malformed lines included; nor is there another file."""
    broken = json.dumps({"prompt": f"{SYSTEM} without a time"})
    log = log_of(tmp_path, [chat(1, QUESTIONS[0]), broken, SYSTEM, chat(2, QUESTIONS[1])])
    out = tmp_path / "trace.jsonl"

    for flags in ([], ["--json"]):
        assert thermocline(["trace", "import", str(log), "--format", "openai-log", "--out", str(out), *flags]) == 0

    captured = capsys.readouterr()
    written = out.read_text()
    words = {word.strip(".,:?'") for text in (SYSTEM, *QUESTIONS, ANSWER) for word in text.split()}
    for word in (word for word in words if len(word) > 4):
        for text in (written, captured.out, captured.err):
            assert word not in text
    assert f"{log}:2: no time" in captured.err
    assert f"{log}:3: no JSON object" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "trace.jsonl"]
    assert set(json.loads(written.splitlines()[0])) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_shared_fronts_are_shared_blocks(tmp_path: Path) -> None:
    """As far as 512 tokens reach; a later turn goes on from the earlier one."""
    _, (one, other, later) = imported(
        tmp_path,
        [chat(1, QUESTIONS[0]), chat(2, QUESTIONS[1]), chat(3, QUESTIONS[0], ANSWER, "And then? " * 500)],
    )

    assert one.hash_ids[:2] == other.hash_ids[:2] == later.hash_ids[:2]
    assert one.hash_ids[-1] != other.hash_ids[-1]
    assert len(later.hash_ids) > len(one.hash_ids)


def test_a_salt_of_ones_own_gives_the_same_names_again(tmp_path: Path) -> None:
    """Without one nobody can compare a name with that of a text they guess, nor two imports with each other."""
    salt = tmp_path / "salt"
    salt.write_text(SALT + "\n")
    records = [chat(1, QUESTIONS[0])]

    kept = [imported(tmp_path, records, salt_file=salt)[1][0].hash_ids for _ in range(2)]
    drawn = [imported(tmp_path, records)[1][0].hash_ids for _ in range(2)]

    assert kept[0] == kept[1]
    assert len({tuple(names) for names in (kept[0], *drawn)}) == 3


def test_a_token_is_measured_by_what_the_server_counted(tmp_path: Path) -> None:
    """So that all prompts together have as many tokens as it said; else a token is four bytes."""
    records = [chat(1, question) for question in QUESTIONS]
    texts = [sum(len(m["content"]) + len(m["role"]) + 4 for m in r["request"]["messages"]) for r in records]
    for record, size in zip(records, texts, strict=True):
        record["response"]["usage"]["prompt_tokens"] = size // 5

    report, requests = imported(tmp_path, records)
    assert report.bytes_per_token_source == "measured"
    assert report.bytes_per_token == pytest.approx(5, abs=0.01)
    assert report.facts.server_prompt_tokens == sum(size // 5 for size in texts)
    assert report.facts.their_prompt_tokens == sum(request.input_length for request in requests)
    assert report.facts.their_prompt_tokens == pytest.approx(report.facts.server_prompt_tokens, rel=0.01)

    given, _ = imported(tmp_path, records, bytes_per_token=2.0)
    assert (given.bytes_per_token, given.bytes_per_token_source) == (2.0, "given")
    assumed, _ = imported(tmp_path, [chat(1, QUESTIONS[0])])
    assert (assumed.bytes_per_token, assumed.bytes_per_token_source) == (4.0, "assumed")


def test_a_tokenizer_counts_tokens(tmp_path: Path) -> None:
    """Those of each text by itself; ids need none."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = QUESTIONS[0] * 100
    records = [{"time": 1, "prompt": text, "choices": [{"text": ANSWER}]}, {"time": 2, "prompt": [7] * 600, "n": 1}]
    records[1]["max_tokens"] = 11
    report, (first, second) = imported(tmp_path, records, tokenizer=MODEL)

    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    answer = len(tokenizer.encode(ANSWER, add_special_tokens=False).ids)
    assert (first.input_length, first.output_length) == (count, answer)
    assert len(first.hash_ids) == -(-count // 512)
    assert (second.input_length, second.output_length, len(second.hash_ids)) == (600, 11, 2)
    assert (report.facts.outputs_from_text, report.facts.outputs_from_limit) == (1, 1)


def test_every_line_is_accounted_for(tmp_path: Path) -> None:
    """Requests and malformed lines are all the lines that are not blank."""
    good = chat(1, QUESTIONS[0])
    report, requests = imported(tmp_path, [good, "", "{}", good, '{"prompt": "x", "time": 1}', good])

    assert report.lines == 5
    assert report.malformed == [
        (3, "neither messages nor prompt"),
        (5, "no length of the answer: neither usage, choices nor max_tokens"),
    ]
    assert report.facts.requests == len(requests) == 3


def test_more_malformed_lines_than_may_be_refuse_the_log(tmp_path: Path) -> None:
    """The first are named, and an earlier trace stays as it was."""
    records = [chat(1, QUESTIONS[0]), "x", "{}", "x"]
    assert len(imported(tmp_path, records, most_malformed=3)[1]) == 1
    before = (tmp_path / "trace.jsonl").read_bytes()

    with pytest.raises(InvalidRequest, match="more than 2 malformed lines; line 2: no JSON object; line 3: neither"):
        imported(tmp_path, records, most_malformed=2)

    assert (tmp_path / "trace.jsonl").read_bytes() == before
    assert not (tmp_path / "trace.jsonl.partial").exists()


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is malformed, and what follows it is read; one as long as may be is a request."""
    good = json.dumps(chat(1, QUESTIONS[0]))
    monkeypatch.setattr(importing, "MOST_LINE_BYTES", len(good))
    records = [good, json.dumps(chat(2, "x" * 20_000)), good, good[:-1] + " " * 100 + "}"]
    report, requests = imported(tmp_path, records)

    assert [number for number, _ in report.malformed] == [2, 4]
    assert "longer than" in report.malformed[0][1]
    assert len(requests) == 2


def test_requests_come_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are written when answers end. What comes too late to be put in order is counted."""
    times = [5.0, 3.0, 4.0, 9.0, 8.0, 1.0]
    report, requests = imported(tmp_path, [chat(moment, QUESTIONS[0]) for moment in times])
    assert [request.timestamp for request in requests] == [0, 2000, 3000, 4000, 7000, 8000]
    assert (report.out_of_order, report.seconds) == (0, 8.0)

    monkeypatch.setattr(arrival_order, "HELD_REQUESTS", 2)
    report, requests = imported(tmp_path, [chat(moment, QUESTIONS[0]) for moment in times])
    assert [request.timestamp for request in requests] == [0, 1000, 2000, 2000, 5000, 6000]
    assert report.out_of_order == 1


def test_a_mooncake_trace_is_checked_and_put_in_order(tmp_path: Path) -> None:
    """Names and lengths stay as they are; malformed lines are left out, and said."""
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 3, "hash_ids": [1, {}]}}'
    log = log_of(tmp_path, [line.format(7, 8), line.format(5, 9), '{"timestamp": 1}', line.format(6, 2**70)])
    report = import_log(Import(log, "mooncake", tmp_path / "trace.jsonl"))

    requests = list(read_trace(tmp_path / "trace.jsonl"))
    assert [(request.timestamp, request.hash_ids[1]) for request in requests] == [(0, 9), (1, 2**70), (2, 8)]
    assert [number for number, _ in report.malformed] == [3]
    assert report.bytes_per_token is None


def test_a_qwen_bailian_trace_keeps_its_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its times are seconds and its blocks 16 tokens; the simulation shares exactly those."""
    lines = [
        {
            "chat_id": 7,
            "parent_chat_id": -1,
            "timestamp": time_s,
            "input_length": 40,
            "output_length": 9,
            "type": "text",
        }
        | {"turn": 1, "hash_ids": names}
        for time_s, names in ((61.114, [0, 1, 2]), (60.0, [0, 1, 5]), (62.5, [8, 9, 2]))
    ]
    short = {"chat_id": 8, "timestamp": 63, "input_length": 11, "output_length": 1, "hash_ids": []}
    out = tmp_path / "trace.jsonl"

    report = import_log(Import(log_of(tmp_path, [*lines, short]), "qwen-bailian", out))

    assert [(each.timestamp, each.block_tokens) for each in read_trace(out)] == [
        (0, 16),
        (1114, 16),
        (2500, 16),
        (3000, 16),
    ]
    assert (report.facts.requests, report.facts.blocks, report.malformed) == (4, 9, [])
    assert simulate(["--trace", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"]["device"] == 32


def test_an_imported_trace_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """End to end: the second question finds the first one's system prompt."""
    log = log_of(tmp_path, [chat(10 * number, f"{number} {QUESTIONS[0]}") for number in range(3)])
    out = tmp_path / "trace.jsonl"
    assert thermocline(["trace", "import", str(log), "--format", "openai-log", "--out", str(out)]) == 0
    capsys.readouterr()

    assert simulate(["--trace", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests"] == 3
    assert figures["hit_tokens"]["device"] == 2 * 1024


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--bytes-per-token", "0"], "--bytes-per-token must be from 0.5 to 16"),
        (["--max-malformed", "-1"], "--max-malformed must be at least 0"),
        (["--tokenizer", "/nowhere"], "cannot read a tokenizer from /nowhere"),
        (["--tokenizer", str(MODEL), "--bytes-per-token", "3"], "give --tokenizer or --bytes-per-token"),
        (["--salt-file", "/nowhere"], "cannot read /nowhere"),
        (["--format", "mooncake", "--bytes-per-token", "3"], "a trace of mooncake has names and lengths already"),
        (["--out", "/nowhere/trace"], "--out /nowhere/trace cannot be written"),
        (["--max-malformed", "0"], "more than 0 malformed lines; line 2"),
    ],
)
def test_bad_lines_exit_with_two(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on standard output, the reason on standard error."""
    log = log_of(tmp_path, [chat(1, QUESTIONS[0]), "x"])
    line = ["trace", "import", str(log), "--format", "openai-log", "--out", str(tmp_path / "trace.jsonl"), *flags]

    assert thermocline(line) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


def test_what_cannot_be_an_import_is_refused(tmp_path: Path) -> None:
    """A short salt, a log that holds nothing or is not there, and a trace in its place."""
    log, out, salt = log_of(tmp_path, ["", ""]), tmp_path / "trace.jsonl", tmp_path / "salt"
    salt.write_text("short\n")

    with pytest.raises(ConfigError, match="holds 5 bytes; a salt has 16 at least"):
        import_log(Import(log, "openai-log", out, salt_file=salt))
    with pytest.raises(InvalidRequest, match="holds no request"):
        import_log(Import(log, "openai-log", out))
    with pytest.raises(InvalidRequest, match="cannot read"):
        import_log(Import(tmp_path / "absent", "openai-log", out))
    with pytest.raises(ConfigError, match="the log itself"):
        import_log(Import(log, "openai-log", log))
    with pytest.raises(OperatorError, match="cannot be written"):
        import_log(Import(log_of(tmp_path, [chat(1, "x")]), "openai-log", tmp_path))


def test_a_pipe_gets_the_trace_and_stays_a_pipe(tmp_path: Path) -> None:
    """As another command's input."""
    out = tmp_path / "pipe"
    os.mkfifo(out)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(out.read_bytes()), daemon=True)
    reader.start()
    import_log(Import(log_of(tmp_path, [chat(1, QUESTIONS[0])]), "openai-log", out))
    reader.join()

    assert out.is_fifo()
    assert json.loads(read[0])["timestamp"] == 0


def test_a_log_with_the_name_of_a_scratch_file_stays(tmp_path: Path) -> None:
    """Also where the import fails."""
    log = tmp_path / "trace.partial"
    log.write_text("no request\n")

    with pytest.raises(InvalidRequest, match="holds no request"):
        import_log(Import(log, "mooncake", tmp_path / "trace"))

    assert log.read_text() == "no request\n"


@pytest.mark.parametrize("out", [".", "/", "", "x" * 300, "/nowhere/trace"])
def test_a_place_where_no_trace_can_be_is_refused(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the log is read."""
    log = log_of(tmp_path, [chat(1, QUESTIONS[0])])

    assert thermocline(["trace", "import", str(log), "--format", "openai-log", "--out", out]) == 2

    told = capsys.readouterr().err
    assert "cannot be written" in told
    assert told.count("\n") == 1


def test_a_log_whose_name_is_too_long_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    out = str(tmp_path / "trace")

    assert thermocline(["trace", "import", "x" * 300, "--format", "mooncake", "--out", out]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_byte_order_mark_costs_no_request(tmp_path: Path) -> None:
    """Programs of Windows begin files with it."""
    log = log_of(tmp_path, [chat(1, QUESTIONS[0]), chat(2, QUESTIONS[1])])
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes())

    report = import_log(Import(log, "openai-log", tmp_path / "trace"))

    assert (report.facts.requests, report.malformed) == (2, [])


def test_a_compressed_log_is_named_as_such(tmp_path: Path) -> None:
    """Rather than by a fault of its first line."""
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(gzip.compress(json.dumps(chat(1, QUESTIONS[0])).encode()))

    with pytest.raises(InvalidRequest, match="is compressed by gzip"):
        import_log(Import(log, "openai-log", tmp_path / "trace"))
