"""Nodes with networks and /dev/shm of their own lend across links that are slow, cut, or end in a dead process.

Whatever happens to a loan, its request is answered with the tokens that it has without: faults cost hits alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from bench.node_networks import DEVICE, NodeNetworks, why_not
from services.storage.sharing.parts import is_installed
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.integration.engine_process import NBYTES
from tests.integration.machines import Machines, running_machines
from tests.nats_server import NatsServer
from tests.reference import Reference
from thermocline.client import Answer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_installed(), reason="NIXL has no wheel for this platform"),
]

DOCUMENT_TOKENS = 1024
"""786,432 bytes of KV."""
ANSWER_TOKENS = 8
SLOW_BITS_PER_S = 500_000
FETCH_DEADLINE_MS = 8_000
"""By then a read whose link was cut is given up; on a link that is only slow a document takes longer."""
BEGUN_BYTES = 64 * 1024
"""Of data, which says that a read is under way: to make a connection takes less."""


@pytest.fixture
def networks() -> Iterator[NodeNetworks]:
    """Three nodes."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with NodeNetworks(("a", "b", "c")) as made:
        yield made


class Documents:
    """Documents, and questions about them whose answers rounding cannot change."""

    def __init__(self, reference: Reference, seed: int) -> None:
        self._rng = random.Random(seed)
        self._reference = reference
        self.all = [self._tokens(DOCUMENT_TOKENS) for _ in range(4)]

    def question(self, document: int) -> list[int]:
        def ask() -> list[int]:
            return [*self.all[document], *self._tokens(9)]

        return self._reference.decided(ask, ANSWER_TOKENS, ignore_eos=True)

    def answer(self, prompt: list[int]) -> list[int]:
        return self._reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


class Apart:
    """A cell whose node *a* has the documents in host memory and no worker, and whose node *b* has none of them."""

    def __init__(self, machines: Machines, networks: NodeNetworks, documents: Documents) -> None:
        self.machines, self.networks, self.documents = machines, networks, documents

    async def ask(self, document: int) -> tuple[Answer, bool]:
        """An answer about a document, and whether it is right."""
        prompt = self.documents.question(document)
        (answer,) = await self.machines.ask(self.machines.body(prompt, ANSWER_TOKENS))
        return answer, answer.token_ids == self.documents.answer(prompt)

    async def ask_slowly(self, document: int, reader: str) -> asyncio.Task[tuple[Answer, bool]]:
        """Begin to ask; when this returns, a read from another node is under way, and far from over."""
        self.networks.slow(reader, SLOW_BITS_PER_S)
        before = self.networks.received_bytes(reader)
        asking = asyncio.create_task(self.ask(document))
        async with asyncio.timeout(60):
            while self.networks.received_bytes(reader) < before + BEGUN_BYTES:
                assert not asking.done(), asking.result()
                await asyncio.sleep(0.01)
        return asking

    async def lent(self) -> int:
        """Tokens that one node has had from another, when nothing moves. Pages are neither lost nor doubled."""
        return (await self.machines.settle(1)).counters.get("fetched_tokens_lent", 0)

    async def read_by(self, name: str) -> None:
        """Start a node; from now on its worker alone answers."""
        node = self.machines.nodes[name]
        await self.machines.start_storage(node)
        await self.machines.start_worker(node)
        await self.machines.until(lambda cell: f"worker-{name}" in [worker.worker_id for worker in cell.workers])
        await self.machines.until(lambda cell: f"storage-{name}" in [pool.owner for pool in cell.pools])

    async def end_worker(self, name: str, left: list[str]) -> None:
        os.kill(self.machines.nodes[name]["worker"].pid, signal.SIGKILL)
        await self.machines.give_up("worker", f"worker-{name}")
        await self.machines.until(lambda cell: [worker.worker_id for worker in cell.workers] == left)

    def kill_storage(self, name: str) -> None:
        os.kill(self.machines.nodes[name]["storage"].pid, signal.SIGKILL)


@asynccontextmanager
async def apart(networks: NodeNetworks, checkpoints: Checkpoints, folder: Path, seed: int) -> AsyncIterator[Apart]:
    """Node *a* has computed all documents and lost its worker; *b* has joined."""
    model, reference = checkpoints["llama"]
    documents = Documents(reference, seed)
    with NatsServer(folder / "nats", host=networks.address) as server:
        async with running_machines(
            (server.url,),
            model,
            folder,
            has_disks=False,
            storage={"share": "nixl"},
            names=("a", "b", "c"),
            networks=networks,
            fetch_deadline_ms=FETCH_DEADLINE_MS,
        ) as machines:
            made = Apart(machines, networks, documents)
            await made.read_by("a")
            await machines.ready(1)
            for number in range(len(documents.all)):
                assert (await made.ask(number))[1]
            await machines.settle(1)
            await made.read_by("b")
            await made.end_worker("a", ["worker-b"])
            yield made


@contextmanager
def engine_on(networks: NodeNetworks, name: str, *arguments: str) -> Iterator[Callable[[str], list[str]]]:
    """A process with an engine on a node; what it says to an order, "" being none."""
    command = [*networks.command(name), sys.executable, "-m", "tests.integration.engine_process", *arguments]
    environment = os.environ | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
    with subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def say(order: str) -> list[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            if order:
                print(order, file=process.stdin, flush=True)
            said = process.stdout.readline().split()
            assert said, f"the engine on node {name} ended with {process.wait()}; its reason is on the standard error"
            return said

        try:
            yield say
        finally:
            process.kill()


def test_a_command_on_a_node_runs_in_this_process_folder(
    networks: NodeNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    said = subprocess.run([*networks.command("a"), "pwd"], capture_output=True, text=True, check=True).stdout

    assert said == f"{tmp_path}\n"


def test_what_is_late_on_a_cut_link_arrives_when_it_is_mended(networks: NodeNetworks) -> None:
    """Nobody may use its memory before, and the engine says when; then the same peers go on."""
    whole = str(NBYTES)
    with engine_on(networks, "a", "lend") as lender, engine_on(networks, "b", "read", *lender("")) as reader:
        first = reader("read 60")
        networks.slow("b", SLOW_BITS_PER_S)
        late = reader("read 0.5")
        networks.cut("b")
        networks.mend("b")
        networks.quicken("b")
        over = reader("wait")
        again = reader("read 60")

    assert first == ["done", whole]
    assert late[0] == "late"
    assert int(late[1]) < NBYTES
    assert over == again == ["done", whole]


def test_a_lender_that_is_killed_ends_its_reads(networks: NodeNetworks) -> None:
    """A late one is over then, and the next one fails at once."""
    with ExitStack() as ends:
        with engine_on(networks, "a", "lend") as lender:
            reader = ends.enter_context(engine_on(networks, "b", "read", *lender("")))
            first = reader("read 60")
            networks.slow("b", SLOW_BITS_PER_S)
            late = reader("read 0.5")
        over = reader("wait")
        after = reader("read 60")

    assert first[0] == "done"
    assert late[0] == "late"
    assert over[0] == "done"  # With whatever the lender's kernel still sent.
    assert after[0] == "failed"


async def test_links_that_are_slow_or_cut_cost_hits_alone(
    networks: NodeNetworks, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """A document crosses from one network to another; of one whose link is cut on the way the rest is computed, and
    what is asked later is answered as before.
    """
    async with apart(networks, checkpoints, tmp_path, seed=11) as cell:
        whole, is_whole_right = await cell.ask(0)
        lent_whole = await cell.lent()
        segments = [node.leftovers for node in cell.machines.nodes.values()]

        asking = await cell.ask_slowly(1, "b")
        networks.cut("b")
        cut, is_cut_right = await asking
        lent_cut = await cell.lent() - lent_whole

        networks.mend("b")
        networks.quicken("b")
        _, is_mended_right = await cell.ask(2)
        after = await cell.machines.settle(1)

    assert (is_whole_right, is_cut_right, is_mended_right) == (True, True, True)
    assert segments == [[], [], []]  # They lie in /dev/shm of the nodes, not of this process.
    assert whole.lent_tokens == lent_whole == DOCUMENT_TOKENS
    assert cut.cached_tokens == lent_cut < DOCUMENT_TOKENS
    # Whether the last is lent depends on how fast the scheduler thinks that the link is by now.
    whole_loans = after.counters["fetches_done"]
    assert after.counters["loans_started"] == whole_loans + 1
    assert after.counters["fetched_tokens_lent"] == whole_loans * DOCUMENT_TOKENS + lent_cut


async def test_readers_and_lenders_that_are_killed_cost_hits_alone(
    networks: NodeNetworks, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Of three nodes one is killed while it reads, and its lender lends to the third; then the lender is killed."""
    async with apart(networks, checkpoints, tmp_path, seed=12) as cell:
        asking = await cell.ask_slowly(0, "b")
        cell.kill_storage("b")
        await cell.machines.give_up("storage", "storage-b")
        reader_killed, is_first_right = await asking

        await cell.read_by("c")
        await cell.end_worker("b", ["worker-c"])
        before = await cell.lent()
        third, is_third_right = await cell.ask(1)
        lent = await cell.lent() - before

        asking = await cell.ask_slowly(2, "c")
        cell.kill_storage("a")
        lender_killed, is_last_right = await asking
        await cell.machines.give_up("storage", "storage-a")
        await cell.machines.settle(1)

    assert (is_first_right, is_third_right, is_last_right) == (True, True, True)
    assert reader_killed.cached_tokens == 0
    assert third.lent_tokens == lent == DOCUMENT_TOKENS
    assert lender_killed.cached_tokens < DOCUMENT_TOKENS
