"""The model, its pool, and one function: ``forward``.

Two ways to compute a step are behind it: the Hugging Face model, on CPUs with its linear layers packed, which serves
every model on any device, and the fused forward of one family, on CPUs (:mod:`services.worker.engine.fused`) and on
GPUs (:mod:`services.worker.engine.fused_gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from services.worker.engine.adapters import Adapters, adapting
from services.worker.engine.attention import AttentionStep, attending
from services.worker.engine.causality import routes_tokens
from services.worker.engine.chunks import expected_chunks
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.cuda_graphs import DecodeGraphs, capture_decode, longest_served
from services.worker.engine.device_checks import check_device
from services.worker.engine.exactness import prove_exact, replaced_operators
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.found_model import FoundModel, find_model
from services.worker.engine.fused.choice import ForwardPath, StepForward, fuse, merge
from services.worker.engine.fused.forward import FusedForward
from services.worker.engine.gpu_attention import EXACT_KERNELS, KERNELS, captured_attention, gpu_attention, way_of
from services.worker.engine.gpu_room import RunnerOf
from services.worker.engine.latent_attention import LatentAttention
from services.worker.engine.model_faults import in_one_line, is_of_the_machine, refusing
from services.worker.engine.model_loading import (
    eos_token_ids,
    expected_windows,
    load_config,
    max_context_tokens,
    model_bytes_of,
    own_context,
)
from services.worker.engine.own_attention import OwnAttention, own_forward, unsteppable
from services.worker.engine.packed_experts import pack_experts
from services.worker.engine.packed_linear import conversion, pack_linears
from services.worker.engine.paged_step import AttentionBackend, PagedStep
from services.worker.engine.planed_step import PlanedStep
from services.worker.engine.probe import LayoutProbe, Verification
from services.worker.engine.quantised.codes import detach_all
from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import choose_unread
from services.worker.engine.seen_shape import seen_shape
from services.worker.engine.shared_prefixes import MEMBERS
from services.worker.engine.states.captured import SlottedSteps
from services.worker.engine.states.layers import StateModule, carrying
from services.worker.engine.states.page_sizes import PAGE_TOKENS
from services.worker.engine.states.running import NoSlots, RunningSlots, StateSlots, slots_over
from services.worker.engine.states.step import Slotted, StateStep, slot_memory
from services.worker.engine.unread_tokens import Following, UnreadTokens, send_home
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import TORCH_DTYPES, DevicePool
from services.worker.kv.planes import PlaneMap, latent_ranks, rounded_map
from services.worker.kv.settled import settle
from services.worker.native.build import announce_missing
from services.worker.proving.parts import AHEAD, FUSED, IPC
from services.worker.proving.shape import expected_shape
from services.worker.proving.table import ProofTable, ServedShape
from shared import logs, progress
from shared.errors import ConfigError, UnsupportedModel
from shared.messages.pools import KvDtype, KvGeometry

_SMALL_MODEL_PARAMETERS = 200_000_000

WARMED_CONTEXT = 1024
"""Tokens of context behind which a decode step on a GPU splits its keys among programs (``key_splits.SPLIT_KEYS``)."""

STATE_COPIES = 5
"""Copies of a module's states that a decode step holds at once."""

Prove = Callable[[ServedShape], ProofTable]
"""Proves what a worker uses of CUDA (``services.worker.proving.device.prove_device``)."""

NOTHING_TO_PROVE = ProofTable()
"""For CPUs, and for measurements of a chosen way: the best ways serve, unproven."""

_log = logs.get_logger("worker.engine")

PoolSizer = Callable[[Any, PlaneMap, int, RunnerOf], int]
"""Pages of the device pool of a model, given its plane map, its longest context and how it is run over a pool; the
model is not changed.
"""


class ModelRunner:
    """A loaded model with its pool. Not thread-safe: one step at a time."""

    def __init__(
        self,
        model: Any,
        pool: DevicePool,
        *,
        vocab_size: int,
        context: int = 0,
        model_bytes: int | None = None,
        fused: StepForward | None = None,
        operators: Any = None,
        attention: str = "auto",
        proofs: ProofTable = NOTHING_TO_PROVE,
        states: Sequence[Slotted] = (),
    ) -> None:
        """Compute by ``model``, or by ``fused``, which computes the same over the same pool.

        ``context`` is the longest one served, in tokens; 0 is the model's own. ``model_bytes`` counts all weights, if
        ``model`` lacks some by now. ``operators`` keeps torch's replaced ones alive in exact mode
        (:func:`~services.worker.engine.exactness.replaced_operators`). ``attention`` names a backend on a GPU, and
        ``proofs`` say which ways serve there, among them the backend for ``auto``. ``states`` are modules of ``model``
        that carry states, see :func:`~services.worker.engine.states.layers.find_state_modules`.
        """
        self._model = model
        self._fused = fused
        self._operators = operators
        self._kernels = KERNELS if operators is None else EXACT_KERNELS
        self._backend: AttentionBackend = (
            cpu_attention(pool, model.dtype)
            if pool.device.type == "cpu"
            else gpu_attention(pool, way_of(attention, proofs), self._kernels)
        )
        self._graphs: DecodeGraphs | None = None
        self.proofs = proofs
        self.pool = pool
        refusal = "its layers carry states" if states else ""
        if isinstance(fused, OwnAttention):
            refusal = "it attends by code of its own"
        self.adapters = Adapters(model, pool.device, are_fused=isinstance(fused, FusedForward), refusal=refusal)
        self.max_context = max_context_tokens(model.config, context)
        self.vocab_size = vocab_size
        self.model_bytes = model_bytes_of(model) if model_bytes is None else model_bytes
        self.eos_token_ids = eos_token_ids(model)
        self.states = tuple(states)
        if isinstance(fused, OwnAttention):
            self._slots = fused.slots
        else:
            self._slots = slot_memory(states, pool.pages, pool.device) if states else None

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        dtype: str,
        device: str,
        page_size: int,
        device_kv_bytes: int | None,
        pages: int | None,
        threads: int,
        shm_prefix: str,
        forward: ForwardPath = "auto",
        sizer: PoolSizer | None = None,
        context_tokens: int = 0,
        exact: bool = False,
        attention: str = "auto",
        prove: Prove | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> ModelRunner:
        """Load a checkpoint and prove that it can be served exactly.

        Pages have ``page_size`` tokens, or where it is 0 a number that suits the model. The pool has ``pages`` pages if
        given, else as many as fit in ``device_kv_bytes``, else as many as ``sizer`` returns once the weights are
        loaded. ``threads`` is for the CPU; 0 leaves torch's default. ``context_tokens`` bounds the context; 0 leaves
        the model's own. ``exact`` is for GPUs (:mod:`~services.worker.engine.exactness`). ``prove`` is called on a GPU,
        before weights are on it, and returns which ways serve there. ``kv_dtype`` is that of K and V in pages. Raises
        UnsupportedModel with the reason, ConfigError for bad settings, DeviceUnproven.
        """
        if page_size < 0 or (pages is None and device_kv_bytes is None and sizer is None):
            raise ConfigError("the device pool needs a page size and a number of pages or bytes")
        if threads > 0:
            torch.set_num_threads(threads)
        config = load_config(model_dir)
        context = max_context_tokens(config, context_tokens)
        longest = own_context(config) or context
        windows = expected_windows(config)
        shape, proofs = None, NOTHING_TO_PROVE
        if prove is not None and torch.device(device).type == "cuda":
            # A checkpoint that does not say its type is proven again when it is loaded.
            kind = TORCH_DTYPES.get(dtype) or getattr(config, "dtype", None) or torch.bfloat16
            shape = expected_shape(
                config,
                windows,
                chunks=expected_chunks(config),
                dtype=kind,
                page_size=page_size or PAGE_TOKENS,
                device=device,
                kv_dtype=kv_dtype,
            )
            proofs = prove(shape)
        found = find_model(
            model_dir,
            config,
            windows,
            dtype=dtype,
            device=device,
            context=context,
            page_size=page_size,
            keeps_codes=device == "cpu" and forward != "portable",
        )
        model, planes = found.model, kept_planes(found, kv_dtype)
        geometry = planes.geometry
        operators = replaced_operators("CUDA") if exact else None
        check_device(planes, device, is_exact=exact)
        if shape is not None and prove is not None and (seen := _seen(shape, found, planes)) != shape:
            proofs = prove(seen)
        if forward == "fused" and not planes.is_identity:
            raise ConfigError(f"--forward fused: it reads no {planes.contents}")
        if exact or proofs.way(FUSED) == "separate" or not planes.is_identity:
            # Kernels of the fused forward are not among those that exact mode knows, and know no plane map.
            forward = "portable"
        with refusing(config.model_type, "probed"):
            merged = merge(model, windows, context, forward)
        make = partial(cls, model, operators=operators, attention=attention, proofs=proofs)
        count = pages_of(
            model,
            planes,
            longest,
            lambda pool: make(
                pool,
                vocab_size=0,
                fused=own_forward(model, pool, found.states, model_bytes=found.model_bytes),
                states=found.states,
            ),
            pages=pages,
            device_kv_bytes=device_kv_bytes,
            sizer=sizer,
        )
        pool = DevicePool.create(
            geometry,
            count,
            device=device,
            shm_prefix=shm_prefix,
            is_exported=proofs.way(IPC) != "none",
            planes=planes,
        )
        try:
            with refusing(config.model_type, "verified"):
                with progress.phase("computing the expected logits"):
                    tokens = probe_tokens(model, count, geometry.page_size, longest, has_states=bool(found.states))
                    verification = Verification(model, tokens, windows, found.attention, is_rounded=geometry.is_rounded)
                fused = fuse(model, windows, pool, forward, merged)
                if fused is None and pool.device.type == "cpu":
                    pack_layers(model)
                if found.attends_itself:
                    fused = OwnAttention(model, pool, found.states, model_bytes=found.model_bytes)
                runner = make(
                    pool,
                    vocab_size=verification.vocab_size,
                    context=context,
                    model_bytes=found.model_bytes,
                    fused=fused,
                    states=found.states,
                )
                with progress.phase("verifying the model"):
                    runner.verify(verification, may_fall_back=merged is not None and forward == "auto")
                if exact:
                    prove_exact(runner.forward, pool, runner.vocab_size, runner.max_context)
        except BaseException:
            pool.close()
            raise
        return runner

    def verify(self, verification: Verification, *, may_fall_back: bool) -> None:
        """Prove that this runner gives the logits expected; overwrites pages of the pool.

        Raises UnsupportedModel when it does not. Where it ``may_fall_back``, a fused forward that fails or computes
        something else is given up, which heartbeats report, and the portable path is proven instead.
        """
        pages, page_size = self.pool.pages, self.geometry.page_size
        try:
            verification.check(self.forward, pages=pages, page_size=page_size)
        except Exception as error:
            if not may_fall_back or is_of_the_machine(error):
                raise
            self._fused = None
            self.adapters.are_fused = False
            verification.check(self.forward, pages=pages, page_size=page_size)
            announce_missing("the fused forward", in_one_line(error))

    @property
    def geometry(self) -> KvGeometry:
        """Sizes of the device pool's pages and planes."""
        return self.pool.geometry

    @property
    def _device(self) -> torch.device:
        return self.pool.device

    @property
    def mixes_adapters(self) -> bool:
        """Whether the base model's rows get the same bits beside rows of adapters as without them."""
        return self._graphs is None and (self._fused is None or isinstance(self._fused, FusedForward))

    @property
    def is_exact(self) -> bool:
        """Whether a row has the same bits in any step."""
        return self._operators is not None

    @property
    def state_slots(self) -> StateSlots:
        """New slots for layer states within pages; each thread that computes requests has one object of its own."""
        return NoSlots() if self._slots is None else RunningSlots(self.geometry.page_size, len(self._slots) - 1)

    @property
    def slots(self) -> torch.Tensor | None:
        """States within pages, uint8 [slots + 1, nbytes], the last of padding; None for a model without states."""
        return self._slots

    @property
    def slot_bytes(self) -> int:
        """Bytes that each slot takes on the device, with what a step holds of it besides; 0 without states.

        A module with states has them gathered and copied, leaves new ones, and has these packed.
        """
        if self._slots is None:
            return 0
        return self._slots.shape[1] + STATE_COPIES * max(each.nbytes for each in self.states)

    @property
    def slotted_steps(self) -> SlottedSteps | None:
        """The slots around captured steps; None for a model without states."""
        modules = [each for each in self.states if isinstance(each, StateModule)]
        return None if self._slots is None else SlottedSteps(modules, self.pool, self._slots)

    @property
    def attends_itself(self) -> bool:
        """Whether attention is the model's own: then steps other than :meth:`forward` raise UnsupportedModel."""
        return isinstance(self._fused, OwnAttention)

    @property
    def lookup_obstacle(self) -> str:
        """Why prompt lookup cannot propose tokens here; "" where it can. See ``compute.Runner``."""
        if self._device.type != "cpu":
            return "on a GPU steps are launched before tokens are read, and captured with one row a request"
        if not self.pool.planes.is_identity or self.attends_itself:
            return "proposed rows have the bits of others only where all layers keep K and V and attend by our code"
        if routes_tokens(self._model.config):
            return "experts round by how many rows they get, so proposals could change tokens"
        return ""

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend over the pool, for steps other than those of :meth:`paged_step`."""
        if self.attends_itself:
            raise unsteppable(self._model)
        return self._backend

    @property
    def model(self) -> Any:
        """The Hugging Face model, for code that reads its modules."""
        return self._model

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one step: write the KV of T tokens to their slots and return logits of R of them.

        ids and positions int64 [T], last_rows int64 [R] (row numbers in the batch, R may be 0); the result is float32
        [R, vocab]. Raises whatever the step's gate raises; pages of the step are then undefined.

        On a GPU rows of a LoRA adapter take the model's own modules, and so do all others of their step.
        """
        adapted = self.adapters.rows_of(meta.segments)
        if adapted and isinstance(self._fused, FusedForward):
            return self._fused.paged(ids, positions, meta, self._backend, last_rows, adapted)
        if adapted:
            with adapting(adapted):
                return self._run_modules(ids, positions, self.paged_step(meta), last_rows)
        if self._graphs is not None:
            logits = self._graphs.replay(ids, positions, meta, last_rows)
            if logits is not None:
                return logits
        if self._fused is not None:
            return self._fused.paged(ids, positions, meta, self._backend, last_rows)
        return self.ordinary(ids, positions, meta, last_rows)

    @torch.inference_mode()
    def ordinary(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute :meth:`forward` over the pool, launched kernel by kernel."""
        with nullcontext() if self._slots is None else carrying(StateStep(meta, self.pool, self._slots)):
            return self.run(ids, positions, self.paged_step(meta), last_rows)

    @property
    def launcher(self) -> ModelRunner | None:
        """The runner itself, where it has captured steps and launching ahead was proven; else None."""
        is_proven = self.proofs.way(AHEAD, "ahead") == "ahead"
        return self if self._graphs is not None and is_proven else None

    @torch.inference_mode()
    def launch(
        self, ids: torch.Tensor | Following, positions: torch.Tensor, meta: ForwardMeta, rows: Sequence[SampleRow]
    ) -> UnreadTokens:
        """Launch a step whose rows each get a token, and return the tokens, unread; see ``compute.Launcher``."""
        given = ids.ids() if isinstance(ids, Following) else ids
        logits = self.forward(given, positions, meta, torch.arange(len(rows)))
        return send_home(choose_unread(logits, rows))

    def settle(self) -> None:
        """Return when everything that steps have written so far is in the pool, for any stream and any process."""
        settle(self._device)

    def paged_step(self, meta: ForwardMeta) -> AttentionStep:
        """Return attention over the pool for one step."""
        kind = PagedStep if self.pool.planes.is_identity else PlanedStep
        return kind(meta, self.pool, self._backend)

    @torch.inference_mode()
    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute :meth:`forward` with any attention. Errors of ``step`` are raised, and may end a pass early."""
        if self._fused is not None:
            return self._fused.stepped(ids, positions, step, last_rows)
        return self._run_modules(ids, positions, step, last_rows)

    def _run_modules(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        ids, positions, last_rows = on_device((ids, positions, last_rows), self._device)
        with attending(step):
            output = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last_rows
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def warm_up(self) -> None:
        """Warm up, see :func:`warm_up`. Raises UnsupportedModel for errors of the model."""
        with refusing(self._model.config.model_type, "warmed up"):
            warm_up(self)
            if self._device.type == "cuda" and not self.attends_itself:
                # Steps with other attention rotate keys in place, by another variant of a kernel.
                self.run(
                    torch.zeros(1, dtype=torch.int64),
                    torch.zeros(1, dtype=torch.int64),
                    LayoutProbe(),
                    torch.tensor([0]),
                )

    def capture_decode(self, most_rows: int) -> DecodeGraphs:
        """Have decode steps of up to ``most_rows`` requests run as CUDA graphs; for a runner on a GPU.

        Overwrites pages of the pool: call it before any request is admitted.
        """
        attention = captured_attention(self._backend, most_rows, longest_served(self))
        self._graphs = capture_decode(self, most_rows, self._kernels, attention)
        return self._graphs

    def attend_by(self, way: str) -> None:
        """Attend by another way from now on (``gpu_attention``). Graphs that were captured are given up."""
        self._graphs = None
        self._backend = gpu_attention(self.pool, way, self._kernels)

    def close(self) -> None:
        """Free the pool; the runner cannot be used afterwards."""
        self._graphs = self._operators = None
        self.pool.close()


def pack_layers(model: Any) -> None:
    """Pack linear layers and experts for oneDNN on a CPU. Codes of quantised layers are dropped."""
    detach_all(model)
    pack_experts(model)
    pack_linears(model)
    advice = conversion(model.dtype)
    if advice:
        _log.warning("dtype_is_converted", advice=advice)


def cpu_attention(pool: DevicePool, dtype: torch.dtype) -> AttentionBackend:
    """Return the attention backend on a CPU, for queries of ``dtype``."""
    if latent_ranks(pool.planes):
        return LatentAttention(pool, CpuAttention(pool, packs_single_rows=True), CpuAttention)
    return CpuAttention(pool, dtype=dtype)


def _seen(shape: ServedShape, found: FoundModel, planes: PlaneMap) -> ServedShape:
    """Return the shape as the model has it: other heads, latents, and sinks are not in the configuration."""
    if found.attends_itself:
        return msgspec.structs.replace(shape, geometry=planes.geometry)
    return seen_shape(shape, found.model, planes)


def kept_planes(found: FoundModel, kv_dtype: KvDtype) -> PlaneMap:
    """Return the plane map under ``kv_dtype``. Raises UnsupportedModel for a model whose KV is not rounded."""
    if kv_dtype == "auto":
        return found.planes
    if found.attends_itself:
        raise UnsupportedModel("--kv-dtype fp8: it attends by code of its own, which was not proven over rounded KV")
    return rounded_map(found.planes)


def pages_of(
    model: Any,
    planes: PlaneMap,
    context: int,
    runner_of: RunnerOf,
    *,
    pages: int | None,
    device_kv_bytes: int | None,
    sizer: PoolSizer | None,
) -> int:
    """Return the pages of the device pool: a number, or as many as fit in a size, or what ``sizer`` returns.

    The first that is given counts, in this order. ``context`` is the longest of the model, or the longest served of a
    model that names none.
    """
    if pages is not None:
        return pages
    if device_kv_bytes is not None or sizer is None:
        return (device_kv_bytes or 0) // planes.geometry.page_bytes
    return sizer(model, planes, context, runner_of)


class _Warmed(Protocol):
    """The part of a runner that :func:`warm_up` uses."""

    pool: DevicePool
    max_context: int

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor: ...


def warm_up(runner: _Warmed) -> None:
    """Run a prefill and a decode step, so that the first request pays for no lazy set-up.

    On a GPU decode steps of a long context follow, one alone and several that share it, whose kernels are others.

    Overwrites the pool's first pages: call it before any request is admitted.
    """
    page_size, pages = runner.pool.geometry.page_size, runner.pool.pages
    slots = slots_over(pages, runner.pool.device.type)
    room = min(runner.max_context, pages * page_size) - 1
    tokens = min(256, room)
    steps = [[(tokens, 0)], [(1, tokens)]]
    if runner.pool.device.type == "cuda":
        longer = 1, min(WARMED_CONTEXT, room)
        steps += [[longer], [longer] * MEMBERS]
    table = np.arange(pages, dtype=np.int32)
    for step in steps:
        total = sum(rows for rows, _ in step)
        if total > 0:
            # Where a tiny pool has fewer slots than a step has requests, they share some: no logits are read.
            segments = [
                Segment(rows, context, table, running=number % slots) for number, (rows, context) in enumerate(step)
            ]
            meta = ForwardMeta.build(segments, page_size, runner.pool.device)
            positions = torch.cat([torch.arange(context, context + rows) for rows, context in step])
            runner.forward(torch.zeros(total, dtype=torch.int64), positions, meta, torch.tensor([total - 1]))


def probe_tokens(model: Any, pages: int, page_size: int, context: int, *, has_states: bool = False) -> int:
    """Return the length of the two prompts that the model is verified with.

    It is 16 tokens, 64 where that costs little, and for layer states as many as show that they are carried into another
    page. Raises ConfigError when a pool of ``pages`` pages cannot hold them.
    """
    wanted = 64 if model.num_parameters() <= _SMALL_MODEL_PARAMETERS else 16
    if has_states:
        wanted = max(wanted, page_size + 16)
    tokens = min(wanted, context, pages // 2 * page_size)
    if tokens < 2:
        raise ConfigError(f"a device pool of {pages} pages is too small to serve anything")
    return tokens
