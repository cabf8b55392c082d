"""Rehearse a run in one process on the CPU: open the file, choose sizes, run the checks, write the record.

    config.json ── open the file ── plan the layout ── checks.py ── rehearsal.json (and plan.json), or refused.json

What is too large for this machine, or not reached within a minute (MOST_S), is left out and named in the
record. The graph is run undivided; the planner tries a configured division on fake tensors. It is compiled for
`graph.compile = "auto"` alone, when everything else is done, within a time limit of its own (compile_trial.py).
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from onward.trainer.config.losses import unchosen_units
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.data.schema.signature import Signature, facts_of, model_bytes, read_source
from onward.trainer.distributed.preflight import free_memory
from onward.trainer.errors import Refused, UnsupportedModel
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.model.first_output_units import choose_output_units, with_first_units
from onward.trainer.model.trainable import open_trainable, open_with_teacher
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.planning.plan_record import may_train_unplanned, needs_plan, with_plan
from onward.trainer.quantities import gib
from onward.trainer.rehearsal.checks import checks
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.trials.compile_trial import not_compiled
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.refusals import exit_with_refusal
from onward.trainer.run.records import write_record

MOST_S = 60.0
"""The time of the checks once the model is open: a person waits for them, and the run itself finds what they miss."""
COPIES_OF_WEIGHTS = 4
"""In memory at once: the file, the module, its gradients, and onnxruntime's session."""


def rehearse(folder: RunDir) -> None:
    """Rehearse `config.json` in `folder`; write rehearsal.json and, if the sizes are chosen, plan.json there.

    Ends the process with a refused.json and an exit status when the run is refused.
    """
    findings = Findings()
    with exit_with_refusal(folder.root):
        config = read_config(folder)
        # without its large weights: this copy of the graph is dropped
        facts = facts_of(read_source(config.model.path, by_parts=True), config.model)
        signature = facts.signature
        config, use = choose_fixed_batch(config, signature)
        findings.fixed_batch = config.model.fixed_batch
        config = _planned(folder, config, signature)
        if too_large := _too_large(facts.size_bytes, config.teacher):
            findings.not_rehearsed.append(too_large)
            if config.graph.compile == "auto":
                findings.compile = not_compiled("the model was not rehearsed, so that nothing was measured")
            for problem in unchosen_units(config.losses, "the model is too large to be tried here"):
                findings.refuse(problem)
            config = with_first_units(config, signature)
            _check_division(config, None, findings, signature)
        else:
            config, findings.output_units, findings.units = choose_output_units(config, signature)
            trainable = open_trainable(config)
            with_teacher = open_with_teacher(config) if config.teacher.path else trainable
            _check_division(config, with_teacher.module, findings, signature)
            with _time_limit(folder, findings, MOST_S) as begin_again:
                trained = with_teacher.module
                steps = checks(config, trainable, use, findings, begin_again, with_teacher=trained, facts=facts)
                # the time limit may end a check at any time: what is left is then in the record
                findings.pending = [what for what, _ in steps]
                for _, check in steps:
                    check()
                    findings.pending[:1] = []
        write_record(folder.rehearsal, findings.record(elapsed_s=_elapsed_s()))


# -- the layout


def _planned(folder: RunDir, config: RunConfig, signature: Signature) -> RunConfig:
    """Return the configuration with the sizes that the planner chooses, if it is to choose them; write plan.json."""
    if config.parallel.sizes == "given":
        return config
    from onward.trainer.parallel.planning.planner import plan  # here: it takes a second to import

    # it opens the file itself, because it weighs layouts by the memory that is free, and this process keeps the weights
    found = plan(config, signature=signature)
    write_record(folder.root / "plan.json", found)
    return with_plan(config, found)


def _check_division(config: RunConfig, module: ImportedGraph | None, findings: Findings, signature: Signature) -> None:
    """Add the planner's error if the graph cannot be divided as configured. module: None = it opens the file."""
    if config.parallel.sizes == "auto" or not needs_plan(config.parallel, config.recompute):
        return
    from onward.trainer.parallel.planning.planner import plan

    try:
        plan(config, module and _without_data(module), signature=signature)
    except UnsupportedModel as error:
        if not may_train_unplanned(config.parallel, config.recompute):
            findings.errors.append(error)
    except Refused as error:
        findings.errors.append(error)


def _without_data(module: ImportedGraph) -> ImportedGraph:
    """Return a copy whose parameters have no data."""
    from onward.trainer.parallel.planning.dry_run import replaced_weights

    def place(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)

    with replaced_weights(module, place):
        return copy.deepcopy(module)


# -- bounds


def _too_large(size_bytes: int, teacher: TeacherConfig) -> str:
    """Return why the model is not rehearsed here, from the sizes of its files; "" if it fits into memory."""
    size = size_bytes + (model_bytes(Path(teacher.path)) if teacher.path else 0)
    free = free_memory(torch.device("cpu"))
    if COPIES_OF_WEIGHTS * size <= free:
        return ""
    return (
        f"everything: {COPIES_OF_WEIGHTS} copies of a model of {gib(size)} (the file, weights, gradients, "
        f"those of onnxruntime) do not fit into the {gib(free)} of memory that are free here"
    )


@contextmanager
def _time_limit(folder: RunDir, findings: Findings, limit_s: float) -> Iterator[Callable[[float], None]]:
    """End the process when the block takes longer, with what was found by then: torch cannot be interrupted.

    Yields what sets another limit, from now on.
    """

    def end() -> None:
        if findings.pending:
            left = ", ".join(findings.pending)
            findings.not_rehearsed.append(f"{left}: the time of the rehearsal, {limit_s:g} s, was over")
        status = 0
        try:
            with exit_with_refusal(folder.root):
                write_record(folder.rehearsal, findings.record(elapsed_s=_elapsed_s()))
        except SystemExit as refused:
            status = int(refused.code or 0)
        os._exit(status)

    running: list[threading.Timer] = []

    def begin(limit_s: float) -> None:
        for timer in running:
            timer.cancel()
        running[:] = [threading.Timer(limit_s, end)]
        running[0].daemon = True
        running[0].start()

    begin(limit_s)
    try:
        yield begin
    finally:
        running[0].cancel()


def _elapsed_s() -> float:
    return time.time() - psutil.Process().create_time()
