"""Renders the chart with Helm's own engine, in a process of its own: Go and an event loop do not mix."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "infra" / "chart" / "thermocline"

Manifest = dict[str, Any]

_PROGRAM = """
import json, shutil, sys, tempfile
from pathlib import Path
import helm_python
order = json.load(sys.stdin)
answer = {}
with tempfile.TemporaryDirectory() as folder:
    # Without the charts that `helm dependency update` put there: their objects are not ours to test.
    alone = str(Path(folder) / Path(order["chart"]).name)
    shutil.copytree(order["chart"], alone, ignore=shutil.ignore_patterns("charts", "Chart.lock"))
    try:
        if order["kind"] == "lint":
            answer["report"] = helm_python.lint(alone, order["values"])
        else:
            with helm_python.Chart.load(alone) as chart:
                chart.validate_schema(order["values"])
                answer["files"] = chart.render(order["values"], name=order["name"], namespace="llm")
    except helm_python.HelmError as error:
        answer["error"] = str(error)
json.dump(answer, sys.stdout)
"""


class Refused(Exception):
    """Helm does not render the chart with these values."""


def _ask(**order: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, timeout=60, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def files_of(chart: Path, values: dict[str, Any], release: str = "cell") -> dict[str, str]:
    """The texts that a chart's templates become, by file. Raises Refused."""
    answer = _ask(kind="render", chart=str(chart), values=values, name=release)
    if "error" in answer:
        raise Refused(answer["error"])
    files: dict[str, str] = answer["files"]
    return files


@functools.cache
def _files(values: str, release: str) -> dict[str, str]:
    return files_of(CHART, json.loads(values), release)


def render(values: dict[str, Any] | None = None, release: str = "cell") -> list[Manifest]:
    """The objects that a release in namespace ``llm`` has. Raises Refused."""
    files = _files(json.dumps(values or {}, sort_keys=True), release)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def lint(values: dict[str, Any] | None = None) -> list[str]:
    """What ``helm lint`` holds against the chart, advice left out."""
    report = _ask(kind="lint", chart=str(CHART), values=values or {})["report"]
    return [message["error"] for message in report["messages"] if message["severity"] >= 2]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The object of that kind and name. Raises KeyError."""
    for manifest in manifests:
        if manifest["kind"] == kind and manifest["metadata"]["name"] == name:
            return manifest
    raise KeyError(f"{kind} {name}")


def pod_specs(manifests: list[Manifest]) -> dict[str, Any]:
    """Specs of pods by the name of what makes them."""
    makers = ("Deployment", "StatefulSet")
    return {m["metadata"]["name"]: m["spec"]["template"]["spec"] for m in manifests if m["kind"] in makers}


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All containers of a pod's spec by name, those that start first included."""
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}
