"""Sizes that the library adds to a ``config.json`` without them, as those of models with a vision part often are.

The library takes seconds and hundreds of megabytes to import, so another process does it:
``python -m services.gateway.library_defaults DIR``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from shared.errors import UnsupportedModel
from shared.guard import guarded

_FIELDS = ("vocab_size", "max_position_embeddings")
_TIMEOUT_S = 120


def library_defaults(model_dir: Path) -> dict[str, int]:
    """Return the sizes of the model's text part, by field. Raises UnsupportedModel when the library has none."""
    command = [sys.executable, "-P", "-m", "services.gateway.library_defaults", str(model_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        found: dict[str, int] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        # After a traceback the library's advice may take several lines; the error itself is the first of them.
        reasons = [line for line in said.splitlines() if re.match(r"[\w.]*Error: ", line)] or said.splitlines()[-1:]
        raise UnsupportedModel(
            f"{model_dir}: config.json leaves out sizes, and the library cannot fill them in: {' '.join(reasons[-1:])}"
        ) from error
    return found


def main() -> int:
    """Print the sizes as JSON."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    print(json.dumps({name: getattr(text, name) for name in _FIELDS if isinstance(getattr(text, name, None), int)}))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
