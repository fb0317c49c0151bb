"""Completion in shells: what bash answers, what every script holds, and that making one needs no PyTorch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from thermocline.commands import COMMANDS
from thermocline.completion import SHELLS, main

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")

# What bash does when Tab is pressed behind "$@", printed a word a line.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
complete=$(complete -p thermocline)
name=$(sed -E 's/.* -F ([^ ]+) .*/\\1/' <<< "$complete")
"$name" thermocline "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, as the command prints it."""
    folder = tmp_path_factory.mktemp("completion")
    made = {}
    for shell in SHELLS:
        made[shell] = folder / f"thermocline.{shell}"
        with made[shell].open("w", encoding="utf-8") as script, redirect_stdout(script):
            assert main([shell]) == 0
    return made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ca", {"cache"}),
        ("", {command.name for command in COMMANDS}),
        ("cache ", {"ls", "stat", "divergences", "pin", "unpin", "prewarm", "flush", "verify"}),
        ("cache flush --tier ", {"device", "host", "disk", "remote"}),
        ("load --time", {"--time-scale", "--timeout-s"}),
        ("worker --device ", {"auto", "cpu", "cuda"}),
        ("top --view w", {"workers"}),
    ],
)
def test_bash_completes_commands_verbs_flags_and_choices(line: str, words: set[str], scripts: dict[str, Path]) -> None:
    """As it does when Tab is pressed behind the line."""
    typed = ["thermocline", *line.split(" ")]
    command = ["bash", "-c", COMPLETE, "bash", str(scripts["bash"]), *typed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr == ""
    assert set(done.stdout.split()) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_holds_every_command_and_no_old_name(shell: str, scripts: dict[str, Path]) -> None:
    """With flags and choices; where the shell is installed, it reads the script."""
    text = scripts[shell].read_text(encoding="utf-8")

    assert [each.name for each in COMMANDS if not re.search(rf"\b{each.name}\b", text)] == []
    assert "time-scale" in text
    assert "divergences" in text
    assert "base-url" not in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(scripts[shell])], timeout=60, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed here")
def test_fish_completes_choices(scripts: dict[str, Path]) -> None:
    """Of a verb's flag."""
    asked = f"source {scripts['fish']}; complete -C 'thermocline cache flush --tier '"
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=60, check=True)

    assert {line.split("\t")[0] for line in done.stdout.splitlines()} >= {"device", "host", "disk", "remote"}


def test_a_script_is_made_without_pytorch() -> None:
    """It is imported by no command's flags, so making a script takes as long as other imports do."""
    code = "import sys; from thermocline.completion import whole_line; whole_line(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout == "False\n"


def test_the_page_says_how_to_install_it_in_each_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands that the help shows, too."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())

    commands = re.findall(r"^thermocline completion (\w+) > (\S+)$", PAGE, re.MULTILINE)
    assert [shell for shell, _ in commands] == list(SHELLS)
    for shell, path in commands:
        assert f"thermocline completion {shell} > {path}" in shown
