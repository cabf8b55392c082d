"""Put a teacher beside the model that is trained: two files become one graph, which every kind of parallelism divides.

    x ---- model ----+---------------------- logits             an output of the file, which the losses read
                     `-- hidden -- projection -- matched:1      a tensor inside it, in the width of the teacher's
    x ---- teacher --+---------------------- teacher:0          what the model's logits are to become
                     `-- hidden ------------ teacher:1

The teacher's weights are parameters without gradient, named `teacher:<initializer>`; no gradient is recorded, because
nothing before them needs one. Its Dropout and BatchNormalization stay in inference form (imported_graph.py). The
weights come from the teacher's file on every rank: checkpoints, optimizers and exported files hold nothing of them. A
projection (`projection:<number>`) is trained like a weight and is in checkpoints.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from onward.trainer.config.distillation import SoftLoss, teacher_output
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.distributed.weights import PROJECTION, TEACHER
from onward.trainer.errors import ConfigError
from onward.trainer.model.trainable import TrainableModel, open_trainable
from onward.trainer.onnx_graph.preprocessing import begin_at_numbers
from onward.trainer.onnx_graph.surgery import extract_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.fixed_batch import batch_use
from onward.trainer.onnx_import.imported_graph import (
    TEACHER_MODULE,
    ImportedGraph,
    mark_constants_nonpersistent,
)
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.roles import Role
from onward.trainer.onnx_import.trial_sizes import declared_batch


def open_with_teacher(config: RunConfig) -> TrainableModel:
    """Return what `open_trainable` does, with the teacher in the module if there is one; the same bits on every rank.

    With a teacher the result is for training only: it cannot be written back. Raises the errors of `open_trainable`,
    and ConfigError when the two files do not fit together.
    """
    if not config.teacher.path:
        return open_trainable(config)
    soft = config.soft_losses
    trainable = open_trainable(config, also=tuple(each.student for each in soft if each.student))
    teacher, outputs = _open_teacher(config, trainable.module.output_names[0])
    merged = _merged(trainable.module, teacher, config)
    _add_outputs(merged, teacher, soft, outputs, seed=config.train.seed)
    return replace(trainable, module=merged)


def _open_teacher(config: RunConfig, first: str) -> tuple[ImportedGraph, list[str]]:
    """Import the teacher; return it, untrained and in inference form, and its output for each soft loss.

    first: the model's first output.
    """
    path = Path(config.teacher.path)
    model = load_model(path)
    known = [value.name for value in model.graph.output]
    outputs = [teacher_output(each, first, known) for each in config.soft_losses]
    settings = ModelConfig(path=path, output=tuple(dict.fromkeys(outputs)))
    if start := begin_at_numbers(model, settings).start:
        raise ConfigError(
            f"teacher.path {path} begins with pre-processing of strings (up to {', '.join(start)}), which is not "
            "computed for a teacher; export it without"
        )
    try:
        part = extract_subgraph(model, settings)
    except ConfigError as error:
        raise ConfigError(
            [problem.replace("model.output", "teacher: the teacher's tensor") for problem in error.problems]
        ) from error
    if declared_batch(part.graph) and (use := batch_use(part, path.parent, outputs=settings.outputs)).kind != "any":
        raise ConfigError(
            f"teacher.path {path} declares a batch of {use.declared}, and no other is proved right ({use.reason}); "
            "export the teacher with a dynamic batch"
        )
    teacher = to_module(part, base=path.parent, fuse=config.graph.fuse)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    for each in teacher.modules():
        if isinstance(each, BatchNorm):
            each.frozen = True
    return teacher, outputs


def _merged(module: ImportedGraph, teacher: ImportedGraph, config: RunConfig) -> ImportedGraph:
    """Return a module of both graphs on the same inputs; it shares all tensors with the two."""
    if taken := [name for name in module.onnx_names.values() if name.startswith((TEACHER, PROJECTION))]:
        raise ConfigError(
            f"the weight {taken[0]!r} of the model has the name of a teacher's; rename it to train with one"
        )
    sources = {name: config.teacher.inputs.get(name, name) for name in teacher.input_names}
    if missing := [name for name, source in sources.items() if source not in module.input_names]:
        raise ConfigError(
            f"teacher: the model has no input {', '.join(map(repr, missing))}, which the teacher reads; the model's "
            f"inputs are {', '.join(module.input_names)}: set [teacher.inputs], {{teacher's input = model's input}}"
        )
    graph = copy.deepcopy(module.graph)
    inputs = dict(zip(module.input_names, graph.find_nodes(op="placeholder"), strict=True))
    placeholders = teacher.graph.find_nodes(op="placeholder")
    copies = {node: inputs[sources[name]] for name, node in zip(teacher.input_names, placeholders, strict=True)}
    # the teacher first: its activations are gone before those of the model are kept for the backward pass
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for node in teacher.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = _copied(graph, node, copies)
    outputs = teacher.graph.output_node().args[0]
    ends = [copies[node] for node in ([outputs] if isinstance(outputs, fx.Node) else outputs)]  # type: ignore[union-attr]
    own = graph.output_node().args[0]
    graph.output_node().args = (((own,) if isinstance(own, fx.Node) else tuple(own)) + tuple(ends),)  # type: ignore[arg-type]
    module.add_module(TEACHER_MODULE, teacher)
    merged = ImportedGraph(module, graph, "ImportedGraph")
    delattr(module, TEACHER_MODULE)
    for name in ImportedGraph.__annotations__:
        setattr(merged, name, getattr(module, name))
    merged.output_names = (*module.output_names, *(TEACHER + name for name in teacher.output_names))
    paths = {f"{TEACHER_MODULE}.{path}": TEACHER + name for path, name in teacher.onnx_names.items()}
    merged.onnx_names = {**module.onnx_names, **paths}
    frozen = {TEACHER + name: replace(role, kind="frozen") for name, role in teacher.roles.items()}
    merged.roles = {**module.roles, **frozen}
    mark_constants_nonpersistent(merged)
    return merged


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, lambda read: copies[read])
    if node.op in ("get_attr", "call_module"):
        copied.target = f"{TEACHER_MODULE}.{node.target}"
    copied.meta = dict(node.meta) | {"teacher": True}
    if "onnx" in node.meta:  # the files may use the same names
        copied.meta["onnx"] = tuple(TEACHER + name for name in node.meta["onnx"])
    return copied


# -- what the soft losses read


def _add_outputs(
    module: ImportedGraph, teacher: ImportedGraph, soft: Sequence[SoftLoss], outputs: Sequence[str], *, seed: int
) -> None:
    """Replace what the module returns by the file's outputs and what the soft losses read, in place."""
    nodes = dict(zip(module.output_names, module.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    inner = {each.student for each in soft if each.matched}
    found = {name: node for name, node in nodes.items() if name not in inner and not name.startswith(TEACHER)}
    shapes, problems = dict(module.output_shapes), list[str]()
    for each, output in zip(soft, outputs, strict=True):
        found[each.teacher_output] = nodes[TEACHER + output]
        if not each.matched:
            continue
        found[each.own_output] = nodes[each.student]
        theirs = teacher.output_shapes[output]
        try:
            sizes = projected_sizes(each, shapes.get(each.student), theirs)
        except ConfigError as error:
            problems += error.problems
            continue
        if sizes:
            found[each.own_output] = _projected(module, each, nodes[each.student], sizes, seed)
        shapes[each.own_output] = theirs
    if problems:
        raise ConfigError(problems)
    module.graph.output_node().args = (tuple(found.values()),)
    module.output_names, module.output_shapes = tuple(found), shapes
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def projected_sizes(
    soft: SoftLoss, own: Sequence[int | None] | None, theirs: Sequence[int | None] | None
) -> tuple[int, int, int] | None:
    """Return the axis in which two matched tensors differ, and both lengths; None if they have one shape.

    Raises ConfigError for shapes that no projection of one axis makes equal.
    """
    name = f"[[teacher.match]] {soft.student!r} of the model and {soft.teacher!r} of the teacher"
    if own is None or theirs is None:
        raise ConfigError(f"{name}: the shape of one of them is not known from its file; match other tensors")
    shown = f"{name} are {_shown(own)} and {_shown(theirs)}"
    if len(own) != len(theirs):
        raise ConfigError(f"{shown}; match tensors with the same number of axes")
    different = [
        axis
        for axis, (one, other) in enumerate(zip(own, theirs, strict=True))
        if axis and one != other and None not in (one, other)
    ]
    if len(different) > 1:
        raise ConfigError(f"{shown}: they differ in more than one axis, and a projection changes one; match others")
    if not different:
        return None
    (axis,) = different
    before, after = own[axis], theirs[axis]
    assert before
    assert after
    return axis, before, after


def _shown(dims: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"


def _projected(module: ImportedGraph, soft: SoftLoss, node: fx.Node, sizes: tuple[int, int, int], seed: int) -> fx.Node:
    """Add a projection of one axis of a tensor, initialised like torch's Linear; return the node of its result."""
    axis, inputs, outputs = sizes
    name = f"{PROJECTION}{soft.place}"
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    weight = torch.empty(outputs, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
    path = f"projection_{soft.place}"
    while hasattr(module, path):
        path += "_"
    module.register_parameter(path, nn.Parameter(weight))
    module.onnx_names = {**module.onnx_names, path: name}
    module.roles = {**module.roles, name: Role("trained", f"projection of {soft.student}", "MatMul")}
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        return graph.call_function(projected, (node, graph.get_attr(path), axis))


def projected(x: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Multiply one axis of x by a weight [outputs, inputs]."""
    return (x.movedim(axis, -1) @ weight.mT).movedim(-1, axis)
