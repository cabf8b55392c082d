"""Check the files that a configuration names: the model, the data, and directories to write to.

The command line runs these checks before it starts anything, and so does the configure task; they need no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from onward.trainer.config.losses import LossConfig, key_of, with_outputs
from onward.trainer.config.rules import Sections
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import is_library
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.config.setting_paths import BUNDLED_SOURCES
from onward.trainer.config.urls import url_of
from onward.trainer.data.batches.cache_needs import cache_problems
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.computations import open_fitted
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.formats.finished_shards import MANIFEST, shards_at
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.reading.sources import locate
from onward.trainer.data.schema.signature import Signature, model_bytes, read_training_signature
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.data.storage.sharding import check_held_out, check_named_files, try_first_rows
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.text.text_checks import text_problems
from onward.trainer.diagnostics.export_conflicts import export_conflicts, files_in_the_way, is_writable, url_conflicts
from onward.trainer.diagnostics.teacher_check import teacher_file_problems
from onward.trainer.errors import Refused
from onward.trainer.extras import how_to_install
from onward.trainer.onnx_graph.files.index import (
    Index,
    all_names,
    did_you_mean,
    graphs_of,
    integer_problems,
    locations,
    nodes_of,
    opsets_of,
    subgraphs,
)
from onward.trainer.onnx_graph.files.loss_files import (
    LEAST_OPSET,
    label_dims,
    read_loss_file,
    too_old,
    unknown_shape,
)
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.named_cuts import tensors_of, unknown_cuts, unknown_tensors
from onward.trainer.onnx_graph.outputs import selected_output
from onward.trainer.onnx_graph.surgery.quantizing import quantizing_problems
from onward.trainer.run.directory import onward_home
from onward.trainer.run.outcomes.storage import broken_storage
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.local_copies import LocalCopies, urls_in, with_copies


def check_files_and_data(sections: Sections, known: LocalCopies | None = None) -> list[str]:
    """Return a sentence for each file that is absent and for data that does not fit the model; [] if there is none.

    Sections that could not be read may be missing; the others are checked. What is named by URL is fetched first;
    known: the copies that a run began with (fetching.py).
    """
    copies, problems = fetch(sections, known)
    return [*problems, *check_local_files(with_copies(sections, copies))]


def check_local_files(sections: Sections) -> list[str]:
    """Return what `check_files_and_data` does, of sections in which local copies have replaced URLs."""
    model, data = sections.get("model"), sections.get("data")
    model_problems = _model(model) if model else []
    source_problems = _data(data) if data else []
    converter_problems = _converters(model) if model else ()
    problems = [*model_problems, *converter_problems, *source_problems, *_paths(sections), *_metrics(sections)]
    absent = [setting for setting, _ in urls_in(sections) if setting.startswith(("model.", "data."))]
    is_complete = model and data and "loss" in sections
    # what does not open has its sentence already, and a comparison would only repeat it
    is_unreadable = absent or model_problems or source_problems
    if is_complete and not is_unreadable:
        try:
            config = completed(RunConfig.model_construct(**dict(sections)))
            problems += _misfits(config.model_copy(update={"model": with_outputs(config.model, config.losses)}))
        except Refused as error:
            problems += error.problems
    return problems


def _misfits(config: RunConfig) -> list[str]:
    """Return where model, data and settings do not fit together. Raises Refused where reading goes no further."""
    signature, schema = read_training_signature(config.model), infer_schema(config.data)
    finished = shards_at(config.data)
    computed = InputColumns(config.data, config.loss, config.model, signature).computed
    made = frozenset[str]()
    # everything that needs no row of the data, so that all of it is reported at once
    if finished:
        manifest = read_record(finished / MANIFEST, ShardManifest)
        misfits = data_problems(config, schema, signature, fitted=manifest.fitted)
        misfits += cache_problems(finished, manifest, config.train, _least_ranks(config.parallel))
    else:
        # columns that are computed have their final type and shape only behind the computation
        own = {name: column for name, column in schema.items() if name not in computed}
        made = made.union(*(each.makes for each in open_fitted(config.data, config.losses, signature, schema)))
        misfits = [*data_problems(config, own, signature, made=made), *text_problems(config, schema, signature)]
    if config.export.training:
        misfits += _training_files(config.model.path, config.losses, signature)
    misfits += [
        *teacher_file_problems(config.teacher, config.model, config.losses, signature),
        *_quantizing(config.model, config.quantize),
    ]
    misfits += _patterns(config)
    # the model with QuantizeLinear has tensors of its own
    if config.parallel.cuts and not config.quantize.aware:
        misfits += _cuts(config.model.path, config.parallel.cuts)
    misfits += _absent_weights(config.model)
    if misfits:
        misfits += _selected(config.model)
        return misfits
    # of finished shards all columns are as they are trained on
    if finished:
        return []
    # from here on rows are read, which takes time and fails at the first bad one
    recipe = recipe_of(config, signature, schema)
    check_named_files(recipe)
    if computed or made or config.data.image:  # what is computed is tried on the first rows
        columns, fitted_columns = try_first_rows(config, signature, schema)
        misfits = data_problems(config, columns, signature, fitted=fitted_columns)
    if not misfits:
        check_held_out(recipe)
    return misfits


def _least_ranks(parallel: ParallelConfig) -> int:
    """Return the ranks of a run, as far as they are known before a layout is chosen."""
    return 1 if parallel.sizes == "auto" else parallel.world_size


def _selected(model: ModelConfig) -> Iterator[str]:
    """Yield which outputs hold what a detector has chosen among its boxes, in a run in which something does not fit."""
    file = read_model(model.path)
    for output in model.outputs:
        what, remedy = selected_output(file, output)
        if what:
            yield f"{what}; {remedy}"


def _absent_weights(model: ModelConfig) -> Iterator[str]:
    """Yield the files of weights that belong to the model and are not beside it."""
    folder = model.path.parent
    for name in locations(read_model(model.path)):
        if not (folder / name).exists():
            yield f"model.path: there is no file {folder / name}, which has weights of {model.path.name}"


def _training_files(path: Path, losses: Sequence[LossConfig], signature: Signature) -> list[str]:
    """Return why the model or a loss cannot be written into the files of the variant `training`."""
    model = read_model(path)
    opset = opsets_of(model).get("", 0)
    # what the signature has inferred does not count: the files are made of what the model declares
    undeclared = {value.name for value in model.graph.output if not value.type.tensor_type.HasField("shape")}
    problems = [f"export.variants 'training': {too_old(opset)}"] if opset < LEAST_OPSET else []
    for loss in losses:
        output = signature.output(loss.outputs[0])
        if not loss.takes_labels or output is None:
            continue
        if output.shape is None or output.name in undeclared:
            problems.append(f"export.variants 'training': {unknown_shape(output.name)}")
        # a file of too old an opset was refused above, and each loss would repeat that
        elif loss.is_own and not problems:
            try:
                read_loss_file(Path(loss.named.location), opset)
                label_dims(Path(loss.named.location), output.shape)
            except Refused as error:
                problems += [f"export.variants 'training': {problem}" for problem in error.problems]
    return problems


def _quantizing(model: ModelConfig, quantize: QuantizeConfig) -> list[str]:
    """Return why the model cannot be quantized as `quantize.aware` says."""
    if not quantize.aware:
        return []
    file, size = read_model(model.path), model_bytes(model.path)
    return quantizing_problems(file, quantize, size=size)


def _patterns(config: RunConfig) -> Iterator[str]:
    """Yield the patterns of weights that match no name at all in the file. Those that match a name that is no weight
    are found when the graph is imported."""
    # the names of the file are known here, and not those that the surgery makes
    if config.model.untie or config.model.num_classes or config.quantize.aware:
        return
    model = read_model(config.model.path)
    if model.functions:
        return
    stored = list(dict.fromkeys(tensor.name for each in graphs_of(model.graph) for tensor in each.initializer))
    nodes = list(nodes_of(model.graph))
    # those inside of nodes have the names of `onward doctor`: the import says why they are not trained
    inside: list[str] = []
    for node in nodes:
        for graph in subgraphs(node):
            inside += [f"{node.name or node.output[0]}/{name}" for name in Index(graph).stored]
    names = {*stored, *inside, *all_names(model.graph)}
    # adapters, projections to a teacher and the scales of quantization have names of their own, too
    is_quantized = any(node.op_type == "QuantizeLinear" for node in nodes)
    has_more = config.lora.weights or config.teacher.match or is_quantized
    of_optimizer = () if has_more else tuple(each.pattern for each in config.optimizer.weights)
    for setting, patterns in (
        ("model.train", config.model.train),
        ("model.freeze", config.model.freeze),
        ("lora.weights", config.lora.weights),
        ("lora.also_train", config.lora.also_train),
        ("optimizer.weights", of_optimizer),
    ):
        yield from integer_problems(model.graph, setting, patterns)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield f"{setting}: no weight of the model matches {pattern!r}{did_you_mean(pattern, stored)}"


def _cuts(path: Path, cuts: Sequence[str | tuple[str, ...]]) -> Iterator[str]:
    """Yield the cuts that name no tensor: those that neither the file has nor the import can make."""
    model = read_model(path)
    if not model.functions:
        for names in unknown_cuts(model, cuts):
            # nodes that the import makes are named by identifiers; tasks/checks/file_check.py asks for those
            if certain := [name for name in names if not name.isidentifier()]:
                yield unknown_tensors(certain, tensors_of(model))


def _converters(model: ModelConfig) -> Iterator[str]:
    """Yield the files of converters that are absent or no Python; tasks/checks/file_check.py runs them."""
    for path in model.converters:
        if not url_of(path) and (problem := converter_problem(path)):  # why one could not be fetched is known
            yield f"model.converters: {problem}"


def converter_problem(path: Path) -> str:
    """Return why a file cannot be run as Python, found without running it; "" if it can."""
    if not path.is_file():
        return f"there is no file {path}"
    if path.suffix != ".py":
        return f"{path}: it is not a Python file; its name must end with .py"
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path}: {type(error).__name__}: {error}"
    return ""


def _metrics(sections: Sections) -> list[str]:
    """Return which metrics cannot be computed here, or from this data."""
    problems, metrics, data = [], sections.get("metrics", ()), sections.get("data")
    library = [each.key for each in metrics if is_library(each)]
    if library and importlib.util.find_spec("torchmetrics") is None:
        problems.append(f"metrics: {', '.join(library)} need torchmetrics: {how_to_install('metrics')}")
    per_byte = [metric for metric in metrics if metric.name == "bits_per_byte"]
    unknown = [metric for metric in per_byte if not metric.bytes_per_target]
    if unknown and isinstance(data, DataConfig) and data.text is None:  # of tokens they are counted
        with contextlib.suppress(Refused):  # of a source that is absent, which is reported elsewhere
            if locate(data.source, data).format != "text":
                problems.append(
                    "metrics: bits_per_byte needs bytes_per_target, the bytes of text that one target (token) stands "
                    "for on average: only where data.format is 'text' each target is a byte"
                )
    return problems


def _model(model: ModelConfig) -> list[str]:
    if url_of(model.path):  # why it could not be fetched is known
        return []
    if model.path.is_dir():
        return [f"model.path: {model.path} is a folder; name the ONNX file in it"]
    if not model.path.is_file():
        return [
            f"model.path: there is no file {model.path}; `onward reference --help` lists the models that Onward can "
            "write; an example that is run by its name, such as squeezenet-digits, writes its own"
        ]
    return [] if os.access(model.path, os.R_OK) else [f"model.path: no permission to read {model.path}"]


def _data(data: DataConfig) -> list[str]:
    problems = []
    named = [("sources" if data.sources else "source", each.source) for each in data.mixture]
    for key, source in (*named, ("evaluation_source", data.evaluation_source), ("test_source", data.test_source)):
        if not source or source in BUNDLED_SOURCES or url_of(source):
            continue
        if not _matches(source):
            problems.append(f"data.{key}: there is no file, directory or glob match {source}")
        elif Path(source).exists() and not os.access(source, os.R_OK):
            problems.append(f"data.{key}: no permission to read {source}")
    absent = [each for each in data.files_from if not Path(each).is_dir()]
    return problems + [f"data.files_from: there is no directory {each}" for each in absent]


def _matches(source: str) -> bool:
    path = Path(source)
    if path.exists():
        return True
    # glob needs a directory without wildcards to begin at
    fixed = next(parent for parent in path.parents if not set("*?[") & set(str(parent)))
    try:
        # the first match is enough: a folder may have millions of files
        return path != fixed and any(True for _ in fixed.glob(str(path.relative_to(fixed))))
    except ValueError:  # such as ** beside other letters
        return False


def _paths(sections: Sections) -> list[str]:
    losses = sections.get("loss", ())
    named = {
        "launch.hostfile": getattr(sections.get("launch"), "hostfile", ""),
        "checkpoint.load": getattr(sections.get("checkpoint"), "load", ""),
    }
    named |= {key_of(losses, at, "file"): each.named.location for at, each in enumerate(losses)}
    problems = []
    for key, path in named.items():
        if path and not url_of(path) and not Path(path).exists():
            problems.append(f"{key}: {path} does not exist")
    load = Path(named["checkpoint.load"])
    if named["checkpoint.load"] and load.is_dir() and not (load / "manifest.json").is_file():
        problems.append(f"checkpoint.load: {load} is no complete checkpoint: it has no manifest.json")
    export, model = sections.get("export"), sections.get("model")
    if isinstance(export, ExportConfig) and (url := url_of(export.path)):
        problems += url_conflicts(url)
    elif isinstance(export, ExportConfig) and export.path:
        source = model.path if isinstance(model, ModelConfig) else None
        problems += [f"export.path: {why}" for why in export_conflicts(Path(export.path), source, export.kinds)]
        # files in the way matter only if the target itself is possible
        if not problems and not export.overwrite:
            problems += [f"export.path: {why}" for why in files_in_the_way(Path(export.path), export.kinds)]
    if not is_writable(onward_home()):
        if broken := broken_storage(onward_home()):
            raise broken
        problems.append(
            f"cannot write to {onward_home()}, where runs are kept; set ONWARD_HOME to a directory of yours"
        )
    return problems
