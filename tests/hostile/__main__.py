"""Try cases and print those that fail: python -m tests.hostile [FAMILY] [--first 0] [--cases 100]."""

from __future__ import annotations

import argparse
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
start, failed, number = time.monotonic(), 0, 0
for name in arguments.family:
    results = []
    for seed in range(arguments.first, arguments.first + arguments.cases):
        result = try_case(name, FAMILIES[name], seed)
        results.append(result)
        if result.problems:
            lines = str(result).splitlines()
            print("\n".join([lines[0], *lines[-2:]] if arguments.quiet else lines), "\n", flush=True)
    number, failed = number + len(results), failed + sum(bool(result.problems) for result in results)
    statuses = Counter(result.status for result in results)
    slowest = max(results, key=lambda result: result.cpu_s)
    print(
        f"{name}: {len(results)} cases, status {dict(sorted(statuses.items()))}, "
        f"{max(result.memory_bytes for result in results) >> 20} MiB, slowest {slowest.seed}: {slowest.cpu_s:.1f} s, "
        f"longest {max(result.elapsed_s for result in results):.0f} s",
        flush=True,
    )
print(f"{number} cases, {failed} failed, {time.monotonic() - start:.0f} s")
