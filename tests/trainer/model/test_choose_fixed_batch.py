"""`model.fixed_batch` is chosen by running the file; sizes that do not fit are refused with the numbers to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import evaluation_batches
from onward.trainer.data.batches.step_shares import check_last_samples
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import ConfigError
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.model.trainable import open_trainable
from onward.trainer.parallel.planning.planner import plan
from tests.support.fixed_batches import FILES, exported, rows
from tests.support.graphs import tiny_mlp
from tests.support.shards import make_shards

CPU = torch.device("cpu")


def config_of(folder: Path, name: str, **sections: Any) -> RunConfig:
    onnx.save(exported(name, "legacy"), folder / "model.onnx")
    np.savez(folder / "data.npz", x=rows(name, 50).numpy(), label=np.arange(50) % 4)
    return build_config(
        {
            "model": {"path": folder / "model.onnx"} | sections.get("model", {}),
            "data": {"source": str(folder / "data.npz"), "evaluation_fraction": 0.3},
            "train": {"global_batch_size": 8, "num_steps": 3} | sections.get("train", {}),
            "parallel": sections.get("parallel", {}),
            "launch": {"device": "cpu"} | sections.get("launch", {}),
        }
    )


@pytest.mark.parametrize("name", ["attention-2", "squeezed-1", "over-the-batch-4"])
def test_auto_becomes_what_the_file_proves(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, name, train={"gradient_accumulation_steps": 8 // FILES[name].batch})
    chosen, use = choose_fixed_batch(config)
    assert (chosen.model.fixed_batch, use.declared) == (FILES[name].use, FILES[name].batch)
    module = open_trainable(chosen).module
    assert module(rows(name, FILES[name].batch)).shape[-1] == 4


def test_a_file_of_dynamic_batch_keeps_the_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path, "attention-2")
    onnx.save(tiny_mlp(), tmp_path / "model.onnx")
    assert choose_fixed_batch(config)[0] is config


def test_micro_batches_of_another_size_are_refused_with_the_numbers_to_set(tmp_path: Path) -> None:
    config = config_of(tmp_path, "squeezed-1", parallel={"data": 2})
    with pytest.raises(
        ConfigError, match=r"trained 1 row at a time.*2 replicas.*= 4 rows; set train\.gradient_acc\w+ = 4"
    ):
        choose_fixed_batch(config)
    config = config_of(tmp_path, "over-the-batch-4", train={"global_batch_size": 10})
    expected = r"set train\.global_batch_size = 8 and train\.gradient_accumulation_steps = 2"
    with pytest.raises(ConfigError, match=expected):
        choose_fixed_batch(config)
    given = {"gradient_accumulation_steps": 2, "evaluation_batch_size": 8}
    with pytest.raises(ConfigError, match="evaluation_batch_size is 8: set it to 4"):
        choose_fixed_batch(config_of(tmp_path, "over-the-batch-4", train=given))


def test_a_use_that_the_file_disproves_is_refused(tmp_path: Path) -> None:
    sizes = {"gradient_accumulation_steps": 2}
    for wrong in ("any", "own"):
        config = config_of(tmp_path, "over-the-batch-4", model={"fixed_batch": wrong}, train=sizes)
        with pytest.raises(ConfigError, match="right only at its own size, never filled up: the results of a row dep"):
            choose_fixed_batch(config)
    config = config_of(tmp_path, "attention-2", model={"fixed_batch": "own"}, train={"gradient_accumulation_steps": 4})
    assert choose_fixed_batch(config)[0].model.fixed_batch == "own"


def test_a_rank_started_by_hand_refuses_a_file_that_auto_cannot_widen(tmp_path: Path) -> None:
    open_trainable(config_of(tmp_path, "attention-2"))
    with pytest.raises(ConfigError, match=r"no other is proved right.*set model\.fixed_batch = 'own'"):
        open_trainable(config_of(tmp_path, "squeezed-1"))


def test_a_joint_file_takes_whole_batches_only(tmp_path: Path) -> None:
    model = {"fixed_batch": "joint"}
    sizes = {"gradient_accumulation_steps": 2, "num_steps": 0, "num_epochs": 1}
    config = config_of(tmp_path, "over-the-batch-4", model=model, train=sizes)
    check_last_samples(config.model, config.train, config.parallel, 36)
    with pytest.raises(ConfigError, match=r"a run of 38 samples ends with 2; .*train\.num_steps = 4"):
        check_last_samples(config.model, config.train, config.parallel, 38)
    signature = read_training_signature(config.model)
    directory, _, _ = make_shards(
        config.data, InputColumns(config.data, config.loss, config.model, signature).to_read(), tmp_path / "cache"
    )
    shards = open_shards(directory, "evaluation")
    assert shards.num_rows % 4
    share = {"num_replicas": 2, "device": CPU}
    found = [
        batch
        for replica in range(2)
        for batch in evaluation_batches(shards, config, signature, replica=replica, **share)
        if not batch.is_padding
    ]
    assert all(batch.size == 4 and not batch.filled_to for batch in found)
    assert sum(batch.size for batch in found) == shards.num_rows // 4 * 4


def test_the_planner_chooses_micro_batches_of_the_declared_size(tmp_path: Path) -> None:
    auto = {"parallel": {"sizes": "auto"}, "launch": {"num_ranks": 2}}
    found = plan(config_of(tmp_path, "over-the-batch-4", train={"global_batch_size": 16}, **auto))
    assert found.micro_batch_size == 4
    with pytest.raises(ConfigError, match="of the rows that the file declares"):
        plan(config_of(tmp_path, "over-the-batch-4", train={"global_batch_size": 18}, **auto))
