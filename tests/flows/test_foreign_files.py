"""A file of each exporter through a whole `onward run`: better under onnxruntime, and changed in its weights only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

from onward.trainer.diagnostics.diff import compare
from tests.support.foreign_files import FILES, Array, ForeignFile
from tests.support.workshop import Workshop

CONFIG = """
[model]
path = "{name}.onnx"
output = "{output}"
[data]
source = "{name}.npz"
[train]
global_batch_size = 32
num_steps = 100
[optimizer]
learning_rate = 1e-2
[parallel]
data = {ranks}
[launch]
device = "cpu"
threads_per_rank = 1
"""
FILE_OF_EACH = {
    "tf2onnx-transformer": 2,
    "jax2onnx-cnn": 1,
    "torch-legacy-recurrent": 1,
    "torch-dynamo-cnn": 2,
    "torch-dynamo-folded-mlp": 1,
    "onnxruntime-transformer": 2,
    "keras-prenorm-cnn": 1,
    "keras-torch-lstm": 1,
    "skl2onnx-mlp": 2,
    "paddle2onnx-text": 1,
    "optimum-bert": 2,
}
"""Committed file -> number of ranks."""
LOGITS = {"skl2onnx-mlp": "add_result2"}
"""What the loss reads where the first output is not logits: here before Softmax and ArgMax."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def learnable(file: ForeignFile, rows: int = 600) -> dict[str, Array]:
    """Return columns of the file's inputs, and labels that depend on them: digits where the size is theirs."""
    columns = file.feed(rows)
    name, first = next(iter(columns.items()))
    if first[0].size == 64 and first.dtype == np.float32:
        digits = load_digits()
        columns[name] = (digits.data[:rows].reshape(first.shape) / 4).astype(np.float32)
        return columns | {"label": digits.target[:rows].astype(np.int64)}
    if "attention_mask" in columns:
        columns["attention_mask"][:] = 1
    random = np.random.default_rng(0)
    label = random.integers(0, 4, rows)
    if "below" in file.inputs[name]:  # most tokens are of one quarter of the vocabulary
        quarter = file.inputs[name]["below"] // 4
        of_label = random.integers(0, quarter, first.shape) + quarter * label.reshape(-1, *[1] * (first.ndim - 1))
        columns[name] = np.where(random.random(first.shape) < 0.6, of_label, first).astype(first.dtype)
    else:  # one feature in four is larger
        first[..., :][np.arange(rows), ..., label] += 2.0
    return columns | {"label": label}


def judged(path: Path, columns: dict[str, Array]) -> tuple[float, float]:
    """Return (cross-entropy, accuracy) of a file under onnxruntime, whose outputs are logits or probabilities."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    results = session.run(None, {value.name: columns[value.name] for value in session.get_inputs()})
    (scores,) = (result for result in results if result.ndim == 2 and result.dtype == np.float32)
    if not np.allclose(scores.sum(1), 1, atol=1e-4) or (scores < 0).any():
        scores = np.exp(scores - scores.max(1, keepdims=True))
    chances = scores / scores.sum(1, keepdims=True)
    label = columns["label"]
    loss = -np.log(np.maximum(chances[np.arange(len(label)), label], 1e-12)).mean()
    return float(loss), float((chances.argmax(1) == label).mean())


@pytest.mark.mpi
@pytest.mark.slow  # one file of another framework trains and comes back every time: tests/compatibility
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("only_servers")
@pytest.mark.parametrize("name", FILE_OF_EACH)
def test_a_run_gives_back_the_file_with_better_weights_and_nothing_else_changed(name: str, workshop: Workshop) -> None:
    file = FILES[name]
    columns = learnable(file)
    (workshop.root / f"{name}.onnx").write_bytes(file.path.read_bytes())
    np.savez(workshop.root / f"{name}.npz", **columns)
    config = CONFIG.format(name=name, output=LOGITS.get(name, ""), ranks=FILE_OF_EACH[name])
    (workshop.root / f"{name}.toml").write_text(config)

    facts: dict[str, Any] = workshop.onward("run", str(workshop.root / f"{name}.toml"))

    assert facts["state"] == "exported"
    assert facts["parity"] < 1e-4
    assert facts["after"]["evaluation/loss"] < 0.8 * facts["before"]["evaluation/loss"]
    (loss, accuracy), (loss_before, accuracy_before) = (
        judged(path, columns) for path in (Path(facts["model"]), file.path)
    )
    assert loss < 0.8 * loss_before
    assert accuracy > accuracy_before + 0.1
    difference = compare(file.path, Path(facts["model"]))
    assert (difference.model, difference.interface, difference.nodes) == ((), (), ())
    changed = {change.name for change in difference.tensors if change.change == "values"}
    assert len(changed) == len(difference.tensors)
    assert changed <= file.trained | file.buffers
    assert len(changed & file.trained) >= 0.8 * len(file.trained)


def test_a_file_of_each_exporter_is_run() -> None:
    assert {FILES[name].exporter for name in FILE_OF_EACH} == {file.exporter for file in FILES.values()}
