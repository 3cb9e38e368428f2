"""Draw the dashboards with data from a Prometheus, and photograph them with Chromium.

    python -m dashboards.preview --prometheus http://localhost:9090 --minutes 15 --out docs/images

The pictures are previews: the panels, queries and data are the dashboards', the drawing is not Grafana's.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import http.server
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dashboards import boards, drawing, prom
from sglang_ext.errors import UsageError

UNIT_WIDTH, UNIT_HEIGHT = 60, 30  # pixels of Grafana's grid units
POINTS = 120
STYLE = """
body{background:#111217;color:#ccccdc;font:12px Inter,Helvetica,Arial,sans-serif;margin:0;width:1456px}
h1{font-size:20px;margin:14px 16px 2px} p{margin:0 16px 6px;color:#9fa7b3}
.board{position:relative;margin:0 8px} .panel{position:absolute;box-sizing:border-box;padding:3px}
.panel>div{background:#181b1f;border:1px solid #25292e;border-radius:3px;height:100%;overflow:hidden}
.title{font-weight:600;padding:6px 8px 2px;color:#d8d9da} .row{font-size:15px;font-weight:600;padding:8px}
text{fill:#9fa7b3;font-size:11px} .small{font-size:11px;fill:#9fa7b3} .bars rect{fill:#5794f2}
.legend{display:flex;flex-wrap:wrap;gap:0 12px;padding:0 8px;white-space:nowrap;font-size:11px;line-height:17px}
.legend i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}
table{border-collapse:collapse;margin:6px 8px} th{text-align:left;color:#6e9fff} th,td{padding:4px 14px 4px 0}
"""


def series_of(url: str, target: dict[str, Any], span: tuple[float, float], window: str) -> list[drawing.Series]:
    """A query's series with their legends, without values that are not finite."""
    expr = boards.fill(target["expr"], window)
    found = prom.query_range(url, expr, span[0], span[1], (span[1] - span[0]) / POINTS)
    result = []
    for series in found:
        labels = series["metric"]

        def named(match: re.Match[str], labels: dict[str, str] = labels) -> str:
            return str(labels.get(match[1], ""))

        name = re.sub(r"\{\{(\w+)\}\}", named, target.get("legendFormat", ""))
        points = [(float(moment), float(value)) for moment, value in series["values"]]
        result.append((name, [point for point in points if math.isfinite(point[1])]))
    return sorted(((name, points) for name, points in result if points), key=lambda row: row[0])


def draw(url: str, panel: dict[str, Any], span: tuple[float, float], window: str, names: list[str]) -> str:
    """One panel's inside."""
    width, height = panel["gridPos"]["w"] * UNIT_WIDTH - 10, panel["gridPos"]["h"] * UNIT_HEIGHT - 36
    if panel["type"] == "table":
        expr = boards.fill(panel["targets"][0]["expr"], window)
        return drawing.table(panel, [series["metric"] for series in prom.query_range(url, expr, *span, step=30)])
    series = [row for target in panel["targets"] for row in series_of(url, target, span, window)]
    if panel["type"] == "timeseries" and series:
        return drawing.lines(panel, series, width, height, span, [*names])
    kinds = {"stat": drawing.big, "bargauge": drawing.bars, "heatmap": drawing.heat}
    return kinds[panel["type"]](panel, series, width, height, span) if series else "<p>no data</p>"


def page(url: str, name: str, span: tuple[float, float], window: str) -> tuple[str, int]:
    """A dashboard as HTML, and its height in pixels."""
    board = boards.read(name)
    parts: list[str] = []
    servers = prom.query_range(url, "max by (method, model_name) (sglang_ext_method_info)", *span, step=30)
    names = sorted(f"{series['metric']['method']} {series['metric']['model_name']}" for series in servers)
    bottom = 0
    for panel in boards.panels(board):
        grid = panel["gridPos"]
        place = (
            f"left:{grid['x'] * UNIT_WIDTH}px;top:{grid['y'] * UNIT_HEIGHT}px;"
            f"width:{grid['w'] * UNIT_WIDTH}px;height:{grid['h'] * UNIT_HEIGHT}px"
        )
        bottom = max(bottom, (grid["y"] + grid["h"]) * UNIT_HEIGHT)
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<div class="panel row" style="{place}">{title}</div>')
        else:
            inside = draw(url, panel, span, window, names)
            parts.append(
                f'<div class="panel" style="{place}"><div><div class="title">{title}</div>{inside}</div></div>'
            )
    head = f"<h1>{html.escape(board['title'])}</h1><p>{html.escape(board['description'])} Preview, not Grafana.</p>"
    body = f'{head}<div class="board" style="height:{bottom}px">{"".join(parts)}</div>'
    return f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{body}', bottom + 76


@contextlib.contextmanager
def serving(url: str, port: int, minutes: float = 10, window: str = "30s") -> Iterator[str]:
    """Serve the dashboards as pages on 127.0.0.1 until the block ends, drawn anew every ten seconds; yields the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/") or boards.NAMES[0]
            if name not in boards.NAMES:
                self.send_error(404)
                return
            now = time.time()
            links = " ".join(f'<a href="/{other}" style="color:#6e9fff">{other}</a>' for other in boards.NAMES)
            try:
                document, _ = page(url, name, (now - minutes * 60, now), window)
            except UsageError as error:
                self.send_error(503, "Prometheus does not answer", str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Refresh", "10")
            self.end_headers()
            self.wfile.write(document.replace("<h1>", f"<p>{links}</p><h1>", 1).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.shutdown()


def photograph(document: str, height: int, out: Path) -> None:
    """Render HTML to a PNG with Chromium; UsageError where there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise UsageError(
            "Chromium is not on PATH, which draws the pictures; install it (Debian: apt-get install chromium)."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        source.write_text(document, encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size=1456,{height}", f"--screenshot={shot}"]
        done = subprocess.run([*command, source.as_uri()], capture_output=True, text=True, timeout=120)
        if not shot.exists():
            raise UsageError(f"Chromium drew nothing ({done.stderr.strip()[-200:]}); run it by hand to see why.")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shot, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw every dashboard; 2 with one sentence where that is impossible."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.preview", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of the Prometheus to ask")
    parser.add_argument("--minutes", type=float, default=15, help="how far to look back")
    parser.add_argument("--end", type=float, help="the end, in seconds since the epoch (default: now)")
    parser.add_argument("--window", default="1m", help="window of rates")
    parser.add_argument("--out", type=Path, default=Path("build/preview"), help="folder of the pictures")
    args = parser.parse_args(argv)
    end = args.end or time.time()
    try:
        for name in boards.NAMES:
            document, height = page(args.prometheus, name, (end - args.minutes * 60, end), args.window)
            photograph(document, height, args.out / f"dashboard-{name}.png")
            print(args.out / f"dashboard-{name}.png")
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
