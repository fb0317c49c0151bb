"""The router's metrics."""

from __future__ import annotations

from shared.metrics import counter, gauge, histogram

REQUESTS = counter("router_requests", "Requests by the cell that answered and by outcome", ("cell", "outcome"))
FALLBACKS = counter("router_fallbacks", "Tries that failed before anything was sent to the client", ("cell", "reason"))
BROKEN_STREAMS = counter("router_broken_streams", "Answers that had begun when their cell was lost", ("cell",))
REFUSED = counter("router_requests_refused", "Requests that no cell took", ("code",))
PROMPT_BYTES = counter("router_prompt_bytes", "Bytes of prompts whose cell was chosen", ("cell",))
MATCHED_BYTES = counter("router_matched_bytes", "Bytes of those prompts that the cell was thought to hold", ("cell",))
IN_FLIGHT = gauge("router_requests_in_flight", "Requests in progress", ("cell",))
CELL_UP = gauge("router_cell_up", "Whether any gateway of a cell answers", ("cell",))
HEADS = gauge("router_heads", "Heads of prompts that a cell is thought to hold", ("cell",))
SUMMARY_AGE = gauge(
    "router_summary_age_seconds", "Time since a cell's last report of load, or since the router's start", ("cell",)
)
CHOICE_TIME = histogram("router_choice_time_seconds", "Reading a body's head and choosing a cell")
TIME_TO_HEAD = histogram("router_time_to_first_byte_seconds", "From a request's body to the first byte of its answer")


def own_families(*, summaries: bool) -> tuple[str, ...]:
    """Return the prefixes of a router's metrics; those of the broker only where it receives ``summaries`` from one.

    Others belong to modules that it shares with gateways, and would stay at 0 here.
    """
    return ("router_", "listener_", "log_", *(("bus_",) if summaries else ()))
