"""The command table: what is listed exists, and a wrong name gets a hint."""

import pytest

from thermocline.__main__ import COMMANDS, Command, commands, main, usage


def test_every_listed_command_can_be_loaded() -> None:
    """Whatever ``--help`` lists has a module with the named function."""
    for command in commands().values():
        if command.target.startswith("services.worker"):
            continue  # It imports torch; the integration tests start it.

        assert callable(command.load()), command.name


def test_help_has_one_line_per_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` succeeds and names every command with its summary."""
    code = main(["--help"])

    out = capsys.readouterr().out
    assert code == 0
    for command in commands().values():
        assert f"  {command.name} " in out
        assert command.summary in out


def test_no_command_prints_the_usage_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty command line is a usage error."""
    code = main([])

    assert code == 2
    assert "usage: thermocline COMMAND" in capsys.readouterr().err


def test_an_unknown_command_suggests_a_close_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error exits with 2 and says what was probably meant."""
    code = main(["docter"])

    assert code == 2
    assert "did you mean `thermocline doctor`?" in capsys.readouterr().err


def test_a_command_without_a_module_is_not_listed() -> None:
    """A command exists only if its module does, however deep the missing part lies."""
    missing = [
        Command("a", "thermocline.no_such_module:main", ""),
        Command("b", "thermocline.no_such_package.deeper:main", ""),
    ]

    assert [command.exists for command in missing] == [False, False]


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
    text = usage([Command("up", "x:y", "first"), Command("scheduler", "x:y", "second")])

    lines = [line for line in text.splitlines() if line.endswith(("first", "second"))]
    assert lines[0].index("first") == lines[1].index("second")


@pytest.mark.parametrize("name", ["up", "demo", "worker", "bench"])
def test_another_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Before anything is imported that such a system lacks; the version can be asked anywhere."""
    monkeypatch.setattr("sys.platform", "darwin")

    assert main([name]) == 2
    assert "Thermocline runs on Linux only" in capsys.readouterr().err
    assert main(["version"]) == 0
