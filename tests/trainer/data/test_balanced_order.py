"""train.shuffle = "length": little padding and equal work, each sample once per epoch, the same steps on any layout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.data.batches.balanced_order import WINDOW_STEPS, BalancedOrder
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.batches.sample_stream import SampleStream
from onward.trainer.data.schema.permutation import Array
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.diagnostics.config_check import check_files_and_data

STEP = 32


def text_lengths(number: int) -> Array:
    """Return lengths as texts have them: log-normal, most short and few long."""
    lengths = np.random.default_rng(0).lognormal(4.0, 0.7, number)
    return np.clip(lengths, 4, 512).astype(np.int64)


def order(lengths: Array, *, seed: int = 0, step: int = STEP) -> tuple[SampleStream, BalancedOrder]:
    stream = SampleStream([len(lengths)], [1.0], seed=seed, shuffle=True)
    return stream, BalancedOrder(stream, lengths, step=step, seed=seed)


@pytest.mark.parametrize("number", [1, 5, 31, 32, 33, 1000, WINDOW_STEPS * STEP, 5000])
def test_each_sample_is_taken_once_per_epoch_however_the_positions_are_asked_for(number: int) -> None:
    _, balanced = order(text_lengths(number))
    rows = balanced.rows(np.arange(3 * number))
    for epoch in range(3):
        assert sorted(rows[epoch * number : (epoch + 1) * number].tolist()) == list(range(number))
    asked = np.random.default_rng(1).permutation(3 * number)
    assert (balanced.rows(asked) == rows[asked]).all()
    _, again = order(text_lengths(number))
    assert (again.rows(asked) == rows[asked]).all()
    if number > STEP:
        assert (order(text_lengths(number), seed=1)[1].rows(asked) != rows[asked]).any()


def padding(rows: Array, lengths: Array, micro_batch: int) -> float:
    """Return the share of a batch's elements that are padding."""
    parts = [lengths[rows[first : first + micro_batch]] for first in range(0, len(rows), micro_batch)]
    return 1 - sum(part.sum() for part in parts) / sum(part.max() * len(part) for part in parts)


def test_padding_falls_from_half_to_a_few_percent_and_the_longest_are_not_always_last() -> None:
    lengths = text_lengths(50_000)
    stream, balanced = order(lengths)
    positions = np.arange(49_984)
    before, after = (padding(each.rows(positions), lengths, 8) for each in (stream, balanced))
    assert before > 0.4
    assert after < 0.05
    means = lengths[balanced.rows(positions)].reshape(-1, STEP).mean(axis=1)
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.1
    tails = [lengths[balanced.rows(np.arange(epoch * 50_000, (epoch + 1) * 50_000)[-8:])].mean() for epoch in range(20)]
    assert min(tails) < lengths.mean() < max(tails)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_have_nearly_equal_work_in_each_micro_batch(replicas: int) -> None:
    lengths = text_lengths(20_000)
    _, balanced = order(lengths, step=96)
    sizes = np.full(replicas, 96 // replicas)
    waits = []
    for step in range(200):
        positions = balanced.dealt(np.arange(step * 96, (step + 1) * 96), sizes)
        assert sorted(positions.tolist()) == list(range(step * 96, (step + 1) * 96))
        longest = lengths[balanced.rows(positions)].reshape(replicas, -1, 4).max(axis=2)
        waits.append(1 - longest.mean() / longest.max(axis=0).mean())
    assert np.mean(waits) < 0.01


def test_uneven_shares_get_every_sample_once() -> None:
    lengths = text_lengths(100)
    _, balanced = order(lengths)
    dealt = balanced.dealt(np.arange(10), np.array([3, 4, 0, 3]))
    assert sorted(dealt.tolist()) == list(range(10))
    shares = np.split(lengths[balanced.rows(dealt)], [3, 7, 7])
    assert all((np.diff(share) >= 0).all() for share in shares)


# -- batches of a configured run


MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
tagger (float[batch, length] values) => (float[batch, 1] sum)
<float[1] weight = {0}, int64[1] axis = {1}>
{
    total = ReduceSum (values, axis)
    sum = Mul (total, weight)
}
"""


def configured(folder: Path, **sections: Any) -> Any:
    onnx.save(onnx.parser.parse_model(MODEL), folder / "model.onnx")
    lines = [{"values": [float(row)] * length, "label": row} for row, length in enumerate(text_lengths(150).tolist())]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"source": str(folder / "data.jsonl")} | sections.pop("data", {})
    train = {
        "global_batch_size": 24,
        "num_epochs": 2.5,
        "gradient_accumulation_steps": 2,
        "shuffle": "length",
    } | sections.pop("train", {})
    model = {"path": folder / "model.onnx", "loss": "mse"}
    return build_config({"model": model, "data": data, "train": train, **sections})


def test_the_samples_of_a_step_are_the_same_on_any_layout_and_after_a_resume(tmp_path: Path) -> None:
    config = configured(tmp_path, data={"rows_per_shard": 40})
    assert check_files_and_data(dict(config)) == []
    signature = read_training_signature(config.model)
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    total, size = config.train.samples_of_run(manifest.rows("train")), 24

    def steps(replicas: int, first: int = 0) -> list[list[int]]:
        found: list[list[int]] = []
        parallel = config.parallel.model_copy(update={"data": replicas})
        mine = config.model_copy(update={"parallel": parallel})
        for position in range(first, total, size):
            found.append([])
            for replica in range(replicas):
                share: Any = {"replica": replica, "num_replicas": replicas, "device": torch.device("cpu")}
                batches = Batches(open_shards(directory, "train"), mine, signature, **share)
                for batch in batches.take(position, min(size, total - position)):
                    if not batch.is_padding:
                        found[-1] += [int(value) for value in np.ravel(batch.labels[0])]
                        widths = {int(row[row != 0].numel()) for row in batch.inputs[0]} - {0}
                        assert not widths or max(widths) == batch.inputs[0].shape[1]
                batches.close()
            found[-1].sort()
        return found

    alone = steps(1)
    assert steps(2) == alone
    assert steps(3, first=4 * size) == alone[4:]
    counts = Counter(row for step in alone for row in step)
    assert len(counts) == manifest.rows("train")
    assert set(counts.values()) == {2, 3}


def test_what_cannot_be_balanced_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(['{"values": [1, 2], "label": 0}'] * 40))
    # lists of JSON may always vary; numbers of one shape do not
    np.savez(tmp_path / "data.npz", values=np.zeros((40, 2), np.float32), label=np.zeros(40))
    data = config.data.model_copy(update={"source": str(tmp_path / "data.npz")})
    assert "every sample has one length" in check_files_and_data({**dict(config), "data": data})[0]
