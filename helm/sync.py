"""Keep what the chart holds of other places in step: its dashboards and rules, and the table of values in its README.

python helm/sync.py            # write them
python helm/sync.py --check    # only say what is out of step; exit code 1 if anything is
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "sglang-ext"
BEGIN, END = "<!-- values: made by helm/sync.py -->", "<!-- end of values -->"


def copies() -> dict[Path, str]:
    """Files of the chart that are copies of the repository's, and what they should hold."""
    sources = {"dashboards": ROOT / "dashboards", "rules": ROOT / "dashboards" / "rules"}
    paths = [(name, path) for name, folder in sources.items() for path in sorted(folder.iterdir())]
    kept = [(name, path) for name, path in paths if path.suffix in (".json", ".yaml")]
    return {CHART / "files" / name / path.name: path.read_text() for name, path in kept}


def rows(text: str) -> list[tuple[str, str, str]]:
    """Key, default and description of every value, in the order of values.yaml.

    A ``# --`` comment above a key describes it. A mapping is one row where it has a description or is empty or written
    in one line, and otherwise a row for each of its keys.
    """
    found: list[tuple[str, str, str]] = []

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name = prefix + key.value
            above = lines[key.start_mark.line - 1].strip() if key.start_mark.line else ""
            note = above.removeprefix("# --").strip() if above.startswith("# --") else ""
            nested = isinstance(value, yaml.MappingNode) and value.value and not value.flow_style
            if nested and not note:
                walk(value, name + ".")
            else:
                default = "see values.yaml" if nested else json.dumps(yaml.safe_load(yaml.serialize(value)))
                found.append((name, default, note))

    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    walk(root, "")
    return found


def table(text: str) -> str:
    """The README's table."""
    lines = ["| value | default | |", "|---|---|---|"]
    for name, default, note in rows(text):
        lines.append(f"| `{name}` | `{default}` | {note.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def readme() -> str:
    """The README with its table as it should be."""
    text = (CHART / "README.md").read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    made = f"{BEGIN}\n{table((CHART / 'values.yaml').read_text())}\n{END}"
    return pattern.sub(lambda _: made, text)


def main(argv: list[str] | None = None) -> int:
    """Write what is out of step, or with ``--check`` name it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    wanted = copies() | {CHART / "README.md": readme()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in (CHART / "files").glob("*/*") if path not in wanted]
    for path in stale + extra:
        print(f"{path.relative_to(ROOT)} is out of step{'; run python helm/sync.py' if args.check else ''}")
    if args.check:
        return 1 if stale or extra else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
