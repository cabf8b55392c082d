"""The memory of a rank when it begins: its own part of the weights, and what it takes to get there.

    python -m tests.bench.rank_memory [--layers 20] [--width 1024]          a few minutes on 2 cores

A GPT-2 of random weights is opened and divided by real ranks, as training does it, up to the moment in which each rank
has its model. Of the rank that takes most are printed: the bytes of its own weights and of the buffers for their
gradients (ZeRO has none yet; its weights are the shards); its greatest and its kept memory beyond those of a model of
the same layers that is 16 columns wide; and the pages of the model's files that it still has mapped. Memory is that of
anonymous pages. Pages of files are the system's: the ranks of a host share them, and it takes them when it needs them.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.run.directory import RunDir, read_config
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_text

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "data 2, ZeRO 3": {"data": 2, "zero": 3},
    "data 2": {"data": 2},
}
TINY = 16
"""The width of the model that the others are compared with."""
MIB = 2**20


class _Measured(Exception):
    """Carries what was measured out of the training loop."""


def gpt2(*, layers: int, width: int) -> onnx.ModelProto:
    """A GPT-2 of random weights: some 12 x layers x width^2."""
    model = build_gpt2(vocab_size=96, sequence_length=12, num_layers=layers, num_heads=4, width=width, dropout=0.0)
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
            values = random.standard_normal(tuple(tensor.dims), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values * np.float32(0.02), tensor.name))
    return model


def make_case(folder: Path, layers: int, width: int, parallel: dict[str, Any], *, external: bool) -> RunDir:
    """A run directory whose model is one file, or has its weights in another one."""
    folder.mkdir(parents=True)
    model = gpt2(layers=layers, width=width)
    if external:
        path = folder / "saved.onnx"
        onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
        model = onnx.load_model(path, load_external_data=False)
    train = {"global_batch_size": 4, "gradient_accumulation_steps": 2, "num_steps": 1}
    return make_run(folder, model, tiny_text(20), train=train, parallel=parallel)


def measured(mpi: MPIContext, root: str) -> list[int]:
    """On a rank: bytes of its weights and of the buffers of their gradients, then its memory beyond that before.

    The memory is the greatest while the model was opened and divided, and what is kept then: anonymous pages and those
    of the model's file.
    """
    from onward.trainer import loop
    from onward.trainer.events import Heartbeat

    before, greatest, done = list[int](), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            greatest[0] = max(greatest[0], anonymous())

    opened, build = loop.open_with_teacher, loop.build_rank_model
    watching = threading.Thread(target=watch, daemon=True)

    def open_(*arguments: Any, **named: Any) -> Any:
        before.append(anonymous())
        watching.start()
        return opened(*arguments, **named)

    def built(*arguments: Any, **named: Any) -> Any:
        model = build(*arguments, **named)
        weights = [weight.tensor for weight in model.reducer.weights]
        gradients = sum(tensor.grad.nbytes for tensor in weights if tensor.grad is not None)
        own = sum(tensor.nbytes for tensor in weights) + gradients
        raise _Measured(own, max(greatest[0], anonymous()) - before[0], anonymous() - before[0], of_files(root))

    loop.open_with_teacher, loop.build_rank_model = open_, built
    run = RunDir(Path(root))
    try:
        loop.train(run, mpi, attempt=1, heartbeat=Heartbeat(run.heartbeat), stop_requested=lambda: False)
    except _Measured as found:
        return list(found.args)
    finally:
        done.set()
        loop.open_with_teacher, loop.build_rank_model = opened, build
    raise AssertionError("no model was built")


def anonymous() -> int:
    """The bytes of this process's memory that are of no file."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def of_files(root: str) -> int:
    """The bytes of the model's files that this process has mapped and read."""
    folder, total, inside = str(Path(root).parent), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line[0].isupper():
            inside = folder in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def of_ranks(run: RunDir) -> np.ndarray[Any, Any]:
    """What `measured` gives for each rank of a run: int64 [ranks, 4]."""
    num_ranks = ParallelDims.of(read_config(run).parallel).world_size
    # processes of their own: memory that a fork shares would count
    return np.array(
        run_ranks(num_ranks, "tests.bench.rank_memory:measured", str(run.root), timeout_s=900, forked=False)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments = parser.parse_args()
    print("MiB                           own part   greatest       kept   of files")
    for layout in arguments.layouts:
        for external in (False, True):
            with tempfile.TemporaryDirectory() as name:
                sizes = {"tiny": TINY, "full": arguments.width}
                cases = {
                    key: make_case(Path(name) / key, arguments.layers, width, LAYOUTS[layout], external=external)
                    for key, width in sizes.items()
                }
                found = {key: of_ranks(run) for key, run in cases.items()}
            own = found["full"][:, 0]
            beyond = (found["full"] - found["tiny"])[:, 1:]
            most = int((beyond[:, 0] / own).argmax())
            row = [f"{layout:<16}", f"{'external' if external else 'one file':<10}"]
            row += [f"{value / MIB:>10.0f}" for value in (own[most], *beyond[most])]
            print(*row, flush=True)


if __name__ == "__main__":
    main()
