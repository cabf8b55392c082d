"""Find out in what blocks onnxruntime's optimiser stored the weights of convolutions (domain com.microsoft.nchwc).

    Conv                   weight [outputs, inputs, height, width]
    com.microsoft.nchwc    the same shape, but the elements are in the order
      OIHWBiBo             [outputs / B, inputs / B, height, width, B inputs, B outputs]
      OIHWBo               [outputs / B, inputs, height, width, B outputs]      few inputs, or one for each output

The order is that of the processor which optimised the file: B is 16 with AVX-512 and 8 without. The file does not say
it. onnxruntime reads every file in the blocks of the processor that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

import onnx
import torch

from onward.trainer.onnx_graph.files.index import attributes_of

DOMAIN = "com.microsoft.nchwc"
BLOCK = "block_size"
"""The attribute by which `mark_blocks` passes the block size to the rules."""


def mark_blocks(model: onnx.ModelProto, stored: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """Return the model with the block size as an attribute of every node of the domain; itself if there is none."""
    if not any(node.domain == DOMAIN for node in model.graph.node):
        return model
    size = block_size(model.graph, stored)
    # in a copy, because onnxruntime's operators have no such attribute
    copy = deepcopy(model)
    for node in copy.graph.node:
        if node.domain == DOMAIN:
            node.attribute.append(onnx.helper.make_attribute(BLOCK, size))
    return copy


def block_size(graph: onnx.GraphProto, stored: Mapping[str, torch.Tensor]) -> int:
    """Return the number of channels in a block: what the file shows, else that of this processor; 0 if unknown.

    It is also 0 if the file shows another size than this processor's, because onnxruntime cannot run such a file here.
    """
    here = {"AVX512": 16, "AVX2": 8, "DEFAULT": 8}.get(torch.backends.cpu.get_cpu_capability().upper(), 0)
    shown = set(_shown_sizes(graph, stored))
    return here if shown <= {here} else 0


def _shown_sizes(graph: onnx.GraphProto, stored: Mapping[str, torch.Tensor]) -> Iterator[int]:
    """Yield the block sizes that only one processor writes: outputs are padded to whole blocks."""
    padded = {}
    for node in graph.node:
        if node.domain != DOMAIN:
            continue
        if node.op_type == "Conv" and len(node.input) > 1 and node.input[1] in stored:
            outputs = padded[node.output[0]] = stored[node.input[1]].shape[0]
            # stored outputs fill whole blocks: a number that is no multiple of 16 is of blocks of 8
            if outputs % 16:
                yield 8
        # a block of 8 is filled up with fewer than 8 outputs
        if node.op_type == "ReorderOutput" and node.input[0] in padded:
            filled_up = padded[node.input[0]] - attributes_of(node)["channels"]
            if filled_up >= 8:
                yield 16
