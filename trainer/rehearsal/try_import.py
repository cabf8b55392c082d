"""Run the files of `model.converters`, and look for the tensors of `parallel.cuts` in the imported graph."""

from __future__ import annotations

from collections.abc import Iterator

from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, OnwardError
from onward.trainer.onnx_graph.named_cuts import names_of_cut, unknown_tensors
from onward.trainer.onnx_import.lowering.converters import load_converters
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.tried_import import ToImport, TriedImport
from onward.trainer.run.records import read_record, write_record


def try_import(folder: RunDir) -> None:
    """Try what `import.json` in `folder` asks for, and write what does not work to `imported.json` there."""
    wanted = read_record(folder.root / "import.json", ToImport)
    problems = list[str]()
    try:
        load_converters(wanted.converters)
    except ConfigError as error:
        problems += error.problems
    if wanted.cuts and not problems:
        problems += _unknown_cuts(read_config(folder))
    write_record(folder.root / "imported.json", TriedImport(problems=tuple(problems)))


def _unknown_cuts(config: RunConfig) -> Iterator[str]:
    from onward.trainer.model.trainable import open_with_teacher
    from onward.trainer.parallel.pipeline.cut_points import names_that_cuts_may_use

    try:
        known = names_that_cuts_may_use(open_with_teacher(config).module.graph)
    except OnwardError:
        return  # the rehearsal says why the model cannot be imported
    for entry in config.parallel.cuts:
        if unknown := [name for name in names_of_cut(entry, known) if name not in known]:
            yield unknown_tensors(unknown, known)
