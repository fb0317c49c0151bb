"""The command line: what it refuses, and what its page shows."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import InvalidRequest, OperatorError
from tests.unit.thermocline.load.made_runs import answered, failed, report
from thermocline.load.__main__ import main
from thermocline.load.command_line import check, parser
from thermocline.load.figures import Slo
from thermocline.load.report import load, save
from thermocline.load.table import lines, rows

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "how-to" / "load.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^thermocline load ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_are_understood(command: str) -> None:
    """Flags and values, as the page has them."""
    options = parser().parse_args(shlex.split(command.replace("\\\n", " "), comments=True))

    if options.compare is None:
        check(options)


def test_the_page_shows_every_flag() -> None:
    """At least once."""
    flags = {flag for action in parser()._actions for flag in action.option_strings if action.help != argparse.SUPPRESS}

    assert {flag for flag in flags if f"`{flag}" not in PAGE and f" {flag}" not in PAGE} == {"--help", "-h"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "give --trace, or --workload with one of"),
        ("--workload nonsense", "no workload 'nonsense'"),
        ("--workload burst --set size=many", "size=many"),
        ("--workload burst --requests 0 --concurrency 9999 --seed -1", "--requests.*--concurrency.*--seed"),
        ("--workload burst --rate nan --time-scale 0 --timeout-s inf", "--rate.*--time-scale.*--timeout-s"),
        ("--workload burst --null-server -1", "--null-server"),
        ("--workload burst --url ftp://host", "http://"),
        ("--workload burst --url http://127.0.0.1:99999999", "port must be from 1 to 65535"),
        ("--workload burst --url http://me:secret@host", "no password"),
        ("--trace nowhere.jsonl --null-server", "cannot read nowhere.jsonl"),
        ("--trace nowhere.jsonl --set size=3", "--set is for workloads"),
        ("--workload burst --out /nowhere/at/all.json", "cannot be written"),
        ("--compare one.json", "two files"),
        ("--compare one.json two.json", "cannot read one.json"),
        ("--workload burst --url http://127.0.0.1:9", "does not answer"),
        ("--workload burst --api-key-env BAD_KEY", "BAD_KEY holds no key"),
    ],
)
def test_what_makes_no_sense_exits_with_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason on standard error, nothing on standard output, and no password repeated."""
    monkeypatch.setenv("BAD_KEY", "schlüssel\n")

    code = main(shlex.split(line))

    printed = capsys.readouterr()
    assert code == 2
    assert re.search(says, printed.err)
    assert printed.out == ""
    assert "secret" not in printed.err


@pytest.mark.parametrize("line", ["--workload burst --trace x", "--no-such-flag", "--rate fast", "--api telepathy"])
def test_a_line_that_cannot_be_read_exits_with_2(line: str) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))

    assert caught.value.code == 2


def test_an_empty_trace_is_refused_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a malformed one, by the number of its line."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    assert main(["--trace", str(trace)]) == 2
    assert "holds no request" in capsys.readouterr().err

    trace.write_text("{}\n")
    assert main(["--trace", str(trace)]) == 2
    assert "trace.jsonl:1" in capsys.readouterr().err


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Requests, figures and all."""
    path = tmp_path / "run.json"
    made = report([answered(0, 0.0, 5.0, cached_tokens=3), failed(1, 1.0, "timeout")], slo=Slo(ttft_ms=9.0))

    save(made, path)

    assert load(path) == made
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    assert json.loads(path.read_text())["schema"] == 1


def test_a_result_of_release_0_2_is_read(tmp_path: Path) -> None:
    """The command had another name then."""
    path = tmp_path / "run.json"
    save(report([answered(0, 0.0, 5.0)]), path)
    path.write_text(path.read_text().replace('"thermocline load"', '"thermocline bench"'))

    assert load(path).kind == "thermocline bench"


def test_flags_of_release_0_2_still_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with a line that says its new name; ``--json FILE`` is ``--out FILE``."""
    path = tmp_path / "nowhere" / "run.json"

    assert main(["--workload", "burst", "--base-url", "ftp://x", "--scale", "2", "--json", str(path)]) == 2
    told = capsys.readouterr().err
    for old, new in (("--base-url", "--url"), ("--scale", "--time-scale"), ("--json FILE", "--out FILE")):
        assert f"thermocline load: {old} is called {new} now; the old name works until the next release\n" in told
    assert "--url must begin with http" in told

    assert main(["--workload", "burst", f"--json={path}"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"schema": 2}, {"kind": "other"}, {"figures": None}])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """By name, and never compared with its figures misread."""
    path = tmp_path / "run.json"
    save(report([answered(0, 0.0, 5.0)]), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(InvalidRequest, match=r"run\.json is no result"):
        load(path)


def test_a_file_that_cannot_be_written_is_an_operators_error(tmp_path: Path) -> None:
    """Also when it comes to that only after the run."""
    with pytest.raises(OperatorError, match="cannot write"):
        save(report([answered(0, 0.0, 5.0)]), tmp_path / "gone" / "run.json")


def test_two_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their labels, each later one against the first."""
    files = []
    for label, ttft_ms in (("base", 100.0), ("half", 50.0), ("same", 100.0)):
        files.append(tmp_path / f"{label}.json")
        save(report([answered(n, float(n), ttft_ms) for n in range(9)], label=label), files[-1])

    code = main(["--compare", *map(str, files)])

    printed = capsys.readouterr().out
    assert code == 0
    assert "half against base" in printed
    assert "same against base" in printed
    assert "0.500" in printed


def test_the_table_says_what_may_be_the_clients_own() -> None:
    """And when the server went away."""
    late = report([answered(0, 0.0, 500.0, sent_s=0.4)])
    busy = report([], client=late.client.__class__(cpu_part=0.95, versions={}, hardware=late.client.hardware))

    def warned(one: object) -> list[str]:
        return [text for name, text in lines(one) if name == "warning"]  # type: ignore[arg-type]

    assert ["sent late" in text for text in warned(late)] == [True]
    assert ["95% of a core" in text for text in warned(busy)] == [True]
    assert warned(report([answered(0, 0.0, 5.0)])) == []
    assert rows(busy)[0] == ("TTFT, ms", ["-"] * 4)


def test_a_link_to_a_result_stays_a_link(tmp_path: Path) -> None:
    """And the file that it names has the result."""
    link = tmp_path / "latest.json"
    link.symlink_to("run.json")
    made = report([answered(0, 0.0, 5.0)])

    save(made, link)

    assert os.readlink(link) == "run.json"
    assert load(tmp_path / "run.json") == made


def test_a_prompt_longer_than_any_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its tokens are made, which would not fit in memory; a scale may shorten it."""
    trace = tmp_path / "trace.jsonl"
    blocks = 2**17
    asked = {"timestamp": 0, "input_length": blocks * 512, "output_length": 1, "hash_ids": list(range(blocks))}
    trace.write_text(json.dumps(asked) + "\n")

    assert main(["--trace", str(trace), "--url", "http://127.0.0.1:9"]) == 2
    assert "longer than any context" in capsys.readouterr().err
    assert main(["--trace", str(trace), "--url", "http://127.0.0.1:9", "--length-scale", "1000"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_the_null_server_ends_in_silence_amid_an_answer() -> None:
    """With its standard input, as an interrupted run closes it."""
    command = [sys.executable, "-m", "thermocline.load.null_server", "--itl-ms", "3600000"]
    body = b'{"max_tokens": 9}'
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        with socket.create_connection(("127.0.0.1", int(server.stdout.readline())), timeout=60) as client:
            client.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            client.recv(1)
            server.stdin.close()
            told = server.stderr.read()

    assert (server.returncode, told) == (0, b"")
