"""The reference of metrics follows from their declarations."""

from __future__ import annotations

import pytest

from shared.metrics import FACTS, REGISTRY, declare
from tools.metric_docs import COMMON, LISTENING, PROCESSES, declared_in, exported_by, unit_of


def test_every_declared_metric_belongs_to_a_process() -> None:
    """Whatever the modules of services declare is on the page, once for each process that exports it."""
    listed = {name for process in PROCESSES for name in exported_by(process)}

    assert listed == {name for name in FACTS if "invented" not in name}


def test_processes_share_nothing_but_what_all_have() -> None:
    """A metric of its own belongs to one process: the same name never means two things."""
    own = [facts.name for modules in PROCESSES.values() for module in modules for facts in declared_in(module)]
    common = [facts.name for module in (*COMMON, LISTENING) for facts in declared_in(module)]

    assert len(own) == len(set(own))
    assert not set(own) & set(common)


def test_what_is_declared_is_what_is_exported() -> None:
    """Type, meaning and name in the registry are those that were written down."""
    for process in PROCESSES:
        exported_by(process)

    for family in REGISTRY.collect():
        facts = FACTS[family.name]
        assert (family.type, family.documentation) == (facts.kind, facts.documentation)


def test_every_metric_says_what_it_means() -> None:
    """A meaning begins with a capital letter and ends without a full stop; labels are plain words."""
    for facts in FACTS.values():
        assert facts.documentation[:1].isupper() or facts.documentation[:1].isdigit()
        assert not facts.documentation.endswith(".")
        assert all(label.isidentifier() for label in facts.labels)


def test_units_follow_from_names() -> None:
    """The last unit in a name counts, and names of the field have the field's."""
    units = {name: unit_of(facts) for name, facts in FACTS.items()}

    assert units["thermocline_time_to_first_token_seconds"] == "seconds"
    assert units["thermocline_storage_tier_bytes"] == "bytes"
    assert units["thermocline_prefix_cache_hits"] == "tokens"
    assert units["thermocline_kv_cache_usage_perc"] == "ratio"
    assert units["thermocline_workers"] == "count"


def test_one_name_has_one_meaning() -> None:
    """A second declaration that says something else fails where it is made."""
    declare("gauge", "invented_for_a_test", "One thing")

    with pytest.raises(AssertionError, match="declared twice"):
        declare("gauge", "invented_for_a_test", "Another thing")
