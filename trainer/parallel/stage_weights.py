"""What a stage stores: the parameters and running statistics that its units read, by initializer name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx, nn

from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.quantization.quantizer_scales import RangeObserver
from onward.trainer.parallel.pipeline.stage import Stage


def stored_places(stage: Stage) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (initializer name, module, attribute) of everything a stage stores; a name once for each of its units."""
    for part in stage.chain.parts:
        names: dict[str, str] = part.module.onnx_names  # type: ignore[assignment]
        for path, name in names.items():
            owner, _, attribute = path.rpartition(".")
            yield name, part.module.get_submodule(owner), attribute


def stored_tensors(stage: Stage) -> dict[str, Tensor]:
    """Return initializer name -> tensor of everything a stage stores, in graph order."""
    tensors: dict[str, Tensor] = {}
    for name, module, attribute in stored_places(stage):
        tensors.setdefault(name, getattr(module, attribute))
    return tensors


def running_statistic_retention(stage: Stage) -> dict[str, float]:
    """Return, by initializer name, the factor by which one micro-batch multiplies each running statistic.

    It is 1 - momentum, to the power of the number of BatchNormalizations that update the same statistic.
    """
    found: dict[str, float] = {}
    for part in stage.chain.parts:
        names: dict[str, str] = part.module.onnx_names  # type: ignore[assignment]
        assert isinstance(part.module, fx.GraphModule)
        for node in part.module.graph.find_nodes(op="call_module"):
            norm = part.module.get_submodule(str(node.target))
            if isinstance(norm, RangeObserver):
                limits = names[str(node.all_input_nodes[1].target)]
                found[limits] = found.get(limits, 1.0) * (1.0 - norm.momentum)
                continue
            if isinstance(norm, BatchNorm) and not norm.frozen:
                momentum = norm.momentum
            elif isinstance(norm, RuntimeNode) and norm.statistics and norm.node.op_type == "BatchNormalization":
                momentum = 1.0 - next((a.f for a in norm.node.attribute if a.name == "momentum"), 0.9)
            else:
                continue
            for operand in node.args[3:]:  # input, scale, bias, running mean, running variance
                if isinstance(operand, fx.Node) and (name := names.get(str(operand.target))):
                    # each of several updates keeps 1 - momentum of the one before
                    found[name] = found.get(name, 1.0) * (1.0 - momentum)
    return found


def is_trained(tensor: Tensor) -> bool:
    """Return whether a stored tensor is trained: a parameter that is not frozen."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad
