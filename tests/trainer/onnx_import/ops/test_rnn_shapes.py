"""The shapes of recurrent layers are those of torch's kernels, and are computed without their steps."""

from __future__ import annotations

import pytest
import torch

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.recurrent import rnn
from tests.support.production_kinds import KINDS


def test_shapes_of_a_recurrent_layer_need_none_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels make a dozen calls in Python for each step of a meta tensor: 77 s for a recogniser of text."""
    module = to_module(KINDS["text recogniser"].build())
    layer = next(each.layer for each in module.modules() if isinstance(each, rnn.Recurrence))
    recurrence, directions = rnn.Recurrence(layer), len(layer.directions)
    shapes = ((7, 2, 4), (directions, 20, 4), (directions, 20, 5))
    with torch.no_grad():
        computed = [each.shape for each in recurrence(*(torch.randn(shape) for shape in shapes))]
    monkeypatch.setattr(rnn, "run_kernel", lambda *_: pytest.fail("the steps were computed"))
    found = [each.shape for each in recurrence(*(torch.empty(shape, device="meta") for shape in shapes))]
    assert found == computed
