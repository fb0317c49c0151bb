"""A GPU is one worker's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.worker.gpu_claims import claimed
from shared.errors import ConfigError
from tests.run_name import shm_prefix

PREFIX = shm_prefix("claims")


def test_a_gpu_is_held_by_one_at_a_time() -> None:
    """Whoever comes second is refused, and holds none of the others either; afterwards it is free."""
    with claimed(["a", "b"], PREFIX):
        with pytest.raises(ConfigError, match="GPU b is another worker's"), claimed(["c", "b"], PREFIX):
            raise AssertionError("two hold it")
        with claimed(["c"], PREFIX):
            pass

    with claimed(["b"], PREFIX):
        pass


def test_a_process_that_is_killed_holds_nothing() -> None:
    """Its GPUs go to whoever is started in its place."""
    program = f"""
from services.worker.gpu_claims import claimed
with claimed(["k"], {PREFIX!r}):
    print(flush=True)
    input()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ConfigError), claimed(["k"], PREFIX):
        raise AssertionError("two hold it")

    process.kill()
    process.communicate()

    with claimed(["k"], PREFIX):
        pass
