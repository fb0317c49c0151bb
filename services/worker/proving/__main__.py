"""Prove every way of every part and print the table as JSON: ``python -m services.worker.proving --shape JSON``.

``thermocline doctor --gpu`` runs this in a process of its own, because only workers import torch. It needs no model and
may run beside a worker on the same GPU, as long as some hundred megabytes are left.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from services.worker.proving.device import proofs_of
from services.worker.proving.parts import parts_of
from services.worker.proving.table import ServedShape
from services.worker.torch_gpus import TorchGpus
from shared.errors import OperatorError
from shared.guard import guarded


def main(argv: list[str] | None = None) -> int:
    """Prove and print; return exit code 1, with the reason, where there is no GPU. Failed ways are in the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help="ServedShape as JSON")
    options: Any = parser.parse_args(argv)
    gpus = TorchGpus()
    if not gpus.count:
        print(f"there is none that PyTorch can use: {gpus.absence}", file=sys.stderr)
        return 1
    try:
        shape = msgspec.json.decode(options.shape, type=ServedShape)
        table = proofs_of(shape, parts_of(), proves_all=True)
    except (OperatorError, msgspec.DecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(table).decode())
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
