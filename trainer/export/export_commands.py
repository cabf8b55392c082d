"""What the processes of an export do: write the trained file and what is made of it, and evaluate both.

    RUN_DIR, checkpoint --- export_file --> model.onnx, model.json ---+--- make_variant --> model.KIND.onnx, its record
                                                                      +--- compare_with_served --> comparison.json

Each is a process of its own (`python -m onward.trainer export`, `variant`, ...): native code of onnxruntime may crash,
and a variant begins with a fresh memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.data.batches.batches import Batch, evaluation_batches
from onward.trainer.data.file_rows import FileRows
from onward.trainer.data.resolve import read_resolved
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_evaluated
from onward.trainer.errors import ExportRefused
from onward.trainer.export.exported_model import Checkpoint, export, export_training
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.export.run_as_read import RunAsRead
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.optim.averages import exported_weights
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.export_folder import comparison_in, variant_in
from onward.trainer.run.outcomes.refusals import exit_with_refusal
from onward.trainer.run.records import ExportedModel, read_record, write_record

log = logging.getLogger(__name__)


def evaluation_data(
    run: RunDir, split: Literal["evaluation", "test"] = "evaluation", *, opened: RunAsRead | None = None
) -> EvaluationData:
    """Return the rows of a split and the metrics of the configured losses, with which exported files are evaluated.

    opened: the run as it was read, None = its settings and its signature are read here.
    """
    config = opened.configs[split] if opened else read_resolved(run, split)
    cpu = torch.device("cpu")
    held_out = open_evaluated(run.shards, config.data, split)
    signature = opened.signature if opened else read_training_signature(config.model)
    shapes = {output.name: output.shape for output in signature.outputs}

    def new_metrics(output_names: Sequence[str]) -> EvaluationMetrics:
        return EvaluationMetrics(Losses(config.losses, output_names, shapes), config.metrics, device=cpu)

    def batches() -> Iterator[Batch]:
        return evaluation_batches(held_out, config, signature, replica=0, num_replicas=1, device=cpu)

    # the whole file is verified, on the rows as the data has them, also where the ranks have read numbers only
    as_stored = open_evaluated(run.shards, config.data, split, for_file=True)
    file_rows = FileRows(as_stored, config, signature) if signature.computed else None
    return EvaluationData(
        batches=batches,
        new_metrics=new_metrics,
        file_rows=file_rows,
        split=split,
        rows=held_out,
        model=config.model,
    )


def export_file(run: RunDir, path: Path, *, folder: Path, training: bool = False) -> None:
    """Write a checkpoint's weights into the ONNX file and verify the result.

    `training`: write the ONNX graphs that continue training without torch instead.
    """
    with exit_with_refusal(folder):
        state, tensors = load(verify(path))
        config = read_config(run)
        # the moving average if [average] asks for it, else as they were trained
        weights = exported_weights(
            config.average, tensors, exports_average=config.exports_average, source=f"checkpoint {path}"
        )
        checkpoint = Checkpoint(step=state.step, weights=weights)
        opened = RunAsRead.of(run, config)
        if training:
            export_training(run, checkpoint, folder=folder, opened=opened)
            return
        test = evaluation_data(run, "test", opened=opened) if config.data.test_source else None
        data = evaluation_data(run, opened=opened)
        exported = export(run, checkpoint, data=data, test=test, folder=folder, opened=opened)
        write_record(folder / "model.json", _with_preprocessing(run, exported, folder, opened))


def _with_preprocessing(run: RunDir, exported: ExportedModel, folder: Path, opened: RunAsRead) -> ExportedModel:
    """Write preprocessing.json beside an exported file; return the file's record with it, or the reason."""
    try:
        files = write_preprocessing(run, exported, folder, opened=opened)
    except ExportRefused as error:
        log.warning("no preprocessing.json was written: %s", error)
        return exported.model_copy(update={"preprocessing_refused": "; ".join(error.problems)})
    return exported.model_copy(update={"preprocessing": files})


def make_variant(run: RunDir, kind: str, *, folder: Path) -> None:
    """Write one variant of the exported file in `folder`, and its record."""
    from onward.trainer.export.variants import variants

    exported = read_record(folder / "model.json", ExportedModel)
    config = read_config(run)
    data = evaluation_data(run)
    losses = [loss.outputs[0] for loss in config.losses if loss.rule.by_graph]
    tolerance = config.export.variant_tolerance
    if kind == "with_preprocessing":
        from onward.trainer.export.preprocessing.with_preprocessing import write_with_preprocessing

        made = variants.kept_if_written(kind, exported.path, partial(write_with_preprocessing, run, exported, data))
    else:
        read = tuple(filter(None, config.model.outputs))
        made = variants.make_variant(kind, exported.path, data=data, tolerance=tolerance, losses=losses, read=read)
    write_record(variant_in(folder, kind), made)


def compare_with_served(run: RunDir, served: Path, *, folder: Path) -> None:
    """Compare the exported file in `folder` with the served one, and write comparison.json there."""
    from onward.trainer.export.measuring.comparison import compare

    config = read_config(run)
    exported = read_record(folder / "model.json", ExportedModel)
    data = evaluation_data(run, "test" if config.promote_metric.startswith("test/") else "evaluation")
    write_record(comparison_in(folder), compare(config, exported, served, data))


def make_quantized(folder: RunDir) -> None:
    """Insert QuantizeLinear into the model of `config.json` in `folder`; write quantized/ there."""
    from onward.trainer.export.variants import quantize_aware

    with exit_with_refusal(folder.root):
        config = read_config(folder, "local")
        made = quantize_aware.make_quantized(config, folder.quantized / config.model.path.name)
        write_record(folder.quantized / "quantized.json", made)
