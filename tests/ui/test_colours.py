"""Colours mean one thing each: none stands for two, and two can be told apart in either scheme."""

from __future__ import annotations

import itertools
import re

import pytest

from services.gateway.ui.pages import read_files

APART = 11.0
"""Least distance of two colours in CIE L*a*b*; about 2.3 can just be noticed."""

CHROME = {"ground", "panel", "raised", "line", "ink", "quiet", "accent", "on-accent", "mark", "good", "warn", "bad"}
"""Of texts, frames and states, which are said in words as well."""


def colours(scheme: str) -> dict[str, str]:
    """What each name of the theme stands for; a name that says that it is another's has none."""
    text = read_files()["theme.css"].body.decode()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", text)
    return {name: light if scheme == "light" else dark for name, light, dark in pairs}


def lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIE L*a*b*, white as D65."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_things_have_one_colour(scheme: str) -> None:
    """Sources of a prompt, parts of a time and hits are all told apart, also from one another."""
    fills = {name: lab(colour) for name, colour in colours(scheme).items() if name not in CHROME}
    near = {
        f"{one}, {other}": round(distance, 1)
        for one, other in itertools.combinations(fills, 2)
        if (distance := sum((a - b) ** 2 for a, b in zip(fills[one], fills[other], strict=True)) ** 0.5) < APART
    }

    assert len(fills) == 20
    assert near == {}


def test_every_fill_of_the_styles_is_a_colour_of_the_theme() -> None:
    """So none is written down twice."""
    files = read_files()
    style = files["style.css"].body.decode()

    assert [block for block in re.findall(r"\{([^{}]*)\}", style) if "#" in block] == []
    assert set(re.findall(r"var\(--([\w-]+)\)", style)) <= set(
        re.findall(r"--([\w-]+):", files["theme.css"].body.decode())
    )
