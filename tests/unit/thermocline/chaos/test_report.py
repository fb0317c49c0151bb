"""What a run showed, as plain numbers."""

import io
import json
from pathlib import Path

from rich.console import Console

from thermocline.chaos.client import Reply
from thermocline.chaos.journal import Journal
from thermocline.chaos.load import Tally
from thermocline.chaos.memory_growth import MOST_GROWTH_BYTES
from thermocline.chaos.outcome import Outcome
from thermocline.chaos.plan import Fault
from thermocline.chaos.report import check_memory, print_summary, summary
from thermocline.chaos.settings import ChaosSettings
from thermocline.chaos.verdicts import Windows

ORIGIN_S = 1000.0


def journal(folder: Path) -> Journal:
    """One that says nothing."""
    return Journal(folder / "timeline.jsonl", Console(file=io.StringIO()))


def outcome(*replies: Reply) -> Outcome:
    """A run in which worker-0 was killed from second 10 to 15, and the storage later."""
    windows = Windows()
    for index, (target, start_s) in enumerate((("worker-0", 10.0), ("storage", 40.0))):
        windows.open(Fault(index=index, at_s=start_s, kind="kill", target=target), start_s).end_s = start_s + 5
    found = Outcome(ChaosSettings(), Tally(streams=list(replies)), windows, origin_s=ORIGIN_S)
    found.faults = [window.fault for window in windows.all]
    found.recovery_s = {"kill worker": [5.0], "kill storage": [5.0]}
    return found


def stream(start_s: float, *gaps: tuple[float, float]) -> Reply:
    """An answered stream that began at a second of the run, with pauses (began, length)."""
    return Reply("answered", ORIGIN_S + start_s, ttft_s=0.1, gaps=[(ORIGIN_S + at, length) for at, length in gaps])


def test_only_pauses_around_the_loss_of_a_worker_count_as_such(tmp_path: Path) -> None:
    """The longest of each stream; another fault's pause is not theirs."""
    seen = outcome(stream(0, (9.9, 2.0), (12.0, 3.0)), stream(0, (30.0, 1.0)), stream(38, (41.0, 4.0)))

    figures = summary(seen, journal(tmp_path))

    assert figures["stream_pause_s_on_worker_loss"] == {"count": 1, "p50": 3.0, "p99": 3.0, "max": 3.0}
    assert figures["faults_by_kind"] == {"kill storage": 1, "kill worker": 1}


def test_memory_that_grew_is_a_violation(tmp_path: Path) -> None:
    """With the process and the figures; one that lived too short to tell is not judged."""
    seen, log = outcome(), journal(tmp_path)
    seen.memory["gateway", 7] = [(float(second), second * MOST_GROWTH_BYTES // 100) for second in range(0, 400, 2)]
    seen.memory["storage", 8] = [(float(second), 2**20) for second in range(0, 400, 2)]
    seen.memory["worker-0", 9] = [(float(second), second * 2**20) for second in range(0, 100, 2)]

    check_memory(seen, log)

    assert [violation.what for violation in log.violations] == ["memory grew"]
    assert "gateway 7" in log.violations[0].seen
    assert set(summary(seen, log)["memory"]) == {"gateway 7", "storage 8"}


def test_a_summary_is_plain_json_and_can_be_read_by_people(tmp_path: Path) -> None:
    """Also of a run in which nothing was answered."""
    for seen in (outcome(), outcome(stream(0, (9.9, 2.0)))):
        figures = summary(seen, journal(tmp_path))
        text = io.StringIO()

        print_summary(Console(file=text, width=120), figures)

        assert json.loads(json.dumps(figures)) == figures
        assert "violations" in text.getvalue()
