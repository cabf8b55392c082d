"""A file of fixed batch, used at its own size with its last rows filled up, trains what the dynamic file trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.distributed.weights import weights_in
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.run.directory import RunDir
from tests.support import graphs
from tests.support.runs import assert_close, events, final_tensors, make_run, train_run

BATCH = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"parallel": {}, "train": {"gradient_accumulation_steps": 4}},
    "two replicas": {"parallel": {"data": 2}, "train": {"gradient_accumulation_steps": 2}},
    "two stages": {"parallel": {"pipeline": 2}, "train": {"gradient_accumulation_steps": 4}},
}


def declared(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """The model with a fixed batch."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


def run_of(folder: Path, model: onnx.ModelProto, *, use: str, layout: str) -> RunDir:
    # 53 rows, of which about 43 are trained on and 10 evaluated: neither is a multiple of 4, nor 43 of 16
    random = np.random.default_rng(0)
    features = random.normal(size=(53, 4)).astype(np.float32)
    sizes = LAYOUTS[layout]
    run = make_run(
        folder,
        model,
        {"features": features, "label": features.sum(1) + 0.1 * random.normal(size=53).astype(np.float32)},
        model={"loss": "mse", "fixed_batch": use},
        train={"global_batch_size": 16, "num_epochs": 2, "evaluation_period": 2, **sizes["train"]},
        parallel=sizes["parallel"],
        optimizer={"learning_rate": 0.01},
    )
    train_run(run)
    return run


@pytest.mark.mpi
@pytest.mark.parametrize(
    "layout", ["two replicas", *(pytest.param(each, marks=pytest.mark.slow) for each in ("one rank", "two stages"))]
)
def test_rows_that_fill_a_batch_up_count_neither_in_training_nor_in_evaluation(layout: str, tmp_path: Path) -> None:
    free = run_of(tmp_path / "free", graphs.tiny_mlp(), use="auto", layout="one rank")
    assert events(free, "start")[0].num_samples % BATCH
    wanted = [event.values for event in events(free, "evaluation")]
    own = run_of(tmp_path / "own", declared(graphs.tiny_mlp(), BATCH), use="own", layout=layout)
    assert_close(final_tensors(own), final_tensors(free), 1e-5)
    assert [event.values for event in events(own, "evaluation")] == [pytest.approx(each, rel=1e-5) for each in wanted]
    newest = newest_complete(own)
    assert newest is not None
    state, tensors = load(newest)
    checkpoint = export.Checkpoint(step=state.step, weights=weights_in(tensors))
    exported = export.export(own, checkpoint, data=evaluation_data(own), folder=own.export)
    assert exported.after == pytest.approx(wanted[-1], rel=1e-4)
    (dims,) = [value.type.tensor_type.shape.dim for value in onnx.load(exported.path).graph.input]
    assert dims[0].dim_value == BATCH
