"""Compute a teacher's outputs once for every row, before training: `teacher.cache`.

    rank 0    chunk 0    chunk 2    chunk 4        each rank runs the whole teacher on its chunks of rows
    rank 1    chunk 1    chunk 3
              barrier    barrier    barrier        after each round, so that no rank waits longer than for one chunk

A chunk that is there, of an attempt that was killed, is kept. The graph that is trained then has no teacher: its
outputs are inputs that come from the files (model/teacher/teacher_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.storage.shards import Shards
from onward.trainer.data.storage.soft_labels import SoftLabelFiles
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.model.precision import autocast
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.onnx_import.imported_graph import ImportedGraph, output_nodes
from onward.trainer.onnx_import.tracing.shape_assumptions import is_impure


def with_soft_labels(
    splits: Sequence[Shards],
    config: RunConfig,
    signature: Signature,
    folder: Path,
    mpi: MPIContext,
    *,
    beat: Callable[[], None],
) -> Sequence[Shards]:
    """Return the training and the evaluation split with the teacher's outputs in `folder`, computed where they are not.

    Returns the splits as they are unless `teacher.cache` is set. Collective: every rank of the world. Raises
    ConfigError for outputs whose shape differs from row to row, DataError for damaged files.
    """
    if not config.teacher.path or config.teacher.cache == "none":
        return splits
    names = tuple(loss.teacher_output for loss in config.soft_losses)
    teacher: ImportedGraph | None = None
    labelled_splits = []
    for name, split in zip(("train", "evaluation"), splits, strict=True):
        files = SoftLabelFiles(folder, name, split.num_rows, names, config.teacher.cache)
        chunks = list(files.chunks())
        for first in range(0, len(chunks), mpi.world_size):
            for number, rows in chunks[first : first + mpi.world_size][mpi.rank : mpi.rank + 1]:
                if not files.is_complete(number):
                    # only where a chunk is missing: a resumed run does not even open the teacher
                    teacher = teacher or _teacher_alone(open_with_teacher(config).module, names, mpi.device)
                    files.write(number, _computed(teacher, split, config, signature, rows, mpi.device, beat))
            beat()
            dist.barrier()
        _check_shapes(files)
        labelled_splits.append(split.with_soft_labels(files))
    return labelled_splits


def _teacher_alone(module: ImportedGraph, names: Sequence[str], device: torch.device) -> ImportedGraph:
    """Return a module of the teacher that takes the model's inputs and returns the soft labels. module: of both."""
    nodes = dict(zip(module.output_names, output_nodes(module.graph), strict=True))
    # the model's own nodes have no reader then, and are eliminated
    module.graph.output_node().args = (tuple(nodes[name] for name in names),)
    module.graph.eliminate_dead_code(is_impure_node=is_impure)
    module.recompile()
    module.output_names = tuple(names)
    return module.to(device).eval()


@torch.no_grad()
def _computed(
    teacher: ImportedGraph,
    split: Shards,
    config: RunConfig,
    signature: Signature,
    rows: Array,
    device: torch.device,
    beat: Callable[[], None],
) -> dict[str, Array]:
    """Return the name of each output -> what the teacher computes of these rows, [rows, ...]."""
    parts: list[list[Array]] = []
    for first in range(0, len(rows), config.evaluation_batch_size):
        batch = one_batch(split, config, signature, rows[first : first + config.evaluation_batch_size])
        with autocast(config.precision, device):
            outputs = batch.own_rows(teacher(*(value.to(device) for value in batch.inputs)))
        for name, value in zip(teacher.output_names, outputs, strict=True):
            if not value.ndim or len(value) != batch.size:
                raise ConfigError(
                    f"teacher.cache: {name} of {batch.size} rows is {list(value.shape)}, which cannot be divided into "
                    "rows; set teacher.cache = 'none'"
                )
        # to the host batch by batch: the outputs of a whole chunk may not fit into the memory of the device
        parts.append([value.float().cpu().numpy() for value in outputs])
        beat()
    columns = list(zip(*parts, strict=True))
    shapes = [sorted({part.shape[1:] for part in column}) for column in columns]
    _refuse_varying(teacher.output_names, shapes)
    return {name: np.concatenate(column) for name, column in zip(teacher.output_names, columns, strict=True)}


def _check_shapes(files: SoftLabelFiles) -> None:
    chunks = list(files.shapes())
    _refuse_varying(files.names, [sorted({tuple(chunk[name]) for chunk in chunks}) for name in files.names])


def _refuse_varying(names: Sequence[str], shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
    for name, found in zip(names, shapes, strict=True):
        if len(found) > 1:
            raise ConfigError(
                f"teacher.cache: {name} is {list(found[0])} for some rows and {list(found[1])} for others, as they are "
                "padded with their batch; set teacher.cache = 'none'"
            )
