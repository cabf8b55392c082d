"""Examine files and keep the results in docs/compatibility-results.jsonl: `python -m tests.compatibility [WORD ...]`.

    python -m tests.compatibility                     everything, in two processes
    python -m tests.compatibility foreign             the entries whose names contain one of the words
    python -m tests.compatibility bert/ --again       also those that have a result of the same code and versions

Each entry has one line, which is written as soon as it is known; a command that was interrupted continues where it
was. A file that ends its process, such as by a memory error, is noted as such. `python docs/generate.py` writes the
page. The exit status is 0 however many checks failed: the page is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from tests.compatibility import report
from tests.compatibility.report import CHECKS, Line
from tests.support.ranks import ROOT

LONGEST_S = 300.0
"""An entry that takes longer is ended."""


def main(arguments: Sequence[str]) -> int:
    """Examine the selected entries."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names, such as foreign, zoo/bert or dynamo-20; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="examine also what has a current result")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        return _work()
    from tests.compatibility.entries import all_entries  # imports torch, which the page does not need

    entries = all_entries()
    lines = {name: line for name, line in report.read(report.RESULTS).items() if name in entries}
    names = [name for name in entries if not chosen.words or any(word in name for word in chosen.words)]
    if not names:
        parser.error(f"no entry has {' or '.join(chosen.words)} in its name; names are such as {next(iter(entries))}")
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        if chosen.again or name not in lines or lines[name]["sources"] != entries[name].sources:
            waiting.put(name)
    print(f"{waiting.qsize()} of {len(names)} entries to examine", flush=True)
    started, total, lock = time.monotonic(), waiting.qsize(), threading.Lock()

    def consume() -> None:
        for line in _results(waiting):
            with lock:
                lines[line["entry"]] = line
                report.write({name: lines[name] for name in entries if name in lines}, report.RESULTS)
                problems = "; ".join(f"{check}: {line[check]}" for check in CHECKS if line[check])
                print(f"[{time.monotonic() - started:4.0f} s] {line['entry']}: {problems or 'good'}", flush=True)

    threads = [threading.Thread(target=consume) for _ in range(min(chosen.processes, total))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"the results are in {report.RESULTS}; `python docs/generate.py` writes the page")
    return 0


def _results(waiting: queue.SimpleQueue[str]) -> Iterator[Line]:
    """Yield a line for each name, examined in a process that serves many; it is replaced when it ends early."""
    process = _start()
    try:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(LONGEST_S, process.kill)
            timer.start()
            process.stdin.write(name + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            timer.cancel()
            if answer:
                yield json.loads(answer)
                continue
            process.communicate()
            status, process = process.returncode, _start()
            yield _line(name, {"imports": _ended(status), "trains": "not reached", "back": "not reached"}, 0.0)
    finally:
        process.kill()
        process.communicate()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compatibility", "--worker"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / ".package"), str(ROOT)])},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _ended(status: int) -> str:
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"the process ended: {name}"


def _work() -> int:
    """Read names of entries on stdin and answer each with a line of JSON on stdout, to which nothing else writes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.compatibility.checks import examine
    from tests.compatibility.entries import all_entries

    entries = all_entries()
    for name in map(str.strip, sys.stdin):
        started = time.monotonic()
        outcome = examine(entries[name])
        answers.write(json.dumps(_line(name, outcome, time.monotonic() - started)) + "\n")
        answers.flush()
    return 0


def _line(name: str, outcome: dict[str, object], seconds: float) -> Line:
    from tests.compatibility.entries import OURS, all_entries, versions

    entry = all_entries()[name]
    return {
        "entry": name,
        "architecture": entry.architecture,
        "exporter": entry.exporter,
        "variant": entry.variant,
        "versions": dict(entry.versions),
        "with": versions(OURS),
        "sources": entry.sources,
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        **outcome,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
