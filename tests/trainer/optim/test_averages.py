"""Moving averages against torch.optim.swa_utils, what is refused, and what a checkpoint holds of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.training import AverageConfig
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.optim.averages import Averages, average_shapes, exported_weights
from onward.trainer.parallel.planning.planner import plan
from tests.support.graphs import tiny_mlp

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    module[1].num_batches_tracked = None  # AveragedModel cannot average an integer
    return module


def weights_of(module: nn.Module) -> list[Weight]:
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    held = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    return [Weight(name, each, Placement.full(each.shape), trained=True) for name, each in held.items()]


def trained(module: nn.Module, averages: Averages, step: int) -> None:
    """One step of any training, which changes every weight and running statistic."""
    torch.manual_seed(step)
    with torch.no_grad():
        for weight in weights_of(module):
            weight.tensor.add_(0.1 * torch.randn_like(weight.tensor))
    averages.update(step)


def values(averages: Averages) -> list[Tensor]:
    return [tensor.clone() for key, (tensor, _) in averages.parts().items() if not key.startswith("averages/")]


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_an_average_has_the_bits_of_torchs_averaged_model(kind: str) -> None:
    module = network()
    rule = get_ema_multi_avg_fn(0.9) if kind == "ema" else get_swa_multi_avg_fn()
    wanted = AveragedModel(module, multi_avg_fn=rule, use_buffers=True)
    settings: dict[str, Any] = {"decay": 0.9} if kind == "ema" else {"period": 2, "start": 3}
    averages = Averages(AverageConfig(kind=kind, **settings), weights_of(module), num_steps=9, device=CPU)
    for step in range(1, 10):
        trained(module, averages, step)
        if kind == "ema" or step in (3, 5, 7, 9):
            wanted.update_parameters(module)
    names = [weight.name for weight in weights_of(module)]
    expected = dict((*wanted.module.named_parameters(), *wanted.module.named_buffers()))
    for name, found in zip(names, values(averages), strict=True):
        assert torch.equal(found, expected[name]), name
    assert averages.count == (9 if kind == "ema" else 4)


def test_the_warm_up_of_an_ema_forgets_the_first_weights_sooner() -> None:
    weight = torch.zeros(1)
    of = [Weight("w", weight, Placement.full((1,)), trained=True)]
    averages = Averages(AverageConfig(kind="ema_warmup", decay=0.5), of, num_steps=9, device=CPU)
    expected = 0.0
    for step in range(1, 10):
        weight.fill_(step)
        averages.update(step)
        t = step - 1
        decay = min(0.5, (1 + t) / (10 + t))
        expected = float(step) if t == 0 else decay * expected + (1 - decay) * step
        assert values(averages)[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "num_steps", "first"),
    [
        ({"kind": "ema"}, 10, 1),
        ({"kind": "swa"}, 10, 8),
        ({"kind": "swa", "start": 0.5}, 10, 5),
        ({"kind": "swa", "start": 3}, 10, 3),
        ({"kind": "ema", "start": 0.999}, 10, 10),
    ],
)
def test_a_start_below_one_is_a_share_of_all_steps(given: dict[str, Any], num_steps: int, first: int) -> None:
    assert AverageConfig(**given).first_step(num_steps) == first


def test_weights_have_every_bit_again_after_their_averages_were_in_their_place() -> None:
    module, swaps = network(), list[int]()
    config = AverageConfig(kind="ema", decay=0.5, start=2)
    averages = Averages(config, weights_of(module), num_steps=9, device=CPU, swapped=lambda: swaps.append(1))
    trained(module, averages, 1)
    assert list(averages.in_turn()) == [("evaluation", "evaluation/average")], "before `start` they are equal"
    assert swaps == []
    for step in (2, 3, 4):
        trained(module, averages, step)
    weights, before = [each.tensor.clone() for each in weights_of(module)], values(averages)
    seen = {}
    for prefixes in averages.in_turn():
        seen[prefixes] = [each.tensor.clone() for each in weights_of(module)]
    assert list(seen) == [("evaluation",), ("evaluation/average",)]
    assert len(swaps) == 2
    for found, wanted in zip(seen[("evaluation/average",)], before, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip((each.tensor for each in weights_of(module)), weights, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(values(averages), before, strict=True):
        assert torch.equal(found, wanted)


def test_without_an_average_nothing_is_kept_and_only_the_weights_are_evaluated() -> None:
    module = network()
    averages = Averages(AverageConfig(), weights_of(module), num_steps=9, device=CPU)
    averages.update(1)
    assert averages.parts() == {}
    assert list(averages.in_turn()) == [("evaluation",)]


# -- checkpoints

SHAPES = {"a": (2,), "b": (3,)}
WITH_EMA = {"model/a": (2,), "average/a/ema": (2,), "average/b/ema": (3,), "averages/ema": ()}


def test_from_a_checkpoint_without_this_average_it_begins_anew_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for stored, found in ({"model/a": (2,)}, "no average of the weights"), (WITH_EMA, "an average of kind 'ema'"):
        kept = average_shapes(AverageConfig(kind="swa"), SHAPES, "step-7", stored)
        assert kept == ({"model/a": (2,)}, {})
        assert caplog.messages[-1] == f"step-7 has {found}; that of average.kind 'swa' begins as its weights"


def test_an_average_with_warmup_goes_on_from_one_without() -> None:
    found = average_shapes(AverageConfig(kind="ema_warmup"), SHAPES, "step-7", WITH_EMA)
    assert found == average_shapes(AverageConfig(kind="ema"), SHAPES, "step-7", WITH_EMA)


def test_a_training_without_average_continues_from_a_checkpoint_with_one() -> None:
    assert average_shapes(AverageConfig(), SHAPES, "step-7", WITH_EMA) == ({"model/a": (2,)}, {})


def test_an_average_that_a_checkpoint_lacks_is_expected_by_name() -> None:
    found, wanted = average_shapes(AverageConfig(kind="ema"), SHAPES | {"c": (1,)}, "step-7", WITH_EMA)
    assert found == WITH_EMA
    assert wanted.keys() - found.keys() == {"average/c/ema"}


def test_averages_are_loaded_or_begin_as_the_weights() -> None:
    module = network()
    config = AverageConfig(kind="swa", start=0.0)
    averages = Averages(config, weights_of(module), num_steps=9, device=CPU)
    for step in (1, 2, 3):
        trained(module, averages, step)
    saved = {key: tensor.clone() for key, (tensor, _) in averages.parts().items()}
    trained(module, averages, 4)
    resumed = Averages(config, weights_of(module), num_steps=9, device=CPU)
    resumed.load(saved)
    assert resumed.count == 3
    resumed.update(4)
    for found, wanted in zip(values(resumed), values(averages), strict=True):
        assert torch.equal(found, wanted)
    resumed.load({})
    assert resumed.count == 0
    for found, weight in zip(values(resumed), weights_of(module), strict=True):
        assert torch.equal(found, weight.tensor)


def configured(tmp_path: Path, **sections: Any) -> RunConfig:
    (tmp_path / "model.onnx").touch()
    return build_config(
        {
            "model": {"path": tmp_path / "model.onnx"},
            "data": {"source": "digits"},
            "train": {"num_steps": 100, "global_batch_size": 8},
            **sections,
        }
    )


def test_the_average_is_exported_where_its_metric_chooses_the_checkpoint(tmp_path: Path) -> None:
    tensors = {"model/a": torch.zeros(2), "model/frozen": torch.ones(1), "average/a/ema": torch.ones(2)}
    ema = {"average": {"kind": "ema"}}
    of_average = {"checkpoint": {"best_metric": "evaluation/average/loss"}}
    for settings, expected in (
        ({}, 0.0),
        (ema, 0.0),
        (ema | of_average, 1.0),
        (ema | {"export": {"weights": "average", "checkpoint": "last"}}, 1.0),
        (ema | of_average | {"export": {"weights": "trained", "checkpoint": "last"}}, 0.0),
    ):
        config = configured(tmp_path, **settings)
        found = exported_weights(config.average, tensors, exports_average=config.exports_average, source="step-7")
        assert found.keys() == {"a", "frozen"}
        assert found["a"].tolist() == [expected, expected], settings
    config = configured(tmp_path, **ema, **of_average)
    assert config.promote_metric == "evaluation/loss", "of the file"
    with pytest.raises(CheckpointError, match=r"step-7 has no average of kind 'ema' to export; set export.weights"):
        exported_weights(config.average, {"model/a": torch.zeros(2)}, exports_average=True, source="step-7")


@pytest.mark.parametrize(
    ("sections", "problems"),
    [
        (
            {"average": {"decay": 0.9, "start": 5}, "export": {"weights": "average"}},
            [r"average.decay and average.start needs average.kind", r"export.weights 'average' needs average.kind"],
        ),
        (
            {"average": {"kind": "swa", "decay": 0.9, "start": 101}},
            [
                r"average.decay is for ema",
                r"average.start 101 is after the last step, 100",
            ],
        ),
        ({"average": {"kind": "ema", "period": 2}}, [r"average.period is for swa, not ema"]),
        (
            {"average": {"kind": "ema"}, "export": {"weights": "average"}},
            [r"set checkpoint.best_metric = 'evaluation/average/loss' or export.checkpoint = 'last'"],
        ),
        (
            {
                "average": {"kind": "ema"},
                "checkpoint": {"best_metric": "evaluation/average/loss"},
                "export": {"weights": "trained"},
            },
            [r"set checkpoint.best_metric = 'evaluation/loss' or export.checkpoint = 'last'"],
        ),
        (
            {"checkpoint": {"best_metric": "evaluation/average/loss"}},
            [r"no evaluation measures 'evaluation/average/loss'"],
        ),
        (
            {
                "average": {"kind": "ema"},
                "loss": [{"name": "mse", "output": "average"}, {"name": "mse", "output": "b"}],
            },
            [r"the output 'average' of a loss and the moving average would both have the metrics"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_all_at_once(
    sections: dict[str, Any], problems: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **sections)
    for problem in problems:
        assert any(problem in line for line in refused.value.problems), refused.value.problems


def test_a_start_after_the_last_step_of_some_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step 50 would be the first of the average, but there are 20 steps"):
        Averages(AverageConfig(kind="ema", start=50), [], num_steps=20, device=CPU)


def test_the_estimate_of_memory_counts_the_average_as_one_more_moment(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(tiny_mlp().SerializeToString())
    np.savez(tmp_path / "data.npz", features=np.zeros((20, 4), np.float32), label=np.zeros((20, 1), np.float32))
    settings: dict[str, Any] = {
        "model": {"path": tmp_path / "model.onnx", "loss": "mse"},
        "data": {"source": str(tmp_path / "data.npz")},
        "train": {"num_steps": 4, "global_batch_size": 4},
        "launch": {"device": "cpu"},
    }
    without, with_average = (plan(build_config(settings | more)) for more in ({}, {"average": {"kind": "ema"}}))
    (plain,), (averaged,) = without.memory, with_average.memory
    assert averaged.optimizer - plain.optimizer == 4 * sum(stage.parameters for stage in without.stages)
    assert averaged.weights == plain.weights
