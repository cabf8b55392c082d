"""Check the files that settings name, on the machine that reads them, after fetching those that are named by URL."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.infra.job.temporary_folders import owned_folder
from onward.tasks.checks.registered_models import with_registered
from onward.tasks.checks.subprocesses import run_module
from onward.trainer.config.rules import Sections
from onward.trainer.config.rules.rank_rules import sizes_beside_auto
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.diagnostics.config_check import check_local_files, converter_problem
from onward.trainer.diagnostics.export_conflicts import store_problems
from onward.trainer.errors import ConfigError, OnwardError, Refused
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.named_cuts import unknown_cuts
from onward.trainer.run.allowed_code import AllowedCode, code_digests
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.tried_import import ToImport, TriedImport
from onward.trainer.run.records import read_record, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies


@dataclass(frozen=True)
class CheckedFiles:
    """The files that settings name, and what is wrong with them."""

    problems: list[str]
    copies: LocalCopies = field(default_factory=LocalCopies)
    code: Mapping[str, str] = field(default_factory=dict)
    """Path -> SHA-256 of the Python files that may be executed."""


def check_files(
    sections: Sections,
    known: LocalCopies | None = None,
    *,
    resumed: bool = False,
    allowed: Mapping[str, str] | None = None,
) -> CheckedFiles:
    """Fetch what the sections name by URL, and check files and data. Sections that could not be read may be missing.

    known: the copies that a run began with. resumed: `parallel = "auto"` has chosen sizes already. allowed: as
    `CheckedFiles.code`; None = the files that the sections name.
    """
    problems = [] if resumed or "parallel" not in sections else list(sizes_beside_auto(sections["parallel"]))
    try:
        # everything else looks at local files, so the remote ones are fetched first
        copies, absent = fetch(sections, with_registered(sections, known))
        local = with_copies(sections, copies)
        code = code_digests(local) if allowed is None else allowed
        problems += [*absent, *check_local_files(local), *import_problems(local, code)]
        # a resumed run goes on without its store, and sends later
        if not resumed and "checkpoint" in sections:
            problems += store_problems(sections["checkpoint"].store)
    except ConfigError as error:
        return CheckedFiles([*problems, *error.problems])
    return CheckedFiles(problems, copies, code)


# -- find out what only an import shows: whether converters run, and whether the import makes the tensors of the cuts
#
# A process of its own does it, because it imports torch, and only where a setting asks for it: that takes seconds.

IMPORT_LIMIT_S = 120.0
"""Longest time of the process."""


def import_problems(sections: Sections, code: Mapping[str, str]) -> list[str]:
    """Return a sentence for each converter that does not run, and each cut that is no tensor of the imported graph.

    sections: with local copies in the place of URLs; sections that could not be read may be missing. code: path ->
    SHA-256 of the Python files that may be executed. What `check_local_files` reports (absent files, syntax errors,
    names that no import makes) is not reported here.
    """
    model = sections.get("model")
    parallel = sections.get("parallel")
    named = model.converters if isinstance(model, ModelConfig) else ()
    converters = tuple(each for each in named if not converter_problem(each))
    config = ""
    if isinstance(model, ModelConfig) and isinstance(parallel, ParallelConfig) and _is_asked(model, parallel):
        try:
            whole = completed(RunConfig.model_validate(dict(sections)))
        except (OnwardError, ValueError, OSError):  # the other problems are reported elsewhere
            pass
        else:
            config = "" if whole.quantize.aware else whole.model_dump_json()
    if not converters and not config:
        return []
    return list(_tried(converters, tuple(code.items()), config))


def _is_asked(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return whether a name of a cut is not in the file, but may be one that the import makes."""
    if not parallel.cuts or not model.path.is_file():
        return False
    try:
        file = read_model(model.path)
    except (Refused, OSError):
        return False
    unknown = [name for names in unknown_cuts(file, parallel.cuts) for name in names]
    if not unknown:
        return False
    # the import inlines functions, and names of torch.fx are identifiers
    return bool(file.functions) or all(name.isidentifier() for name in unknown)


@functools.cache  # the command line asks before it starts anything, and so does `configure` in the same process
def _tried(converters: tuple[Path, ...], code: tuple[tuple[str, str], ...], config: str) -> tuple[str, ...]:
    """Return the problems. code: (path, SHA-256) of what may be executed. config: JSON of the configuration, or ""."""
    with owned_folder("onward-import-") as folder:
        write_record(folder / "import.json", ToImport(converters=converters, cuts=bool(config)))
        write_record(RunDir(folder).code, AllowedCode(files=dict(code)))
        if config:
            (folder / "config.json").write_text(config)
        log = folder / "process.log"
        ending = run_module("onward.trainer", "try-import", str(folder), folder=folder, log=log, limit_s=IMPORT_LIMIT_S)
        if not ending:
            return read_record(folder / "imported.json", TriedImport).problems
    listed = ", ".join(map(str, converters))
    return (f"model.converters: importing {listed} {ending}",) if converters else ()
