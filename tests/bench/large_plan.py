"""What planning a model of billions of parameters takes: a GPT-2 whose weights are zeros in a sparse file.

    python -m tests.bench.large_plan [--layers 32] [--width 4096]          about two minutes on 2 cores

The process is the one that `onward plan` and a run start. Its peak memory counts the pages of the file that it has
read, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, numpy_helper

from onward.trainer.config.loading import build_config
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.records import write_record

SMALL = 64
"""The width of the model that is built, and then widened."""
PAGE = 4096
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 4 x pipeline 2": {"tensor": 4, "pipeline": 2},
    "data 8, ZeRO 3": {"data": 8, "zero": 3},
    "auto": {"sizes": "auto", "memory_gib": 24},
}


def write_sparse_gpt2(path: Path, *, layers: int, width: int, heads: int = 32) -> int:
    """Write a GPT-2 with weights of zeros in a sparse file beside it; return the number of its parameters."""
    model = build_gpt2(vocab_size=32_000, sequence_length=2048, num_layers=layers, num_heads=heads, width=SMALL)
    offset, total, factor = 0, 0, width // SMALL
    for tensor in model.graph.initializer:
        if tensor.name in ("split_heads", "join_heads"):
            shape = numpy_helper.to_array(tensor).copy()
            shape[-1] *= factor
            tensor.CopyFrom(numpy_helper.from_array(shape, tensor.name))
        elif tensor.data_type == TensorProto.FLOAT and tensor.dims:
            dims = [dim * factor if dim in (SMALL, 3 * SMALL, 4 * SMALL) else dim for dim in tensor.dims]
            size = 4 * math.prod(dims)
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=TensorProto.FLOAT, dims=dims))
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", f"{path.name}.data"), ("offset", str(offset)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
            total += size // 4
            offset += -(-size // PAGE) * PAGE
        elif tensor.name == "sqrt_head_width":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * math.sqrt(factor), tensor.name))
    onnx.save_model(model, path)
    with (path.parent / f"{path.name}.data").open("wb") as file:
        file.truncate(offset)
    return total


def plan(model: Path, parallel: dict[str, Any], folder: Path) -> str:
    """Plan a layout of 8 ranks in a process of its own; return what that took."""
    config = build_config(
        {
            "model": {"path": model},
            "data": {"source": "stdlib", "sequence_length": 512},
            "train": {"num_steps": 1, "global_batch_size": 64, "gradient_accumulation_steps": 8},
            "loss": {"name": "cross_entropy"},
            "launch": {"num_ranks": 8} if parallel.get("sizes") == "auto" else {},
            "parallel": parallel,
        }
    )
    write_record(folder / "config.json", config)
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "onward.trainer", "plan", str(folder)], stderr=subprocess.PIPE)
    errors = process.stderr.read().decode() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(errors[-2000:])
    made = json.loads((folder / "plan.json").read_text())
    sizes = " x ".join(f"{name} {made['parallel'][name]}" for name in ("data", "tensor", "pipeline"))
    used = usage.ru_utime + usage.ru_stime
    return f"{time.perf_counter() - began:.0f} s, {used:.0f} s of processor time, {usage.ru_maxrss >> 10:,} MB; {sizes}"


def main() -> None:
    """Print a line for each layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "gpt2.onnx"
        number = write_sparse_gpt2(model, layers=arguments.layers, width=arguments.width)
        print(f"{number / 1e9:.2f} billion parameters, {arguments.layers} layers of width {arguments.width}")
        for layout in arguments.layouts:
            folder = Path(name) / layout.replace(" ", "-")
            folder.mkdir()
            print(f"{layout}: {plan(model, LAYOUTS[layout], folder)}", flush=True)


if __name__ == "__main__":
    main()
