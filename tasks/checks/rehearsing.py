"""Rehearse, plan or quantize a run in a process of its own, which imports torch; the rehearsal may be begun ahead.

`onward run` ─┬─ begun_ahead: process `rehearse` ─────────────┐
              └─ Prefect's server, the flow, ... configure ───┴─ rehearse: waits for it, if it is the same run
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from onward.infra.job.temporary_folders import owned_folder
from onward.tasks.checks.subprocesses import how_it_ended, start_module
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.completed_settings import completed
from onward.trainer.errors import RuntimeUnavailable, UnsupportedModel
from onward.trainer.parallel.planning.cluster import PROGRESS, THIS_MACHINE, Cluster, cluster_in
from onward.trainer.parallel.planning.plan_record import Plan, may_train_unplanned, needs_plan, with_plan
from onward.trainer.run.allowed_code import AllowedCode, code_digests
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.refusals import refusal_of
from onward.trainer.run.recorded.quantized_record import Quantized
from onward.trainer.run.records import CompileTrial, Rehearsal, read_record, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, urls_in, with_copies

log = logging.getLogger(__name__)

NONE = LocalCopies()
Code = Mapping[str, str] | None
PROGRESS_PERIOD_S = 0.2
SETTINGS = ("config.json", "code.json")
"""The records that a process begins with."""


@dataclass(frozen=True)
class _Begun:
    """A rehearsal that runs already."""

    folder: Path
    process: subprocess.Popen[bytes]


_begun: ContextVar[_Begun | None] = ContextVar("rehearsal begun ahead", default=None)
"""The rehearsal that was begun ahead. The command line begins it, and the task configure waits for it; between them is
a Prefect flow, whose parameters are settings only."""


@contextlib.contextmanager
def begun_ahead(config: RunConfig) -> Iterator[None]:
    """Rehearse a new run beside what is done inside; `rehearse` of the same configuration waits for the result.

    Not where files must be fetched or made first. A rehearsal that nothing has waited for is ended. Call it from a
    thread that lives as long.
    """
    # these rehearse another file than the one that lies there now
    if config.launch.rehearsal == "off" or config.quantize.aware or any(urls_in(dict(config))):
        yield
        return
    # of a process that was killed a file may still appear
    with owned_folder("onward-rehearse-") as folder:
        _write_settings(folder, config, NONE, None)
        process = start_module("onward.trainer", "rehearse", str(folder), folder=folder, log=folder / "process.log")
        token = _begun.set(_Begun(folder, process))
        try:
            yield
        finally:
            # a configuration that failed must not leave its rehearsal to the next one
            _begun.reset(token)
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Preparation:
    """What is done with a configuration before a run begins, each in a process of its own."""

    config: RunConfig
    copies: LocalCopies = NONE
    quantized: Path | None = None
    """The directory of the model that `quantize.aware` has made."""
    code: Code = None
    """Path -> SHA-256 of the Python files that may be executed; None = those of the configuration, as they are now."""

    def quantize(self, run: RunDir) -> None:
        """Make RUN_DIR/quantized: the model with QuantizeLinear and DequantizeLinear, which the run trains; its record.

        Raises that process's error: ConfigError or DataError.
        """
        with self._process("quantize") as folder:
            # a retry of the task makes the directory anew
            shutil.rmtree(run.quantized, ignore_errors=True)
            shutil.copytree(folder / "quantized", run.quantized)
        made = read_record(run.quantized / "quantized.json", Quantized)
        kernels = ", ".join(f"{count} {name}" for name, count in made.kernels.items())
        log.info("quantize.aware: %d values are quantized; onnxruntime will run %s", made.nodes, kernels)

    def rehearse(self) -> tuple[RunConfig, Rehearsal]:
        """Run a few micro-batches in a process of its own; return the configuration, with chosen sizes, and the record.

        With `parallel.sizes = "auto"` the process first chooses the sizes; sizes that are given are tried on the graph.
        Raises that process's error, ConfigError with everything that is wrong, or RuntimeUnavailable when it crashes.
        """
        config = self.config
        if config.launch.rehearsal == "off":
            found = Rehearsal(not_rehearsed=("everything: launch.rehearsal is 'off'",))
            if config.graph.compile == "auto":
                why = "nothing was measured, since launch.rehearsal is 'off'"
                found = found.model_copy(update={"compile": CompileTrial(compiles=False, text=why)})
            return _with_choices(self._planned(), found), found
        with self._process("rehearse") as folder:
            # the process has planned with the graph open, so that nothing is imported twice
            if config.parallel.sizes == "auto":
                config = with_plan(config, read_record(folder / "plan.json", Plan))
            found = read_record(RunDir(folder).rehearsal, Rehearsal)
        model = config.model.model_copy(update={"fixed_batch": found.fixed_batch})
        return _with_choices(config.model_copy(update={"model": model}), found), found

    def _planned(self) -> RunConfig:
        """Return the configuration with the planner's sizes; sizes that are given are tried on the graph."""
        config = self.config
        if not needs_plan(config.parallel, config.recompute):
            return config
        try:
            return with_plan(config, self.plan())
        except UnsupportedModel:
            # a plan is an estimate; a layout that needs none of its choices trains without
            if may_train_unplanned(config.parallel, config.recompute):
                return config
            raise

    def plan(self, cluster: Cluster = THIS_MACHINE, progress: TextIO | None = None) -> Plan:
        """Return the plan of the run: layout, memory and messages. Its process imports torch.

        cluster: what is planned for. progress: where lines are written that say how far `auto` is; None = nowhere.

        Raises that process's error (ConfigError, UnsupportedModel: the graph cannot be divided like that),
        or RuntimeUnavailable when the process ends without a plan.
        """
        with self._process("plan", cluster, progress) as folder:
            return read_record(folder / "plan.json", Plan)

    @contextlib.contextmanager
    def _process(self, command: str, cluster: Cluster = THIS_MACHINE, progress: TextIO | None = None) -> Iterator[Path]:
        """Run `python -m onward.trainer COMMAND` on the configuration; yield the directory with its records."""
        with owned_folder(f"onward-{command}-") as folder:
            _write_settings(folder, self.config, self.copies, self.code)
            if cluster != THIS_MACHINE:
                write_record(cluster_in(folder), cluster)
            ahead = _begun.get() if command == "rehearse" else None
            if ahead and all(filecmp.cmp(ahead.folder / name, folder / name, shallow=False) for name in SETTINGS):
                _check(command, ahead.folder, how_it_ended(ahead.process, ahead.folder / "process.log"))
                yield ahead.folder
                return
            if command != "quantize":
                if self.quantized and self.quantized.is_dir():
                    shutil.copytree(self.quantized, RunDir(folder).quantized)
                elif self.config.quantize.aware:
                    _run("quantize", folder)
            _run(command, folder, progress)
            yield folder


def _with_choices(config: RunConfig, found: Rehearsal) -> RunConfig:
    """Return the configuration with what a rehearsal has measured in place of "auto"."""
    precision = config.precision.model_copy(update={"compute": found.compute or config.precision.compute})
    graph = config.graph.with_compile(found.compile.compiles) if found.compile else config.graph
    loss = _with_output_units(config.loss, found.output_units)
    return config.model_copy(update={"precision": precision, "graph": graph, "loss": loss})


def _with_output_units(loss: tuple[LossConfig, ...], chosen: Sequence[str]) -> tuple[LossConfig, ...]:
    """Return [loss] as it is saved, with what was chosen for each loss; chosen: () = nothing was."""
    if not chosen:
        return loss
    entries = loss or (LossConfig(),)
    return tuple(
        entry.model_copy(update={"output_units": units}) if entry.standardise_label != "none" else entry
        for entry, units in zip(entries, chosen, strict=True)
    )


def _write_settings(folder: Path, config: RunConfig, copies: LocalCopies, code: Code) -> None:
    local = with_copies(config, copies)
    write_record(RunDir(folder).code, AllowedCode(files=code_digests(local) if code is None else code))
    write_record(RunDir(folder).config, completed(local))


def _run(command: str, folder: Path, progress: TextIO | None = None) -> None:
    """Run one command of the trainer on the configuration in `folder`. Raises its error, or RuntimeUnavailable."""
    process_log = folder / "process.log"
    process = start_module("onward.trainer", command, str(folder), folder=folder, log=process_log)
    if progress:
        _show_progress(process, process_log, progress)
    _check(command, folder, how_it_ended(process, process_log))


def _show_progress(process: subprocess.Popen[bytes], log_file: Path, progress: TextIO) -> None:
    """Write how far a process is until it ends: on a terminal one line that changes, else a line for each division."""
    begin, end = ("\r\x1b[K", "") if progress.isatty() else ("", "\n")
    shown = ""
    try:
        while process.poll() is None:
            found = re.findall(rf"{PROGRESS}(.*)", log_file.read_text(errors="replace"))
            if found and found[-1] != shown:
                shown = found[-1]
                print(f"{begin}{PROGRESS}{shown}", end=end, file=progress, flush=True)
            time.sleep(PROGRESS_PERIOD_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if shown and not end:
        print(begin, end="", file=progress, flush=True)


def _check(command: str, folder: Path, ending: str) -> None:
    if refusal := refusal_of(folder):
        raise refusal
    if ending:
        raise RuntimeUnavailable(f"`python -m onward.trainer {command}` {ending}")
