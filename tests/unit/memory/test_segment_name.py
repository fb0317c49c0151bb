"""Names of segments say whose they are."""

import os
import subprocess
import sys

import pytest

from shared.errors import ConfigError
from shared.memory.segment_name import SegmentName, new_segment_name, parse_segment_name, process_start_time


def test_a_name_survives_its_text_form() -> None:
    """Parsing what a name prints gives the name."""
    name = new_segment_name("thermocline", "host")

    assert parse_segment_name(str(name)) == name
    assert (name.prefix, name.owner_pid, name.kind) == ("thermocline", os.getpid(), "host")


@pytest.mark.parametrize(
    "text", ["", "thermocline", "a.1.host.0", "a.1-2.host.xyz", "../a.1-2.host.01234567", "a b.1-2.h.01234567"]
)
def test_other_files_are_not_ours(text: str) -> None:
    """A file whose name has another form is never taken for a segment."""
    assert parse_segment_name(text) is None


@pytest.mark.parametrize(("prefix", "kind"), [("a.b", "host"), ("", "host"), ("a", "x/y"), ("a" * 65, "host")])
def test_parts_that_would_break_the_form_are_refused(prefix: str, kind: str) -> None:
    """A prefix or kind with dots, slashes or nothing in it is a ConfigError."""
    with pytest.raises(ConfigError):
        new_segment_name(prefix, kind)


def test_a_reused_process_id_is_not_the_owner() -> None:
    """The same pid with another start time is another process."""
    mine = new_segment_name("a", "host")
    reused = SegmentName(mine.prefix, mine.owner_pid, mine.owner_started + 1, mine.kind, mine.random)

    assert mine.owner_is_alive()
    assert not reused.owner_is_alive()


def test_a_zombie_counts_as_dead() -> None:
    """A killed child that nobody has waited for yet owns nothing."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    alive = process_start_time(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert alive is not None
    assert process_start_time(child.pid) is None
    child.communicate()
