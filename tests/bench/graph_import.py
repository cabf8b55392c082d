"""Processor time of importing a graph, by its number of nodes: GPT-2 of more and more layers, of a small width.

python -m tests.bench.graph_import [--layers 46 92 184]          ten seconds on 2 cores
"""

from __future__ import annotations

import argparse
import time

import onnx

from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module


def gpt2(layers: int) -> onnx.ModelProto:
    return build_gpt2(vocab_size=64, sequence_length=16, num_layers=layers, num_heads=2, width=16, dropout=0.0)


def main() -> None:
    """Print a line for each number of layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 46, 92, 184])
    layers = parser.parse_args().layers
    to_module(gpt2(1))  # with what torch imports at the first call
    for each in layers:
        model = gpt2(each)
        began = time.process_time()
        to_module(model)
        used = time.process_time() - began
        print(f"{len(model.graph.node)} nodes: {used:.2f} s, {1000 * used / len(model.graph.node):.2f} ms a node")


if __name__ == "__main__":
    main()
