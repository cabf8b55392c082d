"""Convert a file to compute in half precision, with onnxruntime's own converter.

    before    x (fp32) ---------------------- MatMul (fp32) -- TopK (fp32) -------------------------> y (fp32)
    after     x (fp32) -- Cast -- x (fp16) -- MatMul (fp16) -- Cast -- TopK (fp32) -- Cast -- Cast -> y (fp32)

Inputs and outputs keep their types. Operators without a kernel for fp16, such as TopK, stay in fp32 between two casts.
A GPU multiplies in fp16. onnxruntime's CPU provider has few kernels for it: it casts to fp32 before every other
operator, leaves out a cast to fp16 that another one follows, and so hides an overflow that a GPU would have. Therefore
the range of each product is measured on the fp32 file. For products in bf16 none of the packages has a converter.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader

from onward.trainer.errors import ExportRefused
from onward.trainer.onnx_graph.files.index import replace_entries
from onward.trainer.onnx_graph.files.whole_models import MOST_BYTES, data_file_of, fits_one_file, write_whole

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention")
"""Operators whose time half precision shortens."""
GREATEST = float(np.finfo(np.float16).max)


def in_half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with fp16 weights and products. Changes the model given. Raises ExportRefused without any."""
    # seconds to import
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    if not any(tensor.data_type == TensorProto.FLOAT for tensor in model.graph.initializer):
        raise ExportRefused("the file has no fp32 weight")
    if not any(node.op_type in PRODUCTS for node in model.graph.node):
        raise ExportRefused(f"there is nothing to gain: the graph has no {', '.join(PRODUCTS[:-1])} or {PRODUCTS[-1]}")
    for number, node in enumerate(model.graph.node):
        # the converter names its casts after the nodes, and those of two nodes without a name would be one
        node.name = node.name or f"node_{number}"
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name in ("value_float", "value_floats"):  # the converter knows tensors only
                    held = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                    tensor = numpy_helper.from_array(np.array(held, np.float32))
                    attribute.CopyFrom(helper.make_attribute("value", tensor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each value that fp16 rounds to 0 or to 65504: the metrics judge the result
        halved: onnx.ModelProto = convert_float_to_float16(
            model, keep_io_types=True, disable_shape_infer=not fits_one_file(model)
        )
    _drop_repeated_casts(halved.graph)
    in_order = OnnxModel(halved)
    in_order.topological_sort()  # the converter appends its casts at the end
    return in_order.model  # type: ignore[no-any-return]


def _drop_repeated_casts(graph: onnx.GraphProto) -> None:
    """Keep one of the equal casts that the converter makes for several readers of one tensor."""
    kept = []
    made = set[str]()
    for node in graph.node:
        # equal casts have equal names, which one graph may have once
        if node.op_type != "Cast" or node.output[0] not in made:
            kept.append(node)
        made.update(node.output)
    replace_entries(graph, node=kept)


def with_types(model: onnx.ModelProto, folder: Path, *, most: int = MOST_BYTES) -> Path:
    """Write a model with the types of all its values to an empty folder; return the file."""
    given = folder / "given.onnx"
    write_whole(model, given, most=most)
    typed = folder / "typed.onnx"
    # by path: in memory it serializes the model
    onnx.shape_inference.infer_shapes_path(str(given), str(typed))
    return typed


def refuse_overflow(typed: Path, rows: CalibrationDataReader) -> None:
    """Raise ExportRefused if an operand or a result of a product of the fp32 model is beyond fp16 on these rows."""
    from onnxruntime.quantization.calibrate import create_calibrator

    split = data_file_of(typed.with_name("given.onnx")).exists()
    calibrator = create_calibrator(
        typed, PRODUCTS, str(typed.with_name("augmented.onnx")), use_external_data_format=split
    )
    calibrator.collect_data(rows)
    ranges = calibrator.compute_data().data.items()
    greatest = {name: float(np.abs([held.lowest, held.highest]).max()) for name, held in ranges}
    if beyond := {name: value for name, value in greatest.items() if not value <= GREATEST}:
        name = max(beyond, key=beyond.__getitem__)
        raise ExportRefused(
            f"{len(beyond)} operands or results of products are beyond fp16's {GREATEST:g}: {name!r} reaches "
            f"{beyond[name]:.4g} on the evaluation data, and a GPU would compute inf"
        )
