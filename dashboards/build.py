"""Write the dashboards' JSON, or with ``--check`` say whether the committed files are what this code makes.

python -m dashboards.build [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import loadtest, serving, speculation

FOLDER = Path(__file__).resolve().parent
BOARDS = {"serving": serving.build, "speculation": speculation.build, "loadtest": loadtest.build}


def generate() -> dict[Path, str]:
    """Text of every dashboard by its file."""
    return {
        FOLDER / f"{name}.json": JSONEncoder(sort_keys=True, indent=2).encode(build().build()) + "\n"
        for name, build in BOARDS.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; with ``--check`` 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 when a file is out of date")
    check = parser.parse_args(argv).check
    stale = [path for path, text in generate().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.name} is out of date; run python -m dashboards.build" if check else f"wrote {path.name}")
        if not check:
            path.write_text(generate()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
