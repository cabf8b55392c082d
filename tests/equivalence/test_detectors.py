"""Detectors of a set and of a grid train alike on every layout, killed and resumed, and their mAP is exact."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.tasks.export import export_file
from onward.trainer.config.loading import load_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.schema.target_counts import count_targets
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.events import ObjectPrecision, read_events
from onward.trainer.model.losses import set_prediction
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.losses.set_prediction import detections
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.metrics.library_measure import import_torchmetrics
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.tensor.regions import find_regions
from onward.trainer.proposal.detectors.boxes import WEIGHTS
from onward.trainer.proposal.detectors.dense_head import recognise
from onward.trainer.proposal.detectors.raw_outputs import find_raw_outputs
from onward.trainer.run.directory import RunDir, read_config
from tests.support.detectors import HEADS, detector_file
from tests.support.own_environment import detectors_of_transformers
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_bits, final_tensors, make_run, train_run, train_until
from tests.trainer.data.images.test_boxes import annotate, pictures

pytestmark = pytest.mark.mpi
LOSSES = [
    {"name": "set_classes", "output": ["logits", "found"], "num_queries": 6},
    {"name": "set_l1", "output": ["logits", "found"], "weight": 5.0},
    {"name": "set_giou", "output": ["logits", "found"], "weight": 2.0},
]


def set_model(size: int = 48, queries: int = 6, classes: int = 2) -> onnx.ModelProto:
    """Convolution, hidden layer, two heads: `image` -> logits [batch, Q, C + 1], found [B, Q, 4]."""
    g = GraphWriter("set model")
    x = g.input("image", ("batch", 3, size, size))
    x = g.op("Relu", g.op("Conv", x, g.weight("w1", g.normal(0.1, 8, 3, 8, 8)), kernel_shape=[8, 8], strides=[8, 8]))
    inner = 8 * (size // 8) ** 2
    x = g.op("Relu", g.op("MatMul", g.op("Flatten", x), g.weight("w2", g.normal(0.1, inner, 32))))
    scores = g.op("MatMul", x, g.weight("w3", g.normal(0.2, 32, queries * (classes + 1))))
    corners = g.op("MatMul", x, g.weight("w4", g.normal(0.2, 32, queries * 4)))
    of_scores, of_corners = g.weight("shape1", [-1, queries, classes + 1]), g.weight("shape2", [-1, queries, 4])
    g.output(g.op("Reshape", scores, of_scores, outputs="logits"), ("batch", queries, classes + 1))
    g.output(g.op("Sigmoid", g.op("Reshape", corners, of_corners), outputs="found"), ("batch", queries, 4))
    return g.model()


GRID_LOSS = [
    {
        "name": "yolov5",
        "output": ["small", "large"],
        "strides": [8, 16],
        "anchors": [[[6, 6], [8, 14], [14, 8]], [[18, 18], [14, 28], [28, 14]]],
    }
]


def grid_model(size: int = 48, classes: int = 2) -> onnx.ModelProto:
    """Two convolutions and a head behind each: `image` -> small, large [batch, 3 x (5 + C), cells, cells]."""
    g = GraphWriter("grid model")
    x = g.input("image", ("batch", 3, size, size))
    channels, cells = 3, size // 8
    for name, stride in (("small", 8), ("large", 2)):
        weight = g.weight(f"trunk {name}", g.normal(0.1, 8, channels, stride, stride))
        x = g.op("Relu", g.op("Conv", x, weight, kernel_shape=[stride, stride], strides=[stride, stride]))
        weight = g.weight(f"head {name}", g.normal(0.1, 3 * (5 + classes), 8, 1, 1))
        bias = g.weight(f"bias {name}", g.normal(0.1, 3 * (5 + classes)))
        head = g.op("Conv", x, weight, bias, kernel_shape=[1, 1], outputs=name)
        g.output(head, ("batch", 3 * (5 + classes), cells, cells))
        channels, cells = 8, cells // 2
    return g.model()


def recognised(family: str) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """The file of a small detector, and the loss that `onward init` finds in it."""
    model = detector_file(family)
    raw = find_raw_outputs(model, Path())
    assert raw
    head = recognise(raw)
    assert head
    loss = head.loss
    return model, [{key: getattr(loss, key) for key in ("name", "output", "strides", "anchors")}]


def transformers_detector(name: str) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """A small detector that transformers has exported, and the losses that `onward init` proposes for it."""
    kind = {"scores": "varifocal"} if name == "rt_detr" else {}
    given = {"output": ["logits", "boxes"], **kind}
    losses = [{**given, "name": each, "weight": WEIGHTS[each]} for each in WEIGHTS]
    losses[0]["num_queries"] = 0 if name == "rt_detr" else 12
    return onnx.load(detectors_of_transformers() / f"{name}.onnx"), losses


DETECTORS: dict[str, Callable[[], tuple[onnx.ModelProto, list[dict[str, Any]]]]] = {
    "set": lambda: (set_model(), LOSSES),
    "yolov5": lambda: (grid_model(), GRID_LOSS),
}
DETECTORS |= {f"file of {family}": partial(recognised, family) for family in HEADS}
TRANSFORMERS = ("rt_detr", "yolos", "detr")
DETECTORS |= {f"{name} of transformers": partial(transformers_detector, name) for name in TRANSFORMERS}
QUICK = ("set",)


def detector_run(
    folder: Path,
    data: Path,
    *,
    kind: str = "set",
    image: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **settings: Any,
) -> RunDir:
    source = {"source": str(data / "images"), "label": "boxes", "evaluation_fraction": 0.3}
    boxes = {"boxes": "../annotations.json", "resize": "stretch", "augment": {"flip": (0.5, 0.5)}, **(image or {})}
    model, loss = DETECTORS[kind]()
    return make_run(
        folder,
        model,
        {},
        data={**source, "image": boxes},
        loss=loss,
        metrics=["map", "map_50", "map_small", "map_medium", "map_large"],
        # the last step has 4 rows, so that a second replica has none
        train={"num_epochs": 3, "global_batch_size": 8, "evaluation_period": 6, **(train or {})},
        checkpoint={"period": 4},
        # AdamW would make steps of the rounding of gradients that are 0, such as those of the biases of keys
        optimizer={"name": "sgd" if "transformers" in kind else "adamw", "learning_rate": 3e-3},
        **settings,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("boxes")
    annotate(folder, pictures(folder, 40))
    return folder


def evaluations(run: RunDir) -> list[dict[str, float]]:
    return [dict(event.values) for event, _ in read_events(run.events) if event.kind == "evaluation"]


@pytest.fixture(
    scope="module", params=[kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DETECTORS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(kind: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = detector_run(tmp_path_factory.mktemp("alone"), data, kind=kind)
    train_run(run)
    return run


PIPELINE = {"pipeline": 2}
TENSOR = {"data": 2, "tensor": 2, "convolutions": "always"}


@pytest.mark.parametrize(
    "parallel",
    [{"data": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"data": 2, "zero": 3}, PIPELINE, TENSOR))],
    ids=str,
)
def test_every_layout_trains_what_one_rank_trains_with_the_same_map(
    parallel: dict[str, Any], kind: str, data: Path, alone: RunDir, tmp_path: Path
) -> None:
    if "tensor" in parallel:
        divided = find_regions(to_module(load_model(read_config(alone).model.path)), 2, convolutions="always")
        assert divided.regions, divided.replicated
    # several micro-batches, whose sums of weights and numbers of matches differ
    number = 4 if "pipeline" in parallel else 2 if "zero" in parallel else 1
    micro_batches = {"gradient_accumulation_steps": number}
    run = detector_run(tmp_path, data, kind=kind, parallel=parallel, train=micro_batches)
    train_run(run)
    wanted = final_tensors(alone)
    for name, value in final_tensors(run).items():
        np.testing.assert_allclose(value, wanted[name], rtol=2e-4, atol=2e-5, err_msg=name)
    for found, expected in zip(evaluations(run), evaluations(alone), strict=True):
        assert found.keys() == expected.keys()
        for name, number in found.items():
            assert number == pytest.approx(expected[name], rel=2e-3, abs=2e-4, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_detector_of_transformers_is_proposed_with_its_loss_whose_gradients_are_the_familys(
    name: str, data: Path, tmp_path: Path
) -> None:
    folder = detectors_of_transformers()
    onward.init(folder / f"{name}.onnx", data / "images", {}, output=tmp_path / "new.toml", steps=0)
    losses = load_config(tmp_path / "new.toml").losses
    wanted = transformers_detector(name)[1]
    assert [{key: getattr(loss, key) for key in given} for loss, given in zip(losses, wanted, strict=True)] == [
        {**given, "output": tuple(given["output"])} for given in wanted
    ]
    reference = np.load(folder / f"{name}.npz")
    module = to_module(load_model(folder / f"{name}.onnx")).eval()
    labels = torch.from_numpy(reference["labels"])
    outputs = module(torch.from_numpy(reference["pixels"]))
    loss = torch.zeros(())
    for each in losses:
        total = getattr(set_prediction, each.name)(*outputs, labels, each)
        loss = loss + each.weight * total / count_targets(labels, len(labels), each)
    assert loss.item() == pytest.approx(float(reference["loss"]), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    compared = 0
    for key, weight in named_weights(module).items():
        # RT-DETR stops gradients between the layers of its decoder, of which a file says nothing
        if key in reference and (name != "rt_detr" or re.search(r"decoder\.(layers|\w+_embed)\.1\.", key)):
            # the gradient of the bias of keys is 0 but for rounding
            atol = max(1e-4 * np.abs(reference[key]).max(), 1e-7)
            np.testing.assert_allclose(weight.grad, reference[key], rtol=1e-4, atol=atol, err_msg=key)
            compared += 1
    assert compared >= 8


@pytest.mark.slow
def test_the_file_comes_back_with_its_nodes(kind: str, alone: RunDir) -> None:
    before, after = DETECTORS[kind]()[0], onnx.load(export_file(alone, max(alone.checkpoints.glob("step-*"))).path)
    assert [node.SerializeToString() for node in after.graph.node] == [
        node.SerializeToString() for node in before.graph.node
    ]
    assert after.graph.output == before.graph.output
    stored = [
        {tensor.name: tensor.SerializeToString() for tensor in each.graph.initializer} for each in (before, after)
    ]
    assert stored[0].keys() == stored[1].keys()
    changed = {key for key in stored[0] if stored[0][key] != stored[1][key]}
    weights = named_weights(to_module(load_model(read_config(alone).model.path)))
    assert changed <= weights.keys()
    # the layers of boxes on levels without an object have no gradient
    assert len(changed) > (20 if "transformers" in kind else len(weights) / 2)
    trained = final_tensors(alone)
    for tensor in after.graph.initializer:
        if tensor.name in changed:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), trained[f"model/{tensor.name}"])


def test_killed_and_resumed_it_has_the_same_bits(kind: str, data: Path, alone: RunDir, tmp_path: Path) -> None:
    run = detector_run(tmp_path, data, kind=kind)
    train_until(run, ("checkpoint", 8), rank=0)
    train_run(run)
    assert_equal_bits(final_tensors(run), final_tensors(alone))


@pytest.mark.slow
@pytest.mark.parametrize("mosaic", [0.7, [0.7, 1]])
def test_mosaics_and_mixed_images_train_alike_on_two_ranks_and_after_a_kill(
    mosaic: Any, data: Path, tmp_path: Path
) -> None:
    image = {"augment": {"mosaic": mosaic, "mixup": 8.0, "flip": 0.5}, "resize": "pad_grey"}
    runs = {}
    for name, settings in (("alone", {}), ("two", {"parallel": {"data": 2}}), ("killed", {}), ("at the switch", {})):
        run = runs[name] = detector_run(tmp_path / name, data, kind="yolov5", image=image, **settings)
        # the last epoch begins at step 8
        if name in ("killed", "at the switch"):
            train_until(run, ("checkpoint", 4 if name == "killed" else 8), rank=0)
        train_run(run)
    wanted = final_tensors(runs["alone"])
    assert_equal_bits(final_tensors(runs["killed"]), wanted)
    assert_equal_bits(final_tensors(runs["at the switch"]), wanted)
    for name, value in final_tensors(runs["two"]).items():
        np.testing.assert_allclose(value, wanted[name], rtol=2e-4, atol=2e-5, err_msg=name)
    losses = [values["evaluation/loss"] for values in evaluations(runs["alone"])]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_more_objects_of_mixed_images_than_queries_are_refused_before_the_start(data: Path, tmp_path: Path) -> None:
    # 6 queries, and up to 3 objects in an image
    detector_run(tmp_path / "two", data, image={"augment": {"mixup": 8.0}})
    with pytest.raises(ConfigError, match=r"put 4 images of up to 3 objects together, but loss set_classes has 6 quer"):
        detector_run(tmp_path / "four", data, image={"augment": {"mosaic": 0.1}})


@pytest.mark.parametrize("size", [44, (48, 44)])
def test_a_size_that_no_grid_ends_with_is_refused_before_the_start(size: Any, data: Path, tmp_path: Path) -> None:
    model = grid_model()
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], ("h", "w"), strict=True):
        dim.dim_param = name
    with pytest.raises(ConfigError, match=r"ends with the 44 pixels .* too large; .* multiples of 8, such as 40 or 48"):
        make_run(
            tmp_path,
            model,
            {},
            data={
                "source": str(data / "images"),
                "label": "boxes",
                "image": {"boxes": "../annotations.json", "resize": "stretch", "size": size},
            },
            loss=GRID_LOSS,
            train={"num_epochs": 1, "global_batch_size": 8},
        )


@pytest.mark.parametrize("kind", ["set"], indirect=True)
def test_the_precision_is_that_of_pycocotools_on_all_images(alone: RunDir) -> None:
    import_torchmetrics()
    from torchmetrics.detection import MeanAveragePrecision

    config = read_config(alone)
    rows = open_shards(alone.shards, "evaluation")
    batch = one_batch(rows, config, read_training_signature(config.model), np.arange(rows.num_rows))
    module = to_module(load_model(config.model.path)).eval()
    with torch.no_grad():
        scores, boxes = module(*batch.inputs)
    labels = batch.labels[0]
    assert labels is not None
    measured = MeanAveragePrecision(backend="pycocotools", class_metrics=True)
    for found, own in zip(detections(scores, boxes, config.losses[0]), labels.reshape(len(labels), -1, 6), strict=True):
        there = own[own[:, 0] >= 0]
        measured.update(
            [{"labels": found[:, 0].long(), "scores": found[:, 1], "boxes": found[:, 2:] * 48.0}],
            [{"labels": there[:, 0].long(), "boxes": there[:, 1:5] * 48.0}],
        )
    wanted = measured.compute()
    first = evaluations(alone)[0]
    for name in ("map", "map_50", "map_small"):
        assert first[f"evaluation/set_classes/{name}"] == pytest.approx(float(wanted[name]), abs=1e-6), name
    # there are no such objects
    for name in ("map_medium", "map_large"):
        assert float(wanted[name]) == -1
        assert math.isnan(first[f"evaluation/set_classes/{name}"])
    events = [event for event, _ in read_events(alone.events) if isinstance(event, ObjectPrecision)]
    of_classes = events[0].classes
    assert [each.of_class for each in of_classes] == wanted["classes"].tolist() == [0, 1]
    assert [each.map for each in of_classes] == pytest.approx(wanted["map_per_class"].tolist(), abs=1e-6)
    assert [each.map_large for each in of_classes] == [None, None]
    counts = labels.reshape(-1, 6)[:, 0].long().tolist()
    assert [each.objects for each in of_classes] == [counts.count(0), counts.count(1)]


def test_the_curve_of_a_class_falls_where_a_better_score_is_wrong() -> None:
    scores = torch.tensor([[[0.0, 2.0], [0.0, 3.0], [0.0, 1.0]]])  # one class, without a class for no object
    boxes = torch.tensor([[[0.25, 0.25, 0.2, 0.2], [0.9, 0.9, 0.05, 0.05], [0.6, 0.6, 0.2, 0.2]]])
    corners = torch.tensor([[0.15, 0.15, 0.35, 0.35], [0.5, 0.5, 0.7, 0.7]])
    labels = torch.cat([torch.ones(2, 1), corners, torch.zeros(2, 1)], 1).reshape(1, -1)
    loss = LossConfig(
        name="set_classes", output=("a", "b"), scores="sigmoid", image_size=(320, 320), ignore_index=-100, label="l"
    )
    names = ("map_50", "map_small", "map_medium")
    measured = EvaluationMetrics(
        Losses([loss], ["a", "b"]), [MetricConfig(name=name) for name in names], device=torch.device("cpu")
    )
    scores[..., 0] = -9.0
    measured.update([scores, boxes], [labels], 1)
    values = measured.compute()
    (row,) = [each for each in measured.precisions[""] if each.objects]
    # the best score is wrong: the precision is 1/2 at a recall of 1/2, and 2/3 at 1, which also holds below
    assert row.curve == [pytest.approx(2 / 3, abs=1e-4)] * 21
    # the objects have 64 x 64 pixels, and the wrong box 16 x 16: it is none of medium size
    assert (row.map_50, row.map_medium) == (pytest.approx(2 / 3), pytest.approx(1.0))
    assert row.map_small is None
    assert [values["map_50"], values["map_medium"]] == [pytest.approx(2 / 3), pytest.approx(1.0)]
    assert math.isnan(values["map_small"])


def precision(mpi: MPIContext) -> list[float]:
    """The precision of a few images of a made-up detector; ranks have different numbers of them."""
    random = torch.Generator().manual_seed(0)
    scores, boxes = torch.randn(9, 5, 4, generator=random), torch.rand(9, 5, 4, generator=random)
    labels = torch.full((9, 3, 6), -1.0)
    for image in range(8):
        first = torch.rand(2, 2, generator=random) * 0.5
        classes = torch.tensor([[image % 3.0], [1.0]])
        labels[image, :2] = torch.cat([classes, first, first + 0.4, torch.zeros(2, 1)], 1)
        boxes[image, 0] = torch.cat([first[0] + 0.22, torch.tensor([0.4, 0.38])])
        scores[image, 0, image % 3] = 4.0
    loss = LossConfig(name="set_classes", output=("logits", "boxes"), num_queries=5, ignore_index=-100, label="b")
    metrics = [MetricConfig(name=name) for name in ("map", "map_50", "map_small")]
    measured = EvaluationMetrics(Losses([loss], ["logits", "boxes"]), metrics, device=torch.device("cpu"))
    for image in range(mpi.rank, 9, mpi.world_size):
        own = slice(image, image + 1)
        measured.update([scores[own], boxes[own]], [labels[own].flatten(1)], 1)
    values = measured.compute()
    return [values["loss"], values["map"], values["map_50"], values["map_small"]]


@pytest.mark.slow
def test_all_ranks_have_the_precision_of_one() -> None:
    [one] = run_ranks(1, "tests.equivalence.test_detectors:precision")
    three = run_ranks(3, "tests.equivalence.test_detectors:precision")
    for found in three:
        assert found == pytest.approx(one, rel=1e-9)
    assert one[2] > 0.3
