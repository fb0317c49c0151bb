"""The doctor's judgement: what is fatal, what is only worth knowing."""

from dataclasses import replace
from typing import Any

import pytest

from thermocline.doctor.__main__ import table
from thermocline.doctor.checks import Check, judge
from thermocline.doctor.facts import Facts, parse_cpu_limit, parse_memory_table

GIB = 1024**3

HEALTHY = Facts(
    system="Linux x86_64",
    python=(3, 12, 1),
    torch_version="2.13.0",
    torch_error="",
    libraries_too_old=(),
    libraries_untried=(),
    gpus=(("NVIDIA H100", 80 * GIB),),
    auto_device="cuda",
    auto_reason="",
    nats_server="nats-server: v2.15.1",
    nats_server_error="",
    runs_folder="/tmp/thermocline-0",
    runs_folder_error="",
    runs_folder_free=90 * GIB,
    shm_total=8 * GIB,
    shm_free=8 * GIB,
    memory_total=16 * GIB,
    memory_available=12 * GIB,
    compiler="cc",
    compiler_error="",
    cores=8,
    cores_limit=None,
    open_files=1024,
    open_files_hard=65536,
    bundled_model="/m",
)


def verdicts(facts: Facts) -> dict[str, str]:
    """Verdicts by name, without those that are ok."""
    return {check.name: check.verdict for check in judge(facts) if check.verdict != "ok"}


def test_a_healthy_machine_has_no_remarks() -> None:
    """Nothing is said about a machine that has it all."""
    assert verdicts(HEALTHY) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"system": "Darwin arm64"}, {"system": "bad"}),
        ({"python": (3, 10, 9)}, {"python": "bad"}),
        ({"python": (3, 15, 0)}, {"python": "bad"}),
        ({"torch_error": "no module"}, {"torch": "bad"}),
        ({"libraries_too_old": ("torch 2.1 is installed",)}, {"libraries": "bad"}),
        ({"libraries_untried": ("torch 9.9 was never tried",)}, {"libraries": "note"}),
        ({"gpus": (), "auto_device": "cpu"}, {"gpu": "note"}),
        ({"auto_device": "cpu", "auto_reason": "broken"}, {"device": "note"}),
        ({"torch_error": "no module", "auto_device": ""}, {"torch": "bad", "device": "note"}),
        ({"nats_server_error": "none"}, {"nats-server": "bad"}),
        ({"runs_folder_error": "it belongs to user 7"}, {"runs folder": "bad"}),
        ({"runs_folder_free": 2 * 1024**2}, {"runs folder": "note"}),
        ({"runs_folder_free": None}, {}),
        ({"shm_free": None}, {"/dev/shm": "bad"}),
        ({"shm_free": 10 * 1024**2}, {"/dev/shm": "bad"}),
        ({"shm_free": 64 * 1024**2}, {"/dev/shm": "note"}),
        ({"memory_available": GIB}, {"memory": "bad"}),
        ({"memory_available": None}, {"memory": "note"}),
        ({"compiler_error": "there is none"}, {"C compiler": "note"}),
        ({"cores": 1}, {"cores": "note"}),
        ({"cores_limit": 0.5}, {"cores": "note"}),
        ({"open_files_hard": 512}, {"open files": "bad"}),
        ({"open_files_hard": 4096}, {"open files": "note"}),
        ({"bundled_model": ""}, {"bundled model": "note"}),
    ],
)
def test_each_lack_is_judged(change: dict[str, object], expected: dict[str, str]) -> None:
    """One lack changes one verdict."""
    assert verdicts(replace(HEALTHY, **change)) == expected  # type: ignore[arg-type]


def test_whatever_is_bad_comes_with_advice() -> None:
    """No fault is named without a way out."""
    sick = replace(
        HEALTHY, system="x", python=(3, 9, 0), torch_error="e", nats_server_error="e", shm_free=0, memory_available=0
    )

    assert all(check.advice for check in judge(sick) if check.verdict == "bad")


def test_the_table_names_what_is_bad_last() -> None:
    """The last line is the answer in a sentence."""
    assert table([Check("a", "ok", "1"), Check("b", "bad", "2", "do c")]).splitlines() == [
        "ok    a  1",
        "BAD   b  2",
        "         -> do c",
        "",
        "Not usable yet: b.",
    ]
    assert table([Check("a", "note", "1")]).endswith("This machine can run Thermocline.")


def test_limits_of_containers() -> None:
    """The file says ``max`` for no limit, and may be missing."""
    assert [parse_cpu_limit(text) for text in ("max 100000", "150000 100000\n", "")] == [None, 1.5, None]


def test_the_memory_table_is_in_bytes() -> None:
    """The kernel's kB are multiples of 1024."""
    assert parse_memory_table("MemTotal:  2 kB\nHugePages_Total:  0\nodd\n") == {"MemTotal": 2048, "HugePages_Total": 0}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "auto takes cuda: NVIDIA H100"),
        ({"auto_device": "cpu", "auto_reason": "GPU 0 cannot be used"}, "auto takes cpu: GPU 0 cannot be used"),
        ({"gpus": (), "auto_device": "cpu"}, "auto takes cpu: there is no GPU"),
    ],
)
def test_it_says_what_auto_takes_and_why(changes: dict[str, Any], found: str) -> None:
    """Which device ``thermocline up`` would run the model on."""
    checks = {check.name: check for check in judge(replace(HEALTHY, **changes))}

    assert checks["device"].found == found
