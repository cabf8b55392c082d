"""Moving averages of the weights: the same in every layout, after a kill, and in the file that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.optim.averages import exported_weights
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence import layouts
from tests.equivalence.layouts import ALONE, MODELS, NUM_STEPS, TOLERANCE, Case, tensors, trained
from tests.support import graphs
from tests.support.cases import both_cases
from tests.support.quantized import quantized
from tests.support.runs import (
    assert_close,
    assert_equal_bits,
    events,
    final_tensors,
    make_run,
    tiny_text,
    train_run,
    train_until,
)

GPT2, BERT, LLAMA, CONV = MODELS
EMA: dict[str, Any] = {"kind": "ema", "decay": 0.6}
SWA: dict[str, Any] = {"kind": "swa", "start": 1}
Make = Callable[..., RunDir]


def sections(average: dict[str, Any]) -> dict[str, Any]:
    # a rate at which the average is far from the weights after three steps
    return {"average": average, "train": {"evaluation_period": 1}, "optimizer": {"learning_rate": 0.03}}


def of_average(run: RunDir) -> list[float]:
    """The loss of the average at each evaluation."""
    return [event.values["evaluation/average/loss"] for event in events(run, "evaluation")]


def assert_same_average(runs: dict[Case, RunDir], cases: list[Case]) -> None:
    for case in cases:
        alone = Case(case.model, ALONE, 0, case.sections)
        found, wanted = tensors(runs[case], NUM_STEPS, "average/"), tensors(runs[alone], NUM_STEPS, "average/")
        assert_close(found, wanted, TOLERANCE)
        weights = tensors(runs[case], NUM_STEPS, "model/")
        assert {name.rpartition("/")[0] for name in found} <= weights.keys()
        losses = of_average(runs[case])
        assert losses == pytest.approx(of_average(runs[alone]), rel=TOLERANCE), case
        last = events(runs[case], "evaluation")[-1].values
        assert abs(last["evaluation/loss"] / losses[-1] - 1) > 10 * TOLERANCE, "they are evaluated apart"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "layout",
    ["dp2", pytest.param("2x2x2", marks=pytest.mark.slow)],
    ids=["data 2, ZeRO 3", "data 2, tensor 2, pipeline 2, ZeRO 3"],
)
def test_an_average_over_ranks_and_zero_3_is_that_of_one_rank(layout: str, tmp_path: Path) -> None:
    cases = [Case(GPT2, layout, 3, sections(EMA))]
    runs = trained([Case(GPT2, ALONE, 0, cases[0].sections), *cases], tmp_path)
    assert_same_average(runs, cases)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("average", [EMA, SWA], ids=["ema", "swa"])
@pytest.mark.parametrize("model", [GPT2, CONV])
def test_the_average_of_every_layout_is_that_of_one_rank(model: str, average: dict[str, Any], tmp_path: Path) -> None:
    divided = [("dp2", 0), ("dp2", 1), ("dp2", 2), ("dp2", 3), ("tp2", 0), ("pp2", 0), ("pp2 interleaved", 0)]
    divided += [("dp4 hybrid", 3), ("dp4 hybrid", 1), ("dp2 x pp2", 3), ("2x2x2", 2)]
    cases = [Case(model, layout, zero, sections(average)) for layout, zero in divided]
    runs = trained([Case(model, ALONE, 0, sections(average)), *cases], tmp_path)
    assert_same_average(runs, cases)


@pytest.mark.mpi
@pytest.mark.slow
def test_adapters_and_masters_of_integers_have_averages_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "int8", (quantized, layouts.tiny_images))
    lora = sections(EMA) | {"lora": {"weights": ["*mlp*weight"], "rank": 2}}
    cases = [Case("int8", "dp2", 3, sections(EMA)), Case(GPT2, "dp2 x tp2", 1, lora), Case(GPT2, "dp2", 3, lora)]
    alone = [Case("int8", ALONE, 0, sections(EMA)), Case(GPT2, ALONE, 0, lora)]
    runs = trained([*alone, *cases], tmp_path)
    assert_same_average(runs, cases)
    averaged = tensors(runs[cases[-1]], NUM_STEPS, "average/")
    assert averaged, "adapters only"
    assert not [name for name in averaged if name.startswith("wte")]


SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 12, "evaluation_period": 3, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-2},
    "parallel": {"data": 2, "zero": 1},
    "checkpoint": {"period": 5, "best_metric": "evaluation/average/loss"},
    "average": {"kind": "ema_warmup", "decay": 0.7},
}


@both_cases(slow="transformer")
@pytest.mark.mpi
def test_an_average_is_killed_and_resumed_with_the_same_bits_and_does_not_change_the_training(make: Make) -> None:
    undisturbed = make("undisturbed", **SETTINGS)
    train_run(undisturbed)
    killed = make("killed", **SETTINGS)
    train_until(killed, lambda event: event.step >= 7 and event.kind == "scalars")
    assert train_run(killed).attempt == 2
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert of_average(killed)[-1] == of_average(undisturbed)[-1]

    plain = SETTINGS | {"average": {}, "checkpoint": {"period": 5}}
    without = make("without", **plain)
    train_run(without)
    average = {key: tensor for key, tensor in final_tensors(killed).items() if key.startswith("average")}
    assert_equal_bits(final_tensors(killed), final_tensors(without) | average)
    assert len(average) > 2


@both_cases(slow="transformer")
@pytest.mark.mpi
@pytest.mark.slow
def test_a_checkpoint_without_an_average_is_continued_with_one_and_one_with_it_without(make: Make) -> None:
    with_average = make("with", **SETTINGS)
    train_run(with_average)
    plain = make("plain", **SETTINGS | {"average": {}, "checkpoint": {"period": 5}})
    train_run(plain)
    start = {"checkpoint": {"load": str(plain.checkpoint(10))}}

    begun = make("begun", **SETTINGS | start)
    train_run(begun)
    model = {key: tensor for key, tensor in final_tensors(plain).items() if key.startswith(("model/", "optimizer/"))}
    found = final_tensors(begun)
    assert_equal_bits({key: found[key] for key in model}, model)
    assert found["averages/ema"].item() == 2, "it has the weights of steps 11 and 12"

    dropped = make("dropped", **SETTINGS | {"average": {}, "checkpoint": {"load": str(with_average.checkpoint(10))}})
    train_run(dropped)
    assert_equal_bits(final_tensors(dropped), final_tensors(plain))


@pytest.mark.mpi
@pytest.mark.slow
def test_an_average_is_resumed_on_another_layout(tmp_path: Path) -> None:
    first = Case(GPT2, "dp2 x pp2", 3, sections(EMA))
    run = trained([first], tmp_path / "first")[first]
    start = {"checkpoint": {"period": 1, "load": str(run.checkpoint(1))}}
    cases = [Case(GPT2, layout, zero, sections(EMA) | start) for layout, zero in (("1x1x1", 0), ("dp2 x tp2", 1))]
    for case, made in trained(cases, tmp_path / "others").items():
        assert_close(tensors(made, NUM_STEPS, "average/"), tensors(run, NUM_STEPS, "average/"), 10 * TOLERANCE)
        assert of_average(made) == pytest.approx(of_average(run)[-2:], rel=10 * TOLERANCE), case


def test_the_exported_average_is_verified_and_measures_what_the_evaluation_measured(tmp_path: Path) -> None:
    settings = SETTINGS | {"parallel": {}, "checkpoint": {"best_metric": "evaluation/average/loss"}}
    run = make_run(tmp_path, graphs.tiny_transformer(), tiny_text(60), **settings)
    result = train_run(run)
    _, held = load(verify(run.checkpoint(result.step)))
    weights = exported_weights(read_config(run).average, held, exports_average=True, source="the checkpoint")
    made = export.export(run, export.Checkpoint(step=result.step, weights=weights), data=evaluation_data(run))
    assert made.after["evaluation/loss"] == pytest.approx(result.metrics["evaluation/average/loss"], rel=1e-5)
    assert made.after["evaluation/loss"] != pytest.approx(result.metrics["evaluation/loss"], rel=1e-2)
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(made.path).graph.initializer}
    averages = {name.rpartition("/")[0]: each for name, each in tensors(run, result.step, "average/").items()}
    assert averages
    for name, average in averages.items():
        assert torch.equal(torch.from_numpy(stored[name].copy()), average), name
