"""An environment for each client, made by uv from the package index."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Client:
    """``packages`` are asked for; ``cases`` is the file with what is tried."""

    packages: tuple[str, ...]
    cases: str


CLIENTS: dict[str, Client] = {
    "openai": Client(("openai",), "openai_cases.py"),
    "openai-agents": Client(("openai-agents",), "agents_cases.py"),
    "anthropic": Client(("anthropic",), "anthropic_cases.py"),
    "litellm": Client(("litellm",), "litellm_cases.py"),
    "langchain": Client(("langchain-openai", "langchain-anthropic"), "langchain_cases.py"),
    "instructor": Client(("instructor",), "instructor_cases.py"),
    "llama-index": Client(("llama-index-core>=0.14", "llama-index-llms-openai-like>=0.5"), "llama_index_cases.py"),
}

CASES = Path(__file__).parent / "cases"


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a client's environment, which is made if it is not there. Raises CalledProcessError."""
    made = folder / name
    python = made / "bin" / "python"
    ready = made / "ready"
    if not ready.exists():
        uv = str(Path(sysconfig.get_path("scripts")) / "uv")
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(made)], check=True)
        install = [uv, "pip", "install", "-q", "--native-tls", "--python", str(python)]
        subprocess.run([*install, *CLIENTS[name].packages], check=True)
        ready.touch()
    return python


def versions_of(name: str, python: Path) -> dict[str, str]:
    """The version of each package that was asked for."""
    names = [package.partition(">")[0] for package in CLIENTS[name].packages]
    code = "import sys; from importlib.metadata import version; print(*(version(n) for n in sys.argv[1:]))"
    told = subprocess.run([str(python), "-c", code, *names], check=True, capture_output=True, text=True).stdout
    return dict(zip(names, told.split(), strict=True))
