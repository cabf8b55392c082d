"""Which weights of an imported graph receive gradients: the settings `model.train` and `model.freeze`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import nodes_inside
from onward.trainer.onnx_graph.files.operators import matches_any
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm


def select_trained(module: ImportedGraph, *, train: Sequence[str] = ("*",), freeze: Sequence[str] = ()) -> None:
    """Set `requires_grad` of the parameters that match a glob of `train` and none of `freeze`; clear it elsewhere.

    Patterns are matched against initializer names. A tied weight also matches under the names of its copies. A
    BatchNormalization whose scale and bias are both frozen also stops updating its running statistics and
    normalises by them. Raises ConfigError for every pattern without a match, and when no weight is left to train.
    """
    parameters = {module.onnx_names[path]: parameter for path, parameter in module.named_parameters()}
    if not parameters:
        raise ConfigError(
            "no stored tensor of the graph is a weight, so there is nothing to train; `onward doctor` shows the role "
            "of each tensor and why, and model.train may name one that is a weight after all"
        )
    originals = {name: name for name in parameters} | {name: of for name, (of, _) in module.copies.items()}
    problems = [
        *_unmatched(module, "model.train", train, originals),
        *_unmatched(module, "model.freeze", freeze, originals),
    ]
    # through a copy's name its original is meant, which is the one parameter of both
    chosen = {original for name, original in originals.items() if matches_any(name, train)}
    frozen = {original for name, original in originals.items() if matches_any(name, freeze)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen - frozen)
    if not problems and not any(parameter.requires_grad for parameter in parameters.values()):
        problems.append(f"model.train and model.freeze leave none of the {len(parameters)} weights to train")
    if problems:
        raise ConfigError(problems)
    for node in module.graph.find_nodes(op="call_module"):
        called = module.get_submodule(str(node.target))
        if isinstance(called, BatchNorm):
            called.frozen = _is_frozen_norm(module, parameters, node.args[1:3])
        elif isinstance(called, RuntimeNode):
            # norms inside an If or a Loop read the operands of the whole node by their names
            operands = dict(zip(called.names, node.args, strict=True))
            statistics = set[str]()
            for inner in nodes_inside([called.node]):
                if inner.op_type != "BatchNormalization":
                    continue
                if _is_frozen_norm(module, parameters, [operands.get(name) for name in inner.input[1:3]]):
                    statistics.update(inner.input[3:5])
            called.frozen_statistics = frozenset(statistics)


def _is_frozen_norm(module: ImportedGraph, parameters: Mapping[str, nn.Parameter], operands: Iterable[object]) -> bool:
    """Return whether scale and bias of a BatchNormalization are frozen; either may be a constant, no parameter."""
    weights = [parameters[name] for operand in operands if (name := _initializer(module, operand)) in parameters]
    # with two constants nothing was frozen: such a norm goes on updating its statistics
    return bool(weights) and not any(parameter.requires_grad for parameter in weights)


def _unmatched(module: ImportedGraph, setting: str, patterns: Iterable[str], names: Iterable[str]) -> Iterable[str]:
    """Yield a sentence for each pattern that matches no weight."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        role = module.roles.get(pattern)
        nearest = difflib.get_close_matches(pattern, list(names), n=1, cutoff=0.3) or list(names)[:1]
        problem = f"{pattern!r} is {role.kind}: {role.reason}" if role else f"no weight matches {pattern!r}"
        yield f"{setting}: {problem}; there is {', '.join(nearest) or 'none at all'}"


def _initializer(module: ImportedGraph, argument: object) -> str:
    """Return the initializer name of an operand that is a stored tensor, "" for any other operand."""
    return module.onnx_names.get(str(argument.target), "") if isinstance(argument, fx.Node) else ""
