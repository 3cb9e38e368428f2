"""Overheads of a round record without the growth of the context, for records whose turns went one way only.

    python benchmarks/gpu/growth.py benchmarks/gpu/round-27b-dspark.json

In such a record every cycle asks stock first and the others behind it, so each method's rounds see a context that is
one turn longer than the method's before it. How much a turn adds is in the record: a method's settled rounds lie evenly
over the whole cell, so the distance of the quartiles of their times is what the context added between them.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

SETTLING = 3  # rounds of a turn that were not counted, and the last, whose end nobody saw


def growth_of_a_turn(document: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Microseconds that one turn's tokens add to a round, from the quartiles of all methods of one cell."""
    turn, methods = document["turn"], len(document["methods"])
    settled = range(SETTLING, turn - 1)
    places = [cycle * methods * turn + place for cycle in range(document["turns"]) for place in settled]
    low, _, high = statistics.quantiles(places, n=4, method="inclusive")
    return statistics.mean((row["round_high_us"] - row["round_low_us"]) * turn / (high - low) for row in rows)


def without_growth(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Per method and cell: the overhead as recorded, and with the growth of its place in the cycle taken off."""
    found = []
    for cell in dict.fromkeys((row["batch"], row["context"]) for row in document["rows"]):
        rows = [row for row in document["rows"] if (row["batch"], row["context"]) == cell]
        growth, stock = growth_of_a_turn(document, rows), rows[0]["round_us"]
        for row in rows[1:]:
            place = document["methods"].index(row["method"])
            level = (row["round_us"] - stock - place * growth) / stock
            chosen = {name: row[name] for name in ("method", "batch", "context", "overhead")}
            found.append({**chosen, "growth_us": growth, "overhead_at_equal_context": level})
    return found


if __name__ == "__main__":
    for row in without_growth(json.loads(Path(sys.argv[1]).read_text())):
        print(
            "{method:17} batch {batch:3} context {context:6}: recorded {overhead:+.2%}, a turn adds "
            "{growth_us:.0f} us, at equal context {overhead_at_equal_context:+.2%}".format(**row)
        )
