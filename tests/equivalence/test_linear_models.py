"""Weights in attributes train alike in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from sklearn.datasets import load_digits

from tests.support.foreign_files import FOLDER
from tests.support.runs import assert_close, final_tensors, make_run, train_run

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


def weights(folder: Path, **parallel: int) -> dict[str, torch.Tensor]:
    pixels, digits = load_digits(return_X_y=True)
    run = make_run(
        folder,
        onnx.load(FOLDER / "sklearn-imputed.onnx"),
        {"X": pixels[:400].astype(np.float32), "label": digits[:400]},
        model={"output": "probability_tensor/log_probabilities"},
        train={"global_batch_size": 32, "num_steps": 12},
        optimizer={"learning_rate": 0.03},
        parallel=parallel,
    )
    train_run(run)
    return final_tensors(run)


def test_every_layout_of_a_logistic_regression_trains_what_one_rank_trains(tmp_path: Path) -> None:
    one = weights(tmp_path / "one")
    trained = {name for name in one if name.startswith("model/")}
    assert trained == {"model/label/coefficients", "model/label/intercepts"}
    for name, parallel in {"replicas": {"data": 2}, "sharded": {"data": 2, "zero": 3}}.items():
        assert_close(weights(tmp_path / name, **parallel), one, 1e-5)
