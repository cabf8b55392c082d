"""What a run is said to need is what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.model.trainable import open_trainable
from onward.trainer.rehearsal.needs import least_needs
from onward.trainer.run.directory import read_config
from tests.support.graphs import tiny_transformer
from tests.support.runs import final_tensors, make_run, tiny_text, train_run


@pytest.mark.mpi
@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"name": "muon", "learning_rate": 0.01}, "average": {"kind": "ema"}},
        {"lora": {"weights": ["*"], "rank": 2}, "optimizer": {"moments": "bf16"}},
        pytest.param({"optimizer": {"name": "sgd"}}, marks=pytest.mark.slow),
        pytest.param({"optimizer": {"name": "adafactor", "learning_rate": 0.01}}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_has_the_size_that_was_computed_before_training(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = make_run(
        tmp_path, tiny_transformer(), tiny_text(40), train={"global_batch_size": 8, "num_steps": 2}, **sections
    )
    config = read_config(run)
    needs = least_needs(open_trainable(config).module, config, size_bytes=config.model.path.stat().st_size)
    train_run(run)
    # beside them there are counts of updates, which are one number each
    saved = {name: tensor for name, tensor in final_tensors(run).items() if tensor.ndim}
    assert needs.checkpoint_bytes == sum(tensor.nbytes for tensor in saved.values())
    assert needs.model_bytes == config.model.path.stat().st_size


def test_ranks_that_divide_the_weights_need_less_each(tmp_path: Path) -> None:
    def rank_bytes(**parallel: int) -> int:
        run = make_run(
            tmp_path / "_".join([f"{name}{size}" for name, size in parallel.items()]),
            tiny_transformer(),
            tiny_text(40),
            train={"global_batch_size": 8, "num_steps": 2, "gradient_accumulation_steps": 2},
            parallel=parallel,
        )
        config = read_config(run)
        return least_needs(open_trainable(config).module, config, size_bytes=0).rank_bytes

    weights = rank_bytes(data=1) // 4  # weights, gradients and two moments
    assert rank_bytes(data=2) == 4 * weights
    assert rank_bytes(data=2, zero=1) == 3 * weights
    assert rank_bytes(data=2, zero=2) == 5 * weights // 2
    assert rank_bytes(data=2, zero=3) == 2 * weights
    assert rank_bytes(tensor=2, pipeline=2) == weights
