"""The supervisor with real, tiny processes: restarts, refusals, order of the shutdown, and no orphans."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import waiting
from thermocline.supervisor.child import Child, ChildSpec
from thermocline.supervisor.process_identity import start_time
from thermocline.supervisor.restarts import RestartPolicy
from thermocline.supervisor.supervisor import Death, Supervisor

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
POLICY = RestartPolicy(initial_delay_s=0.01, max_delay_s=0.05, window_s=600.0, max_restarts=3)

until = functools.partial(waiting.until, timeout_s=60.0)  # Interpreters start slowly on busy cores.

SLEEP = "import time; time.sleep(600)"
# Ready once the word is in the log; before that a signal would find the default handler.
IGNORE_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)


def spec(tmp_path: Path, name: str, code: str, *arguments: str, stage: int = 0) -> ChildSpec:
    """A child that runs Python ``code``."""
    return ChildSpec(
        name=name, argv=(sys.executable, "-c", code, *arguments), log=tmp_path / f"{name}.log", stage=stage
    )


async def test_what_dies_is_restarted(tmp_path: Path) -> None:
    """A killed child comes back under another pid, and the log of its first life is kept."""
    supervisor = Supervisor(POLICY, grace_s=20.0)
    await supervisor.start(spec(tmp_path, "a", "print('alive', flush=True)\n" + SLEEP))
    minded = supervisor.minded["a"]
    try:
        first = minded.child
        assert first is not None
        await until(lambda: "alive" in (tmp_path / "a.log").read_text())
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: minded.state == "running" and minded.child is not first)
        await until(lambda: (tmp_path / "a.log").read_text().count("alive") == 2)

        assert minded.restarts == 1
        assert supervisor.failure is None
    finally:
        await supervisor.stop()


async def test_a_refusal_is_not_restarted(tmp_path: Path) -> None:
    """Exit code 2 ends it at the first time."""
    supervisor = Supervisor(POLICY)
    await supervisor.start(spec(tmp_path, "a", "import sys; print('once'); sys.exit(2)"))

    failure = await asyncio.wait_for(supervisor.failed(), 60)
    await supervisor.stop()

    assert (failure.name, failure.refused) == ("a", True)
    assert (tmp_path / "a.log").read_text() == "once\n"


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    """After as many restarts as the policy allows there is an end."""
    supervisor = Supervisor(POLICY)
    await supervisor.start(spec(tmp_path, "a", "print('try'); raise SystemExit(1)"))

    failure = await asyncio.wait_for(supervisor.failed(), 60)
    await supervisor.stop()

    assert (failure.name, failure.refused) == ("a", False)
    assert (tmp_path / "a.log").read_text().count("try") == POLICY.max_restarts + 1


async def test_a_program_that_is_not_there_is_a_refusal(tmp_path: Path) -> None:
    """No restart will make it appear."""
    supervisor = Supervisor(POLICY)
    await supervisor.start(ChildSpec(name="a", argv=(str(tmp_path / "none"),), log=tmp_path / "a.log"))

    assert supervisor.failure is not None
    assert supervisor.failure.refused
    await supervisor.stop()


async def test_a_program_that_is_away_for_a_moment_is_run_again(tmp_path: Path) -> None:
    """An upgrade may replace the program of a child that dies meanwhile; the cell goes on."""
    program = tmp_path / "program"
    program.symlink_to("/bin/sleep")
    attempts: list[int] = []

    def put_back() -> None:
        attempts.append(minded.restarts)
        if len(attempts) == 2:
            program.symlink_to("/bin/sleep")

    supervisor = Supervisor(POLICY)
    await supervisor.start(ChildSpec(name="a", argv=(str(program), "600"), log=tmp_path / "a.log"))
    minded = supervisor.minded["a"]
    supervisor._on_change = put_back
    try:
        assert minded.child is not None
        program.unlink()
        os.kill(minded.child.pid, signal.SIGKILL)
        await until(lambda: minded.state == "running" and minded.restarts == 2)

        assert supervisor.failure is None
    finally:
        await supervisor.stop()


async def test_a_program_that_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    """The failure says why it could not be run."""
    program = tmp_path / "program"
    program.symlink_to("/bin/sleep")
    supervisor = Supervisor(POLICY)
    await supervisor.start(ChildSpec(name="a", argv=(str(program), "600"), log=tmp_path / "a.log"))
    child = supervisor.minded["a"].child
    assert child is not None
    program.unlink()
    os.kill(child.pid, signal.SIGKILL)

    failure = await asyncio.wait_for(supervisor.failed(), 60)
    await supervisor.stop()

    assert (failure.name, failure.refused) == ("a", False)
    assert "cannot be run" in failure.reason


async def test_stages_stop_one_after_another(tmp_path: Path) -> None:
    """A child of a later stage still runs when those of an earlier one have ended."""
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    open(sys.argv[1], 'a').write(sys.argv[2])\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    supervisor = Supervisor(POLICY, grace_s=30.0)
    order = tmp_path / "order"
    for name, stage in (("x", 2), ("y", 0), ("z", 1)):
        await supervisor.start(spec(tmp_path, name, code, str(order), name, stage=stage))
    await until(lambda: all("ready" in (tmp_path / f"{name}.log").read_text() for name in "xyz"))

    await supervisor.stop()

    assert order.read_text() == "yzx"
    assert {minded.state for minded in supervisor.minded.values()} == {"stopped"}


async def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    """After the grace period the whole process group goes."""
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print(child.pid, flush=True)\n" + IGNORE_SIGTERM
    )
    supervisor = Supervisor(POLICY, grace_s=0.1)
    await supervisor.start(spec(tmp_path, "a", code))
    await until(lambda: "deaf" in (tmp_path / "a.log").read_text())
    grandchild = int((tmp_path / "a.log").read_text().split()[0])

    await supervisor.stop()

    await until(lambda: start_time(grandchild) == 0)
    child = supervisor.minded["a"].child
    assert child is not None
    assert await child.wait() == -signal.SIGKILL


async def test_an_impatient_operator_need_not_wait(tmp_path: Path) -> None:
    """``hurry`` ends a shutdown that waits for a deaf child."""
    supervisor = Supervisor(POLICY, grace_s=600.0)
    await supervisor.start(spec(tmp_path, "a", IGNORE_SIGTERM))
    await until(lambda: "deaf" in (tmp_path / "a.log").read_text())
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: supervisor.minded["a"].state == "stopping")

    supervisor.hurry()
    await asyncio.wait_for(stopping, 60)

    assert supervisor.minded["a"].state == "stopped"


async def test_stopping_while_a_restart_is_pending(tmp_path: Path) -> None:
    """A child that waits for its restart is not started any more."""
    slow = RestartPolicy(initial_delay_s=600.0, max_delay_s=600.0)
    supervisor = Supervisor(slow)
    await supervisor.start(spec(tmp_path, "a", "print('once')"))
    await until(lambda: supervisor.minded["a"].state == "backing_off")

    await asyncio.wait_for(supervisor.stop(), 30)

    assert supervisor.minded["a"].state == "stopped"
    assert (tmp_path / "a.log").read_text() == "once\n"


async def test_changes_are_reported(tmp_path: Path) -> None:
    """Whoever writes the record hears of every start and death."""
    seen: list[str] = []
    supervisor = Supervisor(POLICY, on_change=lambda: seen.append(supervisor.minded["a"].state))
    await supervisor.start(spec(tmp_path, "a", SLEEP))
    child = supervisor.minded["a"].child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: seen.count("running") == 2)
    await supervisor.stop()

    assert seen == ["running", "backing_off", "running", "stopped"]


async def test_an_error_of_the_supervisor_itself_is_a_failure(tmp_path: Path) -> None:
    """The next death of that child would go unseen; its owner must not wait for ever."""

    def changed() -> None:
        if supervisor.minded["a"].state == "backing_off":
            raise OSError(28, "No space left on device")

    supervisor = Supervisor(POLICY, on_change=changed)
    await supervisor.start(spec(tmp_path, "a", SLEEP))
    child = supervisor.minded["a"].child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)

    failure = await asyncio.wait_for(supervisor.failed(), 60)
    await supervisor.stop()

    assert (failure.name, failure.refused) == ("a", False)
    assert "No space left on device" in failure.reason


async def test_a_child_is_restarted_on_demand(tmp_path: Path) -> None:
    """In order, by SIGTERM; a child that does not run is left alone."""
    supervisor = Supervisor(POLICY, grace_s=20.0)
    await supervisor.start(spec(tmp_path, "a", SLEEP))
    minded = supervisor.minded["a"]
    first = minded.child
    assert first is not None

    await supervisor.restart("a")
    await until(lambda: minded.state == "running" and minded.child is not first)
    await supervisor.stop()
    await supervisor.restart("a")

    assert await first.wait() == -signal.SIGTERM
    assert (minded.restarts, minded.state) == (1, "stopped")


# A supervisor with two children: it prints their pids and waits.
_SUPERVISOR = f"""
import asyncio, sys
from pathlib import Path
from shared import logs
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.supervisor import Death, Supervisor

logs.configure("supervisor", "test")

async def main():
    supervisor = Supervisor()
    for name in "ab":
        argv = (sys.executable, "-c", {SLEEP!r})
        await supervisor.start(ChildSpec(name=name, argv=argv, log=Path(sys.argv[1]) / name))
    print(*(minded.child.pid for minded in supervisor.minded.values()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    """The kernel ends the children of a supervisor that had no chance to."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert supervisor.stdout is not None
    try:
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 2
        assert all(start_time(pid) for pid in pids)
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()

    assert waiting.holds(lambda: not any(start_time(pid) for pid in pids))


async def test_deaths_are_told_with_their_exit_code_and_stops_are_not(tmp_path: Path) -> None:
    """Whoever started the supervisor can tell a crash from an end that was asked for."""
    told: list[Death] = []
    supervisor = Supervisor(POLICY, on_death=told.append)
    await supervisor.start(spec(tmp_path, "a", SLEEP))
    first = supervisor.minded["a"].child
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: supervisor.minded["a"].child is not first)
    await supervisor.stop()

    assert told == [Death("a", first.pid, -signal.SIGKILL)]


async def test_a_child_inherits_what_its_specification_lets_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside that it has variables of its own, whatever it inherits."""
    monkeypatch.setenv("THERMOCLINE_ADMIN_KEY", "secret")
    monkeypatch.setenv("OF_THE_MACHINE", "stays")
    code = "import os; print(*(name in os.environ for name in ('OF_THE_MACHINE', 'OWN', 'THERMOCLINE_ADMIN_KEY')))"
    child = replace(spec(tmp_path, "a", code), env={"OWN": "1"}, inherits=lambda name: name != "THERMOCLINE_ADMIN_KEY")

    await (await Child.spawn(child)).wait()

    assert child.log.read_text() == "True True False\n"
