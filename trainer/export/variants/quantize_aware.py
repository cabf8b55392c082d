"""Insert QuantizeLinear and DequantizeLinear into a float model before it is trained (`quantize.aware`).

    model.onnx --- onnxruntime's optimizer --- its quantizer, calibrated on --- RUN_DIR/quantized/model.onnx
                   (BatchNorm into Conv)       training rows                    what the run trains
                                               (weights stay float, biases become int32)

The file is made once, in a process of its own, because native code may crash; everything after it sees an ordinary file
with these nodes. Names of inputs, outputs and of weights that are not folded stay.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_static

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, one_batch
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import model_digest, read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.errors import ConfigError
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.variants.variants import Calibration, prepared
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.surgery.quantizing import without
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.recorded.quantized_record import Quantized

log = logging.getLogger(__name__)

TYPES = {"s": QuantType.QInt8, "u": QuantType.QUInt8}
"""Signed and unsigned, as in "u8s7": activations in uint8, weights in int8 of which 7 bits are used."""
CALIBRATION_ROWS = 256
"""Training rows from all over the data: onnxruntime takes the range of all values, which more rows hardly widen."""
INTEGER_KERNELS = ("QLinear", "MatMulInteger", "ConvInteger", "QGemm", "QAttention", "DynamicQuantize", "NhwcMaxPool")
"""Parts of the names of onnxruntime's operators that compute with integers."""


def make_quantized(config: RunConfig, target: Path) -> Quantized:
    """Write the model of a configuration with QuantizeLinear and DequantizeLinear to `target`; return its record.

    The same bytes for the same file, settings and data. Raises ConfigError when nothing is quantized, DataError when
    there are no training rows to calibrate on.
    """
    file = ModelFile.read(config.model.path)
    settings = config.quantize
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder, durable_file(target) as partial:
        ready = prepared(file, Path(folder))
        # the nodes after onnxruntime's optimiser, which are the ones that its quantizer sees
        nodes = onnx.load_model(ready, load_external_data=False).graph.node
        kept = {node.name for node in without(nodes, settings.exclude)}
        excluded = [node.name for node in nodes if node.name not in kept]
        rows = _calibration_rows(config)
        quantize_static(
            ready,
            partial,
            Calibration(OnnxRunner(file, rows)),
            op_types_to_quantize=list(settings.op_types) or None,
            nodes_to_exclude=excluded,
            per_channel=True,
            reduce_range=settings.types.endswith("7"),
            activation_type=TYPES[settings.types[0]],
            weight_type=TYPES[settings.types[2]],
            # biases are stored in int32: a float bias, which onnxruntime's kernels would round, shifts every result by
            # up to half of an input step times a weight step, and deep graphs add these shifts up
            # Relu and Clip stay nodes: without them the range of the next QuantizeLinear would do their work, and a
            # range that follows the values would not
            extra_options={"AddQDQPairToWeight": True, "QDQKeepRemovableActivations": True},
        )
        model = onnx.load_model(partial)
        found = Counter(node.op_type for node in model.graph.node)
        if not found["QuantizeLinear"]:
            raise ConfigError(
                "quantize.aware: onnxruntime's quantizer left all of the graph in floating point (it has "
                f"{', '.join(sorted(found))}); see quantize.op_types and quantize.exclude"
            )
        kernels = integer_kernels(partial)
        if not kernels:
            raise ConfigError(
                f"quantize.aware: onnxruntime would run none of the {found['QuantizeLinear']} quantized values in "
                "8 bits; quantize other operators (quantize.op_types)"
            )
    return Quantized(
        original_sha256=model_digest(config.model.path), sha256=model_digest(target), nodes=found["QuantizeLinear"],
        kernels=kernels,
    )  # fmt: skip


def integer_kernels(path: Path) -> dict[str, int]:
    """Return the operators that compute with integers when onnxruntime runs a file: operator -> number of nodes."""
    with tempfile.TemporaryDirectory(prefix="onward-kernels-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        open_session(path, save=optimised)
        nodes = onnx.load_model(optimised, load_external_data=False).graph.node
    kernels: dict[str, int] = {}
    for operator, number in Counter(node.op_type for node in nodes).items():
        if any(part in operator for part in INTEGER_KERNELS):
            kernels[operator] = number
    return kernels


def _calibration_rows(config: RunConfig) -> EvaluationData:
    """Return training rows, in batches of those of an evaluation."""
    signature = read_training_signature(config.model)
    rows = read_first_rows(config, signature, CALIBRATION_ROWS, spread=True)
    config = resolve(config, rows, signature)
    count = min(CALIBRATION_ROWS, rows.num_rows)
    size = max(1, min(config.evaluation_batch_size, count))

    def batches() -> Iterator[Batch]:
        # complete batches: the file may have a fixed batch size
        for start in range(0, count - count % size, size):
            yield one_batch(rows, config, signature, np.arange(start, start + size), training=False)

    def no_metrics(output_names: Sequence[str]) -> EvaluationMetrics:
        raise AssertionError("calibration measures no metrics")

    return EvaluationData(batches=batches, new_metrics=no_metrics, model=config.model)
