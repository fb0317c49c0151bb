"""NATS subjects and streams, in one place.

========================  ==============  ==========================================
subject                   stream          carries
========================  ==============  ==========================================
``tc.in.>``               ``TC_INPUTS``   everything that can influence a decision
``tc.out.>``              ``TC_OUTPUTS``  numbered plans and notices (captured copies)
``tc.tokens.<gateway>``   none            tokens, one message per gateway and step
``tc.heartbeat.>``        none            liveness
``tc.status``             none            CellStatus, twice a second
``tc.rpc.>``              none            request/reply calls
``tc.cells.<cell>.>``     none            heads and load, for routers; the only ones that leave a cell
========================  ==============  ==========================================
"""

from __future__ import annotations

INPUTS_STREAM = "TC_INPUTS"
OUTPUTS_STREAM = "TC_OUTPUTS"
SNAPSHOT_BUCKET = "TC_SNAPSHOTS"  # JetStream object store
RECORD_BUCKET = "TC_LEASES"  # JetStream key/value store
KEPT_BUCKET = "TC_RESPONSES"  # JetStream key/value store
ANSWER_BUCKET = "TC_ANSWERS"  # JetStream key/value store

INPUTS = "tc.in.>"
SKIPS = "tc.in.skips.*"  # Inputs about other inputs; few, so that they can be read ahead.
OUTPUTS = "tc.out.>"
STATUS = "tc.status"
HEARTBEATS = "tc.heartbeat.>"

# Header of a published plan: wall-clock ns when the scheduler sent it. Not in the body, which must replay
# byte for byte.
SENT_NS_HEADER = "tc-sent-ns"


def request_input(gateway_id: str) -> str:
    """Return the subject of a gateway's inputs about requests."""
    return f"tc.in.request.{gateway_id}"


def worker_input(worker_id: str) -> str:
    """Return the subject of a worker's events."""
    return f"tc.in.worker.{worker_id}"


def storage_input(storage_id: str) -> str:
    """Return the subject of a storage's events."""
    return f"tc.in.storage.{storage_id}"


def cell_input() -> str:
    """Return the subject of inputs from the scheduler's shell and from operators."""
    return "tc.in.cell"


def worker_output(worker_id: str) -> str:
    """Return the subject of the plans for a worker."""
    return f"tc.out.worker.{worker_id}"


def storage_output(storage_id: str) -> str:
    """Return the subject of the plans for a storage."""
    return f"tc.out.storage.{storage_id}"


def gateway_output(gateway_id: str) -> str:
    """Return the subject of the notices for a gateway."""
    return f"tc.out.gateway.{gateway_id}"


def skips_input() -> str:
    """Return the subject on which schedulers publish which inputs fail, and which are left out."""
    return "tc.in.skips.scheduler"


def skip_orders_input() -> str:
    """Return the subject on which operators order that an input is left out."""
    return "tc.in.skips.operator"


def tokens(gateway_id: str) -> str:
    """Return the subject of the tokens for a gateway."""
    return f"tc.tokens.{gateway_id}"


def heartbeat(kind: str, process_id: str) -> str:
    """Return the subject of a process's heartbeats."""
    return f"tc.heartbeat.{kind}.{process_id}"


def rpc(kind: str, verb: str, process_id: str = "") -> str:
    """Return a call's subject: ``tc.rpc.scheduler.status``, ``tc.rpc.worker.<id>.outputs``."""
    return f"tc.rpc.{kind}.{process_id}.{verb}" if process_id else f"tc.rpc.{kind}.{verb}"


CELLS_HEADS = "tc.cells.*.heads.*"
CELLS_LOAD = "tc.cells.*.load.*"


def cell_heads(cell: str, gateway_id: str) -> str:
    """Return the subject on which a gateway publishes the heads of prompts that its cell holds."""
    return f"tc.cells.{cell}.heads.{gateway_id}"


def cell_load(cell: str, gateway_id: str) -> str:
    """Return the subject on which a gateway publishes its cell's load."""
    return f"tc.cells.{cell}.load.{gateway_id}"


def heads_wanted(cell: str) -> str:
    """Return the subject on which routers ask the gateways of a cell for whole summaries."""
    return f"tc.cells.{cell}.wanted"
