"""Expressions over clock, frequency and length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.cache.heat import parse
from shared.errors import ConfigError

VALUES = {"clock": 6, "frequency": 5, "length": 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("frequency", 5),
        ("freq*clock", 30),
        ("frequency + clock / length", 6.5),
        ("clock/length+frequency", 6.5),
        ("clock + frequency * length", 26),
        ("clock * frequency + length", 34),
        ("clock / frequency / length", 0.3),
        ("clock / frequency * length", 4.8),
        ("length + length + length", 12),
        ("  clock\t+frequency ", 11),
    ],
)
def test_products_bind_before_sums_and_equals_from_the_left(text: str, value: float) -> None:
    """The value is what arithmetic says, wherever the spaces are."""
    assert parse(text)(**VALUES) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("frequency + age", 13, "'age' is none of clock"),
        ("frequency - clock", 11, "'-' is none of the operators"),
        ("frequency clock", 11, "'clock' is none of the operators"),
        ("frequency + / clock", 13, "'/' is none of clock"),
        ("frequency +", 12, "missing after '+'"),
        ("clock + clock + clock + clock", 25, "at most 3 terms"),
        ("(clock)", 1, "'(' is none of clock"),
        ("2 * clock", 1, "'2' is none of clock"),
        ("__import__('os')", 1, "'__import__' is none of clock"),
        ("clock ** length", 8, "'*' is none of clock"),
        ("clock // length", 8, "'/' is none of clock"),
        ("Clock", 1, "'Clock' is none of clock"),
    ],
)
def test_a_bad_text_is_refused_with_the_place_of_its_fault(text: str, column: int, what: str) -> None:
    """The error says what is wrong and at which column."""
    with pytest.raises(ConfigError) as caught:
        parse(text)

    assert f"column {column}: " in caught.value.message
    assert what in caught.value.message


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_text_is_refused(text: str) -> None:
    """There is nothing to point at, so the error shows an example."""
    with pytest.raises(ConfigError, match="empty"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["clock / length", "frequency / length", "frequency / clock", "clock / length / clock"]
)
def test_a_divisor_of_zero_counts_as_one(text: str) -> None:
    """No division fails, and nothing becomes hotter than with a divisor of one."""
    dividend = 0.0 if text.startswith("clock") else 9.0

    assert parse(text)(clock=0, frequency=9, length=0) == dividend


names = st.sampled_from(["clock", "frequency", "freq", "length"])
counts = st.integers(1, 10**9)


@given(st.lists(names, min_size=1, max_size=3), st.lists(st.sampled_from("+*/"), min_size=2, max_size=2), *[counts] * 3)
def test_every_expression_means_what_python_reads_in_it(
    terms: list[str], operators: list[str], clock: int, frequency: int, length: int
) -> None:
    """Against Python's own arithmetic over the same text."""
    text = terms[0] + "".join(f" {op} {term}" for op, term in zip(operators, terms[1:], strict=False))
    known = {"clock": clock, "frequency": frequency, "freq": frequency, "length": length}
    expected = eval(text, {"__builtins__": {}}, known)

    assert parse(text)(clock=clock, frequency=frequency, length=length) == pytest.approx(expected, rel=1e-12)


@given(st.text(max_size=200) | st.text("clockfreqlength +*/", max_size=40))
def test_no_text_does_worse_than_a_typed_error(text: str) -> None:
    """Whatever is typed is an expression or a ConfigError with a message of bounded length."""
    message = ""
    try:
        parse(text)
    except ConfigError as fault:
        message = fault.message

    assert len(message) < 1000
