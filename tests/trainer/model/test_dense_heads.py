"""Losses of detectors with a grid: values and gradients are those of torchvision and of the published formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig, setting_problems
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.anchor_matches import count_matches
from onward.trainer.data.schema.detection_grids import grids_of, size_problems
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses.dense_heads.anchor_ratio import balance
from onward.trainer.model.losses.dense_heads.assigned import DividedLoss
from onward.trainer.model.losses.dense_heads.families import FAMILIES, dense_detections, dense_loss
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.guards.loss_checks import check_counts
from tests.support.own_environment import run_script, with_packages

SIDE, CLASSES, IMAGES = 64, 5, 3
STRIDES = (8.0, 16.0, 32.0)
ANCHORS = tuple(tuple((4.0 * s * w, 4.0 * s / w) for w in (0.8, 1.0, 1.5)) for s in (2, 4, 8))
CHANNELS = {
    "yolov5": (4, 1, CLASSES),
    "yolov8": (64, CLASSES),
    "yolov10": (64, CLASSES),
    "yolo26": (4, CLASSES),
    "yolo26_end2end": (4, CLASSES),
    "yolox": (4, 1, CLASSES),
    "fcos": (4, 1, CLASSES),
    "retinanet": (4, CLASSES),
    "ssd": (4, CLASSES + 1),
    "centernet": (CLASSES, 2, 2),
}


def config(name: Any, num_outputs: int = 0, **changes: Any) -> LossConfig:
    anchors = ANCHORS if name in ("yolov5", "retinanet", "ssd") else ()
    strides = STRIDES[:1] if name == "centernet" else STRIDES
    given = {
        "name": name,
        "strides": strides,
        "anchors": anchors,
        "ignore_index": -100,
        "output": ("raw",) * num_outputs,
    }
    return LossConfig.model_validate(given | changes)


def raw_outputs(name: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loss = config(name)
    per_cell = len(ANCHORS[0]) if loss.anchors else 1
    found = []
    for stride in loss.strides:
        cells = int(SIDE / stride)
        for channels in CHANNELS[name]:
            values = torch.randn(IMAGES, channels * per_cell, cells, cells, generator=generator)
            # distances of FCOS come behind a ReLU, and those of YOLO26 begin at 2 cells
            if name == "fcos" and channels == 4:
                values = 2 * values.abs()
            if name.startswith("yolo26") and channels == 4:
                values += 4.0
            found.append((0.5 * values).requires_grad_())
    return found


def labels_of(objects: list[list[tuple[float, ...]]]) -> Tensor:
    """Rows of class, x1, y1, x2, y2, flag, padded."""
    most = max(map(len, objects))
    rows = torch.full((len(objects), most, 6), -1.0)
    for image, own in enumerate(objects):
        for place, values in enumerate(own):
            rows[image, place] = torch.tensor(values)
    return rows.flatten(1)


def labels(seed: int = 0) -> Tensor:
    """Four objects, of which one is a crowd; three; none."""
    random = np.random.default_rng(seed)
    objects: list[list[tuple[float, ...]]] = [[], [], []]
    for image, number in enumerate((4, 3, 0)):
        for place in range(number):
            corner = random.random(2) * 0.6
            size = 0.1 + random.random(2) * 0.3
            flag = 1 if (image, place) == (0, 1) else 0
            objects[image].append((int(random.integers(CLASSES)), *corner, *(corner + size), flag))
    return labels_of(objects)


def computed(name: str, outputs: list[Tensor], own_labels: Tensor, **changes: Any) -> DividedLoss:
    return dense_loss(outputs, own_labels, config(name, len(outputs), **changes))


def mean_and_gradients(name: str, outputs: list[Tensor], own_labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    total, divisor = computed(name, outputs, own_labels)
    mean = (total / divisor.clamp(min=1)).sum()
    return mean, torch.autograd.grad(mean, outputs)


def targets_of(own_labels: Tensor) -> list[dict[str, Tensor]]:
    """As torchvision takes them: boxes in pixels and classes of each image, without crowds."""
    found = []
    for rows in own_labels.reshape(IMAGES, -1, 6):
        counted = rows[(rows[:, 0] >= 0) & (rows[:, 5] == 0)]
        found.append({"boxes": counted[:, 1:5] * SIDE, "labels": counted[:, 0].long()})
    return found


def torchvision_mean(name: str, outputs: list[Tensor], own_labels: Tensor) -> Tensor:
    """The sum of torchvision's losses for the same raw outputs."""
    import_torchvision()
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
    from torchvision.models.detection.image_list import ImageList

    targets = targets_of(own_labels)
    images = ImageList(torch.zeros(IMAGES, 3, SIDE, SIDE), [(SIDE, SIDE)] * IMAGES)
    features = [torch.zeros(IMAGES, 1, int(SIDE / stride), int(SIDE / stride)) for stride in STRIDES]
    kinds = len(CHANNELS[name])
    per_cell = len(ANCHORS[0]) if config(name).anchors else 1

    def table(kind: int) -> Tensor:
        rows = []
        for level in range(len(STRIDES)):
            value = outputs[level * kinds + kind]
            split = value.unflatten(1, (per_cell, -1)).permute(0, 3, 4, 1, 2)
            rows.append(split.flatten(1, 3))
        return torch.cat(rows, 1)

    if name == "fcos":
        head: Any = detection.fcos.FCOSHead(256, 1, CLASSES, 1)
        anchors = AnchorGenerator(tuple((stride,) for stride in STRIDES), ((1.0,),) * 3)(images, features)
        result = {"bbox_regression": table(0), "bbox_ctrness": table(1), "cls_logits": table(2)}
        per_level = [feature.shape[2] * feature.shape[3] for feature in features]
        owner = object.__new__(detection.FCOS)
        torch.nn.Module.__init__(owner)
        owner.head, owner.center_sampling_radius = head, 1.5
        return sum(owner.compute_loss(targets, result, anchors, per_level).values(), torch.zeros(()))
    if name == "retinanet":
        generator: Any = AnchorGenerator(((1,),) * 3, ((1.0,),) * 3)
        generator.cell_anchors = [torch.tensor([[-w / 2, -h / 2, w / 2, h / 2] for w, h in sides]) for sides in ANCHORS]
        owner = object.__new__(detection.RetinaNet)
        torch.nn.Module.__init__(owner)
        owner.head = detection.retinanet.RetinaNetHead(256, 3, CLASSES)
        owner.proposal_matcher = detection._utils.Matcher(0.5, 0.4, allow_low_quality_matches=True)
        result = {"bbox_regression": table(0), "cls_logits": table(1)}
        return sum(owner.compute_loss(targets, result, generator(images, features)).values(), torch.zeros(()))
    boxes = DefaultBoxGenerator([[]] * 3, scales=[0.1, 0.2, 0.3, 0.4])
    boxes._wh_pairs = [torch.tensor(sides) / SIDE for sides in ANCHORS]
    boxes.clip = False
    owner = object.__new__(detection.ssd.SSD)
    torch.nn.Module.__init__(owner)
    owner.box_coder = detection._utils.BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
    owner.proposal_matcher = detection._utils.SSDMatcher(0.5)
    owner.neg_to_pos_ratio = 3
    defaults = boxes(images, features)
    matched = [
        owner.proposal_matcher(detection.ssd.box_ops.box_iou(t["boxes"], d))
        if len(t["boxes"])
        else torch.full((len(d),), -1)
        for t, d in zip(targets, defaults, strict=True)
    ]
    # class 0 is the background
    shifted = [{"boxes": t["boxes"], "labels": t["labels"] + 1} for t in targets]
    result = {"bbox_regression": table(0), "cls_logits": table(1)}
    return sum(owner.compute_loss(shifted, result, defaults, matched).values(), torch.zeros(()))


@pytest.mark.parametrize("name", ["fcos", "retinanet", "ssd"])
def test_the_loss_and_its_gradients_are_those_of_torchvision(name: str) -> None:
    outputs, own_labels = raw_outputs(name), labels()
    mean, gradients = mean_and_gradients(name, outputs, own_labels)
    reference = torchvision_mean(name, outputs, own_labels)
    torch.testing.assert_close(mean, reference, rtol=1e-5, atol=0)
    expected = torch.autograd.grad(reference, outputs)
    for own, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-7)


REFERENCES = {
    "ultralytics": ("ultralytics", "opencv-python-headless"),
    # Megvii's code, whose own package of 2022 has another assignment and no wheel
    "yolox": ("pixeltable-yolox", "opencv-python-headless", "loguru", "tabulate"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", REFERENCES)
def test_the_loss_and_its_gradients_are_those_of_the_own_package_of_a_family(package: str, tmp_path: Path) -> None:
    """Nothing of these packages is in this repository: they are installed for this test, in a folder of its own."""
    python = with_packages(tmp_path / "env", *REFERENCES[package])
    for name in ("yolov8", "yolov10", "yolo26", "yolo26_end2end") if package == "ultralytics" else ("yolox",):
        made = [[value.detach() for value in raw_outputs(name, seed)] for seed in range(4)]
        outputs = [torch.cat(values) for values in zip(*made, strict=True)]
        if CHANNELS[name][0] == 64:
            # boxes about as large as the objects, of a cell to each side
            outputs[::2] = [value - torch.arange(16).repeat(4)[:, None, None] for value in outputs[::2]]
        outputs = [value.requires_grad_() for value in outputs]
        own_labels = torch.cat([labels(seed) for seed in range(4)]).reshape(len(outputs[0]), -1, 6)
        # a second object in the cells of another
        other = own_labels[:, :1] + torch.tensor([0, -0.01, -0.02, 0.02, 0.03, 0])
        own_labels = torch.cat([own_labels, other], 1)
        own_labels[2::IMAGES] = -1.0
        given = {f"output {place}": value.detach().numpy() for place, value in enumerate(outputs)}
        np.savez(tmp_path / "given.npz", labels=own_labels.flatten(1), strides=np.float32(STRIDES), **given)
        run_script(python, "dense_loss_reference.py", tmp_path / "given.npz", name, tmp_path / "reference.npz")
        reference = np.load(tmp_path / "reference.npz")
        mean, gradients = mean_and_gradients(name, outputs, own_labels.flatten(1))
        assert mean.item() == pytest.approx(float(reference["loss"]), rel=1e-5), name
        assert np.abs(reference["gradient 0"]).max() > 0.01, "no box is assigned"
        for place, gradient in enumerate(gradients):
            wanted = reference[f"gradient {place}"]
            np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_and_divisors_of_single_images_are_those_of_the_batch(name: str) -> None:
    outputs, own_labels = raw_outputs(name), labels()
    whole = computed(name, outputs, own_labels)
    parts = [
        computed(name, [each[image : image + 1] for each in outputs], own_labels[image : image + 1])
        for image in range(IMAGES)
    ]
    torch.testing.assert_close(whole.total, sum((part.total for part in parts), torch.zeros(())))
    torch.testing.assert_close(
        whole.divisor.double(), sum((part.divisor.double() for part in parts), torch.zeros((), dtype=torch.float64))
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_background_has_a_finite_loss_and_gradient(name: str) -> None:
    for own_labels in (torch.full((IMAGES, 12), -1.0), torch.zeros(IMAGES, 0)):
        mean, gradients = mean_and_gradients(name, raw_outputs(name), own_labels)
        assert torch.isfinite(mean)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_tensor_with_the_channels_of_all_roles_reads_as_several(name: str) -> None:
    outputs, own_labels = raw_outputs(name), labels()
    kinds = len(CHANNELS[name])
    per_cell = len(ANCHORS[0]) if config(name).anchors else 1
    joined = []
    for level in range(0, len(outputs), kinds):
        by_anchor = [value.unflatten(1, (per_cell, -1)) for value in outputs[level : level + kinds]]
        joined.append(torch.cat(by_anchor, 2).flatten(1, 2))
    one, several = (computed(name, each, own_labels) for each in (joined, outputs))
    torch.testing.assert_close(one.total, several.total)


@pytest.mark.parametrize(
    "name", ["yolox", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "yolox")]
)
def test_training_the_raw_outputs_finds_the_objects(name: str) -> None:
    own_labels = labels_of(
        [[(2, 0.1, 0.2, 0.5, 0.6, 0)], [(0, 0.3, 0.3, 0.8, 0.9, 0), (4, 0.05, 0.6, 0.3, 0.9, 0)], []]
    )
    share = 1.0 if name.startswith("yolo26") else 0.1
    outputs = [value.detach().mul(share).requires_grad_() for value in raw_outputs(name)]
    optimizer = torch.optim.Adam(outputs, 0.1)
    for _ in range(300):
        optimizer.zero_grad()
        total, divisor = computed(name, outputs, own_labels)
        (total / divisor.clamp(min=1)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = dense_detections(outputs, config(name, len(outputs)))
    for image, number in enumerate((1, 2, 0)):
        objects = own_labels[image].reshape(-1, 6)[:number]
        best = found[image][:number]
        for row in objects:
            same = best[best[:, 0] == row[0]]
            assert len(same) == 1
            assert same[0, 1] > 0.4
            assert (same[0, 2:] - row[1:5]).abs().max() < 0.03
        assert not (found[image][number:, 1] > 0.6).any()


def complete_overlap(ours: Any, theirs: Any) -> Tensor:
    """CIoU (arXiv:1911.08287) of two boxes, each as centre, width and height."""
    (x, y, w, h), (other_x, other_y, other_w, other_h) = ours, theirs
    left, right = torch.maximum(x - w / 2, other_x - other_w / 2), torch.minimum(x + w / 2, other_x + other_w / 2)
    top, bottom = torch.maximum(y - h / 2, other_y - other_h / 2), torch.minimum(y + h / 2, other_y + other_h / 2)
    common = (right - left).clamp(min=0) * (bottom - top).clamp(min=0)
    iou = common / (w * h + other_w * other_h - common)
    hull_w = torch.maximum(x + w / 2, other_x + other_w / 2) - torch.minimum(x - w / 2, other_x - other_w / 2)
    hull_h = torch.maximum(y + h / 2, other_y + other_h / 2) - torch.minimum(y - h / 2, other_y - other_h / 2)
    apart = ((x - other_x) ** 2 + (y - other_y) ** 2) / (hull_w**2 + hull_h**2)
    aspect = 4 / math.pi**2 * (torch.atan(w / h) - torch.atan(other_w / other_h)) ** 2
    return iou - apart - aspect * (aspect / (1 - iou + aspect)).detach()


def yolov5_cells(x: float, y: float, cells: int) -> list[tuple[int, int]]:
    """Column and line of the cells that an object with this centre, in cells, may match."""
    column, line = int(x), int(y)
    near = [(column + (1 if x % 1 > 0.5 else -1), line), (column, line + (1 if y % 1 > 0.5 else -1))]
    return [(column, line), *(place for place in near if set(place) <= set(range(cells)))]


def yolov5_terms(outputs: list[Tensor], own_labels: Tensor) -> tuple[Tensor, list[int]]:
    """The means [objectness, level 0, 1, 2] by the published formulas, pair by pair, and for each level the matches of
    cells and anchors that have another match."""
    means, of_objects, shared = [], torch.zeros(()), []
    for level, stride in enumerate(STRIDES):
        boxes, objectness, scores = outputs[3 * level : 3 * level + 3]
        cells, classes = boxes.shape[-1], scores.shape[1] // len(ANCHORS[level])
        targets: dict[tuple[int, ...], list[float]] = {}
        of_boxes, of_classes = [], []
        for image, rows in enumerate(own_labels.reshape(IMAGES, -1, 6).tolist()):
            counted = [row for row in rows if row[0] >= 0 and row[5] == 0]
            for (kind, x1, y1, x2, y2, _), (place, sides) in itertools.product(counted, enumerate(ANCHORS[level])):
                size = ((x2 - x1) * SIDE, (y2 - y1) * SIDE)
                if max(max(a / b, b / a) for a, b in zip(size, sides, strict=True)) >= 4:
                    continue
                x, y = (x1 + x2) / 2 * SIDE / stride, (y1 + y2) / 2 * SIDE / stride
                wanted = torch.tensor([x * stride, y * stride, *size])
                for column, line in yolov5_cells(x, y, cells):
                    t = 2 * boxes[image, 4 * place : 4 * place + 4, line, column].sigmoid()
                    centre = ((t[0] - 0.5 + column) * stride, (t[1] - 0.5 + line) * stride)
                    overlap = complete_overlap((*centre, t[2] ** 2 * sides[0], t[3] ** 2 * sides[1]), wanted)
                    of_boxes.append(1 - overlap)
                    targets.setdefault((image, place, line, column), []).append(overlap.item())
                    for number in range(classes):
                        logit = scores[image, classes * place + number, line, column]
                        of_classes.append(F.softplus(-logit if number == kind else logit))
        shared.append(sum(len(values) - 1 for values in targets.values()))
        target = torch.zeros_like(objectness)
        for key, values in targets.items():
            target[key] = max(0.0, *values)
        entropy = F.binary_cross_entropy_with_logits(objectness, target)
        of_objects = of_objects + (4.0, 1.0, 0.4)[level] * entropy * (SIDE / 640) ** 2
        mean = 0.05 * torch.stack(of_boxes).mean()
        means.append(mean + (0.5 * classes / 80 * torch.stack(of_classes).mean() if classes > 1 else 0.0))
    return torch.stack([of_objects, *means]), shared


@pytest.mark.parametrize("classes", [CLASSES, 1])
def test_yolov5_is_its_published_formulas(classes: int) -> None:
    own_labels = labels().reshape(IMAGES, -1, 6)
    # a second object in the cells of another, and one in the corner of the image, which has no cells beyond it
    own_labels = torch.cat([own_labels, torch.full((IMAGES, 2, 6), -1.0)], 1)
    own_labels[1, -2, :5] = own_labels[1, 0, :5] + torch.tensor([0, -0.01, -0.02, 0.02, 0.03])
    own_labels[1, -1, :5] = torch.tensor([1.0, 0.0, 0.0, 0.09, 0.08])
    own_labels[1, -2:, 5] = 0
    own_labels[..., 0] = own_labels[..., 0].clamp(max=classes - 1)
    outputs = []
    for place, value in enumerate(raw_outputs("yolov5")):
        is_scores = place % 3 == 2
        outputs.append(value[:, : classes * 3].detach().requires_grad_() if is_scores else value)
    total, divisor = computed("yolov5", outputs, own_labels.flatten(1))
    wanted, shared = yolov5_terms(outputs, own_labels)
    assert min(shared) > 0, "no cell and anchor has two objects, so nothing is compared"
    torch.testing.assert_close(total / divisor, wanted, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad((total / divisor).sum(), outputs, allow_unused=True)
    expected = torch.autograd.grad(wanted.sum(), outputs, allow_unused=True)
    for own, other in zip(gradients, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-8)


def centernet_radius(height: int, width: int) -> int:
    """The radius of a Gaussian, in cells, as the code of CornerNet computes it for an overlap of 0.7."""
    total, area = height + width, height * width
    forms = ((1.0, total, area * 0.3 / 1.7), (4.0, 2 * total, 0.3 * area), (2.8, -1.4 * total, -0.3 * area))
    return int(min((b + math.sqrt(b * b - 4 * a * c)) / 2 for a, b, c in forms))


def test_centernet_is_its_published_formulas() -> None:
    own_labels = labels().reshape(IMAGES, -1, 6)
    # one that is large enough for a Gaussian of several cells, and the same class beside it
    own_labels[2, :2] = torch.tensor([[2, 0.14, 0.1, 0.9, 0.95, 0], [2, 0.4, 0.5, 0.95, 0.9, 0]])
    outputs = raw_outputs("centernet")
    heat, sizes, offsets = outputs
    target, of_boxes, radii = torch.zeros_like(heat), [], []
    for image, rows in enumerate(own_labels.tolist()):
        for kind, x1, y1, x2, y2, flag in rows:
            if kind < 0 or flag:
                continue
            x, y, width, height = (SIDE / 8 * each for each in ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1))
            column, line, radius = int(x), int(y), centernet_radius(math.ceil(height), math.ceil(width))
            radii.append(radius)
            for place in itertools.product(range(line - radius, line + radius + 1), range(SIDE // 8)):
                if place[0] in range(SIDE // 8) and abs(place[1] - column) <= radius:
                    apart = (place[0] - line) ** 2 + (place[1] - column) ** 2
                    value = math.exp(-apart / (2 * ((2 * radius + 1) / 6) ** 2))
                    target[(image, int(kind), *place)] = max(float(target[(image, int(kind), *place)]), value)
            of_boxes.append((offsets[image, :, line, column] - torch.tensor([x - column, y - line])).abs().mean())
            of_boxes.append(0.1 * (sizes[image, :, line, column] - torch.tensor([width, height])).abs().mean())
    assert max(radii) > 0
    p = heat.sigmoid()
    terms = torch.where(target == 1, -((1 - p) ** 2) * p.log(), -((1 - target) ** 4) * p**2 * (1 - p).log())
    wanted = (terms.sum() + torch.stack(of_boxes).sum()) / len(radii)
    mean, gradients = mean_and_gradients("centernet", outputs, own_labels.flatten(1))
    torch.testing.assert_close(mean, wanted, rtol=1e-5, atol=0)
    for own, other in zip(gradients, torch.autograd.grad(wanted, outputs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-8)


def test_the_host_counts_the_matches_of_yolov5_without_outputs() -> None:
    own_labels = labels()
    _, divisor = computed("yolov5", raw_outputs("yolov5"), own_labels)
    counted = count_matches(own_labels, IMAGES, config("yolov5"), (SIDE, SIDE))
    assert counted.tolist() == divisor.tolist()
    assert min(counted.tolist()) > 0
    assert count_matches(torch.zeros(2, 0), 2, config("yolov5"), (SIDE, SIDE)).tolist() == [2, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"loss 'yolov5' reads boxes of images; .* data\.image"):
        count_matches(own_labels, IMAGES, config("yolov5"), None)


@pytest.mark.parametrize("rows", [range(IMAGES), [2]], ids=["all images", "background"])
def test_an_evaluation_divides_each_term_of_yolov5_by_its_own_targets(rows: Sequence[int]) -> None:
    """A level without a match, as all are of background, has no term, and the loss is a number all the same."""
    outputs, own_labels = raw_outputs("yolov5"), labels()
    names = [f"raw {place}" for place in range(len(outputs))]
    each = [config("yolov5", output=tuple(names), weight=0.5), config("yolov5", output=tuple(names))]
    measured = EvaluationMetrics(Losses(each, names), device=torch.device("cpu"))
    for row in rows:
        own = slice(row, row + 1)
        measured.update([value[own] for value in outputs], [own_labels[own]] * 2, 1)
    chosen = list(rows)
    total, divisor = computed("yolov5", [value[chosen] for value in outputs], own_labels[chosen])
    mean = (total / divisor.clamp(min=1)).sum()
    assert measured.of_totals(measured.totals())["loss"] == pytest.approx(1.5 * mean.item(), rel=1e-5)


def test_the_rehearsal_refuses_strides_that_are_not_those_of_the_outputs() -> None:
    outputs, own_labels = raw_outputs("yolov5"), labels()
    names = [f"raw {place}" for place in range(len(outputs))]
    counted = tuple(count_matches(own_labels, IMAGES, config("yolov5"), (SIDE, SIDE)).double().tolist())
    batch = Batch((), (own_labels,), IMAGES, counted)
    problems = []
    for strides in (STRIDES, (4.0, 8.0, 16.0)):
        losses = Losses([config("yolov5", output=tuple(names), strides=strides)], names)
        graph: Any = SimpleNamespace(losses=losses, outputs=lambda _: outputs)
        findings = Findings()
        check_counts(graph, batch, findings)
        problems.append([problem for error in findings.errors for problem in error.problems])
    assert problems[0] == []
    assert "correct loss.strides, loss.output or data.image.size" in problems[1][0]


@pytest.mark.parametrize("shape", [(IMAGES, 3, SIDE, SIDE), (IMAGES, SIDE, SIDE, 3)])
def test_strides_that_are_not_those_of_the_input_are_refused(shape: tuple[int, ...]) -> None:
    outputs = raw_outputs("yolov8")
    names = [f"raw {place}" for place in range(len(outputs))]
    batch = Batch((torch.zeros(shape),), (labels(),), IMAGES, (1.0,))
    Losses([config("yolov8", output=tuple(names))], names).check_labels(batch, outputs)
    halved = Losses([config("yolov8", output=tuple(names), strides=tuple(each / 2 for each in STRIDES))], names)
    with pytest.raises(ConfigError, match=rf"are of images of {SIDE / 2:g} x {SIDE / 2:g} pixels, but the input is"):
        halved.check_labels(batch, outputs)


def test_the_balance_of_the_objectness_is_that_of_the_stride() -> None:
    assert balance([8, 16, 32]) == [4.0, 1.0, 0.4]
    assert balance([32, 16, 8]) == [0.4, 1.0, 4.0]
    assert balance([8, 16, 32, 64]) == [4.0, 1.0, 0.25, 0.06]


def test_what_does_not_fit_is_named() -> None:
    outputs, own_labels = raw_outputs("yolox"), labels()
    with pytest.raises(ConfigError, match=r"names 8 tensors and loss.strides 3 levels; yolox reads 1 or 3 tensors"):
        computed("yolox", outputs[:8], own_labels)
    with pytest.raises(
        ConfigError, match=r"reads raw outputs \[batch, channels, height, width\], but 'raw' is \[3, 4\]"
    ):
        computed("yolox", [value[..., 0, 0] for value in outputs[:1]], own_labels, strides=(8.0,))
    with pytest.raises(ConfigError, match=r"loss\.anchors has 3 levels, but loss.strides 1"):
        computed("ssd", raw_outputs("ssd")[:2], own_labels, strides=(8.0,))
    with pytest.raises(ConfigError, match=r"has 4 channels for each anchor; .* need 65"):
        computed("yolov8", [raw_outputs("fcos")[0]], own_labels, strides=(8.0,))
    own_labels[0, 0] = CLASSES
    with pytest.raises(DataError, match=r"a box has class 5, but the scores of loss yolox have the classes 0\.\.4"):
        computed("yolox", outputs, own_labels)


SSD300 = (8.0, 16.0, 32.0, 64.0, 100.0, 300.0)


def test_boxes_have_the_size_of_an_image_that_the_first_stride_does_not_divide() -> None:
    sides = tuple(((0.9 * stride, 1.1 * stride),) for stride in SSD300)
    levels = grids_of((300, 300), SSD300)
    assert [height for height, _ in levels] == [38, 19, 10, 5, 3, 1], "as torchvision's SSD300 has them"
    outputs = [torch.zeros(1, channels, *cells) for cells in levels for channels in (4, CLASSES + 1)]
    loss = config("ssd", len(outputs), strides=SSD300, anchors=sides)
    outputs[-1][:, 1] = 9.0
    (found,) = dense_detections(outputs, loss)
    # the only cell of the last level is the image: its anchor lies in the middle, 0.9 and 1.1 times as long
    torch.testing.assert_close(found[0, 2:], torch.tensor([0.05, -0.05, 0.95, 1.05]))
    head = FAMILIES["ssd"].head(outputs, loss)
    import_torchvision()
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

    generator = DefaultBoxGenerator([[2]] * 6, steps=[int(stride) for stride in SSD300])
    # four anchors of each cell, whose centres are shares of the image
    centres = generator._grid_default_boxes([list(cells) for cells in levels], [300, 300])[::4, :2]
    torch.testing.assert_close(head.points / head.size, centres)
    _, corners, _ = head.objects(labels_of([[(0, 0.1, 0.2, 0.5, 1.0, 0)]]))
    torch.testing.assert_close(corners[0, 0], torch.tensor([30.0, 60.0, 150.0, 300.0]))
    by_level = config("yolov5", 1, strides=SSD300, anchors=sides)
    matched = count_matches(labels_of([[(0, 0.1, 0.2, 0.481, 0.6, 0)]]), 1, by_level, (300, 300))
    # 114.3 pixels wide, which is less than 4 times as long as 28.8; of 304 pixels it would be more
    assert (matched > 0).tolist() == [True, False, False, True, True, True, True]


def test_sizes_of_images_with_which_no_grid_ends_are_refused_with_sizes_that_work() -> None:
    (problem,) = size_problems(config("yolox", 1), (320, 300))
    assert "ends with the 300 pixels of an image, so that boxes would be 1.3% too large" in problem
    assert problem.endswith("multiples of 8, such as 296 or 304")
    shares = tuple(300 / cells for cells in (38, 19, 10, 5, 3, 1))
    for strides in (SSD300, shares, (7.5,)):
        assert list(size_problems(config("yolox", 1, strides=strides), (300, 300))) == []
    both = config("yolox", 1, strides=(8.0, 16.0))
    assert [len(list(size_problems(both, (side, side)))) for side in (303, 304)] == [2, 0]


def test_outputs_in_another_order_and_strides_of_other_grids_are_refused() -> None:
    boxes, scores = raw_outputs("yolov8")[:2]
    with pytest.raises(
        ConfigError, match=r"reads boxes, scores of each level in this order, and boxes have 64 channels"
    ):
        computed("yolov8", [scores, boxes], labels(), strides=(8.0,))
    outputs = raw_outputs("yolov8")
    with pytest.raises(ConfigError, match=r"a level of 8 x 8 cells is no grid of an input of 16 x 16 pixels"):
        computed("yolov8", [*outputs[:2], *outputs[4:]], labels(), strides=(32.0, 8.0))


def test_a_box_that_is_far_too_large_leaves_the_loss_finite() -> None:
    outputs = [value.detach() for value in raw_outputs("yolox")]
    outputs[0][0, 2:, 0, 0] = 60.0
    outputs = [value.requires_grad_() for value in outputs]
    mean, gradients = mean_and_gradients("yolox", outputs, labels())
    assert torch.isfinite(mean)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("yolov5", {"anchors": ANCHORS[:1]}, "loss.anchors has 1 levels, but loss.strides 3"),
        ("ssd", {"anchors": ((), *ANCHORS[1:])}, "loss.anchors has a level without anchors"),
        ("centernet", {"strides": (8.0, 16.0)}, "loss.strides has 2 levels, but centernet reads one heat map"),
        ("fcos", {"strides": ()}, "loss.name 'fcos' needs loss.strides"),
        ("yolov8", {}, "loss.output names 2 tensors, but loss.strides has 3 levels, of one tensor or 2 each: boxes, s"),
    ],
)
def test_settings_of_levels_that_contradict_each_other_are_named(name: Any, changes: Any, problem: str) -> None:
    found = list(setting_problems([config(name, 2, **changes)]))
    assert any(problem in each for each in found), found
