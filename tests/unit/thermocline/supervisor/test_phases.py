"""How the phases of a start are read and shown."""

from __future__ import annotations

import io

import pytest

from shared.progress import MOST_LINE_BYTES, READY, Phase
from thermocline.supervisor.phases import PhaseLines, StartDisplay, described

LOADING = Phase(name="loading weights", total=290, unit="tensors")


class Terminal(io.StringIO):
    """A stream that people watch."""

    def isatty(self) -> bool:
        return True


def test_lines_may_come_in_any_pieces() -> None:
    """And what is no phase is passed over."""
    found: list[Phase] = []
    lines = PhaseLines(found.append)
    stream = b'{"name":"a"}\nnonsense\n{"name":"b","done":1,"total":2,"unit":"bytes"}\n'

    for place in range(0, len(stream), 7):
        lines.data_received(stream[place : place + 7])

    assert found == [Phase(name="a"), Phase(name="b", done=1, total=2, unit="bytes")]


def test_a_line_without_an_end_takes_no_memory() -> None:
    """A process that writes something else altogether does not fill the supervisor."""
    found: list[Phase] = []
    lines = PhaseLines(found.append)

    for _ in range(100):
        lines.data_received(b"x" * MOST_LINE_BYTES)
    lines.data_received(b'\n{"name":"a"}\n')

    assert len(lines._rest) <= MOST_LINE_BYTES
    assert found == [Phase(name="a")]


def test_a_file_gets_a_line_for_each_phase_of_each_process() -> None:
    """And none for progress within a phase."""
    out = io.StringIO()
    display = StartDisplay(out)

    display.show("worker-0", LOADING)
    display.show("worker-0", Phase(name="loading weights", done=5, total=290, unit="tensors"))
    display.show("gateway", READY)
    display.show("worker-0", Phase(name="verifying the model"))
    display.show("worker-0", READY)
    display.close()
    display.show("worker-0", LOADING)

    assert out.getvalue() == (
        "  worker-0: loading weights, 290 tensors\n  worker-0: verifying the model\n  waiting for the cell\n"
    )


def test_a_terminal_has_one_line_that_changes() -> None:
    """No wider than it is, with all processes that are busy; it is cleared at the end."""
    out = Terminal()
    display = StartDisplay(out, columns=lambda: 60)

    display.show("worker-0", Phase(name="loading weights", done=145, total=290, unit="tensors"))
    display.show("gateway", Phase(name="loading the tokenizer"))
    display.show("worker-0", READY)
    display.close()

    shown = out.getvalue().split("\r\x1b[K")
    assert shown[1:] == [
        "worker-0: loading weights, 145 of 290 tensors",
        "worker-0: loading weights, 145 of 290 tensors · gateway: lo",
        "gateway: loading the tokenizer",
        "",
    ]


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (Phase(name="importing PyTorch"), "importing PyTorch"),
        (Phase(name="listing the disk", done=12_000, unit="chunks"), "listing the disk, 12,000 chunks"),
        (Phase(name="reading", total=16_060_522_240, unit="bytes"), "reading, 16.1 GB"),
        (Phase(name="reading", done=8 * 10**9, total=16 * 10**9, unit="bytes"), "reading, 50 % of 16.0 GB"),
        (Phase(name="reading", total=512, unit="bytes"), "reading, 512 bytes"),
    ],
)
def test_a_phase_says_how_far_it_is(phase: Phase, text: str) -> None:
    """With the unit that it counts in."""
    assert described(phase) == text
