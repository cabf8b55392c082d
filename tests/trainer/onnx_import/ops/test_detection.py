"""NonMaxSuppression and RoiAlign compute what onnxruntime does, with the right gradients."""

import itertools

import numpy as np
import pytest
import torch

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops import detection
from tests.support.onenode import assert_agrees, one_node

RANDOM = np.random.default_rng(0)


def boxes_and_scores(centred: bool):
    middle, side = RANDOM.random((2, 30, 2)), RANDOM.random((2, 30, 2)) * 0.5
    boxes = [middle, side] if centred else [middle + side / 2, middle - side / 2]  # corners in either order
    scores = RANDOM.integers(0, 20, (2, 3, 30)) / 20  # with ties
    return {"boxes": np.concatenate(boxes, 2).astype(np.float32), "scores": scores.astype(np.float32)}


@pytest.mark.parametrize("centred", [0, 1])
def test_non_max_suppression_chooses_the_boxes_of_onnxruntime(centred):
    for opset, count, overlap, least in itertools.product((10, 11), (0, 3, 100), (0.0, 0.5), (None, 0.4)):
        limits = {"count": np.array([count]), "overlap": np.array([overlap], np.float32)}
        if least is not None:
            limits["least"] = np.array([least], np.float32)
        assert_agrees(
            "NonMaxSuppression", boxes_and_scores(bool(centred)), limits, opset=opset, center_point_box=centred
        )


def test_non_max_suppression_without_a_number_chooses_no_boxes():
    assert_agrees("NonMaxSuppression", boxes_and_scores(False), opset=11)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_computes_what_onnxruntime_does(mode):
    corner = RANDOM.random((5, 2)) * 14 - 1  # some begin outside of the image
    rois = np.concatenate([corner, corner + RANDOM.random((5, 2)) * 9], 1).astype(np.float32)
    inputs = {
        "x": RANDOM.standard_normal((2, 3, 9, 11)).astype(np.float32),
        "rois": rois,
        "samples": np.array([0, 1, 1, 0, 1]),
    }
    for ratio, scale in itertools.product((0, 1, 2, 3), (0.25, 1.0)):
        settings = {"mode": mode, "sampling_ratio": ratio, "spatial_scale": scale}
        settings |= {"output_height": 3, "output_width": 2}
        assert_agrees("RoiAlign", inputs, opset=10, **settings)
        for coordinates in ("half_pixel", "output_half_pixel"):
            assert_agrees("RoiAlign", inputs, opset=16, coordinate_transformation_mode=coordinates, **settings)


def test_roi_align_with_an_adaptive_number_of_points_is_a_runtime_node():
    inputs = {"x": np.zeros((1, 1, 4, 4), np.float32), "rois": np.zeros((1, 4), np.float32), "at": np.array([0])}
    module = to_module(one_node("RoiAlign", inputs, opset=16))
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    module(x, torch.tensor([[0.0, 0.0, 3.0, 3.0]]), torch.tensor([0])).sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_gradient_of_roi_align_equals_finite_differences():
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0.3, 0.7, 3.9, 4.1]], dtype=torch.float64, requires_grad=True)

    def run(x, rois):
        settings = {"ratio": 2, "scale": 1.0, "half_pixel": True, "use_max": False}
        return detection.roi_align(x, rois, torch.tensor([0]), (2, 2), **settings)

    assert torch.autograd.gradcheck(run, (x, rois))
