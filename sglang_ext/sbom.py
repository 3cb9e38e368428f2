"""Software bill of materials of the Python packages in this environment: CycloneDX 1.6, JSON.

``python -m sglang_ext.sbom NAME`` prints it; the image's build keeps it in ``/usr/local/share/sbom``. It has neither
time stamp nor serial number, so that equal packages give equal files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote

from sglang_ext import __version__


def bill(name: str, packages: Iterable[Distribution]) -> dict[str, Any]:
    """The bill for an image called ``name``, one component per package, sorted by name and version."""
    whole = (package for package in packages if package.metadata["Name"] and package.version)
    components = {entry["bom-ref"]: entry for entry in map(_component, whole)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": name, "name": name, "version": __version__},
        },
        "components": [components[reference] for reference in sorted(components)],
    }


def _component(package: Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    purl = f"pkg:pypi/{name}@{quote(package.version)}"
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": package.version,
        "purl": purl,
    }
    if licence := _licence(package):
        entry["licenses"] = [licence]
    return entry


def _licence(package: Distribution) -> dict[str, Any] | None:
    """SPDX expression where the package states one, else the name it gives; None where it says nothing short."""
    fields = package.metadata.json
    if expression := fields.get("license_expression"):
        return {"expression": expression}
    marks = [value for value in fields.get("classifier", []) if value.startswith("License ::")]
    name = marks[-1].split(" :: ")[-1] if marks else str(fields.get("license", ""))
    # Older packages put the whole text of their licence there.
    return {"license": {"name": name}} if name and "\n" not in name and len(name) < 100 else None


def main() -> int:
    """Print the bill of this interpreter's packages."""
    if len(sys.argv) != 2:
        print("sglang_ext.sbom: give the image's name and nothing else.", file=sys.stderr)
        return 2
    json.dump(bill(sys.argv[1], distributions()), sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
