"""Command lines: faults in one line, defaults in help, and names of earlier releases."""

from __future__ import annotations

import pytest

from shared.arguments import ArgumentParser, Secret, add_old_name, positive, whole_number, with_new_json


def a_parser() -> ArgumentParser:
    """A command with a flag of each kind."""
    made = ArgumentParser(prog="thermocline brew", description="First.\n\nSecond paragraph.")
    cups = made.add_argument("--cups", type=whole_number(10), required=True, metavar="N", help="cups to brew")
    add_old_name(made, "--mugs", cups)
    made.add_argument("--heat", type=positive, default=0.5, metavar="X", help="heat of the water-bath-and-kettle unit")
    made.add_argument("--sugar", type=int, default=0, metavar="N", help="lumps")
    made.add_argument("--kind", choices=("green", "black"), help="kind of tea")
    made.add_argument("--key", default=Secret("sesame"), metavar="KEY", help="key of the kitchen")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--cups 11", "--cups: '11' is not a whole number from 1 to 10"),
        ("--cups 1 --heat nan", "--heat: 'nan' is not a number above 0"),
        ("--cups 1 --sugar much", "--sugar: 'much' is not a whole number"),
        ("--cups 1 --kind blakc", "--kind: 'blakc' is none of green, black; did you mean black?"),
        (
            "--cups 1 --jsom --haet=3",
            "--jsom is not a flag; did you mean --json?; --haet is not a flag; did you mean --heat?",
        ),
        ("--cups 1 tea", "'tea' is one argument too many"),
        ("--cup 1", "the following arguments are required: --cups"),
    ],
)
def test_a_fault_is_one_line(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2 and where the flags are listed."""
    with pytest.raises(SystemExit) as ended:
        a_parser().parse_args(line.split())

    assert ended.value.code == 2
    assert capsys.readouterr().err == f"thermocline brew: {told} (thermocline brew --help lists the flags)\n"


def test_help_says_defaults_and_keeps_secrets_and_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a default of 0; an empty one and a switch have none to say."""
    monkeypatch.setenv("COLUMNS", "60")
    text = a_parser().format_help()

    assert text.startswith("usage: thermocline brew [flags] --cups N\n\nFirst.\n\nSecond paragraph.\n")
    assert "(default: 0)" in text
    assert "water-bath-and-kettle" in text  # Names are not broken at hyphens.
    assert "(default: 0.5)" in " ".join(text.split())
    assert "sesame" not in text
    assert "--mugs" not in text
    assert "False" not in text


def test_an_old_name_does_what_the_new_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the new one is required; a line says it."""
    parsed = a_parser().parse_args(["--mugs", "3"])

    assert (parsed.cups, parsed.key) == (3, "sesame")
    told = "thermocline brew: --mugs is called --cups now; the old name works until the next release\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("--json", "--json"),
        ("--json --rate 2", "--json --rate 2"),
        ("--rate 2 --json out.json", "--rate 2 --out out.json"),
        ("--json=out.json", "--out=out.json"),
    ],
)
def test_json_with_a_file_is_out(line: str, new: str) -> None:
    """As release 0.2 had it."""
    assert with_new_json(line.split(), "thermocline brew") == new.split()
