"""The results of proofs: plain data, sent from the process that proves, between ranks, and to ``doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shared.messages.base import Message
from shared.messages.pools import KvGeometry


class HeadsShape(Message, frozen=True):
    """K and V of some layers, where not all are alike.

    The heads are those that one call of attention takes, as wide as in pages; their rows have ``row_values`` values.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    row_values: int


class LatentsShape(Message, frozen=True):
    """Latents of some layers, in rows of ``row_values`` values, to which ``query_heads`` heads attend."""

    query_heads: int
    rank: int
    rope: int
    row_values: int


class ServedShape(Message, frozen=True):
    """The properties of a worker's computation by which its kernels differ.

    ``device`` is torch's name of it. ``heads`` and ``latents`` describe, each kind once, what attention reads in pages
    whose layers are not all alike; without any the geometry describes it. ``windows`` are the sliding windows of
    layers, each once, 0 for full attention; ``chunks`` are those of layers that attend in chunks; ``softcap`` is that
    of scores, 0 without.
    """

    device: str
    geometry: KvGeometry
    query_heads: int
    windows: tuple[int, ...] = (0,)
    softcap: float = 0.0
    chunks: tuple[int, ...] = ()
    has_sinks: bool = False
    heads: tuple[HeadsShape, ...] = ()
    latents: tuple[LatentsShape, ...] = ()
    rank: int = 0  # Of a group, with its number of ranks and the port where they meet (``parallel.collectives``).
    ranks: int = 1
    store_port: int = 0
    dtype: str = ""  # Data type of computed K and V, where the pool's is another.

    @property
    def computed_dtype(self) -> str:
        """The data type of activations."""
        return self.dtype or self.geometry.dtype

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep K and V of the same heads."""
        return not self.heads and not self.latents


class Speed(Message, frozen=True):
    """The speed of a way in its proof: small work, so a hint and no benchmark."""

    value: float
    unit: str

    def __str__(self) -> str:
        """Return the value, in three digits, and its unit."""
        return f"{self.value:.3g} {self.unit}"


class Attempt(Message, frozen=True):
    """A way that was tried, or the reason why it was not.

    ``fault`` is "" for one that passed. ``is_absent``: nothing is broken, it is not installed, or not for such a model
    (``part.WayAbsent``).
    """

    way: str
    fault: str = ""
    seconds: float = 0.0
    speed: Speed | None = None
    is_absent: bool = False


class Proof(Message, frozen=True):
    """The proof of a part. ``way`` is the one that serves, "" where none passed; ``attempts`` are best first."""

    part: str
    way: str
    attempts: tuple[Attempt, ...] = ()

    @property
    def passed(self) -> tuple[str, ...]:
        """Ways that may serve, best first."""
        return tuple(each.way for each in self.attempts if not each.fault)

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """Ways that may not serve, with their faults."""
        return tuple(each for each in self.attempts if each.fault)


class Lost(Message, frozen=True):
    """A way that would serve if it had passed, and the way ``instead`` of it."""

    part: str
    way: str
    instead: str
    fault: str
    is_absent: bool = False

    def __str__(self) -> str:
        """Return one line that says which way serves instead, and why."""
        return f"{self.instead or 'nothing'} in the place of {self.way}: {self.fault}"


class ProofTable(Message, frozen=True):
    """All parts of one device, in the order in which they were proven. Without entries, no proof was needed."""

    device: str = ""  # Its maker's name.
    proofs: tuple[Proof, ...] = ()
    seconds: float = 0.0

    def way(self, part: str, default: str = "") -> str:
        """Return the way by which ``part`` serves; ``default`` where no proof was needed."""
        return next((each.way for each in self.proofs if each.part == part), default)

    def passed(self, part: str) -> tuple[str, ...] | None:
        """Return the ways of ``part`` that may serve, best first; None where no proof was needed."""
        return next((each.passed for each in self.proofs if each.part == part), None)

    def failed(self, part: str) -> tuple[Attempt, ...]:
        """Return the ways of ``part`` that may not serve, with their faults."""
        return next((each.failed for each in self.proofs if each.part == part), ())

    def with_fault(self, part: str, way: str, fault: str, instead: str) -> ProofTable:
        """Return the table after a ``way`` of ``part`` that had passed failed with the model itself.

        It may still serve in part, where ``instead`` is the same.
        """
        return msgspec.structs.replace(self, proofs=tuple(
            _with_fault(proof, way, fault, instead) if proof.part == part else proof for proof in self.proofs
        ))  # fmt: skip

    def lost(self) -> Iterator[Lost]:
        """Yield each way that was preferred to the serving one and failed, with its fault."""
        for proof in self.proofs:
            for attempt in proof.attempts:
                if attempt.fault:
                    yield Lost(
                        part=proof.part,
                        way=attempt.way,
                        instead=proof.way,
                        fault=attempt.fault,
                        is_absent=attempt.is_absent,
                    )
                if attempt.way == proof.way:
                    break


def _with_fault(proof: Proof, way: str, fault: str, instead: str) -> Proof:
    attempts = [msgspec.structs.replace(each, fault=fault) if each.way == way else each for each in proof.attempts]
    if instead not in [each.way for each in attempts]:
        attempts.append(Attempt(way=instead))
    return Proof(part=proof.part, way=instead, attempts=tuple(attempts))


def joined(tables: Sequence[ProofTable]) -> ProofTable:
    """Return which ways serve in a group, by the tables of its ranks, which tried the same parts.

    A way has passed where no rank found a fault in it. Its faults name the rank.
    """
    first = tables[0]
    proofs = tuple(_joined([table.proofs[at] for table in tables]) for at in range(len(first.proofs)))
    return ProofTable(device=first.device, proofs=proofs, seconds=max(table.seconds for table in tables))


def _joined(proofs: Sequence[Proof]) -> Proof:
    """Join one part's proofs. The longest list of attempts begins with those of all others."""
    longest = max(proofs, key=lambda proof: len(proof.attempts)).attempts
    attempts = []
    for at, attempt in enumerate(longest):
        faults = [
            f"rank {rank}: {proof.attempts[at].fault}"
            for rank, proof in enumerate(proofs)
            if at < len(proof.attempts) and proof.attempts[at].fault
        ]
        attempts.append(msgspec.structs.replace(attempt, fault="; ".join(faults)))
    way = next((each.way for each in attempts if not each.fault), "")
    return Proof(part=proofs[0].part, way=way, attempts=tuple(attempts))
