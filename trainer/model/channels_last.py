"""Convert the images inside a graph to channels-last format.

    images [B, C, H, W], contiguous --- contiguous(channels_last) --- convolution --- ... --- convolution

Only the images are converted: torch's convolutions follow the format of their input and convert their weights in each
call, which costs one pass over the weights. So parameters, gradients in the reducer's buckets, optimizer state and
checkpoints keep the layout of the file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.config.sections import GraphConfig

CONVOLUTIONS = (F.conv2d, F.conv_transpose2d)


def use_channels_last(module: fx.GraphModule, config: GraphConfig, device: torch.device) -> None:
    """Convert the images of a graph where it is configured, in place. Call before compiling, which then contains it.

    `auto` converts on GPUs. On CPUs oneDNN has its own format, and conversions cost more.
    """
    wanted = config.memory_format == "channels_last" or (config.memory_format == "auto" and device.type == "cuda")
    images = _images(module.graph) if wanted else []
    for image in images:
        with module.graph.inserting_after(image):
            converted = module.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        converted.meta.update(image.meta)
        for user in [user for user in image.users if user is not converted]:
            user.replace_input_with(image, converted)
    if images:
        module.recompile()


def _images(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs with four dimensions that a convolution depends on."""
    reached: dict[fx.Node, bool] = {}
    # backwards, so that the readers of a node are known when it is reached
    for node in reversed(graph.nodes):
        is_convolution = node.op == "call_function" and node.target in CONVOLUTIONS
        reached[node] = is_convolution or any(reached[user] for user in node.users)
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if reached[node] and _rank(node) == 4]


def _rank(node: fx.Node) -> int:
    """Return the number of dimensions seen while tracing; 0 if it is unknown."""
    probes = node.meta.get("probes")
    return probes[0].ndim if probes and isinstance(probes[0], torch.Tensor) else int(node.meta.get("rank") or 0)
