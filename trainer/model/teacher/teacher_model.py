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

import onnx
import torch
from torch import Tensor, fx, nn

from onward.trainer.config.distillation import SoftLoss, teacher_output
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.distributed.weights import PROJECTION, TEACHER
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import dims_of
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.row_layout import rows_first
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.fixed_batch.fixed_batch import batch_use
from onward.trainer.onnx_import.imported_graph import (
    TEACHER_MODULE,
    ImportedGraph,
    mark_constants_nonpersistent,
    output_nodes,
)
from onward.trainer.onnx_import.lowering.node_origins import rename_origins
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch
from onward.trainer.quantities import shown_shape


def with_teacher(
    module: ImportedGraph, config: RunConfig, *, cached: bool = False, by_parts: bool = False
) -> ImportedGraph:
    """Return a module of the model and its teacher, for training only; the same bits on every rank.

    module: of the model, which also returns the tensors that the soft losses read. cached: what the teacher computes
    becomes further inputs of the module, in the order of the soft losses. by_parts: as in `open_trainable`. Raises
    ConfigError when the two files do not fit together, UnsupportedModel when the teacher cannot be imported.
    """
    soft = config.soft_losses
    part, outputs = _teacher_part(config.teacher, soft, module.output_names[0], by_parts=by_parts)
    shapes = {value.name: dims_of(value) for value in part.graph.output}
    if cached:
        merged = _with_soft_labels(module, soft)
    else:
        teacher = _imported(part, Path(config.teacher.path), fuse=config.graph.fuse, by_parts=by_parts)
        merged = _merged(module, teacher, outputs, config.teacher, soft)
    kept = {merged.output_names[0], *(output for loss in config.losses for output in loss.outputs)}
    kept |= {loss.student for loss in soft if not loss.matched}
    _add_outputs(merged, soft, [shapes[output] for output in outputs], kept=kept, seed=config.train.seed)
    return merged


def _teacher_part(
    teacher: TeacherConfig, soft_losses: Sequence[SoftLoss], first: str, *, by_parts: bool
) -> tuple[onnx.ModelProto, list[str]]:
    """Return the part of the teacher's graph that is computed, and its output for each soft loss.

    first: the model's first output.
    """
    path = Path(teacher.path)
    model = load_model(path, by_parts=by_parts)
    known = [value.name for value in model.graph.output]
    outputs = [teacher_output(loss, first, known) for loss in soft_losses]
    # several soft losses may read one output, which is computed once
    settings = ModelConfig(path=path, output=tuple(dict.fromkeys(outputs)))
    if start := begin_at_numbers(model, settings).start:
        raise ConfigError(
            f"teacher.path {path} begins with pre-processing of strings or trees (up to {', '.join(start)}), which is "
            "not computed for a teacher; export it without"
        )
    try:
        return rows_first(extract_subgraph(model, settings), settings), outputs
    except ConfigError as error:
        raise ConfigError(
            [problem.replace("model.output", "teacher: the teacher's tensor") for problem in error.problems]
        ) from error


def _imported(part: onnx.ModelProto, path: Path, *, fuse: bool, by_parts: bool) -> ImportedGraph:
    """Import the teacher, untrained and in inference form."""
    names = [value.name for value in part.graph.output]
    if declared_batch(part.graph) and (use := batch_use(part, path.parent, outputs=names)).kind != "any":
        raise ConfigError(
            f"teacher.path {path} declares a batch of {use.declared}, and no other is proved right ({use.reason}); "
            "export the teacher with a dynamic batch"
        )
    teacher = to_module(part, base=path.parent, fuse=fuse, by_parts=by_parts)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    for child in teacher.modules():
        if isinstance(child, BatchNorm):
            child.frozen = True
    return teacher


def _with_soft_labels(module: ImportedGraph, soft: Sequence[SoftLoss]) -> ImportedGraph:
    """Return the module with an input for what the teacher computed for each soft loss, which it returns as it is."""
    graph = copy.deepcopy(module.graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        added = [graph.placeholder(f"soft_labels_{loss.place}") for loss in soft]
    _return_also(graph, added)
    names = tuple(loss.teacher_output for loss in soft)
    merged = _like(module, graph)
    merged.input_names = (*module.input_names, *names)
    merged.output_names = (*module.output_names, *names)
    return merged


def _merged(
    module: ImportedGraph,
    teacher: ImportedGraph,
    outputs: Sequence[str],
    config: TeacherConfig,
    soft: Sequence[SoftLoss],
) -> ImportedGraph:
    """Return a module of both graphs on the same inputs; it shares all tensors with the two.

    outputs: the teacher's for each soft loss.
    """
    if taken := [name for name in module.onnx_names.values() if name.startswith((TEACHER, PROJECTION))]:
        raise ConfigError(
            f"the weight {taken[0]!r} of the model has the name of a teacher's; rename it to train with one"
        )
    # inputs of the same name are the same, unless [teacher.inputs] says otherwise
    sources = {name: config.inputs.get(name, name) for name in teacher.input_names}
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
    # behind the model's outputs, at whose positions the losses against labels read
    ends = dict(zip(teacher.output_names, output_nodes(teacher.graph), strict=True))
    _return_also(graph, [copies[ends[name]] for name in outputs])
    module.add_module(TEACHER_MODULE, teacher)
    merged = _like(module, graph)
    delattr(module, TEACHER_MODULE)
    merged.output_names = (*module.output_names, *(loss.teacher_output for loss in soft))
    # both files may have a weight of one name: the teacher's get a prefix
    paths = {f"{TEACHER_MODULE}.{path}": TEACHER + name for path, name in teacher.onnx_names.items()}
    merged.onnx_names = {**module.onnx_names, **paths}
    frozen = {TEACHER + name: replace(role, kind="frozen") for name, role in teacher.roles.items()}
    merged.roles = {**module.roles, **frozen}
    mark_constants_nonpersistent(merged)
    return merged


def _like(module: ImportedGraph, graph: fx.Graph) -> ImportedGraph:
    """Return a module of another graph with the tensors, modules and names of this one."""
    result = ImportedGraph(module, graph, "ImportedGraph")
    for name in ImportedGraph.__annotations__:
        setattr(result, name, getattr(module, name))
    mark_constants_nonpersistent(result)
    return result


def _return_also(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    graph.output_node().args = ((*output_nodes(graph), *nodes),)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, lambda read: copies[read])
    if node.op in ("get_attr", "call_module"):
        copied.target = f"{TEACHER_MODULE}.{node.target}"
    copied.meta = dict(node.meta) | {"teacher": True}
    if "onnx" in node.meta:  # the files may use the same names
        copied.meta["onnx"] = tuple(TEACHER + name for name in node.meta["onnx"])
    rename_origins(copied, TEACHER)
    return copied


# -- what the soft losses read


def _add_outputs(
    module: ImportedGraph,
    soft: Sequence[SoftLoss],
    theirs: Sequence[Sequence[int | None] | None],
    *,
    kept: set[str],
    seed: int,
) -> None:
    """Replace what the module returns by the file's outputs and what the soft losses read, in place.

    theirs: the declared shape of what the teacher computes for each soft loss. kept: outputs that the losses read.
    """
    nodes = dict(zip(module.output_names, output_nodes(module.graph), strict=True))
    # tensors inside the model are returned for the soft losses alone, and by the name of the match
    inner = {loss.student for loss in soft if loss.matched} - kept
    returned = {name: node for name, node in nodes.items() if name not in inner}
    shapes = dict(module.output_shapes)
    problems = list[str]()
    for loss, dims in zip(soft, theirs, strict=True):
        shapes[loss.teacher_output] = None if dims is None else tuple(dims)
        if not loss.matched:
            continue
        try:
            sizes = projected_sizes(loss, shapes.get(loss.student), dims)
        except ConfigError as error:
            problems += error.problems
            continue
        node = nodes[loss.student]
        returned[loss.own_output] = _projected(module, loss, node, sizes, seed) if sizes else node
        shapes[loss.own_output] = shapes[loss.teacher_output]
    if problems:
        raise ConfigError(problems)
    module.graph.output_node().args = (tuple(returned.values()),)
    module.output_names = tuple(returned)
    module.output_shapes = shapes
    module.graph.lint()
    module.recompile()


def projected_sizes(
    soft: SoftLoss, own: Sequence[int | None] | None, theirs: Sequence[int | None] | None
) -> tuple[int, int, int] | None:
    """Return the axis in which two matched tensors differ, and both lengths; None if they have one shape.

    Raises ConfigError for shapes that no projection of one axis makes equal.
    """
    name = f"teacher.match: {soft.student!r} of the model and {soft.teacher!r} of the teacher"
    if own is None or theirs is None:
        raise ConfigError(f"{name}: the shape of one of them is not known from its file; match other tensors")
    shown = f"{name} are {shown_shape(own)} and {shown_shape(theirs)}"
    if len(own) != len(theirs):
        raise ConfigError(f"{shown}; match tensors with the same number of axes")
    different = []
    for axis, lengths in enumerate(zip(own, theirs, strict=True)):
        # axis 0 is the batch, and dynamic lengths follow the inputs of both
        if axis and lengths[0] != lengths[1] and None not in lengths:
            different.append(axis)
    if len(different) > 1:
        raise ConfigError(f"{shown}: they differ in more than one axis, and a projection changes one; match others")
    if not different:
        return None
    (axis,) = different
    before = own[axis]
    after = theirs[axis]
    assert before
    assert after
    return axis, before, after


def _projected(module: ImportedGraph, soft: SoftLoss, node: fx.Node, sizes: tuple[int, int, int], seed: int) -> fx.Node:
    """Add a projection of one axis of a tensor, initialised like torch's Linear; return the node of its result."""
    axis, inputs, outputs = sizes
    name = f"{PROJECTION}{soft.place}"
    # a generator of its own, so that the numbers do not depend on what was drawn before
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
