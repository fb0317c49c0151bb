"""Policies, schedules and admissions of other people's packages, in processes that have such packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.outside_package import MODULE, run_python, write_package

SAID = """
import json, sys
from services.scheduler import outside
from services.scheduler.config import SchedulerConfig
from shared.errors import ConfigError

def said(act):
    try:
        return act()
    except ConfigError as error:
        return "refused: " + error.message
"""


def said_by(code: str, *folders: Path, cwd: Path | None = None) -> Any:
    """What ``code``, an expression, is in a process with these folders on its path."""
    done = run_python("-c", f"{SAID}\nprint(json.dumps({code}))", folders=folders, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_an_installed_package_offers_is_known_by_name(tmp_path: Path) -> None:
    """Without a setting that says so; each is of its kind, and is told apart from ours."""
    folder = write_package(tmp_path / "site")
    kinds = {"policy": "newest-first", "schedule": "backwards", "admission": "short-only"}

    found = said_by(
        f"[[outside.name_of(kind, name) for kind, name in {kinds}.items()], outside.of_config("
        f"SchedulerConfig(**{kinds}).cell_config()), outside.of_config(SchedulerConfig().cell_config())]",
        folder,
    )

    assert found == [list(kinds.values()), [f"{kind} {name}" for kind, name in kinds.items()], []]


def test_a_class_is_named_by_its_module_where_no_package_offers_it(tmp_path: Path) -> None:
    """Also one in the working directory. The cell knows it by its own name."""
    write_package(tmp_path, offers={})

    found = said_by(
        "[outside.name_of('schedule', 'strangers:Backwards'), "
        "SchedulerConfig(policy='strangers:Newest', admission='strangers:Short').cell_config().admission]",
        cwd=tmp_path,
    )

    assert found == ["backwards", "short-only"]


REFUSED = {
    ("policy", "newest"): "'newest' is none of 2q, arc, fifo",
    ("policy", "nowhere:Newest"): "'nowhere:Newest' cannot be imported: ModuleNotFoundError",
    ("policy", "strangers:Nobody"): "'strangers:Nobody' cannot be imported: AttributeError",
    ("policy", "strangers:Backwards"): "'strangers:Backwards' is a class of the kind schedule, not policy",
    ("policy", "json:JSONDecoder"): "is no subclass of Policy, Schedule or Admission of thermocline.policies",
    ("policy", "odd:Unnamed"): "'odd:Unnamed' has the name ''",
    ("policy", "odd:Taken"): "'odd:Taken' cannot be registered: policies LruPolicy and Taken are 'lru'",
    ("policy", "odd:Zero"): "'odd:Zero' has the state_version 0",
    ("admission", "odd:All"): "'odd:All' cannot be registered: admission 'all' is built in",
}
"""(Kind, what is given) and the reason."""
ODD = """
from thermocline.policies import Admission, Policy

class Unnamed(Policy):
    pass

class Taken(Policy):
    name = "lru"

class Zero(Policy):
    name, state_version = "zero", 0

class All(Admission):
    name = "all"
"""


def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    """One sentence, whatever the code of a stranger does."""
    folder = write_package(tmp_path)
    write_package(tmp_path, ODD, {}, "odd")

    found = said_by(f"[said(lambda: outside.name_of(*given)) for given in {list(REFUSED)}]", folder)

    assert [
        given
        for given, words in zip(REFUSED, found, strict=True)
        if not (words.startswith("refused: ") and REFUSED[given] in words)
    ] == []


def test_a_package_that_cannot_be_loaded_stops_nobody_else(tmp_path: Path) -> None:
    """It is told of, and whoever names what it offers is told why."""
    folder = write_package(tmp_path / "site")
    write_package(folder, "raise SystemError('no such machine')", {"broken": "broken:Policy"}, "broken")
    write_package(folder, MODULE.replace('"newest-first"', '"other"'), {"named": "renamed:Newest"}, "renamed")

    faults, policy, broken = said_by(
        "[dict(outside.load_installed()), outside.name_of('policy', 'newest-first'), "
        "said(lambda: outside.name_of('policy', 'broken'))]",
        folder,
    )

    assert sorted(faults) == ["broken", "named"]
    assert "'broken' of package broken cannot be loaded" in faults["broken"]
    assert "no such machine" in faults["broken"]
    assert "the class calls itself 'other'" in faults["named"]
    assert policy == "newest-first"
    assert broken == f"refused: {faults['broken']}"


RELEASE = "__import__('services.scheduler.fold_release').scheduler.fold_release.fold_release()"


def test_schedulers_with_other_code_from_outside_do_not_fold_alike(tmp_path: Path) -> None:
    """With the same package they do, wherever it lies; without it, or with one changed letter, they do not."""
    releases = [
        said_by(RELEASE),
        said_by(RELEASE, write_package(tmp_path / "one")),
        said_by(RELEASE, write_package(tmp_path / "two")),
        said_by(RELEASE, write_package(tmp_path / "three", MODULE.replace("-node.id", "+node.id"))),
        said_by(RELEASE, write_package(tmp_path / "four", MODULE.replace("state_version = 3", "state_version = 4"))),
    ]

    assert releases[1] == releases[2]
    assert len(set(releases)) == 4


def test_what_another_process_names_is_compared_with_what_is_here(tmp_path: Path) -> None:
    """In the words in which a claim and a recording say it."""
    labels = [f"policy {name}" for name in ("newest-first", "lru", "2q")]
    here, there = said_by(f"outside.missing({labels})"), said_by(f"outside.missing({labels})", write_package(tmp_path))

    assert (here, there) == (["policy newest-first"], [])


def test_a_scheduler_refuses_to_start_with_what_there_is_not(tmp_path: Path) -> None:
    """By the flag, in one line and with exit code 2 or what refusals have."""
    done = run_python("-m", "services.scheduler", "--policy", "nowhere:Newest", cwd=tmp_path)

    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "nowhere:Newest" in line]
    assert len(lines) == 1
    assert "--policy: 'nowhere:Newest' cannot be imported" in lines[0]
    assert "Traceback" not in done.stdout + done.stderr
