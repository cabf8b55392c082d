"""ONNX file <-> torch module: the graph becomes a torch.fx GraphModule whose parameters are the initializers.

    model = load_model(path)
    module = to_module(model, base=path.parent)     # called with the graph's inputs, in order
    trainable(module, train=("*",), freeze=("*.wpe.*",))
    ...
    write(module, model, path, target)              # the same file, with the module's weights in it

Weights keep their name, their layout and their ties: nothing is transposed, scaled, folded or copied on
the way in, so the way back is exact. Files in half precision are computed in fp32 and rounded once, when
they are written back. The operators are in trainer/ops/; what is not there is refused, all of it at once.
"""

from __future__ import annotations

import contextlib
import difflib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, inliner
from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module

import onward.trainer.onnx_import.ops  # noqa: F401  files the operator table
from onward.trainer.errors import CheckpointError, ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.external_data import (
    external_problems,
    is_external,
    place,
    with_small_tensors,
    write_back,
)
from onward.trainer.onnx_graph.index import all_tensors
from onward.trainer.onnx_graph.initializers import slots, store, stored_tensors
from onward.trainer.onnx_graph.stochastic_depth import branches, marked
from onward.trainer.onnx_import.driver import Importer, import_graph
from onward.trainer.onnx_import.ops.contrib import OWN_NORMS, check_optimised
from onward.trainer.onnx_import.ops.norm import BatchNorm
from onward.trainer.onnx_import.passes.fuse import fuse as fuse_graph
from onward.trainer.onnx_import.roles import Role, promoted, roles
from onward.trainer.onnx_import.shape_assumptions import is_kept
from onward.trainer.onnx_import.ties import Copies, copy_roles, find_copies
from onward.trainer.onnx_import.ties import tie as tie_copies
from onward.trainer.run.durable_files import durable_file


class ImportedGraph(fx.GraphModule):
    """A graph that runs in torch and knows where in the ONNX file its weights came from."""

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    onnx_names: dict[str, str]
    """Path of each parameter and running statistic in this module -> its name in the file."""
    roles: dict[str, Role]
    """Name in the file -> what it is to training, for every stored float tensor."""
    copies: Copies
    """Name in the file of a copy -> (the weight it is a copy of, whether transposed): no parameter of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedGraph:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, ImportedGraph)
        for name in ("input_names", "output_names", "onnx_names", "roles", "copies"):
            setattr(copy, name, getattr(self, name))
        hold_constants_back(copy)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return _unpickled, arguments


def _unpickled(body: dict[str, Any], imports: str) -> ImportedGraph:
    """As torch unpickles a GraphModule, but of our class, so that its copies know their names, too."""
    plain = reduce_graph_module(body, imports)
    assert isinstance(plain, fx.GraphModule)
    module = ImportedGraph(plain, plain.graph, "ImportedGraph")
    for name, value in vars(plain).items():
        if name not in vars(module):
            setattr(module, name, value)
    hold_constants_back(module)
    return module


def hold_constants_back(module: ImportedGraph) -> None:
    """Constants of the graph move with the module, and are in no checkpoint."""
    for path, _ in module.named_buffers():
        if path not in module.onnx_names:
            owner, _, leaf = path.rpartition(".")
            module.get_submodule(owner)._non_persistent_buffers_set.add(leaf)


# -- in


def load_model(path: Path) -> onnx.ModelProto:
    """Read and check an ONNX file. What it keeps in other files stays there; `to_module(base=path.parent)` maps it.

    Raises ConfigError when there is no readable file, UnsupportedModel when it is not valid ONNX or one of its
    other files is absent, cut short or outside its directory.
    """
    try:
        path.open("rb").close()
        model = _checked(path)
    except OSError as error:
        raise ConfigError(f"cannot read the model {path}: {error.strerror}") from None
    except onnx.checker.ValidationError as error:
        raise UnsupportedModel(f"{path} is not valid ONNX: {error}") from None
    if problems := external_problems(model, path.parent):
        raise UnsupportedModel(problems)
    return model


def _checked(path: Path) -> onnx.ModelProto:
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        if not any(f"No Op registered for {name}" in str(error) for name in OWN_NORMS):
            raise
        model = onnx.load(str(path), load_external_data=False)
        check_optimised(model)
        return model
    return onnx.load(str(path), load_external_data=False)


def to_module(
    model: onnx.ModelProto, *, base: Path | None = None, fuse: bool = True, tie: bool = True, train: Sequence[str] = ()
) -> ImportedGraph:
    """Import a model. The module takes the graph's inputs in order (not those that have an initializer) and
    gives the graph's outputs in order: the tensor itself if there is one, else a tuple.

    `base`: the model's directory, for what it keeps in other files: mapped copy-on-write, not read. `fuse`:
    rewrite attention and linear layers into single calls; the results differ by rounding only. `tie`: let the
    copies an exporter made of one weight be that one weight. `train`: stored tensors that are to be weights
    though they do not look like one, by name. Dropout, stochastic depth and BatchNormalization follow train() and
    eval(). Raises UnsupportedModel with one sentence for every node that cannot be imported.
    """
    stored = stored_tensors(model.graph, base)  # before inlining: what a local function holds has no place of its own
    depth = branches(model, base)
    model = with_small_tensors(model, base)
    if model.functions:
        model = inliner.inline_local_functions(model)
    found = promoted(roles(model.graph, stored), stored, train)
    importer, traced = import_graph(marked(model, depth), stored, found, base)
    return _finish(traced, importer, find_copies(stored, found) if tie else {}, fuse=fuse)


def _finish(graph: fx.Graph, importer: Importer, copies: Copies, *, fuse: bool) -> ImportedGraph:
    tie_copies(graph, importer.tracer.root, {name: path for path, name in importer.onnx_names.items()}, copies)
    if fuse:
        fuse_graph(graph, importer.tracer.root)
    graph.eliminate_dead_code(is_impure_node=is_kept)
    graph.lint()
    module = ImportedGraph(importer.tracer.root, graph, "ImportedGraph")
    importer.tracer.root = nn.Module()  # nodes remember the tracer; with it, every rank would keep all weights whole
    paths = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    module.onnx_names = {path: name for path, name in importer.onnx_names.items() if path in paths}
    hold_constants_back(module)
    module.input_names = tuple(value.name for value in importer.inputs)
    module.output_names = tuple(value.name for value in importer.model.graph.output)
    module.copies = {name: of for name, of in copies.items() if of[0] in module.onnx_names.values()}
    module.roles = copy_roles(importer.roles, module.copies)
    return module


# -- weights by name


def weights(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """Every parameter, frozen or not, and every running statistic, by its name in the file."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    return {name: tensors[path] for path, name in module.onnx_names.items()}


def stored_weights(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """What each place in the file is to hold: `weights`, and the copies of some of them that the file has."""
    own = weights(module)
    return own | {name: own[of].t() if transposed else own[of] for name, (of, transposed) in module.copies.items()}


def running_statistics(module: ImportedGraph) -> dict[str, torch.Tensor]:
    """What training changes without a gradient: running means and variances, by name in the file."""
    return {name: tensor for name, tensor in weights(module).items() if not isinstance(tensor, nn.Parameter)}


def load_weights(module: ImportedGraph, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the module, by name in the file. Raises CheckpointError unless all fit."""
    own = weights(module)
    problems = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    problems += [f"{name} is not in the model" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name} is {list(tensors[name].shape)}, the model's is {list(own[name].shape)}")
    if problems:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(sorted(problems)[:5])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def trainable(module: ImportedGraph, *, train: Sequence[str] = ("*",), freeze: Sequence[str] = ()) -> None:
    """Train the parameters that match a pattern of `train` and none of `freeze`; the others get no gradient.

    Patterns are globs over names in the file; a weight answers to the names of its copies, too. A
    BatchNormalization whose scale and bias are not trained keeps its running statistics, too, and uses them.
    Raises ConfigError for each that matches no parameter, and when nothing is left to train.
    """
    parameters = {module.onnx_names[path]: parameter for path, parameter in module.named_parameters()}
    called = {name: name for name in parameters} | {name: of for name, (of, _) in module.copies.items()}
    problems = [
        *_unmatched(module, "model.train", train, called),
        *_unmatched(module, "model.freeze", freeze, called),
    ]
    chosen, held = ({of for name, of in called.items() if _matches(name, patterns)} for patterns in (train, freeze))
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen - held)
    if not problems and not any(parameter.requires_grad for parameter in parameters.values()):
        problems.append(f"model.train and model.freeze leave none of the {len(parameters)} weights to train")
    if problems:
        raise ConfigError(problems)
    for node in module.graph.nodes:
        if node.op == "call_module" and isinstance(norm := module.get_submodule(str(node.target)), BatchNorm):
            own = [parameters[name] for arg in node.args[1:3] if (name := _file_name(module, arg)) in parameters]
            norm.frozen = bool(own) and not any(parameter.requires_grad for parameter in own)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unmatched(module: ImportedGraph, setting: str, patterns: Iterable[str], called: Iterable[str]) -> Iterable[str]:
    """A sentence for each pattern that matches no weight."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in called):
            continue
        role = module.roles.get(pattern)
        near = difflib.get_close_matches(pattern, list(called), n=1, cutoff=0.3) or list(called)[:1]
        known = f"{pattern!r} is {role.kind}: {role.reason}" if role else f"no weight matches {pattern!r}"
        yield f"{setting}: {known}; there is {', '.join(near) or 'none at all'}"


def _file_name(module: ImportedGraph, argument: object) -> str:
    """The name in the file of a stored tensor that is an operand; "" for any other operand."""
    return module.onnx_names.get(str(argument.target), "") if isinstance(argument, fx.Node) else ""


def describe(module: ImportedGraph) -> list[tuple[str, str, str]]:
    """(name in the file, trained | statistic | frozen, why) for every stored float tensor, trained ones first."""
    parameters = {module.onnx_names[path]: parameter for path, parameter in module.named_parameters()}
    rows = []
    for name, role in module.roles.items():
        own = module.copies[name][0] if name in module.copies else name
        frozen = own in parameters and not parameters[own].requires_grad
        rows.append((name, "frozen", "by model.train or model.freeze") if frozen else (name, role.kind, role.reason))
    return sorted(rows, key=lambda row: ("trained", "statistic", "frozen").index(row[1]))


# -- out


def to_onnx(module: ImportedGraph, model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` with the module's weights in it, each in the type and the field it was stored in.

    A tensor is touched only if its bytes changed: without training the copy equals the original, bit for
    bit. Raises ConfigError when `model` is not the one the module came from, or keeps weights in other files
    (see `write`).
    """
    trained, outside = _filled(module, model)
    if outside:
        raise ConfigError(f"weight {next(iter(outside))!r} is in another file; graph.write writes it there")
    return trained


def write(module: ImportedGraph, model: onnx.ModelProto, source: Path, target: Path) -> list[Path]:
    """Write `model` with the module's weights in it to `target`, and beside it the files it keeps weights in.

    Those keep their names and are copies of the ones beside `source` but for the bytes of changed weights. All
    are written under temporary names and renamed, the model last. Memory does not grow with the weights; a
    model that was not trained comes out as the same bytes. Returns every file written, the model first.
    Raises ConfigError when `model` is not the one the module came from, or a file in the way is not ours.
    """
    trained, outside = _filled(module, model)
    externals = [tensor for tensor in all_tensors(trained) if is_external(tensor)]
    locations = sorted({place(tensor).location for tensor in externals})
    if problems := _in_the_way(source, target, locations):
        raise ConfigError(problems)
    with contextlib.ExitStack() as files:
        content = files.enter_context(durable_file(target))
        copies = {name: files.enter_context(durable_file(target.parent / name)) for name in locations}
        for location, copy in copies.items():
            shutil.copyfile(source.parent / location, copy)
        written = {id(proto) for _, proto in outside.values()}
        write_back(outside, (proto for proto in externals if id(proto) not in written), copies)
        content.write_bytes(_content(trained, source))
    return [target, *(target.parent / name for name in locations)]


def _filled(
    module: ImportedGraph, model: onnx.ModelProto
) -> tuple[onnx.ModelProto, dict[str, tuple[torch.Tensor, TensorProto]]]:
    """A copy of the model with the weights it holds itself; and those that belong into other files, by name."""
    trained = onnx.ModelProto()
    trained.CopyFrom(model)
    places = dict(slots(trained.graph))
    outside = {}
    for name, tensor in stored_weights(module).items():
        proto = places.get(name)
        if proto is None or list(proto.dims) != list(tensor.shape):
            raise ConfigError(
                f"the model has no tensor {name!r} of shape {list(tensor.shape)}: it is not the one imported"
            )
        if is_external(proto):
            outside[name] = (tensor, proto)
        else:
            store(tensor, proto)
    return trained, outside


def _content(model: onnx.ModelProto, source: Path) -> bytes:
    """The model as bytes: those of the source if they say the same, for not every writer orders them as we do."""
    content: bytes = model.SerializeToString()
    original = source.read_bytes()
    same = onnx.ModelProto.FromString(original).SerializeToString() == content
    return original if same else content


def _in_the_way(source: Path, target: Path, locations: Sequence[str]) -> list[str]:
    """One sentence for each file that must not be written over: the source's own, and those of other models."""
    if target.exists() and target.samefile(source):
        return [f"{target} is the model that was trained; write to another file"]
    ours: set[str] = set()
    if target.is_file():
        with contextlib.suppress(DecodeError, OSError):
            before = onnx.load(str(target), load_external_data=False)
            ours = {place(tensor).location for tensor in all_tensors(before) if is_external(tensor)}
    problems = []
    for location in locations:
        side = target.parent / location
        if side.exists() and side.samefile(source.parent / location):
            problems.append(f"{side} holds the weights of {source}; write to another directory")
        elif side.exists() and location not in ours:
            problems.append(f"{side} exists and is not a file of {target.name}; write to another directory")
    return problems
