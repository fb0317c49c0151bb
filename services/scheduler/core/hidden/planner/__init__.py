"""The restoration planner: how a prefix's KV gets onto the device soonest (HCache 4.1, for any number of sources).

One cost model, no special cases. The parts, from the numbers up:

* :mod:`costs` what a layer of a token costs; :mod:`resources` links, routes, queues; :mod:`rate` how it is learned;
* :mod:`partition` one stretch of tokens with one source: the paper's closed form, the exact answer, the baselines;
* :mod:`spans` what exists where; :mod:`groups` spans that are alike; :mod:`sources` which copy is read;
* :mod:`staircase` which mixes a worker can execute, and the search among them; :mod:`assignment` the forms of the rest;
* :mod:`planning` puts them together, :mod:`plan` is the answer, :mod:`singles` what one method alone would take,
  :mod:`explaining` says why in words;
* :mod:`timeline` executes a plan layer by layer in virtual time, bubbles included;
* :mod:`storing` which form is worth keeping; :mod:`prediction_error` how wrong plans were.
"""

from services.scheduler.core.hidden.planner.costs import LayerCosts, ModelShape, costs_from_speed, costs_of_shape
from services.scheduler.core.hidden.planner.partition import LayerTimes, Partition, best_partition, layer_times
from services.scheduler.core.hidden.planner.plan import Method, Piece, Plan
from services.scheduler.core.hidden.planner.planning import plan_restoration
from services.scheduler.core.hidden.planner.prediction_error import PredictionErrors, note_restoration, plan_kind
from services.scheduler.core.hidden.planner.rate import Rate, note, per_us
from services.scheduler.core.hidden.planner.resources import Link, Resources
from services.scheduler.core.hidden.planner.spans import Copy, Span, all_layers, layer_mask
from services.scheduler.core.hidden.planner.storing import Storing, worth_storing
from services.scheduler.core.hidden.planner.timeline import timeline_us

__all__ = [
    "Copy",
    "LayerCosts",
    "LayerTimes",
    "Link",
    "Method",
    "ModelShape",
    "Partition",
    "Piece",
    "Plan",
    "PredictionErrors",
    "Rate",
    "Resources",
    "Span",
    "Storing",
    "all_layers",
    "best_partition",
    "costs_from_speed",
    "costs_of_shape",
    "layer_mask",
    "layer_times",
    "note",
    "note_restoration",
    "per_us",
    "plan_kind",
    "plan_restoration",
    "timeline_us",
    "worth_storing",
]
