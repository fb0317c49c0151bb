"""The command table: what is listed exists, and a wrong name gets a hint."""

import os
import tempfile
from pathlib import Path

import pytest

from shared.memory.segment_name import process_start_time
from thermocline.__main__ import main
from thermocline.commands import COMMANDS, GROUPS, commands, usage
from thermocline.supervisor import local_cell
from thermocline.supervisor.records import CellRecord, write_record


def test_every_listed_command_can_be_loaded() -> None:
    """Whatever ``--help`` lists has a module with the named function."""
    for command in commands().values():
        assert callable(command.load()), command.name


@pytest.mark.parametrize(
    ("argv", "said"), [([], "usage: thermocline COMMAND"), (["docter"], "did you mean thermocline doctor?")]
)
def test_no_command_and_an_unknown_one_are_usage_errors(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage goes to stderr; for a typing error, what was probably meant."""
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_names_are_unique() -> None:
    """No two commands share a name."""
    names = [command.name for command in COMMANDS]

    assert len(names) == len(set(names))


def test_version_flag_and_command_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` and ``version`` print the same line."""
    assert main(["--version"]) == 0
    by_flag = capsys.readouterr().out

    assert main(["version"]) == 0
    assert capsys.readouterr().out == by_flag
    assert by_flag.startswith("thermocline ")


def test_usage_aligns_the_summaries() -> None:
    """Summaries start in one column."""
    text = usage().splitlines()

    places = {line.index(each.summary) for each in commands().values() for line in text if f"  {each.name} " in line}
    assert len(places) == 1
    assert max(map(len, text)) <= 80


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` succeeds; each group has a heading, and its commands follow in its order, one a line."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out.splitlines()

    for title, group in GROUPS.items():
        first = text.index(f"{title}:") + 1
        assert [line.split()[0] for line in text[first : first + len(group)]] == [each.name for each in group]


def test_an_old_name_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line that says the new one, and without a place in the help."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])

    printed = capsys.readouterr()
    assert printed.out.startswith("usage: thermocline load")
    assert printed.err == "thermocline: bench is called load now; the old name works until the next release\n"
    assert "bench" not in usage()


@pytest.mark.parametrize("name", ["up", "demo", "worker", "load"])
def test_another_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Before anything is imported that such a system lacks; the version can be asked anywhere."""
    monkeypatch.setattr("sys.platform", "darwin")

    assert main([name]) == 2
    assert "Thermocline runs on Linux only" in capsys.readouterr().err
    assert main(["version"]) == 0


@pytest.fixture
def two_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells that run on this machine, and no broker in the environment."""
    started = process_start_time(os.getpid())
    assert started is not None
    for name in ("one", "two"):
        cell = CellRecord(
            owner_pid=os.getpid(),
            owner_started=started,
            base_url=f"http://{name}",
            nats_url=f"nats://{name}:4222",
            data_dir=f"/data/{name}",
            data_dir_is_temporary=True,
            shm_prefix=name,
        )
        write_record(cell, (tmp_path / f"{name}.json",))
    monkeypatch.setattr(local_cell, "runs_dir", lambda: tmp_path)
    for variable in local_cell._VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("two_cells")
@pytest.mark.parametrize("verb", [["pin", "--prompt", "text"], ["unpin", "name"]])
def test_an_address_chooses_among_several_cells(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that has a gateway's address asks no broker; without one it must be told."""
    assert main(["cache", *verb, "--url", "http://127.0.0.1:9"]) == 1
    assert "the gateway at http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err

    assert main(["cache", *verb]) == 2
    assert "several cells run here" in capsys.readouterr().err


def test_a_folder_of_records_that_others_can_write_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that looks for a cell ends with a line."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"thermocline-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)

    assert main(["record", "--out", str(tmp_path / "out")]) == 2
    assert f"{folder}: other users can write to it" in capsys.readouterr().err


@pytest.mark.usefixtures("two_cells")
@pytest.mark.parametrize(
    ("argv", "says"),
    [(["cache"], "VERB"), (["cache", "nope"], "'nope' is none of"), (["cache", "pin"], "--tokens-file"),
     (["record"], "--out"), (["skip-input", "x"], "SEQ")],
)  # fmt: skip
def test_a_usage_error_comes_before_the_choice_of_a_cell(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not depend on what runs here."""
    with pytest.raises(SystemExit) as ended:
        main(argv)

    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in told
    assert "several cells" not in told
