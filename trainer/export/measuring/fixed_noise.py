"""Let onnxruntime compute with the random numbers that the module has drawn, so that both can be compared.

module         x -- MatMul -- RandomNormalLike -- eps      eps is recorded
onnxruntime    x -- MatMul                        eps      the node is left out, and eps is an input
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import deepcopy

import onnx
import onnxruntime
from onnx import helper
from torch import Tensor, nn

from onward.trainer.data.schema.columns import Array
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.files.index import inner_graphs, nodes_inside, replace_entries
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.surgery.stochastic_depth import RANDOM
from onward.trainer.onnx_import.ops.random import RandomNode


@contextlib.contextmanager
def recorded_noise(module: nn.Module) -> Iterator[dict[str, Array]]:
    """Yield a dict that each call of the module fills: tensor of the file -> the numbers that its node drew."""
    drawn: dict[str, Array] = {}

    def record(node: nn.Module, _: object, result: Tensor) -> None:
        assert isinstance(node, RandomNode)
        drawn[node.name] = result.detach().cpu().numpy()

    nodes = [each for each in module.modules() if isinstance(each, RandomNode)]
    hooks = [each.register_forward_hook(record) for each in nodes]
    try:
        yield drawn
    finally:
        for hook in hooks:
            hook.remove()


class NoiseSessions:
    """onnxruntime on a model with an input in place of each node whose numbers are recorded."""

    def __init__(self, model: ModelFile | onnx.ModelProto) -> None:
        self._model = model
        self._session: onnxruntime.InferenceSession | None = None

    def run(self, drawn: Mapping[str, Array], feed: Mapping[str, Array]) -> list[Array]:
        """Return the outputs of the model, [B, ...] each, for the inputs of `feed` and the numbers that were drawn.

        Raises the errors of onnxruntime, which have no common base class.
        """
        if self._session is None:
            self._session = self._open(drawn)
        names = {value.name for value in self._session.get_inputs()}
        return list(self._session.run(None, {**feed, **{name: drawn[name] for name in drawn.keys() & names}}))

    def _open(self, drawn: Mapping[str, Array]) -> onnxruntime.InferenceSession:
        model = self._model
        proto, folder = (model.proto, model.path.parent) if isinstance(model, ModelFile) else (model, None)
        copy = deepcopy(proto)
        random_nodes = [node for node in copy.graph.node if node.op_type in RANDOM]
        fixed = {name for node in random_nodes for name in node.output} & drawn.keys()
        kept = [node for node in copy.graph.node if not fixed & set(node.output)]
        replace_entries(copy.graph, node=kept)
        # what the removed nodes drew becomes inputs, without a shape: it may depend on the batch
        for name in sorted(fixed):
            element_type = helper.np_dtype_to_tensor_dtype(drawn[name].dtype)
            copy.graph.input.append(helper.make_tensor_value_info(name, element_type, None))
        return open_session(copy, base=folder)


def noise_inside_bodies(model: onnx.ModelProto) -> list[str]:
    """Return a sentence about the random nodes whose numbers cannot be given, as a list of one; [] without any.

    They are in bodies of If, Loop and Scan, which may run several times, and in local functions.
    """
    bodies = [node for graph in inner_graphs(model.graph.node) for node in graph.node]
    functions = [node for function in model.functions for node in nodes_inside(function.node)]
    random_nodes = [node for node in (*bodies, *functions) if node.op_type in RANDOM]
    names = [node.name or node.output[0] for node in random_nodes]
    if not names:
        return []
    return [
        f"{len(names)} nodes draw random numbers in bodies of If, Loop or Scan or in functions "
        f"({', '.join(names[:5])}{', ...' if names[5:] else ''}), where onnxruntime cannot be given the numbers of the "
        "module, so that no two computations agree; export the model with this noise outside of them, or as an input"
    ]
