"""The functions of `import onward` about an ONNX file alone. Importing this module is quick, as of flows/api.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.configuration import AnyPath, Overrides, changes_in, checked_config
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.diagnostics.difference import Difference
    from onward.trainer.diagnostics.doctor import Diagnosis
    from onward.trainer.onnx_import.imported_graph import ImportedGraph


def doctor(
    model: AnyPath,
    data: AnyPath | None = None,
    overrides: Overrides = (),
    /,
    *,
    label: str = "",
    rows: int = 300,
    converters: Sequence[AnyPath] = (),
) -> Diagnosis:
    """Return which tensors of an ONNX file are trained and why, how each operator is imported, and known problems.

    With `data`, or with a configuration in place of the file, the model is also run on `rows` rows of the data under
    each plausible preprocessing: `trials` of the record. `overrides` are settings; `label` is short for `data.label`.
    `converters`: Python files that add operators, as in `model.converters`. Raises ConfigError or UnsupportedModel when
    the file cannot be read or the data does not fit it; an operator that cannot be imported is in the record.
    """
    from onward.tasks.checks.registered_models import local_model
    from onward.trainer.data.reading.fetching import local_file
    from onward.trainer.diagnostics.doctor import diagnose
    from onward.trainer.rehearsal.guards.guarded_files import with_guard

    files = [local_file(Path(file)) for file in converters]
    changes = changes_in(overrides)
    changes += [("data.label", label)] if label else []
    if Path(model).suffix == ".onnx":
        path = local_model(Path(model))
        if data is None and not changes:
            return with_guard(diagnose(path, converters=files))
        from onward.trainer.rehearsal.trials.data_of_model import settings_for

        tried = settings_for(path, "" if data is None else os.fspath(data), changes)
    else:
        changes = ([] if data is None else [("data.source", os.fspath(data))]) + changes
        tried = checked_config(model, changes)
    from onward.trainer.rehearsal.trials.preprocessing_trials import try_preprocessings

    found = with_guard(diagnose(tried.model.path, converters=[*tried.model.converters, *files]), tried)
    return found.model_copy(update={"trials": try_preprocessings(tried, rows)})


def diff(a: AnyPath, b: AnyPath) -> Difference:
    """Return what distinguishes two ONNX files: structure, metadata, and every tensor by how far its values moved."""
    from onward.tasks.checks.registered_models import local_model
    from onward.trainer.diagnostics.diff import compare

    return compare(local_model(Path(a)), local_model(Path(b)))


def to_module(
    path: AnyPath,
    *,
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    fuse: bool = True,
    tie: bool = True,
    converters: Sequence[AnyPath] = (),
) -> ImportedGraph:
    """Return an ONNX file as a torch module; call it with the graph's inputs, in order.

        module = onward.to_module("model.onnx", freeze=["*bias*"])
        loss = torch.nn.functional.cross_entropy(module(images), labels)
        ...
        onward.write(module, "model.onnx", "trained.onnx")

    `train`, `freeze`: glob patterns over initializer names; a weight is trained (`requires_grad`) if it matches one of
    `train` and none of `freeze`. `fuse`: compute attention and linear layers in single calls; results differ by
    rounding only. `tie`: let copies of one weight be one parameter. `converters`: Python files that add operators.
    Dropout and BatchNormalization follow train() and eval(). Weights in other files are mapped copy-on-write. A file
    that declares a fixed batch is run a few times: if the module is right for batches of any size, it takes them, else
    it refuses all but the declared one. An input that is a sequence of tensors takes a list. Of a file that begins with
    strings or decision trees the module is the part behind them, up to the first output that a loss can read:
    `module.input_names` are the tensors that it takes. Raises ConfigError for a pattern that matches nothing,
    UnsupportedModel with everything that cannot be imported.
    """
    from onward.tasks.checks.registered_models import local_model
    from onward.trainer.config.sections.model import ModelConfig
    from onward.trainer.data.reading.fetching import local_file
    from onward.trainer.onnx_graph.files.index import integer_problems
    from onward.trainer.onnx_graph.outputs import readable_output
    from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers, has_untrained
    from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
    from onward.trainer.onnx_import import driver
    from onward.trainer.onnx_import.fixed_batch.fixed_batch import batch_use
    from onward.trainer.onnx_import.lowering.converters import load_converters
    from onward.trainer.onnx_import.train_selection import select_trained

    load_converters([local_file(Path(file)) for file in converters])
    path = local_model(Path(path))
    model, base = driver.load_model(path), path.parent
    wrong = [*integer_problems(model.graph, "train", train), *integer_problems(model.graph, "freeze", freeze)]
    if wrong:
        raise ConfigError(wrong)
    settings = ModelConfig(path=path, output=readable_output(model), freeze=tuple(freeze))
    if has_untrained(model.graph) and (behind := begin_at_numbers(model, settings)) is not settings:
        model, freeze = extract_subgraph(model, behind), behind.freeze
    widen = batch_use(model, base, train=train).kind == "any"
    module = driver.to_module(model, base=base, fuse=fuse, tie=tie, train=train, widen=widen)
    select_trained(module, train=train, freeze=freeze)
    return module


def write(module: ImportedGraph, source: AnyPath, target: AnyPath) -> list[Path]:
    """Write the weights of a module into a copy of the ONNX file it was made of; return the files, the model first.

    Graph, names, opset and metadata stay as in `source`, and so do the bytes of every tensor that did not change.
    Files that hold weights are copied to `target`'s directory. Does not run the checks of `onward.export`. Raises
    ConfigError when `source` is not the file that the module was made of, TypeError for another kind of module.
    """
    from onward.trainer.onnx_import.driver import load_model
    from onward.trainer.onnx_import.imported_graph import ImportedGraph
    from onward.trainer.onnx_import.write_back import write_model

    if not isinstance(module, ImportedGraph):
        raise TypeError(
            f"onward.write takes a module of onward.to_module, not {type(module).__name__}; unwrap it first, such as "
            "`ddp.module` or `compiled._orig_mod`"
        )
    return write_model(module, load_model(Path(source)), Path(source), Path(target))
