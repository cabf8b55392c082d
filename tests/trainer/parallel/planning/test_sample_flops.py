"""The FLOPs of samples depend on the samples alone: not on padding, replicas or micro-batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.planning import sample_flops
from onward.trainer.parallel.planning.flops import count_flops
from onward.trainer.parallel.planning.sample_flops import Lengths, SampleFlops, count_sample_flops
from tests.support import graphs
from tests.support.runs import make_run, tiny_text
from tests.support.texts import bert_tokenizer, reviews, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, sharded
from tests.trainer.parallel.test_cost import compressed

ALONE = MPIContext(0, 1, 0, 1, "host", torch.device("cpu"))


def divided(config: RunConfig, directory: Path, replica: int = 0, num_replicas: int = 1) -> Batches:
    signature = read_training_signature(config.model)
    share: dict[str, Any] = {"replica": replica, "num_replicas": num_replicas, "device": ALONE.device}
    return Batches(open_shards(directory, "train"), config, signature, **share)


def counted(config: RunConfig, batches: Batches) -> SampleFlops:
    module = open_trainable(config).module
    found = count_sample_flops(module, config, batches.example().inputs, batches, ALONE, beat=lambda: None)
    assert found is not None
    return found


@pytest.mark.slow
def test_texts_cost_the_same_in_every_division_and_padding_costs_nothing(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ("text", "label"), reviews(80))
    model = graphs.tiny_bert(vocab_size=400, positions=64)
    found = []
    for replicas, accumulated in ((1, 1), (1, 4), (2, 2), (3, 1)):
        train = {"num_steps": 4, "global_batch_size": 12, "gradient_accumulation_steps": accumulated}
        config = configured(tmp_path, model, {}, train=train, parallel={"data": replicas})
        directory, _ = sharded(config, tmp_path)
        shares = [divided(config, directory, replica, replicas) for replica in range(replicas)]
        flops = counted(config, shares[0])
        batches = [batch for share in shares for batch in share.take(0, 12)]
        found.append((flops.of(batches), sum(batch.num_tokens for batch in batches), flops.mean))
        for share in shares:
            share.close()
    # ids and mask have one length; each row counts as a micro-batch of its own length would
    lengths = np.concatenate([batch.lengths for batch in batches])
    assert lengths.shape == (12, 2)
    assert (lengths[:, 0] == lengths[:, 1]).all()
    assert len(set(lengths[:, 0].tolist())) > 3
    module = to_module(model)
    alone = [count_flops(module, [torch.ones(2, n, dtype=torch.int64)] * 2).total / 2 for n in lengths[:, 0].tolist()]
    for total, num_tokens, mean in found:
        assert total == pytest.approx(sum(alone), rel=1e-9)
        assert num_tokens == lengths[:, 0].sum()
        assert min(alone) < mean < max(alone)


def test_samples_of_one_shape_all_cost_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path, graphs.tiny_transformer(), tiny_text(40), train={"num_steps": 2, "global_batch_size": 6})
    config = RunConfig.model_validate_json(run.config.read_text())
    batches = divided(config, run.shards)
    flops = counted(config, batches)
    module = to_module(graphs.tiny_transformer())
    each = count_flops(module, [torch.ones(6, 12, dtype=torch.int64)]).total / 6
    assert (flops.coefficients, flops.mean) == ((each,), each)
    assert flops.of(batches.take(0, 6)) == 6 * each
    batches.close()


def test_a_padding_micro_batch_costs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, graphs.tiny_mlp(), _table(10), model={"loss": "mse"}, train=_step(4), parallel={"data": 2})
    config = RunConfig.model_validate_json(run.config.read_text())
    shares = [divided(config, run.shards, replica, 2) for replica in (0, 1)]
    flops = counted(config, shares[0])
    last = [share.take(4, 1) for share in shares]  # one replica has the only sample
    (first,), (second,) = last
    assert {first.is_padding, second.is_padding} == {False, True}
    assert [flops.of(each) for each in last] == [0.0 if each[0].is_padding else flops.mean for each in last]
    for share in shares:
        share.close()


def _table(rows: int) -> dict[str, Any]:
    return {"features": np.ones((rows, 4), np.float32), "label": np.ones((rows, 1), np.float32)}


def _step(size: int) -> dict[str, int]:
    return {"num_steps": 4, "global_batch_size": size}


# -- the polynomial


def test_inputs_of_one_length_are_one_and_others_are_not() -> None:
    ids, targets = np.array([8, 6, 4, 5, 3]), np.array([2, 2, 1, 3, 1])
    found = Lengths.of(np.stack([ids, targets, ids], 1))
    assert found.members == ((0, 2), (1,))
    assert found.nodes == ((8, 6, 4), (3, 2, 1))
    assert found.terms == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    # as many powers as there are lengths
    assert Lengths.of(np.array([[7], [7]])).terms == [(0,)]
    assert Lengths.of(np.array([[7], [5]])).terms == [(0,), (1,)]
    assert Lengths.of(np.empty((0, 0), np.int64)).terms == [()]


@pytest.mark.parametrize("num_lengths", [1, 2, 3])
def test_every_polynomial_of_second_degree_is_found(num_lengths: int) -> None:
    rows = np.array(list(itertools.product((30, 512, 1024, 700), repeat=num_lengths)))
    lengths, random = Lengths.of(rows), np.random.default_rng(num_lengths)
    wanted = random.uniform(1, 1e6, len(lengths.terms)).tolist()

    def value(row: Sequence[int]) -> float:
        powers = zip(lengths.terms, wanted, strict=True)
        return sum(c * float(np.prod(np.array(row, np.float64) ** np.array(term))) for term, c in powers)

    counts = [value(lengths.of_term(term)) for term in lengths.terms]
    found = SampleFlops(lengths, tuple(sample_flops._polynomial(lengths, counts)), 0.0)
    for row in rows:
        assert found.of_rows(row[None]) == pytest.approx(value(row.tolist()), rel=1e-9)


# -- what cannot be counted by shapes


def test_shapes_that_depend_on_data_are_counted_for_the_first_micro_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"x": np.ones((40, 4), np.float32), "label": np.ones((40, 4), np.float32)}
    run = make_run(tmp_path, compressed(), data, model={"loss": "mse"}, train=_step(4))
    config = RunConfig.model_validate_json(run.config.read_text())
    batches = divided(config, run.shards)
    with caplog.at_level(logging.INFO):
        assert counted(config, batches).mean == 0.0  # no product
    assert "cannot be counted by shapes: RuntimeError" in caplog.text
    assert "they are counted for the first micro-batch" in caplog.text

    def fails(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(sample_flops, "measure_flops", fails)
    module, example = open_trainable(config).module, batches.example().inputs
    assert count_sample_flops(module, config, example, batches, ALONE, beat=lambda: None) is None
    assert "so TFLOP/s and MFU are not shown: no such operator" in caplog.text
    batches.close()
