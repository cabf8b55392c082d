"""Processor time of the commands that only read, of all their processes, beside importing torch alone.

    python -m tests.bench.command_costs [--rounds 5] [--commands diff ...]          about a minute on 2 cores

Each command runs once before it is measured. Each figure is the median over the rounds, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
from onnx import numpy_helper

from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet

ONWARD = ("-m", "onward.flows.cli")


def processor_s(words: list[str]) -> float:
    """Run Python to its end; return the processor time of all its processes. Raises RuntimeError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 1, 3):  # 1: the files differ; 3: the machine has a problem
        raise RuntimeError(f"{words} ended with {ended.returncode}: {ended.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a line for each command."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["ONWARD_HOME"] = str(Path(name) / "home")
        first, second = (str(Path(name) / each) for each in ("a.onnx", "b.onnx"))
        model = build_squeezenet(num_classes=10)
        onnx.save(model, first)
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array((array * 1.01).astype(array.dtype), tensor.name))
        onnx.save(model, second)
        commands = {
            "import torch": ["-c", "import torch"],
            "doctor": [*ONWARD, "doctor"],
            "doctor MODEL": [*ONWARD, "doctor", first],
            "plan": [*ONWARD, "plan", "squeezenet-digits"],
            "diff": [*ONWARD, "diff", first, second],
        }
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--commands", nargs="+", choices=commands, default=list(commands))
        options = parser.parse_args()
        samples: dict[str, list[float]] = {command: [] for command in options.commands}
        for _ in range(options.rounds + 1):  # in turn, so that whatever else the machine does hits all
            for command, found in samples.items():
                found.append(processor_s(commands[command]))
        for command, (_, *found) in samples.items():
            print(f"{command}: {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
