"""What the benchmark of the engine says that cannot be beaten."""

from typing import Any

from bench.engine_speed import better


def reading(read: float, onednn: float, fused: float) -> dict[str, Any]:
    products = {"qkv": {"shape": [512, 8, 16], "onednn": onednn, "fused": fused}}
    return {"read_gb_per_s": read, "reading_weights_ms": 100 / read, "gflop_per_s": products}


def test_a_limit_is_the_better_of_two_readings() -> None:
    """Each figure by itself: a core that was taken away in one reading was not slow in all of them."""
    found = better(reading(20.0, 300.0, 210.0), reading(40.0, 290.0, 380.0))

    assert found == reading(40.0, 300.0, 380.0)
