"""Runs whose file is as good as exported, and what serves it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from onward.trainer.config.loading import build_config
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.export.served import raw_inputs
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, write_record


def serve() -> ModuleType:
    """What computes inputs from raw rows, as it is copied into registered models."""
    return raw_inputs


def exported_run(folder: Path, proto: onnx.ModelProto, **sections: Any) -> RunDir:
    """A run whose file is as good as exported; its evaluation rows are those of evaluation_source, in order."""
    onnx.save(proto, folder / "model.onnx")
    config = build_config(
        {
            "model": {"path": folder / "model.onnx", **sections.pop("model", {})},
            "train": {"num_steps": 1, "global_batch_size": 4},
            **sections,
        }
    )
    run = RunDir(folder / "run")
    write_record(run.config, config)
    shards, _, _ = make_training_shards(config, folder / "cache")
    run.shards.symlink_to(shards, target_is_directory=True)
    return run


def exported_model(path: Path) -> ExportedModel:
    """The record of a file."""
    return ExportedModel(path=path, sha256=model_digest(path), step=1, parity=0, before={}, after={}, changed=0)


def two_tables(folder: Path, **columns: Any) -> dict[str, Any]:
    """Write a.parquet and b.parquet with these columns, to train and to evaluate on; return the settings of [data]."""
    for name in ("a", "b"):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return {"source": str(folder / "a.parquet"), "evaluation_source": str(folder / "b.parquet")}


def finished_run(run: RunDir, model: Path) -> RunDir:
    """The run with its exported file (in truth that of `model`) and its preprocessing, as a finished run has them."""
    run.export.mkdir(parents=True)
    file = run.export / "model.onnx"
    shutil.copyfile(model, file)
    exported = exported_model(file)
    preprocessing = write_preprocessing(run, exported, run.export)
    write_record(run.exported, exported.model_copy(update={"preprocessing": preprocessing}))
    return run
