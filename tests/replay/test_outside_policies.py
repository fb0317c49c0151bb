"""Recordings and snapshots of cells with a stranger's policy, schedule and admission: with the package, without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.outside_package import MODULE, run_python, write_package

ROOT = Path(__file__).parents[2]

MAKE = """
import random, sys
from pathlib import Path
from services.scheduler.outside import of_config
from services.scheduler.recording import Header
from services.scheduler.snapshots import encode_snapshot, take_snapshot
from shared.codec import encode
from shared.messages.cell_events import CellConfig, CellConfigured, SchedulerStarted
from tests.recording_files import writing
from tests.scripted_cell import ScriptedCell, submit, worker_joined

cell, folder, begins_at, chance = ScriptedCell(), Path(sys.argv[1]), 0, random.Random(3)
config = CellConfig(policy="newest-first", schedule="backwards", admission="short-only", reserve_fraction=0.0)
cell.put(SchedulerStarted(scheduler_id="scripted", epoch=1))
cell.put(CellConfigured(config=config))
cell.put(worker_joined(pages=16))
for number in range(24):
    cell.put(submit(f"r{number}", [chance.randrange(1, 7)] * 70 + [number], max_tokens=1))
    if number == 11:
        begins_at = len(cell.messages)
        snapshot = encode_snapshot(take_snapshot(cell.fold))
assert cell.fold.state.counters["evicted_pages_device"] > 0
for name, first, policies in (("day", 1, of_config(config)), ("unsaid", 1, ()), ("late", begins_at + 1, ())):
    header = Header(first_seq=first, complete_to_seq=len(cell.messages), policies=policies)
    with writing(folder / f"{name}.tcrec", header) as writer:
        if name == "late":
            writer.write_snapshot(snapshot)
        for message, published in zip(cell.messages, cell.outputs):
            if message.seq >= first:
                writer.write_input(message)
                for output in published:
                    writer.write_output(encode(output))
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of one day: as recorded, by a recorder that did not say whose policy it was, and from a snapshot on."""
    folder = tmp_path_factory.mktemp("recordings")
    site = write_package(tmp_path_factory.mktemp("made") / "site")
    made = run_python("-c", MAKE, str(folder), folders=(site, ROOT))
    assert made.returncode == 0, made.stderr
    return folder


def replayed(
    recording: Path, *arguments: str, site: Path | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Exit code and both outputs of ``thermocline replay``."""
    folders = () if site is None else (site,)
    done = run_python("-m", "thermocline", "replay", str(recording), *arguments, folders=folders, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["day", "unsaid", "late"])
def test_with_the_package_it_replays_to_the_byte(recordings: Path, tmp_path: Path, name: str) -> None:
    """From its beginning, and from a snapshot that holds the policy's own bytes."""
    code, out, err = replayed(recordings / f"{name}.tcrec", site=write_package(tmp_path))

    assert (code, err) == (0, "")
    assert "no difference" in out


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("day", "the recording names policy newest-first, schedule backwards, admission short-only"),
        ("unsaid", "the recording names policy newest-first"),
        ("late", "the snapshot names policy 'newest-first'"),
    ],
)
def test_without_the_package_it_is_one_line(recordings: Path, name: str, missing: str) -> None:
    """With the exit code of a file that cannot be replayed, and not a difference that explains nothing."""
    code, out, err = replayed(recordings / f"{name}.tcrec")

    assert (code, out) == (2, "")
    assert err == f"thermocline replay: {missing}, which is not registered here: install the package that has it\n"


def test_programs_are_told_the_type(recordings: Path) -> None:
    """As JSON."""
    code, out, _ = replayed(recordings / "day.tcrec", "--json")

    assert code == 2
    assert json.loads(out)["error"]["code"] == "policy_missing"


def test_a_module_that_no_package_offers_is_loaded_on_demand(recordings: Path, tmp_path: Path) -> None:
    """By its flag alone: what a recording names is never imported because of that."""
    write_package(tmp_path, offers={})
    recording, loads = recordings / "day.tcrec", ("Newest", "Backwards", "Short")

    without, _, _ = replayed(recording, cwd=tmp_path)
    code, out, err = replayed(recording, *(f"--load=strangers:{each}" for each in loads), cwd=tmp_path)

    assert without == 2
    assert (code, err) == (0, "")
    assert "no difference" in out


def test_a_policy_of_another_version_begins_anew_and_says_so(recordings: Path, tmp_path: Path) -> None:
    """A snapshot's bytes of version 3 are not given to code of version 4."""
    site = write_package(tmp_path, MODULE.replace("state_version = 3", "state_version = 4"))

    code, out, _ = replayed(recordings / "late.tcrec", site=site)

    assert code in (0, 1)  # It may decide otherwise from then on.
    assert "policy 'newest-first' begins anew: the snapshot has version 3 of its state, this is 4" in out


@pytest.mark.parametrize("policy", ["strangers:Newest", "newest-first"])
def test_what_if_asks_about_a_policy_from_outside(tmp_path: Path, policy: str) -> None:
    """Of a recording of ours, with a class or with what a package offers."""
    site = write_package(tmp_path)

    code, out, err = replayed(
        ROOT / "tests/replay/recordings/shared-documents.tcrec", "--policy", policy, "--json", site=site
    )

    assert (code, err) == (0, "")
    assert json.loads(out)["changed"] == {"policy": "newest-first"}


def test_what_if_of_a_recording_with_a_missing_policy_is_the_same_line(recordings: Path) -> None:
    """The column that stands for what was recorded would not be that."""
    code, out, err = replayed(recordings / "day.tcrec", "--policy", "lru")

    assert (code, out) == (2, "")
    assert "the recording names policy newest-first" in err


def test_a_cell_is_simulated_under_all_three(tmp_path: Path) -> None:
    """By name and by class; the figures differ from those of the defaults."""
    site = write_package(tmp_path)
    line = (
        *("-m", "thermocline", "simulate", "--workload", "retrieval", "--profile", "a100-pcie4/llama-3.1-8b", "--json"),
        *("--requests", "60", "--device-tokens", "20000", "--host-tokens", "20000"),
    )
    chosen = ("--policy", "strangers:Newest", "--set", "schedule=backwards", "--set", "admission=strangers:Short")

    default, ours = (run_python(*line, *more, folders=(site,)) for more in ((), chosen))
    before, after = json.loads(default.stdout), json.loads(ours.stdout)

    assert after["policy"] == "newest-first"
    assert after["finished"] == before["finished"] == 60
    assert after["hit_tokens"] != before["hit_tokens"]
    assert after["counters"]["host_refused_admission_pages"] > 0
