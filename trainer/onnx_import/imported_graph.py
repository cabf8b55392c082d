"""The torch module that an ONNX graph is imported into, and its weights by initializer name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module

from onward.trainer.onnx_import.quantization.quantizer_scales import Quantizer, final_scales
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.roles.ties import Copies

TEACHER_MODULE = "teacher_beside"
"""The submodule of a training graph that holds what a teacher stores (model/teacher/teacher_model.py)."""


class ImportedGraph(fx.GraphModule):
    """A GraphModule with the initializer name of each of its parameters and running statistics."""

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    output_shapes: dict[str, tuple[int | None, ...] | None]
    """Output -> the shape that the file declares, None for a dynamic length; None where it declares none."""
    onnx_names: dict[str, str]
    """Path of a parameter or running statistic in this module -> its initializer name. Paths and names are both
    unique; `named_weights` resolves them to tensors."""
    roles: dict[str, Role]
    """Initializer name -> role in training, for every stored float tensor."""
    copies: Copies
    """Initializer name of a tied copy -> (initializer name of the original, whether the copy is its transpose).
    A copy has no parameter of its own."""
    quantizers: tuple[Quantizer, ...]
    """The scales of quantization that follow what is trained."""

    def recompile(self) -> Any:
        """Generate the code of the graph, and call it as any module is called."""
        code = super().recompile()
        # fx would print a traceback for an error of the graph, in the middle of what a command says. Each GraphModule
        # has a class of its own.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code

    def train(self, mode: bool = True) -> ImportedGraph:
        """Set the mode of every module but those of a teacher, which are always in inference form."""
        super().train(mode)
        if isinstance(teacher := self._modules.get(TEACHER_MODULE), nn.Module):
            teacher.eval()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedGraph:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, ImportedGraph)
        # GraphModule copies the graph and what it reads, but not these attributes, and registers all buffers as
        # persistent
        for name in ("input_names", "output_names", "output_shapes", "onnx_names", "roles", "copies", "quantizers"):
            setattr(copy, name, getattr(self, name))
        mark_constants_nonpersistent(copy)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()  # (attributes, import block of the generated code)
        return _unpickle, arguments


def _unpickle(body: dict[str, Any], imports: str) -> ImportedGraph:
    """Rebuild an ImportedGraph; torch's own `reduce_graph_module` returns a plain GraphModule without the names."""
    plain = reduce_graph_module(body, imports)
    assert isinstance(plain, fx.GraphModule)
    module = ImportedGraph(plain, plain.graph, "ImportedGraph")
    for name, value in vars(plain).items():
        if name not in vars(module):
            setattr(module, name, value)
    mark_constants_nonpersistent(module)
    return module


def mark_constants_nonpersistent(module: ImportedGraph) -> None:
    """Make every buffer that is not a running statistic non-persistent: it moves with the module, but is not saved."""
    for path, _ in module.named_buffers():
        if path not in module.onnx_names:
            owner, _, attribute = path.rpartition(".")
            # torch has no public way to change this after registration
            module.get_submodule(owner)._non_persistent_buffers_set.add(attribute)


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes whose values a graph returns, in order; a graph may return one alone or a tuple."""
    outputs = graph.output_node().args[0]
    return [outputs] if isinstance(outputs, fx.Node) else list(cast("Sequence[fx.Node]", outputs))


def takes_any_batch(module: ImportedGraph) -> bool:
    """Return whether the leading dimension of an input was dynamic when the graph was traced.

    Only for a module as `to_module` returns it; copies and unpickled modules have no record of the tracing.
    """
    for node in module.graph.find_nodes(op="placeholder"):
        probes = node.meta.get("probes")
        # a sequence, or a tensor of unknown rank: nothing was fixed
        if probes is None:
            return True
        first, second = probes
        if first.ndim and first.shape[0] != second.shape[0]:
            return True
    return False


def named_weights(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """Return {initializer name: tensor} of every parameter, frozen ones included, and every running statistic.

    Each tensor appears once: tied copies are left out (see `stored_weights`).
    """
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    return {name: tensors[path] for path, name in module.onnx_names.items()}


def stored_weights(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """Return the value of every initializer that training may change: with tied copies, and scales of quantization."""
    weights = named_weights(module)
    for name, (original, transposed) in module.copies.items():
        weights[name] = weights[original].t() if transposed else weights[original]
    # the states of quantizers are no tensors of the file: the scales that they make are
    states = {quantizer.state for quantizer in module.quantizers}
    kept = {name: tensor for name, tensor in weights.items() if name not in states}
    return kept | final_scales(module.quantizers, weights)


@contextmanager
def statistics_kept(module: ImportedGraph) -> Iterator[None]:
    """Restore the running statistics, which a forward pass in training mode updates, at the end of a block."""
    # constants are buffers as well, but nothing writes to them
    before = [(buffer, buffer.clone()) for path, buffer in module.named_buffers() if path in module.onnx_names]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
