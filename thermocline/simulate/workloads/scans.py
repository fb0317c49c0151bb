"""Popular prompts beside a job that sometimes scans many documents, each once, or the same ones in every scan."""

from __future__ import annotations

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import SHARED, name
from thermocline.simulate.workloads.open_loop import (
    Count,
    OpenLoopOptions,
    OpenLoopWorkload,
    Real,
    Zipf,
    between,
    length_of,
    whole_between,
)

_SCANNED = 1 << 24  # Numbers from here on are documents of the job.


class ScanOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """Options of prompts and scans; 0 is drawn by the seed."""

    prompts: Count = 0
    prompt_tokens: Count = 0  # On average.
    exponent: Real = 0.0  # Zipf exponent of the prompts' popularity.
    scan_length: Count = 0  # Requests per scan.
    pause_length: Count = 0  # Requests between two scans.
    document_tokens: Count = 0  # On average.
    repeats: bool | None = None  # Whether each scan reads the same documents; None is drawn by the seed.


class ScanWorkload(OpenLoopWorkload):
    """Popular prompts for ``pause_length`` requests, then a scan of ``scan_length``, in turn."""

    def __init__(self, options: ScanOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves open, such as the lengths of scans and pauses.

        Where ``repeats`` is None, one seed in three reads the same documents in each scan.
        """
        super().__init__(options, seed)
        rng = self._rng
        self._prompt_tokens = whole_between(rng, options.prompt_tokens, 300, 4000)
        self._popularity = Zipf(whole_between(rng, options.prompts, 30, 400), between(rng, options.exponent, 0.4, 1.2))
        self._scan = whole_between(rng, options.scan_length, 30, 400)
        self._pause = whole_between(rng, options.pause_length, 100, 600)
        self._document_tokens = whole_between(rng, options.document_tokens, 1000, 8000)
        drawn = rng.random() < 1 / 3
        self._repeats = drawn if options.repeats is None else options.repeats

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        run, place = divmod(number, self._scan + self._pause)
        if place < self._pause:
            chosen, mean = self._popularity.draw(self._rng), self._prompt_tokens
        else:
            first = 0 if self._repeats else run * self._scan
            chosen, mean = _SCANNED + first + place - self._pause, self._document_tokens
        return (Span(name(SHARED, chosen), length_of(self._seed, chosen, mean)),)
