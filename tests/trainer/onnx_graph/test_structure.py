"""The digest of a model's structure: the same for other weights, another one for another computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onward.flows.planning.time_needed import structure_digest
from tests.support.graphs import tiny_conv_net, tiny_transformer


def digest(folder: Path, model: onnx.ModelProto) -> str:
    onnx.save(model, folder / "m.onnx")
    return structure_digest(folder / "m.onnx")


def test_other_weights_have_the_same_structure_and_other_shapes_another(tmp_path: Path) -> None:
    model = tiny_conv_net()
    before = digest(tmp_path, model)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(values + 1, values.dtype), tensor.name))
    model.doc_string = "trained"
    assert digest(tmp_path, model) == before
    assert digest(tmp_path, tiny_conv_net(num_classes=7)) != before


def test_the_integers_of_shapes_belong_to_the_structure(tmp_path: Path) -> None:
    model = tiny_transformer()
    before = digest(tmp_path, model)
    whole = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT64)
    whole.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(whole) + 1, whole.name))
    assert digest(tmp_path, model) != before
