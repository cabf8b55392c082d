"""Losses that a graph computes itself, with gradients, as single nodes and as the nodes that ONNX defines them by."""

import pytest
import torch

from onward.trainer.onnx_import.driver import to_module
from tests.support import suite

NAMES = ("test_sce_mean_no_weight_ii_4d", "test_sce_mean_no_weight_ii_4d_log_prob")


@pytest.mark.parametrize("name", [name + end for name in NAMES for end in ("", "_expanded")])
def test_gradients_pass_through_the_losses_of_onnx(name):
    """The definition transposes the scores, and torch's kernel takes only contiguous ones backwards."""
    case = next(case for case in suite.cases() if case.name == name)
    scores, *others = map(suite.as_torch, case.data_sets[0][0])
    scores = scores.double().requires_grad_()
    others = [each.double() if each.is_floating_point() else each for each in others]
    module = to_module(case.model).double()
    assert torch.autograd.gradcheck(lambda x: module(x, *others), scores, fast_mode=True)
