"""What counts as flat memory."""

from thermocline.chaos.memory_growth import LEAST_LIFE_S, MOST_GROWTH_BYTES, WARM_UP_S, growth

MIB = 2**20


def test_memory_that_grows_while_warming_up_and_stays_is_flat() -> None:
    """The first minute does not count."""
    found = growth([(float(second), int(min(second, WARM_UP_S)) * MIB + 100 * MIB) for second in range(600)])

    assert found is not None
    assert found.is_flat
    assert found.first_bytes == found.last_bytes == 160 * MIB
    assert abs(found.slope) < 1.0


def test_a_leak_is_found_whatever_the_noise() -> None:
    """By the medians of quarters, not by single samples."""
    found = growth([(second, 100 * MIB + second * MIB // 10 + (second % 7) * MIB) for second in range(600)])

    assert found is not None
    assert not found.is_flat
    assert found.last_bytes - found.first_bytes > MOST_GROWTH_BYTES
    assert 0.09 * MIB < found.slope < 0.11 * MIB


def test_nothing_is_said_of_a_short_life() -> None:
    """A process that was killed soon has no slope."""
    assert growth([(second, 100) for second in range(int(LEAST_LIFE_S) - 1)]) is None
    assert growth([]) is None
