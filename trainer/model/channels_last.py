"""Compute convolutions in channels-last format.

    before    images [B, C, H, W] ------------------------ conv2d       weight (fp32) -- half ----------------- conv2d
    after     images -- contiguous(channels_last) -------- conv2d       weight (fp32) -- half(channels_last) -- conv2d

torch's convolutions follow the format of their input, and would convert a contiguous weight in every forward and
backward pass. So a parameter that only convolutions read is stored in that format, with its gradient and its moments;
its shape, and what checkpoints and files hold, stay the same. Where something needs the order of the file (ZeRO, tied
weights, update rules that split weights) a `half` node (weight_casts.py) converts it once in a step, in the pass that
casts it; in fp32 it does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import attrgetter
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.model.weight_casts import half
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights

CONVOLUTIONS = (F.conv2d, F.conv_transpose2d)
NARROW = 8
"""Channels of a block of oneDNN's kernels."""
WeightFormat = Literal["stored", "once", "each"]


def use_channels_last(
    module: fx.GraphModule,
    config: GraphConfig,
    device: torch.device,
    *,
    rows: int,
    weights: WeightFormat = "stored",
    but: Collection[str] = (),
) -> None:
    """Convert images and weights of a graph's convolutions where it is configured, in place. Call before compiling.

    `fastest` converts on GPUs, and on CPUs where it pays. rows: samples of a micro-batch. weights: whether parameters
    are `stored` in the format, with `fastest` and on CPUs, or converted `once` in each step, or by `each` convolution.
    but: initializer names of those that are converted, not stored.
    """
    format = config.memory_format
    if weights == "stored" and (format != "fastest" or device.type != "cpu"):
        weights = "once"
    wanted = format == "channels_last" or (format in ("auto", "fastest") and device.type == "cuda")
    if not wanted and format == "fastest":
        wanted = _pays_on_cpu(module, rows)
    # at the inputs alone: what follows keeps the format of its operand
    images = _images(module.graph) if wanted else []
    for image in images:
        with module.graph.inserting_after(image):
            converted = module.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        converted.meta.update(image.meta)
        for user in [user for user in image.users if user is not converted]:
            user.replace_input_with(image, converted)
    # the gradient takes the format of the weight, so that nothing is converted in the backward pass, either
    stored = _store_weights(module, but) if images and weights == "stored" else set()
    if images and weights != "each":
        _convert_weights(module, stored)
    if images and device.type == "cpu":
        _select_before_narrow_convolutions(module)
    if images:
        module.recompile()


def _pays_on_cpu(module: fx.GraphModule, rows: int) -> bool:
    """Return whether the convolutions of a micro-batch have more results than weights that have to be converted.

    Pooling and activations are faster in channels-last format, and conversions take time for each element of a weight
    whose kernel is larger than 1 x 1, in every step. Measured by tests/bench/memory_format.py: a ResNet-18 at 64 x 64
    has 0.2 results a weight for each row, and gains from 5 rows on.
    """
    results = 0.0
    converted = 0
    for node in _convolutions(module.graph):
        weight = _stored(module, _weight_read(node)[1])
        if isinstance(weight, torch.Tensor) and math.prod(weight.shape[2:]) > 1:
            converted += weight.numel()
        probes = node.meta.get("probes")
        if probes and isinstance(probes[0], torch.Tensor):
            first, second = probes
            if first.shape[2:] != second.shape[2:]:
                return True  # images of any size, which are usually large
            results += first.numel() * (rows / len(first) if len(first) != len(second) else 1)
    return results > converted


def _select_before_narrow_convolutions(module: fx.GraphModule) -> None:
    """Let 1 x 1 convolutions with a stride and few input channels read the pixels that they use, in place.

    On processors without AVX-512 oneDNN's gradient of such a weight in channels-last format writes beyond its memory
    (torch 2.13, fewer than 8 input channels): the process ends by SIGSEGV or SIGABRT, or computes with damaged numbers.
    """
    for node in module.graph.find_nodes(op="call_function", target=F.conv2d):
        weight = _stored(module, _weight_read(node)[1])
        # of a 1 x 1 kernel the pixels between the strides are never read
        x, kernel, bias, stride, padding, *rest = node.args
        if not isinstance(weight, torch.Tensor) or weight.shape[1] >= NARROW or tuple(weight.shape[2:]) != (1, 1):
            continue
        if tuple(stride) == (1, 1) or padding not in (0, (0, 0), [0, 0]):
            continue
        with module.graph.inserting_before(node):
            selected = module.graph.call_function(every_nth_pixel, (x, *stride))
        selected.meta.update(node.meta)
        node.args = (selected, kernel, bias, (1, 1), padding, *rest)


def every_nth_pixel(images: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return every `rows`th row and every `columns`th column of images [B, C, H, W]."""
    return images[:, :, ::rows, ::columns]


def _convolutions(graph: fx.Graph) -> list[fx.Node]:
    return [node for target in CONVOLUTIONS for node in graph.find_nodes(op="call_function", target=target)]


def _store_weights(module: fx.GraphModule, but: Collection[str]) -> set[object]:
    """Store the parameters in channels-last format that nothing but convolutions reads; return them."""
    names = {tensor: name for name, tensor in named_weights(cast("ImportedGraph", module)).items()}
    of_convolutions = {_stored(module, _weight_read(node)[1]) for node in _convolutions(module.graph)}
    of_others = set[object]()
    for read in module.graph.find_nodes(op="get_attr"):
        for given in read.users:
            # a weight may be cast before it is read
            readers = list(given.users) if given.target is half else [given]
            if any(reader.target not in CONVOLUTIONS or _weight_read(reader)[1] is not read for reader in readers):
                of_others.add(_stored(module, read))
    stored = set[object]()
    for parameter in of_convolutions - of_others:
        if isinstance(parameter, nn.Parameter) and names.get(parameter) not in but:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            stored.add(parameter)
    return stored


def _convert_weights(module: fx.GraphModule, stored: Collection[object]) -> None:
    """Put a `half` node with the format before each convolution, once for all that read one parameter, but for those
    that are stored in the format."""
    made: dict[fx.Node, fx.Node] = {}
    for node in _convolutions(module.graph):
        given, read = _weight_read(node)
        parameter = _stored(module, read)
        if not isinstance(parameter, nn.Parameter) or parameter in stored:
            continue
        if read not in made:
            with module.graph.inserting_after(read):
                made[read] = module.graph.call_function(half, (read, torch.channels_last))
            made[read].meta.update({key: value for key, value in read.meta.items() if key != "probes"})
        node.update_arg(1, made[read])
        if given is not read and not given.users:
            module.graph.erase_node(given)


def _weight_read(convolution: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the node that gives a convolution its weight, and the node before it if that is a cast; else it again."""
    given = cast("fx.Node", convolution.args[1])
    return given, cast("fx.Node", given.args[0]) if given.target is half else given


def _stored(module: fx.GraphModule, node: fx.Node) -> object:
    """Return what a node reads of the module; None for a computed value."""
    return attrgetter(str(node.target))(module) if node.op == "get_attr" else None


def _images(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs with four dimensions that a convolution depends on."""
    reached: dict[fx.Node, bool] = {}
    # backwards, so that the readers of a node are known when it is reached
    for node in reversed(graph.nodes):
        is_convolution = node.op == "call_function" and node.target in CONVOLUTIONS
        reached[node] = is_convolution or any(reached[user] for user in node.users)
    inputs = [node for node in graph.find_nodes(op="placeholder") if reached[node]]
    return [node for node in inputs if _rank(node) == 4]


def _rank(node: fx.Node) -> int:
    """Return the number of dimensions seen while tracing; 0 if it is unknown."""
    probes = node.meta.get("probes")
    if probes and isinstance(probes[0], torch.Tensor):
        return probes[0].ndim
    return int(node.meta.get("rank") or 0)
