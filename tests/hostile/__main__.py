"""Try cases and print those that fail: python -m tests.hostile [FAMILY] [--first 0] [--cases 100]."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from tests.hostile.families import FAMILIES
from tests.hostile.sandbox import import_all, try_case

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("family", nargs="*", default=list(FAMILIES))
parser.add_argument("--first", type=int, default=0)
parser.add_argument("--cases", type=int, default=100, help="of each family")
parser.add_argument("--quiet", action="store_true", help="print one line of each failure")
arguments = parser.parse_args()

import_all()
start, failed, statuses = time.monotonic(), 0, Counter[tuple[str, int]]()
greatest, slowest = 0, (0.0, "")
for name in arguments.family:
    for seed in range(arguments.first, arguments.first + arguments.cases):
        result = try_case(name, FAMILIES[name], seed)
        statuses[name, result.status] += 1
        greatest, slowest = max(greatest, result.memory_bytes), max(slowest, (result.cpu_s, f"{name} {seed}"))
        if result.problems:
            failed += 1
            shown = str(result)
            print(
                shown if not arguments.quiet else "\n".join([shown.splitlines()[0], *shown.splitlines()[-2:]]),
                "\n",
                flush=True,
            )
number = sum(statuses.values())
summary = {f"{name} {status}": count for (name, status), count in sorted(statuses.items())}
print(json.dumps(summary, indent=1))
print(
    f"{number} cases, {failed} failed, {time.monotonic() - start:.0f} s, {greatest >> 20} MB, "
    f"slowest {slowest[1]}: {slowest[0]:.1f} s of processor time"
)
