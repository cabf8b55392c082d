"""Accuracy of a model in fp32, after static quantization and after quantization-aware training, in 8 bits.

    python -m tests.bench.quantization [--models mobile_net bert] [--steps 300]      some minutes on 2 cores

Each model is trained in fp32 by a run, exported, and quantized (`export.variants = ["int8_static"]`, calibrated on
evaluation rows). The exported fp32 file is then trained by a second run with `quantize.aware`. All accuracies are of
the files, on the same evaluation rows, under onnxruntime's CPU provider and its kernels for 8 bits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from onward.tasks.checks.rehearsing import Preparation
from onward.tasks.export import export_file
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, write_record
from tests.support import mobile_models, runs

MODELS = {
    "mobile_net": (mobile_models.mobile_net, mobile_models.digits, 1e-3),
    "bert": (mobile_models.bert, mobile_models.words, 5e-4),
}
"""Name -> the graph, the data, and the learning rate of the second run."""
ACCURACY = "evaluation/accuracy"


def trained(folder: Path, model: onnx.ModelProto, columns: Mapping[str, Any], **sections: Any) -> ExportedModel:
    """Train a model to the end, as the tasks do; return the record of the exported file."""
    run = runs.make_run(folder, model, columns, **sections)
    insert_nodes(run)
    done = runs.train_run(run, timeout_s=1800)
    return export_file(run, run.checkpoint(done.step))


def insert_nodes(run: RunDir) -> None:
    """Do what `configure` does with `quantize.aware`, in a run directory that was made without it."""
    if read_config(run, "local").quantize.aware:
        Preparation(read_config(run, "local")).quantize(run)
        identity, digest = read_record(run.identity, RunIdentity), model_digest(read_config(run).model.path)
        write_record(run.identity, identity.model_copy(update={"model_sha256": digest}))


def compare(name: str, folder: Path, *, steps: int, **quantized: Any) -> tuple[ExportedModel, ExportedModel]:
    """Return the records of a model after fp32 training, with its int8_static, and after that with `quantize.aware`."""
    build, columns, learning_rate = MODELS[name]
    how: dict[str, Any] = {
        "data": {"evaluation_fraction": 0.3},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "schedule": {"mode": "cosine"},
    }
    train = {"global_batch_size": 64, "num_steps": steps, "seed": 1}
    before = trained(
        folder / "fp32",
        build(),
        columns(),
        **how,
        train=train,
        export={"variants": ["int8_static"], "variant_tolerance": 1.0},
    )
    how["optimizer"] = {"name": "adamw", "learning_rate": learning_rate}
    after = trained(
        folder / "aware",
        onnx.load(before.path),
        columns(),
        **how,
        train=train,
        quantize={"aware": True, **quantized},
    )
    return before, after


def row(name: str, before: ExportedModel, after: ExportedModel) -> str:
    """Return a line of the table."""
    static = before.variants[0]
    kernels = ", ".join(f"{count} {kind}" for kind, count in sorted(after.kernels.items()))
    figures = (before.after, static.metrics, after.before, after.after)
    percents = " | ".join(f"{100 * each[ACCURACY]:.1f} %" for each in figures)
    return f"| {name} | {percents} | {100 * after.neighbours:.2g} % | {kernels} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    print("| model | fp32 | int8_static | nodes inserted | trained with them | other integers than torch | kernels |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="quantization-") as folder:
            print(row(name, *compare(name, Path(folder), steps=given.steps)), flush=True)


if __name__ == "__main__":
    main()
