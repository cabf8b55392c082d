"""What the rehearsal of a new run takes: its process, with starting Python and torch, beside importing torch alone.

    python -m tests.bench.rehearsal [--rounds 5]          about a minute on 2 cores

The examples are rehearsed by the process that `configure` starts, with one thread. Each figure is the median over the
rounds, in seconds: wall time, and processor time, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx

from onward.flows.api import checked_config
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.rehearsal.guards.guarded_files import guard_of_file
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Rehearsal, read_record, write_record

EXAMPLES = ("squeezenet-digits", "gpt2-stdlib")


def timed(*words: str) -> tuple[float, float]:
    """Run a process to its end; return (wall time, processor time of the process and its threads)."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used


def median(samples: list[tuple[float, float]]) -> str:
    wall, used = (statistics.median(values) for values in zip(*samples, strict=True))
    return f"{wall:.1f} s, {used:.1f} s of processor time"


def main() -> None:
    """Print a line for `import torch`, and one for each example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = range(parser.parse_args().rounds)
    with tempfile.TemporaryDirectory() as name:
        os.environ["ONWARD_HOME"] = str(Path(name) / "home")
        folders = {}
        for example in EXAMPLES:
            folders[example] = RunDir(Path(name) / example)
            write_record(folders[example].config, checked_config(example, {"launch.device": "cpu"}))
        samples: dict[str, list[tuple[float, float]]] = {word: [] for word in ("import torch", *EXAMPLES)}
        for _ in rounds:  # in turn, so that whatever else the machine does hits all
            samples["import torch"].append(timed("-c", "import torch"))
            for example, folder in folders.items():
                samples[example].append(timed("-m", "onward.trainer", "rehearse", str(folder.root)))
        for word, found in samples.items():
            print(f"{word}: {median(found)}")
            if word in folders:
                record = read_record(folders[word].rehearsal, Rehearsal)
                print(f"    {record.summary}")
                print(f"    the guard: {record.guard.elapsed_s if record.guard else math.nan:.1f} s of it")
        path = Path(name) / "gpt2.onnx"
        onnx.save(
            build_gpt2(vocab_size=50257, sequence_length=64, num_layers=12, num_heads=12, width=768, dropout=0.0), path
        )
        before = time.process_time()
        guard, said = guard_of_file(path)
        used = time.process_time() - before
        told = f"{guard.elapsed_s:.1f} s, {used:.1f} s of processor time; {guard.summary}" if guard else said
        print(f"GPT-2 12 x 768, 2 rows: {told}")


if __name__ == "__main__":
    main()
