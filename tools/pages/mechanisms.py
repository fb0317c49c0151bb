"""The mechanisms of HotPrefix and Strata, and which of them are on by default: read from the code's own defaults."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from thermocline.settings import SECTIONS

ROOT = Path(__file__).parents[2]

ALWAYS, ON, OFF, ABSENT = "always", "on", "off", "not built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One mechanism of a paper.

    ``where`` is a file of this repository and a name in it, as ``services/worker/bubble.py:fill``; empty where nothing
    is built. ``setting`` is the command and the setting that switch it, as ``scheduler.promotion``; empty where nothing
    does. ``is_on`` says which of its values switch it on. ``figure`` is where its effect is shown, as a link's text and
    its target from ``docs/results``.
    """

    section: str
    what: str
    differs: str
    where: str = ""
    setting: str = ""
    is_on: Callable[[Any], bool] = bool
    figure: tuple[str, str] = ("", "")

    @property
    def file(self) -> str:
        """The file alone."""
        return self.where.partition(":")[0]


def default_of(setting: str) -> Any:
    """The default of a command's setting. Raises KeyError where the command or the setting is not there."""
    command, _, name = setting.partition(".")
    fields = {field.name: field for field in msgspec.structs.fields(SECTIONS[command])}
    return fields[name].default


def by_default(mechanism: Mechanism, default: Callable[[str], Any] = default_of) -> str:
    """Whether a mechanism is at work in a cell whose settings nobody changed. Raises KeyError, see default_of."""
    if not mechanism.where:
        return ABSENT
    if not mechanism.setting:
        return ALWAYS
    return ON if mechanism.is_on(default(mechanism.setting)) else OFF


def shown_setting(mechanism: Mechanism) -> str:
    """The setting with its default, as it is written in a file; "-" where nothing switches the mechanism."""
    if not mechanism.setting:
        return "-"
    value = default_of(mechanism.setting)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{mechanism.setting.partition('.')[2]} = {text}`"


def defines(where: str) -> bool:
    """Whether the file is there and has a class, function or constant of that name at its top level."""
    file, _, name = where.partition(":")
    if not (ROOT / file).is_file():
        return False
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return name in found


CORE = "services/scheduler/core"
SWITCHES = ("the switches beside the default policy", "hotprefix.md#the-switches-beside-the-default-policy")
FIGURE_9 = ("Figure 9", "strata.md#figure-9-throughput-against-ttft")
FIGURE_11 = ("Figure 11", "strata.md#figure-11-cache-distance")

HOTPREFIX = (
    Mechanism(
        section="3.2.1",
        what="a cuckoo filter remembers clock, frequency and depth of each prefix",
        where=f"{CORE}/cache/hotness/filter.py:HotnessFilter",
        differs="doubles without its keys; as large as the pools ask for; known by a prefix's head",
        figure=("the filter", "../concepts/hotness.md#measured"),
    ),
    Mechanism(
        section="3.2.2",
        what="a use adds one and resets the clock; all clocks age",
        where=f"{CORE}/cache/hotness/tracking.py:request_admitted",
        setting="scheduler.aging_requests",
        differs="ages with every so many admissions, not in a thread: a replay has the same ages",
        figure=("the filter", "../concepts/hotness.md#measured"),
    ),
    Mechanism(
        section="3.3.1",
        what="hotness-aware eviction: the leaf of least Equation 5 leaves",
        where="services/scheduler/policies/hotprefix.py:HotPrefixPolicy",
        setting="scheduler.policy",
        is_on=lambda value: value == "hotprefix",
        differs="the default policy learns the law of reuse instead; its rules count frequency across evictions, too",
        figure=("policies", "policies.md#conversation-trace"),
    ),
    Mechanism(
        section="3.3.2",
        what="selective admission: a frequency threshold, then hotter than what would leave (Equation 6)",
        where=f"{CORE}/tiers/host_admission.py:admit_to_host",
        setting="scheduler.admission",
        is_on=lambda value: value == "selective",
        differs="threshold 2, not 10; with loads on demand more of what is refused is missed",
        figure=SWITCHES,
    ),
    Mechanism(
        section="3.4",
        what="hotness promotion: the hottest host copies take the places of the coldest leaves (Algorithm 2)",
        where=f"{CORE}/tiers/promotion.py:promote",
        setting="scheduler.promotion",
        is_on=lambda value: value != "off",
        differs="a load on demand brings up what is asked for, and displaces no more than it needs",
        figure=SWITCHES,
    ),
    Mechanism(
        section="3.4.3",
        what="promotions are copied beside decoding",
        where="services/worker/kv/promotions.py:Promotions",
        setting="scheduler.promotion",
        is_on=lambda value: value != "off",
        differs="with promotion; one at a time, none while a batch loads; verified before it counts",
        figure=("Figure 16", "hotprefix.md#figure-16-what-promotion-goes-by"),
    ),
    Mechanism(
        section="2.3, 3.4",
        what="no load on demand: the paper recomputes what was not promoted",
        where=f"{CORE}/cache/prefix_match.py:reach",
        setting="scheduler.min_host_load_tokens",
        is_on=lambda value: value > 1 << 20,
        differs="the other way round: a hit in host memory is loaded, layer by layer (Strata 4.1)",
        figure=SWITCHES,
    ),
    Mechanism(
        section="4",
        what="Equations 5 and 6 can be replaced",
        where=f"{CORE}/cache/heat.py:parse",
        setting="scheduler.hotness_expression",
        differs="checked where it is set; a divisor of 0 counts as 1",
    ),
)

STRATA = (
    Mechanism(
        section="4.1",
        what="a layer's computation waits for that layer's load alone",
        where="services/worker/kv/layer_gate.py:LayerGate",
        differs="each page and layer is verified first",
        figure=("what layer-wise loading hides", "data-plane.md#what-layer-wise-loading-hides"),
    ),
    Mechanism(
        section="4.1",
        what="backups to host memory run beside computation",
        where=f"{CORE}/tiers/backups.py:open_transfer",
        setting="scheduler.host_tier",
        differs="at eviction, ahead of need while the reserve is short; `host_writes` can copy sooner",
    ),
    Mechanism(
        section="4.2",
        what="GPU-assisted I/O: a kernel copies small pages",
        where="services/worker/kv/movers/gpu_assisted.py:GpuAssistedMover",
        setting="worker.mover",
        is_on=lambda value: value in ("auto", "gpu_assisted"),
        differs="`auto` takes it on a GPU unless another was measured faster, and verifies where pages arrive; "
        "a CPU has a native copy; never run on a GPU here",
        figure=("Figure 3", "strata.md#figure-3-loading-8192-tokens-of-llama-31-8b"),
    ),
    Mechanism(
        section="4.2",
        what="quota: two blocks for loads, one for backups",
        where="services/worker/kv/movers/gpu_assisted.py:LOAD_PROGRAMS",
        setting="worker.mover_programs",
        is_on=lambda value: value >= 0,
        differs="0 takes what was measured, else the paper's; on CPUs see the next row",
    ),
    Mechanism(
        section="4.2",
        what="backups take a bounded share of the link",
        where="services/storage/copy_share.py:CopyShare",
        setting="storage.backup_share",
        is_on=lambda value: value < 1,
        differs="a share of the time; a load beside a bounded backup loses less, for longer, and as much in all",
        figure=("backups in half of the time", "strata.md#backups-in-half-of-the-time"),
    ),
    Mechanism(
        section="4.2",
        what="small pages",
        where="services/worker/kv/page_memory.py:PageLayout",
        setting="worker.page_size",
        is_on=lambda value: value <= 32,
        differs="0 is 16 tokens, not 1; more where layers carry states",
        figure=("Figure 10", "strata.md#figure-10-page-sizes"),
    ),
    Mechanism(
        section="4.2.1",
        what="layer-first on the device, page-first below",
        where="shared/memory/host_pool.py:HostPoolView",
        differs="the disk has chunks of 64 tokens, pages one behind the other",
        figure=("Figure 12", "data-plane.md#page-first-against-layer-first-strata-figure-12"),
    ),
    Mechanism(
        section="4.2.1",
        what="a queued request's prefix is fetched from disk to host memory",
        where=f"{CORE}/restoring/prefetch.py:prefetch",
        setting="scheduler.prefetch_fraction",
        differs="near the front of the queue only; from an object store, too",
    ),
    Mechanism(
        section="4.2.1",
        what="at dispatch the fetch is cut off, and what has arrived is used",
        where=f"{CORE}/restoring/fetch_waits.py:waits_for_fetch",
        setting="scheduler.prefetch_wait",
        is_on=lambda value: value == "best_effort",
        differs="by default the request waits up to a deadline, never longer than computing would take",
        figure=("cut off at dispatch", "strata.md#fetches-cut-off-at-dispatch"),
    ),
    Mechanism(
        section="4.3.1",
        what="deferral on a delay hit, by transient nodes",
        where=f"{CORE}/waiting/waits.py:find_aside",
        setting="scheduler.defer_tokens",
        differs="transient nodes have a tree of their own; waits for the tokens it needs, and has a deadline",
        figure=("a burst on one new document", "strata.md#a-burst-on-one-new-document"),
    ),
    Mechanism(
        section="4.3.2",
        what="balanced batches (Algorithm 1)",
        where="services/scheduler/policies/balanced.py:Balanced",
        setting="scheduler.schedule",
        is_on=lambda value: value == "balanced",
        differs="puts aside only what brings load out of proportion",
        figure=FIGURE_9,
    ),
    Mechanism(
        section="4.3.2",
        what="the ratio of a loading-bound batch",
        where=f"{CORE}/rates.py:load_compute_ratio",
        setting="scheduler.load_compute_ratio",
        is_on=lambda value: value >= 0,
        differs="0 measures it for each worker; the paper's 100 until then",
    ),
    Mechanism(
        section="4.3.2",
        what="bundle hits: who shares a load joins its batch",
        where=f"{CORE}/queue/batch_builder.py:bundle_hits_among",
        setting="scheduler.queue_window",
        differs="looked for in the first requests of the queue",
        figure=FIGURE_9,
    ),
    Mechanism(
        section="4.3.3",
        what="bubbles are filled by decoding",
        where="services/worker/bubble.py:fill",
        setting="scheduler.bubble_filling",
        differs="ends as soon as what is left of the load would hardly stall",
        figure=FIGURE_11,
    ),
    Mechanism(
        section="4.3.3",
        what="bubbles are filled by another prefill batch",
        where="services/worker/bubble.py:may_go_ahead",
        setting="scheduler.bubble_prefill",
        differs="only a batch that loads nothing goes ahead; few could, and no workload gained by more than 0.4%",
        figure=("bubbles filled with prefill", "strata.md#bubbles-filled-with-prefill"),
    ),
)
