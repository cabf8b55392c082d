"""Promise 3: pipeline, tensor and ZeRO, and their products, train what one rank trains; whatever graph it is.

And promises 5 and 9 in every layout: a checkpoint of one is continued by any other with the same samples; an overflow
on one rank of one stage skips the step on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper

from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.small_models import build_resnet18
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence import layouts
from tests.equivalence.layouts import (
    ALONE,
    MODELS,
    NUM_STEPS,
    TOLERANCE,
    Case,
    differences,
    exported,
    make_case,
    trained,
)
from tests.support import graphs
from tests.support.quantized import quantized
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_bits, events, final_tensors, losses, make_run, tiny_images, tiny_text

GPT2, BERT, LLAMA, CONV = MODELS

# the quick part: each axis, each ZeRO and each model at least once, in worlds of 4 and 8 ranks
QUICK = [
    Case(GPT2, "2x2x2"),
    Case(GPT2, "dp2 x pp2", zero=3),
    Case(BERT, "tp2 x pp2"),
    Case(LLAMA, "dp2 x tp2", zero=2),
    Case(CONV, "dp2 x pp2", zero=1),
]


@pytest.mark.mpi
def test_every_kind_of_parallelism_trains_what_one_rank_trains(tmp_path: Path) -> None:
    runs = trained([*QUICK, *(Case(model, ALONE) for model in MODELS)], tmp_path)
    found = {case.name: differences(runs[case], runs[Case(case.model, ALONE)]) for case in QUICK}
    assert {name for name, each in found.items() if max(each.values()) > TOLERANCE} == set(), found
    assert_exported_alike(runs, QUICK)
    for case in QUICK:
        wanted = layouts.norms(runs[Case(case.model, ALONE)])
        least = 1e-3 * max(value for name, value in wanted.items() if "gradient_norm/" in name)
        assert layouts.norms(runs[case]) == pytest.approx(wanted, rel=5 * TOLERANCE, abs=5 * TOLERANCE * least), case
        assert layouts.counted_flops(runs[case]) == layouts.counted_flops(runs[Case(case.model, ALONE)]) > 0
        assert layouts.flops_of_steps(runs[case]) == pytest.approx([layouts.counted_flops(runs[case])] * NUM_STEPS)


def assert_exported_alike(runs: dict[Case, RunDir], cases: Iterable[Case]) -> None:
    """The files that come out have the same weights to rounding, all others the same bits."""
    files = {model: exported(runs[Case(model, ALONE)]) for model in {case.model for case in cases}}
    for case in cases:
        wanted, found = files[case.model], exported(runs[case])
        assert found.keys() == wanted.keys()
        for name in found:
            limit = TOLERANCE * max(np.abs(wanted[name]).max(initial=0), 1e-6)
            assert np.abs(found[name] - wanted[name]).max(initial=0) <= limit, (case.name, name)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_matrix_trains_what_one_rank_trains(model: str, tmp_path: Path) -> None:
    cases = [case for case in layouts.matrix() if case.model == model]
    runs = trained(cases, tmp_path, timeout_s=2400)
    found = {case.name: differences(runs[case], runs[Case(model, ALONE)]) for case in cases if case.layout != ALONE}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    assert_exported_alike(runs, [case for case in cases if case.layout != ALONE])


@pytest.mark.mpi
@pytest.mark.slow
def test_every_layout_trains_batch_norms_by_stored_and_by_computed_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "statistics", (graphs.tiny_computed_statistics, tiny_images))
    cases = [Case("statistics", *each) for each in (("dp2",), ("tp2",), ("pp2",), ("2x2x2",), ("dp2 x pp2", 3))]
    runs = trained([Case("statistics", ALONE), *cases], tmp_path)
    found = {case.name: differences(runs[case], runs[Case("statistics", ALONE)]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    assert_exported_alike(runs, cases)


@pytest.mark.mpi
@pytest.mark.slow
def test_parameters_of_one_number_train_alike_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "numbers", (graphs.with_learned_numbers, tiny_text))
    layouts_of_numbers = (("dp2", 1), ("dp2", 2), ("dp2", 3), ("tp2",), ("pp2",), ("2x2x2", 3))
    alone, *cases = [Case("numbers", *each) for each in ((ALONE,), *layouts_of_numbers)]
    runs = trained([alone, *cases], tmp_path)
    found = {case.name: differences(runs[case], runs[alone]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    before, after = graphs.with_learned_numbers(), exported(runs[alone])
    numbers = {tensor.name: tensor for tensor in before.graph.initializer if tensor.name in after}
    learned = [name for name, tensor in numbers.items() if np.any(numpy_helper.to_array(tensor) != after[name])]
    assert {"h.0.alpha", "h.1.alpha", "h.0.mlp.beta", "h.0.attn.temperature", "logit_scale"} <= set(learned)


@pytest.mark.mpi
@pytest.mark.slow
def test_every_layout_trains_weights_that_are_stored_as_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "int8", (quantized, tiny_images))
    cases = [Case("int8", "dp2"), Case("int8", "pp2"), Case("int8", "dp2 x pp2", 3)]
    runs = trained([Case("int8", ALONE), *cases], tmp_path)
    found = {case.name: differences(runs[case], runs[Case("int8", ALONE)]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}


def continued(run: RunDir, folder: Path, layout: str, zero: int = 0) -> RunDir:
    """A run in another layout that starts from the checkpoint of step 1 of `run`."""
    case = Case(GPT2, layout, zero, {"checkpoint": {"period": 1, "load": str(run.checkpoint(1))}})
    return make_case(case, folder)


@pytest.mark.mpi
def test_a_checkpoint_of_one_layout_is_continued_by_any_other_with_the_same_samples(tmp_path: Path) -> None:
    """Saved by 2 x 2 ranks with a ZeRO-3 pipeline in the middle of an epoch; loaded by one, two and four."""
    first = trained([Case(GPT2, "dp2 x pp2", zero=3)], tmp_path / "first")
    (run,) = first.values()
    others = [("1x1x1", 0), ("tp2", 0), ("dp2 x tp2", 1), ("dp2 x pp2", 3)]
    runs = {name: continued(run, tmp_path / name.replace(" ", ""), name, zero) for name, zero in others}
    for size in (1, 2, 4):
        roots = [str(made.root) for made in runs.values() if read_config(made).world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=300)
    wanted, rows = losses(run), stream(run)
    for made in runs.values():
        assert losses(made) == pytest.approx({step: wanted[step] for step in (2, 3)}, rel=TOLERANCE)
        assert stream(made) == rows
    assert_equal_bits(final_tensors(runs["dp2 x pp2"]), final_tensors(run))


def stream(run: RunDir) -> list[list[int]]:
    """The rows of each step, over all replicas."""
    config = read_config(run)
    batches = Batches(
        open_shards(run.shards, "train"),
        config,
        read_training_signature(config.model),
        replica=0,
        num_replicas=1,
        device=torch.device("cpu"),
    )
    size = config.train.global_batch_size
    found = [sorted(batches.rows(step * size, size).tolist()) for step in range(layouts.NUM_STEPS)]
    batches.close()
    return found


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("layout", "rank"), [("tp2 x pp2", 3), pytest.param("2x2x2", 5, marks=pytest.mark.slow)], ids=["2x2", "2x2x2"]
)
def test_an_overflow_on_one_rank_of_one_stage_is_skipped_by_all(tmp_path: Path, layout: str, rank: int) -> None:
    case = Case(GPT2, layout, 0, {"precision": {"compute": "fp16", "loss_scale": ("dynamic", 1024.0)}})
    run = make_case(case, tmp_path)
    planted = "tests.equivalence.test_layouts:with_a_planted_overflow"
    steps = run_ranks(case.world_size, planted, str(run.root), rank, 2, timeout_s=300)
    assert steps == [layouts.NUM_STEPS] * case.world_size
    skipped = [event for event in events(run, "scalars") if event.values.get("train/skipped")]
    assert [(event.step, event.values["train/loss_scale"]) for event in skipped] == [(2, 512.0)]
    assert sorted(losses(run)) == [1, 2, 3], "the step is tried again at half the scale"


def with_a_planted_overflow(mpi: MPIContext, root: str, rank: int, step: int) -> int:
    """The loop, in which one gradient on one rank overflows in the first backward pass of a step."""
    from onward.trainer import loop
    from onward.trainer.events import Heartbeat

    run = RunDir(Path(root))
    heartbeat = Heartbeat(run.heartbeat)
    build_rank_model, planted = loop.build_rank_model, []

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        if heartbeat.step == step and not planted:
            planted.append(step)
            return torch.full_like(gradient, torch.inf)
        return gradient

    def assembled(*arguments: Any, **settings: Any) -> Any:
        model = build_rank_model(*arguments, **settings)
        if mpi.rank == rank:
            weight = next(weight for weight in model.trained if weight.name.endswith("mlp.c_fc.weight"))
            weight.tensor.register_hook(overflow)
        return model

    loop.build_rank_model = assembled
    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    result = loop.train(run, mpi, attempt=1, heartbeat=heartbeat, stop_requested=lambda: False)
    return result.step


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_with_unequal_shares_recompute_what_the_others_do(tmp_path: Path) -> None:
    """Whole units are recomputed with their all-reduces: those of other units on another rank would add up wrongly."""
    rows = np.random.default_rng(0)
    columns = {"x": rows.normal(size=(60, 16)).astype(np.float32), "label": rows.integers(0, 5, 60)}
    runs = {
        size: make_run(
            tmp_path / str(size),
            graphs.residual_mlps(65, 16, 64, 64),
            columns,
            train={"global_batch_size": 8, "num_steps": layouts.NUM_STEPS},
            parallel={"tensor": size, "units": 3},
            recompute={"mode": "whole"},
            checkpoint={"period": 1},
        )
        for size in (1, 2)
    }
    for size, run in runs.items():
        run_ranks(size, "tests.equivalence.layouts:train_all", [str(run.root)], timeout_s=300)
    for prefix in ("model/", "optimizer/"):
        found, wanted = (layouts.tensors(runs[size], layouts.NUM_STEPS, prefix) for size in (2, 1))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE * float(tensor.abs().max()))
    assert losses(runs[2]) == pytest.approx(losses(runs[1]), rel=TOLERANCE)


COMPRESSED = {"recompute": {"mode": "compressed"}}
ROUNDED = {"recompute": {"mode": "compressed_bf16"}}


@pytest.mark.mpi
def test_compressed_activations_train_the_same_bits(tmp_path: Path) -> None:
    plain, compressed = Case(CONV, ALONE), Case(CONV, ALONE, sections=COMPRESSED)
    runs = trained([plain, compressed], tmp_path)
    assert losses(runs[plain]) == losses(runs[compressed])
    assert_equal_bits(final_tensors(runs[plain]), final_tensors(runs[compressed]))


def small_images(rows: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"image": random.normal(size=(rows, 3, 24, 24)).astype(np.float32), "label": random.integers(0, 5, rows)}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_compressed_activations_change_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones leave every bit of what the layout trains, rounded ones its losses; the images are large enough."""
    name = "wide"
    monkeypatch.setitem(MODELS, name, (lambda: build_resnet18(num_classes=5, image_size=24, width=8), small_images))
    monkeypatch.setitem(layouts.LAYOUTS, "pp2 zero bubble", {"pipeline": 2, "schedule": "zero_bubble"})
    tried = [("dp2",), ("dp2", 3), ("tp2",), ("pp2",), ("pp2 interleaved",), ("pp2 zero bubble",), ("dp2 x pp2", 2)]
    cases = {each: [Case(name, *each, sections=how) for how in ({}, COMPRESSED, ROUNDED)] for each in tried}
    runs = trained([case for three in cases.values() for case in three], tmp_path, timeout_s=1800)
    for plain, exact, rounded in cases.values():
        assert losses(runs[plain]) == losses(runs[exact]), plain.name
        assert_equal_bits(final_tensors(runs[plain]), final_tensors(runs[exact]))
        found = differences(runs[rounded], runs[plain])
        assert found["loss"] < 1e-4, (plain.name, found)
        assert 1e-4 < found["gradients"] < 0.02, (plain.name, found)
