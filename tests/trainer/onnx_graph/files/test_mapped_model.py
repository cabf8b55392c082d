"""Large weights of an ONNX file stay there until they are divided, with the same values; odd files are read as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.external_data import copy_bytes, is_mapped, own_copy
from onward.trainer.onnx_graph.files.mapped_model import LARGE_BYTES, read_mapped
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights

SIDE = 512


def two_layers(*, shift: int = 0) -> onnx.ModelProto:
    """Two large weights and a bias; `shift` bytes of documentation move all that is behind."""
    random = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(random.standard_normal(shape, np.float32), name)
        for name, shape in (("a.weight", (SIDE, SIDE)), ("bias", (SIDE,)), ("b.weight", (SIDE, SIDE)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "a.weight"], ["h"]),
        helper.make_node("Add", ["h", "bias"], ["i"]),
        helper.make_node("MatMul", ["i", "b.weight"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", SIDE]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored, doc_string="." * shift)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], doc_string="d" * shift)


@pytest.mark.parametrize("shift", range(4))
def test_weights_are_mapped_from_the_file_at_any_offset_and_have_the_same_bits(shift: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(two_layers(shift=shift), path)
    light = load_model(path, by_parts=True)
    assert [tensor.data_location == TensorProto.EXTERNAL for tensor in light.graph.initializer] == [True, False, True]
    assert light.ByteSize() < LARGE_BYTES < path.stat().st_size
    mapped = named_weights(to_module(light, base=tmp_path, by_parts=True))
    read = named_weights(to_module(load_model(path), base=tmp_path))
    assert mapped.keys() == read.keys() == {"a.weight", "bias", "b.weight"}
    for name, tensor in mapped.items():
        own = own_copy(tensor)
        assert torch.equal(own, read[name])
        assert own.data_ptr() % 4 == 0
        assert not is_mapped(own)
        part = torch.empty(SIDE // 2) if tensor.ndim == 1 else torch.empty(SIDE, 100)
        copy_bytes(part, tensor.detach()[: SIDE // 2] if tensor.ndim == 1 else tensor.detach()[:, 33:133])
        assert torch.equal(part, read[name][: SIDE // 2] if tensor.ndim == 1 else read[name][:, 33:133])


def test_opening_a_model_by_parts_reads_next_to_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    large = two_layers()
    random = np.random.default_rng(1)
    for tensor in large.graph.initializer:
        if len(tensor.dims) > 1:
            tensor.CopyFrom(numpy_helper.from_array(random.standard_normal((2048, 2048), np.float32), tensor.name))
        else:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(2048, np.float32), tensor.name))
    for value in (*large.graph.input, *large.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = 2048
    onnx.save_model(large, path)
    del large
    to_module(load_model(path, by_parts=True), base=tmp_path, by_parts=True)  # what is imported once is not counted
    before = anonymous()
    module = to_module(load_model(path, by_parts=True), base=tmp_path, by_parts=True)
    assert sum(tensor.nbytes for tensor in module.parameters()) > 32 << 20
    assert anonymous() - before < 8 << 20


def anonymous() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def test_a_link_to_a_model_is_mapped_as_well(tmp_path: Path) -> None:
    onnx.save_model(two_layers(), tmp_path / "model.onnx")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.onnx"
    link.symlink_to(tmp_path / "model.onnx")
    weights = named_weights(to_module(load_model(link, by_parts=True), base=link.parent, by_parts=True))
    assert is_mapped(weights["a.weight"])


def _floats(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, tensor.dims, values.reshape(-1)))


def _small(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.zeros((4,) * len(tensor.dims), np.float32), tensor.name))


@pytest.mark.parametrize("change", [_floats, _small])
def test_a_model_without_large_raw_values_is_read_as_ever(
    change: Callable[[onnx.ModelProto], None], tmp_path: Path
) -> None:
    model = two_layers()
    change(model)
    onnx.save_model(model, tmp_path / "model.onnx")
    assert read_mapped(tmp_path / "model.onnx") is None


def test_a_damaged_file_is_refused_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = two_layers()
    model.graph.initializer[2].dims[0] = SIDE - 1
    onnx.save_model(model, path)
    with pytest.raises(UnsupportedModel, match=r"'b.weight' holds 262144 values, but its shape takes 261632"):
        load_model(path, by_parts=True)
    onnx.save_model(two_layers(), path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 1000, content[:100], content + b"\x0a"):
        path.write_bytes(damaged)
        assert read_mapped(path) is None
        with pytest.raises(UnsupportedModel):
            load_model(path, by_parts=True)


def test_two_graphs_in_one_file_are_read_as_protobuf_does(tmp_path: Path) -> None:
    content = two_layers().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content + content)
    assert read_mapped(tmp_path / "model.onnx") is None
