"""``thermocline simulate`` as a command: what it prints, and how it refuses what makes no sense."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from services.scheduler.core.cache.eviction import POLICIES
from shared.errors import InternalError
from thermocline.__main__ import main as thermocline
from thermocline.simulate import __main__ as simulate
from thermocline.simulate.__main__ import main, parser, prepare
from thermocline.simulate.simulation import Simulation
from thermocline.simulate.workloads import Asked
from thermocline.trace import arrival_order

_QUICK = [
    "--workload",
    "few-shot",
    "--profile",
    "a6000-pcie3/llama-2-7b",
    "--requests",
    "40",
    "--device-tokens",
    "9000",
]


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """One object with what was asked for and all that a comparison needs."""
    assert thermocline(["simulate", *_QUICK, "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert (figures["hardware"], figures["model"], figures["requests"]) == ("a6000-pcie3", "llama-2-7b", 40)
    for name in ("input_tokens", "hit_tokens", "hit_ratio", "ttft_ms", "tpot_ms", "throughput", "wall_seconds"):
        assert name in figures
    for name in ("load", "compute", "stall", "bubble"):
        assert figures[f"{name}_seconds"] >= 0
    for name in ("evicted_tokens", "backups", "promotions", "deferrals"):
        assert name in figures
    assert set(figures["ttft_ms"]) == {"mean", "p50", "p99"}


def test_json_is_the_same_but_for_the_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The same line gives the same object."""
    printed = []
    for _ in range(2):
        main([*_QUICK, "--json"])
        figures = json.loads(capsys.readouterr().out)
        del figures["wall_seconds"]
        printed.append(json.dumps(figures))

    assert printed[0] == printed[1]


def test_what_nodes_lend_one_another_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a part of the hits of its own."""
    nodes = ["--workers", "4", "--workers-per-node", "1", "--host-tokens", "3000"]
    main([*_QUICK, *nodes, "--requests", "200", "--network-gb-s", "10", "--set", "host_writes=through", "--json"])

    figures = json.loads(capsys.readouterr().out)
    assert figures["hit_tokens"]["lent"] > 0


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the workload and the figures."""
    assert main(_QUICK) == 0

    printed = capsys.readouterr().out
    for text in ("few-shot on 1 x a6000-pcie3", "hit ratio", "TTFT", "load / compute / stall / bubble", "promotions"):
        assert text in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "clairvoyant"], "policy: 'clairvoyant' is none of"),
        (["--set", "eviction_expression=frequency -"], "eviction_expression"),
        (["--set", "nonsense=1"], "--set nonsense: unknown setting; of the cell there are"),
        (["--set", "max_running=none"], "--set max_running=none: Expected `int`"),
        (["--workload", "poetry"], "no workload 'poetry'; known are few-shot"),
        (["--hardware", "h300"], "no hardware profile 'h300'; known are"),
        (["--model", "llama-9"], "no model profile 'llama-9'"),
        (["--model", "llama-3.1-70b", "--hardware", "a100-pcie4"], "no room for a page"),
        (
            ["--workers", "0", "--rate", "nan"],
            "--workers must be at least 1; --rate must be a finite number, and not nan",
        ),
        (["--workers", "100000000"], "--workers must be at most 10,000"),
        (["--device-tokens", "68719476736"], "--device-tokens must be at most 34,359,738,352"),
        (["--host-tokens", "68719476736"], "--host-tokens must be at most 34,359,738,352"),
        (["--disk-tokens", "1" * 400], "--disk-tokens must be at most"),
        (["--page-size", "1" * 400], "--page-size must be at most"),
        (["--tensor-parallel", "1" * 400], "--tensor-parallel must be at most"),
        (["--device-tokens", "15"], "--device-tokens 15 is less than a page of 16 tokens"),
        (["--rate", "inf"], "--rate must be a finite number, and not inf"),
        (["--time-scale", "inf"], "--time-scale must be a finite number, and not inf"),
        (["--network-gb-s", "nan"], "--network-gb-s must be 0, or a finite number, and not nan"),
        (["--rate", "1e-320"], "--rate must be at least 1e-09"),
        (["--time-scale", "1e-320"], "--time-scale must be at least 1e-09"),
        (["--network-gb-s", "1e-300"], "--network-gb-s must be 0, or at least 1e-09"),
        (["--backup-share", "1e-320"], "--backup-share must be from 1e-09 to 1"),
        (["--tensor-parallel", "3"], "do not divide"),
        (["--trace", "/nowhere"], "cannot read /nowhere"),
        (["--workload", "chat", "--requests", ""], ""),
    ],
)
def test_bad_lines_exit_with_two_and_one_clear_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on standard output, the reason on standard error."""
    given = dict(zip(_QUICK[::2], _QUICK[1::2], strict=True))
    if "--model" in arguments or "--hardware" in arguments:
        given |= {"--hardware": "a6000-pcie3", "--model": "llama-2-7b"}
        del given["--profile"]
        if "llama-3.1-70b" in arguments:
            del given["--device-tokens"]
    asked = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if "--trace" in asked:
        del given["--workload"]
    line = [part for pair in (given | asked).items() for part in pair]

    try:
        code: object = main(line)
    except SystemExit as exited:
        code = exited.code

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert complaint in captured.err


def _interrupted_after(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C once so many requests were answered."""
    made = simulate.prepare

    def prepared(options: argparse.Namespace) -> Simulation:
        simulation = made(options)
        answered = simulation.cell.answered

        def interrupt(asked: Asked) -> None:
            if simulation.ended >= requests:
                raise KeyboardInterrupt
            answered(asked)

        simulation.cell.answered = interrupt
        return simulation

    monkeypatch.setattr(simulate, "prepare", prepared)


def test_ctrl_c_prints_the_figures_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They say that they are not those of the whole, and so do standard error and the exit code."""
    _interrupted_after(15, monkeypatch)

    assert main([*_QUICK, "--json"]) == 130

    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert figures["interrupted"] is True
    assert 15 <= figures["finished"] < 40
    assert f"interrupted; {figures['finished']} requests ended" in captured.err


def test_ctrl_c_before_the_first_answer_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are no figures yet."""

    def interrupted(_: Simulation, __: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", interrupted)

    with pytest.raises(KeyboardInterrupt):
        main(_QUICK)

    assert capsys.readouterr().out == ""


def test_an_endless_workload_needs_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations go on for ever unless it is said how many."""
    assert main(["--workload", "chat", "--profile", "a100-pcie4/llama-3.1-8b"]) == 2
    assert "never ends" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "hardware", "model"),
    [([], "a100-pcie4", "llama-3.1-8b"), (["--profile", "gh200"], "gh200", "llama-3.1-8b")],
)
def test_what_is_not_given_has_a_default(
    given: list[str], hardware: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command alone simulates the sample trace; output says on what."""
    assert main([*given, "--requests", "20", "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert (figures["workload"], figures["hardware"], figures["model"]) == ("sample trace", hardware, model)
    assert figures["requests"] == 20


@pytest.mark.parametrize(
    "bad", ['{"timestamp": 1}', "\x00", '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [1]}']
)
def test_a_malformed_trace_line_is_named(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of the line is in the message, and nothing was printed before it."""
    path = tmp_path / "trace.jsonl"
    good = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]})
    path.write_text(f"{good}\n{good}\n{bad}\n")

    assert main(["--trace", str(path), "--profile", "a100-pcie4/llama-3.1-8b", "--json"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trace.jsonl:3:" in captured.err


def test_an_empty_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A simulation of nothing is a mistake."""
    (tmp_path / "trace.jsonl").write_text("")

    assert main(["--trace", str(tmp_path / "trace.jsonl"), "--profile", "a100-pcie4/llama-3.1-8b"]) == 2
    assert "holds no request" in capsys.readouterr().err


def test_a_profile_of_one_s_own_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path stands where a name does, and its faults are reported with exit code 2."""
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n')
    line = ["--workload", "few-shot", "--hardware", str(path), "--model", "llama-2-7b", "--requests", "10"]

    assert main(line) == 2
    assert "memory: missing; compute: missing" in capsys.readouterr().err


def test_a_prompt_beyond_the_pool_fails_without_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As any that is too long; all of its tokens would not fit in memory."""
    path = tmp_path / "trace.jsonl"
    blocks = 2**15
    asked = {"timestamp": 0, "input_length": blocks * 512, "output_length": 1, "hash_ids": list(range(blocks))}
    path.write_text(json.dumps(asked) + "\n")

    assert main(["--trace", str(path), "--device-tokens", "9000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == {"context_length_exceeded": 1}


def _trace(path: Path, times: list[int]) -> Path:
    """Write a trace in which every fourth request asks about the same document."""
    lines = [
        {"timestamp": time, "input_length": 1100, "output_length": 3, "hash_ids": [time // 1000 % 4, 50, time]}
        for time in times
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _simulated(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["--trace", str(path), "--device-tokens", "20000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    return {name: figures[name] for name in ("ttft_ms", "simulated_seconds", "throughput", "hit_ratio")}


def test_a_reversed_trace_gives_the_figures_of_the_sorted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times say when requests came, and not the order of the lines."""
    times = list(range(0, 40_000, 1000))

    ways = [_simulated(_trace(tmp_path / "trace.jsonl", order), capsys) for order in (times, times[::-1])]

    assert ways[0] == ways[1]


def test_figures_count_from_the_first_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace may be a part of a longer one, or have the time since 1970."""
    ways = [
        _simulated(_trace(tmp_path / "trace.jsonl", [start_ms + 1000 * place for place in range(40)]), capsys)
        for start_ms in (0, 600_000, 1_732_900_000_000)
    ]

    assert ways[0] == ways[1] == ways[2]


def test_the_wait_for_a_first_arrival_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """One request at a low rate is simulated in the time of its answer."""
    assert main([*_QUICK, "--requests", "1", "--rate", "0.001", "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert figures["simulated_seconds"] == pytest.approx(figures["latency_ms"]["mean"] / 1000, rel=0.01)


def test_late_requests_of_a_trace_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error; the figures are printed."""
    monkeypatch.setattr(arrival_order, "HELD_REQUESTS", 8)
    monkeypatch.setattr(arrival_order, "MOST_LATE_SHARE", 0.5)
    path = _trace(tmp_path / "trace.jsonl", [*range(1000, 40_000, 1000), 0])

    assert main(["--trace", str(path), "--device-tokens", "20000", "--json"]) == 0

    captured = capsys.readouterr()
    assert "1 requests come more than 8 lines after later ones" in captured.err
    assert json.loads(captured.out)["requests"] == 40


_POLICIES = """
from thermocline.policies import RankedPolicy

class Silent(RankedPolicy):
    name = "test-silent"
    def rank(self, node): return (node.last_use,)
    def victim(self, evictable, moment): return None

class Leaves(RankedPolicy):
    name = "test-leaves"
    def rank(self, node): raise SystemExit(3)

class Nought(RankedPolicy):
    name = "test-nought"
    def rank(self, node): return None
"""


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ("Silent", "policy 'test-silent' named no node of worker-0, though"),
        ("Leaves", r"policy test-leaves: its code called for the end of the process, by SystemExit\(3\)"),
        ("Nought", "policy 'test-nought' ranks node 2 as None; a rank is a tuple of numbers"),
    ],
)
def test_a_policy_that_is_at_fault_is_named(
    policy: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it stops the cell or ends the process."""
    (tmp_path / "at_fault.py").write_text(_POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(POLICIES)
    try:
        with pytest.raises(InternalError, match=complaint) as failed:
            main([*_QUICK, "--host-tokens", "0", "--policy", f"at_fault:{policy}"])
    finally:
        POLICIES.clear()
        POLICIES.update(before)
        del sys.modules["at_fault"]

    assert "while simulating policy 'test-" in "".join(failed.value.__notes__)


def test_a_stuck_request_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is open at the gateway and known to the core; the policy is named too."""
    watched = prepare(parser().parse_args(_QUICK))
    monkeypatch.setattr(watched.cell.workers["worker-0"], "deliver", lambda orders: None)

    with pytest.raises(InternalError, match="40 requests are stuck, r1 among them, under policy"):
        watched.run()
