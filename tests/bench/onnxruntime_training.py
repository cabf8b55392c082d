"""One weight update of Onward, and of PyTorch by hand, beside ONNX Runtime training 1.19.2: the same file and batch.

    python -m tests.bench.onnxruntime_training [--models squeezenet96 gpt] [--rounds 5]     about 3 minutes

Processes of one thread take turns; the figure is the median over the rounds of the ratio of the processor times of an
update, the median of a process without its first updates. ONNX Runtime: its on-device API with AdamW, which clips by
the norm as the other sides do. 1.19.2 is the last release that trains; it has wheels for Python 3.8 to 3.12, and gets
an environment of its own in build/ (300 MB), with the torch of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

UPDATES, FIRST = 12, 3
MODELS = ("squeezenet96", "gpt")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("onnxruntime-training==1.19.2", "onnx==1.16.2", "numpy<2")
OUTPUTS = {"Dropout": 2, "LayerNormalization": 3}
"""How many outputs of a node the gradients of ONNX Runtime read; files for inference leave some out."""


def ort_update(folder: Path) -> Callable[[], float]:
    """One update by ONNX Runtime; needs neither Onward nor its environment."""
    import onnxruntime as ort
    from onnxruntime.training import artifacts  # type: ignore[import-not-found]
    from onnxruntime.training.api import CheckpointState, Module, Optimizer  # type: ignore[import-not-found]

    model, data = onnx.load(folder / "model.onnx"), np.load(folder / "data.npz")
    for number, node in enumerate(model.graph.node):
        missing = range(len(node.output), OUTPUTS.get(node.op_type, 0))
        node.output.extend(f"more_{number}_{place}" for place in missing)
    output = model.graph.output[0]
    classes = output.type.tensor_type.shape.dim[-1].dim_value
    if len(output.type.tensor_type.shape.dim) == 3:  # its loss takes classes in the second dimension
        model.graph.initializer.append(helper.make_tensor("flat_shape", TensorProto.INT64, [2], [-1, classes]))
        model.graph.node.append(helper.make_node("Reshape", [output.name, "flat_shape"], ["flat"]))
        model.graph.output.pop()
        model.graph.output.append(helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["n", classes]))
    trained = {*data["trained"].tolist()}
    artifacts.generate_artifacts(
        model,
        requires_grad=[each.name for each in model.graph.initializer if each.name in trained],
        frozen_params=[each.name for each in model.graph.initializer if each.name not in trained],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(folder),
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, device="cpu", session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    module.train()
    inputs, labels = data["inputs"], data["labels"].reshape(-1)

    def update() -> float:
        loss = float(module(inputs, labels))
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return update


def update_of(side: str, name: str, folder: Path) -> Callable[[], float]:
    """One update by Onward or by hand; `write` leaves the file and the batch for ONNX Runtime."""
    import torch

    from onward.trainer.distributed.processes import connect
    from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
    from onward.trainer.onnx_import.imported_graph import named_weights
    from tests.bench import update_time
    from tests.bench.handwritten import gpt2_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mpi = connect(expected_world_size=1, timeout_s=60, device="cpu", threads=1, ranks_per_gpu=1)
    build, batch_size = update_time.MODELS[name]
    imported, by_hand, batch = build(batch_size)
    if side == "write":
        squeezenet = name == "squeezenet96"
        model = build_squeezenet(num_classes=10, image_size=96) if squeezenet else gpt2_model(update_time.GPT_SIZES)
        onnx.save(model, folder / "model.onnx")
        trained = np.array([name for name, tensor in named_weights(imported).items() if tensor.requires_grad])
        arrays: dict[str, Any] = {"inputs": batch.inputs[0].numpy(), "labels": batch.labels[0].numpy()}
        np.savez(folder / "data.npz", trained=trained, **arrays)
    if side == "by hand":
        return update_time.handwritten_update(by_hand, batch, mpi)
    return update_time.onward_update(imported, batch, mpi)


def main() -> None:
    """Let the sides take turns and print their ratios; with --side, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side, name, folder = given.side
        update = ort_update(Path(folder)) if side == "ort" else update_of(side, name, Path(folder))
        times = []
        for _ in range(0 if side == "write" else UPDATES):
            began = time.process_time()
            update()
            times.append(time.process_time() - began)
        print(json.dumps(times))
        return
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="ort-") as folder:
            compare(name, folder, given.rounds)


def ort_python() -> str:
    """The interpreter of the environment of ONNX Runtime, which is made if it is not there."""
    folder = ROOT / "build" / "onnxruntime-training"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
        (folder / "ready").touch()
    return str(python)


def compare(name: str, folder: str, rounds: int) -> None:
    """Print the time of an update of each side, and the ratios."""
    python = ort_python()

    def run(side: str) -> float:
        command = [python] if side == "ort" else [sys.executable]
        command += [__file__] if side == "ort" else ["-m", "tests.bench.onnxruntime_training"]
        found = subprocess.run(
            [*command, "--side", side, name, folder], capture_output=True, text=True, env=os.environ, check=False
        )
        assert found.returncode == 0, found.stderr[-3000:]
        times = json.loads(found.stdout.splitlines()[-1])
        return statistics.median(times[FIRST:]) if times else 0.0

    run("write")
    turns = [{side: run(side) for side in ("ort", "onward", "by hand")} for _ in range(rounds)]
    medians = {side: 1e3 * statistics.median(turn[side] for turn in turns) for side in turns[0]}
    shown = ", ".join(f"{side} {value:.1f} ms" for side, value in medians.items())
    for side in ("onward", "by hand"):
        ratios = sorted(turn["ort"] / turn[side] for turn in turns)
        shown += f"; ONNX Runtime / {side} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
