"""The bill of materials of this release: every distribution that it runs on, as installed here, in CycloneDX 1.6 JSON.

    python -m tools.sbom --out FILE     or --table for the licences alone

It tells what is installed, by its own metadata: names, versions, licences and who needs whom. Nothing is asked of a
network. Development tools are not in it. The same installation and time give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tomllib
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.dependency_audit import ROOT, closure, licence

SCHEMA = SchemaVersion.V1_6
UNDECLARED = "not declared by the package"  # So with cuda-toolkit, which PyTorch's CUDA build brings.


def make(*, epoch_s: int) -> Bom:
    """The bill; ``epoch_s`` is the time that it bears."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    own = _component(project["name"], project["version"], project["license"], ComponentType.APPLICATION)
    needs = closure(requirements)
    components = {
        name: _component(name, metadata.version(name), licence(name), ComponentType.LIBRARY) for name in sorted(needs)
    }
    bom = Bom(components=components.values())
    bom.metadata.component = own
    bom.metadata.timestamp = datetime.fromtimestamp(epoch_s, UTC)
    listed = ",".join(f"{each.purl}" for each in (own, *components.values()))
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"{epoch_s} {listed}")
    direct = {canonicalize_name(each.name) for each in requirements if each.marker is None or each.marker.evaluate()}
    bom.register_dependency(own, [components[name] for name in sorted(direct & components.keys())])
    for name, component in components.items():
        bom.register_dependency(component, [components[need] for need in sorted(needs[name])])
    return bom


def _component(name: str, version: str, told: str, kind: ComponentType) -> Component:
    purl = PackageURL("pypi", name=canonicalize_name(name), version=version)
    licenses = [LicenseFactory().make_from_string(told or UNDECLARED)]
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl), licenses=licenses)


def to_json(bom: Bom) -> str:
    return make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=2) + "\n"


def write(path: Path, *, epoch_s: int) -> None:
    path.write_text(to_json(make(epoch_s=epoch_s)), encoding="utf-8")


def table() -> str:
    """Name, version and licence of each, in Markdown."""
    rows = ["| package | version | licence |", "|---|---|---|"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in sorted(closure([Requirement(text) for text in project["dependencies"]])):
        rows.append(f"| {name} | {metadata.version(name)} | {licence(name) or UNDECLARED} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Write the bill, or print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.sbom", description="Bill of materials in CycloneDX JSON.")
    parser.add_argument("--out", type=Path, default=None, help="file; standard output where there is none")
    parser.add_argument("--table", action="store_true", help="print the licences as a table instead")
    options = parser.parse_args(argv)
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    if options.table:
        print(table())
    elif options.out:
        write(options.out, epoch_s=epoch_s)
    else:
        print(to_json(make(epoch_s=epoch_s)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
