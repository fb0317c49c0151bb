"""The numbers that sampling draws, which are fixed for ever."""

from __future__ import annotations

from services.worker.engine.uniform import uniform

PINNED = {
    (0, 0): 0xE220A8397B1DCDAF >> 11,  # SplitMix64 seeded with 0 starts with this output (published test vector).
    (0, 7): 6949473567187669,
    (1, 0): 6753131800803418,
    (1, 1): 3354221761027669,
    (2, 0): 2289754527093698,
    (42, 0): 5369361458086087,
    (42, 3): 432577909219377,
    (42, 1000): 7602122488422961,
    (123456789, 12): 5233736117867371,
    (2147483648, 5): 1773010073202844,
    (9223372036854775808, 0): 3695532497387464,
    (18446744073709551615, 0): 5821841146422611,
    (-1, 2047): 1227832345824633,
    (11400714819323198485, 1): 6315957190297641,
}
"""By seed and position, times 2**53, as release 0.1.0 drew them."""


def test_numbers_are_those_of_the_first_release() -> None:
    """A request that is resumed under another release, or asked again with its seed, draws the same."""
    drawn = {(seed, position): uniform(seed, position) * 2**53 for seed, position in PINNED}

    assert drawn == PINNED


def test_a_seed_of_any_size_or_sign_is_one_modulo_2_to_the_64() -> None:
    """Seeds come from clients as any integer."""
    for seed in (0, 1, 42, 2**63):
        for position in (0, 9):
            assert uniform(seed - 2**64, position) == uniform(seed, position) == uniform(seed + 2**64, position)


def test_numbers_are_at_least_0_and_below_1() -> None:
    """Each is a multiple of 2**-53, so that none rounds to 1."""
    for seed in range(50):
        for position in range(50):
            number = uniform(seed, position)
            assert 0 <= number < 1, (seed, position)
            assert (number * 2**53).is_integer(), (seed, position)
