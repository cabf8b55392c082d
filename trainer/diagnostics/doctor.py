"""Report how an ONNX file would be trained: the role of each weight, its operators, and warnings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import defs, inliner

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.diagnostics.audit_input import AuditInput
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings
from onward.trainer.diagnostics.output_warnings import output_warnings
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.attribute_weights import with_operands
from onward.trainer.onnx_graph.beyond_onnx import departures
from onward.trainer.onnx_graph.files.index import (
    SMALL,
    element_type_name,
    inputs_of,
    locations,
    opsets_of,
    shape_text,
    without_large_tensors,
)
from onward.trainer.onnx_graph.files.mapped_model import read_mapped
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.stored_protos import load_small_tensors, stored_protos
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.inner_tensors import inner_tensors, lift_inner_tensors
from onward.trainer.onnx_graph.outputs import describe_type, readable_output, with_numeric_outputs
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import (
    begin_at_numbers,
    describe,
    find_preprocessing,
    preprocessing_model,
)
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_graph.surgery.training_norms import mark_batch_statistics
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.fixed_batch.fixed_batch import batch_use
from onward.trainer.onnx_import.lowering.converters import load_converters
from onward.trainer.onnx_import.lowering.lowering import list_operators
from onward.trainer.onnx_import.quantization.quantized_weights import quantized_weights, scales_of
from onward.trainer.onnx_import.roles.exporter_records import read_records
from onward.trainer.onnx_import.roles.roles import find_roles, inner_roles
from onward.trainer.onnx_import.roles.ties import find_copies, roles_of_copies
from onward.trainer.quantities import gib
from onward.trainer.run.recorded.trial_records import PreprocessingTrials
from onward.trainer.run.records import ExporterWarning, Guard, Record

IN_FRONT = "onnxruntime, in front"
"""How the nodes of the pre-processing are imported."""


class Weight(Record):
    """One stored tensor."""

    name: str
    original: str = ""
    """The weight of the exported network that it was folded from, where the exporter wrote it, else ""."""
    shape: tuple[int, ...]
    stored_as: str
    kind: str
    """trained, statistic, frozen, or copy (of a trained one)."""
    reason: str
    source: str = "guessed"
    """file (the exporter wrote what the tensor is, or the graph leaves no choice), or guessed."""
    module: str = ""
    """Path of its module, as far as it is written."""


class Operator(Record):
    """All nodes of one operator in one version."""

    operator: str
    version: int
    nodes: int
    imported_by: str
    """rule, definition (ONNX's own, by simpler operators), onnx2torch, your converter, function (the file's own), kept
    (only outputs of strings or maps need it: it stays in the file and is not computed), onnxruntime, in front (it is
    part of the pre-processing, and computed when the data is read), or nothing."""
    leaves: int = 0
    """Number of runtime nodes among them: lowered each time the graph runs, because their shapes depend on data."""


class Unsupported(Record):
    """A node or tensor that cannot be imported."""

    where: str
    """The node's name, or that of a tensor."""
    operator: str
    version: int
    why: str
    remedy: str


class Total(Record):
    """Number of tensors of one kind, and of their elements."""

    tensors: int
    values: int


class Diagnosis(Record):
    """The report on one file."""

    path: Path
    size_bytes: int
    """Of the file and of its external data."""
    producer: str
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    importable: bool
    runtime: RuntimeCheck
    preprocessing: str = ""
    """For a file that begins with strings: where the trained part begins, and which nodes are in front of it."""
    totals: dict[str, Total]
    weights: tuple[Weight, ...]
    operators: tuple[Operator, ...]
    unsupported: tuple[Unsupported, ...]
    warnings: tuple[ExporterWarning, ...]
    guard: Guard | None = None
    """How the file under another runtime agrees with the module that would be trained."""
    trials: PreprocessingTrials | None = None
    """How well the file does on data under the plausible preprocessings, if data was given."""


def diagnose(path: Path, *, converters: Sequence[Path] = ()) -> Diagnosis:
    """Read a file and report how it would be trained, with the user's `converters` as in [model].

    Raises ConfigError or UnsupportedModel if it cannot be read.
    """
    load_converters(converters)
    model = load_model(path)
    # each step goes on behind the problems of the one before, so that all of them are in one report
    problems = list[str]()
    preprocessing = ""
    front = onnx.ModelProto()
    # as `to_module` does: what only computes strings or maps is not imported
    part = with_numeric_outputs(model)
    try:
        settings = ModelConfig(path=path, output=readable_output(model))
        if found := find_preprocessing(model, settings):
            preprocessing = describe(found.nodes, found.tensors)
            front = preprocessing_model(model, found)
            if settings.output != model.graph.output[0].name:
                preprocessing += f"; this is for model.output = {settings.output!r}"
            part = extract_subgraph(model, begin_at_numbers(model, settings))
    except UnsupportedModel as error:
        problems = list(error.problems)
    audit = AuditInput(with_operands(part), path.parent, records=read_records(model))
    # of the file, because the model that was loaded is put right
    audit.departures = departures(read_mapped(path) or read_model(path))
    main = part
    try:
        audit.batch = batch_use(part, path.parent)
        module = to_module(part, base=path.parent, widen=audit.batch.kind == "any")
        audit.read_graph(module)
    except UnsupportedModel as error:
        problems += error.problems
    try:
        main = lift_inner_tensors(part)
        audit.inner = tuple(inner_tensors(part))
        audit.records = read_records(main, audit.inner)
    except UnsupportedModel as error:
        problems += error.problems
    audit.model = with_operands(main)
    if model.functions:  # roles are found by the operators that read a tensor, so functions are inlined
        audit.model = inliner.inline_local_functions(audit.model)
    audit.model = mark_batch_statistics(audit.model)
    try:
        _read_roles(audit, part, main)
    except UnsupportedModel as error:
        problems = list(dict.fromkeys([*error.problems, *problems]))
    size_bytes = sum((path.parent / name).stat().st_size for name in (path.name, *locations(model)))
    weights = tuple(_weights(audit))
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    unsupported = tuple(_unsupported(problem, model) for problem in problems)
    return Diagnosis(
        path=path,
        size_bytes=size_bytes,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets=opsets,
        inputs=tuple(map(_value, inputs_of(model.graph))),
        outputs=tuple(map(_value, model.graph.output)),
        importable=not problems,
        preprocessing=preprocessing,
        runtime=check_runtime(model, path, size_bytes),
        totals=_totals(weights),
        weights=weights,
        operators=tuple(_operators(model, part, front, audit.runtime_nodes)),
        unsupported=unsupported,
        warnings=(*exporter_warnings(audit), *output_warnings(model, audit.model.graph)),
    )


def _read_roles(audit: AuditInput, part: onnx.ModelProto, main: onnx.ModelProto) -> None:
    """Set the stored tensors of an audit, their roles and their copies.

    part: the graph that is imported. main: the same, with the tensors of inner graphs in its own.
    """
    stored = stored_tensors(main.graph, audit.base)
    quantized = quantized_weights(main.graph, stored)
    audit.stored = stored | {name: weight.dequantized() for name, weight in quantized.items()}
    roles = find_roles(audit.model.graph, audit.stored, audit.records, scales_of(quantized)) | inner_roles(part)
    audit.copies = find_copies(audit.stored, roles, audit.records.originals)
    audit.roles = roles_of_copies(roles, audit.copies)


def _value(value: onnx.ValueInfoProto) -> str:
    if not value.type.HasField("tensor_type"):
        return f"{value.name} {describe_type(value)}"
    return f"{value.name} {element_type_name(value.type.tensor_type.elem_type).lower()} {shape_text(value)}"


def _weights(audit: AuditInput) -> Iterator[Weight]:
    # the type is that of the file: what is read may have been dequantized or widened
    places = dict(stored_protos(audit.model.graph)) | {tensor.name: tensor.proto for tensor in audit.inner}
    for name, role in audit.roles.items():
        tensor = audit.stored.get(name)
        proto = places.get(name)
        shape: Sequence[int] = ()
        stored_as = element_type_name(proto.data_type).lower() if proto is not None else ""
        if tensor is not None:
            shape = tensor.shape
        elif proto is not None:
            shape = proto.dims
        yield Weight(
            name=name,
            original=audit.records.originals.get(name, ""),
            shape=tuple(shape),
            stored_as=stored_as,
            kind="copy" if name in audit.copies else role.kind,
            reason=role.reason,
            source="file" if role.written else "guessed",
            module=audit.records.modules.get(name, ""),
        )


def _totals(weights: Iterable[Weight]) -> dict[str, Total]:
    listed = list(weights)
    totals = {}
    for kind in ("trained", "statistic", "frozen"):
        members = [weight for weight in listed if weight.kind == kind]
        totals[kind] = Total(tensors=len(members), values=sum(math.prod(weight.shape) for weight in members))
    return totals


def _operators(
    model: onnx.ModelProto, part: onnx.ModelProto, front: onnx.ModelProto, runtime_nodes: Mapping[str, int]
) -> Iterator[Operator]:
    needed = Counter(list_operators(part))
    needed += Counter((operator, version, IN_FRONT) for operator, version, _ in list_operators(front))
    outside = Counter((operator, version, "kept") for operator, version, _ in list_operators(model))
    for (operator, version, _), number in needed.items():
        outside[operator, version, "kept"] -= number
    for (operator, version, how), nodes in sorted((needed + outside).items()):
        yield Operator(
            operator=operator,
            version=version,
            nodes=nodes,
            imported_by=how,
            leaves=runtime_nodes.get(operator.rpartition(".")[2], 0),
        )


# -- what is not supported


def _unsupported(problem: str, model: onnx.ModelProto) -> Unsupported:
    """Parse a sentence of UnsupportedModel, and add what to do."""
    found = re.fullmatch(r"node '(.*?)': ([\w.]+)-(\d+): (.*)", problem, re.S)
    if not found:
        what = re.match(r"\w+ '(.*?)'", problem)
        return Unsupported(where=what.group(1) if what else "", operator="", version=0, why=problem, remedy="")
    where, operator, version, why = found.groups()
    domain, _, name = operator.rpartition(".")
    return Unsupported(
        where=where, operator=operator, version=int(version), why=why, remedy=_remedy(domain, name, int(version), model)
    )


def _remedy(domain: str, name: str, version: int, model: onnx.ModelProto) -> str:
    key = f'"{name}", version={version}' + (f', domain="{domain}"' if domain else "")
    own = f"in a Python file named in model.converters: onnx2torch's add_converter({key})"
    opset = opsets_of(model).get("", 0)
    if not domain and opset > defs.onnx_opset_version():
        return f"export it again at opset {defs.onnx_opset_version()} or below: the installed onnx supports none newer"
    if not domain and version > 1:
        return f"export it again at another opset (now {opset}; 18 to 23 suit best), or write a converter {own}"
    return f"write a converter for it {own}; or export without it"


# -- find out whether onnxruntime opens an ONNX file: what it rejects cannot be verified after training
#
# A large file is opened as a copy in which its weights are inputs, so that they are neither read nor kept in memory.

MOST_OPENED_BYTES = 256 * 2**20
"""Files up to this size, external data included, are opened as they are."""

LACKS = re.compile(r"NOT_IMPLEMENTED|is not a registered function|IR version|ValidateOpsetForDomain|No opset import")
"""What onnxruntime says about a file that needs more than it has: an operator, a type or a version."""


class RuntimeCheck(Record):
    """Whether onnxruntime opens a file."""

    opens: bool
    valid: bool
    """False if onnxruntime finds an error in the file, and not an operator, a type or a version that it lacks."""
    how: str
    """What was opened."""
    error: str = ""


def check_runtime(model: onnx.ModelProto, path: Path, size_bytes: int) -> RuntimeCheck:
    """Open a file with onnxruntime's CPU provider, without optimisations, and return whether it does.

    model: the file's content, external data not loaded. size_bytes: of the file and its external data.
    """
    how = "the file, without optimisations"
    source: Path | onnx.ModelProto = path
    if size_bytes > MOST_OPENED_BYTES:
        how = (
            f"a copy without optimisations in which tensors of more than {SMALL:,} elements are inputs, because the "
            f"file has {gib(size_bytes)}"
        )
        source = without_large_tensors(load_small_tensors(model, path.parent))
    try:
        open_session(source, optimise=False)
    except Exception as error:  # onnxruntime's errors have no common base class
        text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
        text = re.sub(r"^Load model from \S+ failed:", "", text)
        return RuntimeCheck(opens=False, valid=bool(LACKS.search(str(error))), how=how, error=" ".join(text.split()))
    return RuntimeCheck(opens=True, valid=True, how=how)
