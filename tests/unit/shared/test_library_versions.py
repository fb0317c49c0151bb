"""Releases of PyTorch, Triton and Transformers: served with, too old, or never tried."""

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shared.library_versions import RANGES, installed, too_old, untried
from tools.lock import read_project


def test_the_ranges_are_those_of_the_project() -> None:
    """The oldest and the newest release that pip would take are in the range, and their neighbours are not."""
    asked = {
        str(canonicalize_name(each.name)): each.specifier for each in map(Requirement, read_project()["dependencies"])
    }

    for name, (lowest, beyond) in RANGES.items():
        assert f"{lowest[0]}.{lowest[1]}.0" in asked[name]
        assert f"{lowest[0]}.{lowest[1] - 1}.99" not in asked[name]
        assert f"{beyond[0]}.{beyond[1] - 1}.99" in asked[name]
        assert f"{beyond[0]}.{beyond[1]}.0" not in asked[name]


def test_what_is_installed_here_is_served_with() -> None:
    """The environment of the tests is in all ranges."""
    assert installed("torch")
    assert not list(too_old())
    assert not list(untried())


def test_an_older_release_is_named_with_the_one_that_is_needed() -> None:
    """Local labels and patch numbers do not matter."""
    versions = {"torch": "2.10.1+cu130", "transformers": "5.17.0", "triton": "3.5.1"}

    assert list(too_old(versions.__getitem__)) == [
        "torch 2.10.1+cu130 is installed; 2.11 or later is needed",
        "triton 3.5.1 is installed; 3.6 or later is needed",
    ]
    assert not list(untried(versions.__getitem__))


def test_a_missing_library_is_named_unless_workers_do_without() -> None:
    """Triton is only for GPUs."""
    assert [sentence.split()[0] for sentence in too_old(lambda name: "")] == ["torch", "transformers"]


def test_a_newer_or_unnumbered_release_is_untried() -> None:
    """It is served with, and said."""
    versions = {"torch": "2.14.0", "transformers": "main", "triton": "3.7.1"}

    assert not list(too_old(versions.__getitem__))
    assert [sentence.split()[:2] for sentence in untried(versions.__getitem__)] == [
        ["torch", "2.14.0"],
        ["transformers", "main"],
    ]


def test_a_library_that_is_not_there_has_no_version() -> None:
    """Its metadata is asked for; nothing is imported."""
    assert installed("no-such-distribution") == ""
