"""Make an imported graph run faster: torch.compile, and images in channels-last format.

    chain.units[0] = accelerate(unit, config.graph, device)

One compiled graph serves all batch sizes. Runtime nodes (loops, branches and shapes that depend on data) are graph
breaks: a warning names them, and the parts between them are compiled.

For channels-last only the images are converted: torch's convolutions follow the format of their input and convert
their weights in each call, which costs one pass over the weights. So parameters, gradients in the reducer's buckets,
optimizer state and checkpoints keep the layout of the file.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.config.sections import GraphConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.runtime_node import RuntimeNode

log = logging.getLogger(__name__)

CONVOLUTIONS = (F.conv2d, F.conv_transpose2d)


def accelerate(module: fx.GraphModule, config: GraphConfig, device: torch.device) -> nn.Module:
    """Return the module to call in place of an imported one, which is changed; its weights are the same tensors.

    Raises ConfigError where the graph is to be compiled and there is no compiler.
    """
    # before compiling, so that the compiled graph contains the conversion
    if _wants_channels_last(config, device) and (images := _images(module.graph)):
        _convert(module, images)
    if not config.compile:
        return module
    if problem := missing_compiler():
        raise ConfigError(problem)
    breaks = [f"{node.target} ({child.node.op_type})" for node, child in _runtime_nodes(module)]
    if breaks:
        log.warning(
            "graph.compile: %d nodes are computed by Python when the graph runs, between compiled parts: %s",
            len(breaks),
            ", ".join(breaks),
        )
    lengths = module.graph.find_nodes(op="call_method", target="item")  # integers from another unit arrive as tensors
    compiled: nn.Module = torch.compile(module, fullgraph=not (breaks or lengths), dynamic=True)  # type: ignore[assignment]
    return compiled


def _runtime_nodes(module: fx.GraphModule) -> list[tuple[fx.Node, RuntimeNode]]:
    called = [(node, module.get_submodule(str(node.target))) for node in module.graph.nodes if node.op == "call_module"]
    return [(node, child) for node, child in called if isinstance(child, RuntimeNode)]


# -- images


def _wants_channels_last(config: GraphConfig, device: torch.device) -> bool:
    """Return whether to convert: `auto` does on GPUs. On CPUs oneDNN has its own format, and conversions cost more."""
    return config.memory_format == "channels_last" or (config.memory_format == "auto" and device.type == "cuda")


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


def _convert(module: fx.GraphModule, images: list[fx.Node]) -> None:
    for image in images:
        with module.graph.inserting_after(image):
            converted = module.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        converted.meta.update(image.meta)
        for user in [user for user in image.users if user is not converted]:
            user.replace_input_with(image, converted)
    module.recompile()


# -- the compiler


@functools.cache
def missing_compiler() -> str:
    """Return a sentence if torch.compile has no working C++ compiler here, else an empty string."""
    named = os.environ.get("CXX", "")
    for compiler in (named,) if named else ("g++", "clang++"):
        if shutil.which(compiler) and _runs(compiler):
            return ""
    tried = f"CXX={named}" if named else "neither g++ nor clang++"
    return (
        f"graph.compile needs a C++ compiler, and there is {'none at ' if named else ''}{tried} on this machine; "
        "install one (apt-get install g++), name it in CXX, or set graph.compile to false"
    )


def _runs(compiler: str) -> bool:
    command: list[Any] = [compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
