"""Run one process of the trainer: a rank of the training job, an export, a plan, a rehearsal.

    mpirun -n 2 python -m onward.trainer preflight RUN_DIR     report host, device and versions; test one all-reduce
    mpirun -n 2 python -m onward.trainer train RUN_DIR         train, or resume from the newest complete checkpoint
    python -m onward.trainer export RUN_DIR CHECKPOINT         write the trained ONNX file and verify it
    python -m onward.trainer training RUN_DIR CHECKPOINT       write ONNX graphs that continue training without torch
    python -m onward.trainer variant RUN_DIR KIND              write one variant of the exported file
    python -m onward.trainer compare RUN_DIR SERVED.onnx       evaluate the served file beside the exported one
    python -m onward.trainer plan FOLDER                       estimate the layout: plan.json, or refused.json
    python -m onward.trainer quantize FOLDER                   insert QuantizeLinear: quantized/, or refused.json
    python -m onward.trainer rehearse FOLDER                   run a few rows: rehearsal.json, or refused.json
    python -m onward.trainer try-import FOLDER                 run converters, look for cuts: imported.json

All settings are in RUN_DIR/config.json. Exit status: 0 done, 75 stopped after saving a checkpoint, 70 failed
(RUN_DIR/errors has the reason), 72 a newer attempt has taken over RUN_DIR, 78 refused: a retry would fail again.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onward.trainer.distributed.launched import die_with_parent, launched_rank
from onward.trainer.run.machine.quick_imports import quick_imports
from onward.trainer.run.machine.this_machine import ignore_lower_precision, spin_briefly_if_busy

# Before the imports below, which take seconds: a rank whose launcher is killed meanwhile would be left behind.
if launched_rank() is not None:
    die_with_parent()

# before torch is imported, whose OpenMP and oneDNN read the environment
spin_briefly_if_busy()
ignore_lower_precision()

with quick_imports():
    import torch

    from onward.trainer.distributed.failures import (
        StopSignal,
        install_excepthook,
        trace_collectives,
        write_stacks_when_ended,
        write_tracebacks,
    )
    from onward.trainer.distributed.preflight import run_preflight
    from onward.trainer.distributed.processes import connect, disconnect
    from onward.trainer.errors import ExportRefused, Stopped
    from onward.trainer.events import Heartbeat
    from onward.trainer.run.allowed_code import allow_code_of
    from onward.trainer.run.directory import RunDir, read_config
    from onward.trainer.run.export_folder import comparison_in, variant_in
    from onward.trainer.run.kept_settings import refuse_edited
    from onward.trainer.run.machine.node_usage import recorded_usage
    from onward.trainer.run.records import ExportedModel, read_record, write_record

if TYPE_CHECKING:
    from onward.trainer.export.measuring.evaluation_data import EvaluationData
    from onward.trainer.export.run_as_read import RunAsRead

log = logging.getLogger("onward.trainer")


def train_rank(run: RunDir, *, until: int = 0) -> int:
    """Train as one rank of the current attempt. Every rank of the job calls it.

    until: stop, with a checkpoint, after this step; 0 = train to the end.
    """
    # The `train` task counts the attempts; a job that was started by hand begins the first one itself.
    if launched_rank() in (None, 0) and not run.current_attempt:
        run.begin_attempt()
    attempt = run.current_attempt or 1
    stop = StopSignal()
    heartbeat = Heartbeat(run.heartbeat)
    install_excepthook(run, attempt=attempt, step=lambda: heartbeat.step)
    traceback = write_tracebacks(run.traceback(attempt, launched_rank() or 0))
    write_stacks_when_ended(run.stack(attempt, launched_rank() or 0))
    trace_collectives(run.attempt(attempt) / "collectives-rank-")
    given = read_config(run, "given")
    refuse_edited(run, config=given)
    config = read_config(run, given=given)
    mpi = connect(
        expected_world_size=config.world_size,
        timeout_s=config.collective_timeout_s,
        device=config.launch.device,
        threads=config.launch.threads_per_rank,
        ranks_per_gpu=config.launch.ranks_per_gpu,
    )
    log.info("attempt %d: rank %d of %d on %s, %s", attempt, mpi.rank, mpi.world_size, socket.gethostname(), mpi.device)
    heartbeat.start(
        rank=mpi.rank,
        timeout_s=config.launch.heartbeat_timeout_s,
        start_timeout_s=config.launch.start_timeout_s,
        compile_timeout_s=config.compile_timeout_s,
        traceback=traceback,
    )

    # After `connect` has checked the world size: these imports take seconds.
    from onward.trainer.distributed.arithmetic import named_if_not_deterministic
    from onward.trainer.loop import train
    from onward.trainer.parallel.observing.memory_snapshot import memory_snapshots

    def stop_requested() -> bool:
        return stop.requested or 0 < until <= heartbeat.step

    usage = recorded_usage(run, attempt=attempt, rank=mpi.rank, local_rank=mpi.local_rank, host=mpi.host)
    memory = memory_snapshots(config.monitor, run, mpi, attempt=attempt)
    with named_if_not_deterministic(), usage, memory:
        result = train(run, mpi, attempt=attempt, heartbeat=heartbeat, stop_requested=stop_requested, given=config)
    # This file is the only proof of success; the exit status of mpirun is none.
    if mpi.rank == 0:
        write_record(run.result(attempt), result)
    # srun ends the other ranks once one has exited with 75, and the handler of a signal may crash a Python that ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # after the result is written: a rank that hangs while it leaves must not hide a success
    disconnect()
    run.reserved_for(attempt, mpi.rank).unlink(missing_ok=True)
    return 0 if result.status == "done" else Stopped.exit_code


def evaluation_data(
    run: RunDir, split: Literal["evaluation", "test"] = "evaluation", *, opened: RunAsRead | None = None
) -> EvaluationData:
    """Return the rows of a split and the metrics of the configured losses, with which exported files are evaluated.

    opened: the run as it was read, None = its settings and its signature are read here.
    """
    from onward.trainer.data.batches.batches import Batch, evaluation_batches
    from onward.trainer.data.file_rows import FileRows
    from onward.trainer.data.resolve import read_resolved
    from onward.trainer.data.schema.signature import read_training_signature
    from onward.trainer.data.storage.opened_shards import open_evaluated
    from onward.trainer.export.measuring.evaluation_data import EvaluationData
    from onward.trainer.model.losses.loss import Losses
    from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics

    config = opened.configs[split] if opened else read_resolved(run, split)
    cpu = torch.device("cpu")
    held_out = open_evaluated(run.shards, config.data, split)
    signature = opened.signature if opened else read_training_signature(config.model)
    shapes = {output.name: output.shape for output in signature.outputs}

    def new_metrics(output_names: Sequence[str]) -> EvaluationMetrics:
        return EvaluationMetrics(Losses(config.losses, output_names, shapes), config.metrics, device=cpu)

    def batches() -> Iterator[Batch]:
        return evaluation_batches(held_out, config, signature, replica=0, num_replicas=1, device=cpu)

    # the whole file is verified, on the rows as the data has them, also where the ranks have read numbers only
    as_stored = open_evaluated(run.shards, config.data, split, for_file=True)
    file_rows = FileRows(as_stored, config, signature) if signature.computed else None
    return EvaluationData(
        batches=batches,
        new_metrics=new_metrics,
        file_rows=file_rows,
        split=split,
        rows=held_out,
        model=config.model,
    )


def export_file(run: RunDir, path: Path, *, folder: Path, training: bool = False) -> int:
    """Write a checkpoint's weights into the ONNX file and verify the result.

    `training`: write the ONNX graphs that continue training without torch instead.
    """
    from onward.trainer.checkpoint.load import load
    from onward.trainer.checkpoint.verification import verify
    from onward.trainer.export import exported_model as export
    from onward.trainer.export.run_as_read import RunAsRead
    from onward.trainer.optim.averages import exported_weights
    from onward.trainer.run.outcomes.refusals import exit_with_refusal

    with exit_with_refusal(folder):
        state, tensors = load(verify(path))
        config = read_config(run)
        # the moving average if [average] asks for it, else as they were trained
        weights = exported_weights(
            config.average, tensors, exports_average=config.exports_average, source=f"checkpoint {path}"
        )
        checkpoint = export.Checkpoint(step=state.step, weights=weights)
        opened = RunAsRead.of(run, config)
        if training:
            export.export_training(run, checkpoint, folder=folder, opened=opened)
        else:
            test = evaluation_data(run, "test", opened=opened) if config.data.test_source else None
            data = evaluation_data(run, opened=opened)
            exported = export.export(run, checkpoint, data=data, test=test, folder=folder, opened=opened)
            write_record(folder / "model.json", with_preprocessing(run, exported, folder, opened))
    return 0


def with_preprocessing(run: RunDir, exported: ExportedModel, folder: Path, opened: RunAsRead) -> ExportedModel:
    """Write preprocessing.json beside an exported file; return the file's record with it, or the reason."""
    from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing

    try:
        files = write_preprocessing(run, exported, folder, opened=opened)
    except ExportRefused as error:
        logging.getLogger(__name__).warning("no preprocessing.json was written: %s", error)
        return exported.model_copy(update={"preprocessing_refused": "; ".join(error.problems)})
    return exported.model_copy(update={"preprocessing": files})


def make_variant(run: RunDir, kind: str, *, folder: Path) -> int:
    """Write one variant of the exported file in `folder`, and its record."""
    from onward.trainer.export.variants import variants

    exported = read_record(folder / "model.json", ExportedModel)
    config = read_config(run)
    data = evaluation_data(run)
    losses = [loss.outputs[0] for loss in config.losses if loss.rule.by_graph]
    tolerance = config.export.variant_tolerance
    if kind == "with_preprocessing":
        from onward.trainer.export.preprocessing.with_preprocessing import write_with_preprocessing

        made = variants.kept_if_written(kind, exported.path, partial(write_with_preprocessing, run, exported, data))
    else:
        read = tuple(filter(None, config.model.outputs))
        made = variants.make_variant(kind, exported.path, data=data, tolerance=tolerance, losses=losses, read=read)
    write_record(variant_in(folder, kind), made)
    return 0


def compare_with_served(run: RunDir, served: Path, *, folder: Path) -> int:
    """Compare the exported file in `folder` with the served one, and write comparison.json there."""
    from onward.trainer.export.measuring.comparison import compare

    config = read_config(run)
    exported = read_record(folder / "model.json", ExportedModel)
    data = evaluation_data(run, "test" if config.promote_metric.startswith("test/") else "evaluation")
    write_record(comparison_in(folder), compare(config, exported, served, data))
    return 0


def make_plan(folder: RunDir) -> int:
    """Estimate the layout for `config.json` in `folder`, and write plan.json there."""
    with quick_imports():
        from onward.trainer.data.schema.signature import facts_of, read_source
        from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
        from onward.trainer.model.first_output_units import with_first_units
        from onward.trainer.model.trainable import open_with_teacher
        from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster, cluster_in
        from onward.trainer.parallel.planning.planner import plan, refuse_absent_gpu
        from onward.trainer.rehearsal.needs import least_needs
        from onward.trainer.run.outcomes.refusals import exit_with_refusal

    with exit_with_refusal(folder.root):
        place = cluster_in(folder.root)
        cluster = read_record(place, Cluster) if place.exists() else THIS_MACHINE
        config = read_config(folder)
        refuse_absent_gpu(config.launch, cluster)
        source = read_source(config.model.path, by_parts=True)
        facts = facts_of(source, config.model)
        config, _ = choose_fixed_batch(config, facts.signature)
        config = with_first_units(config, facts.signature)
        module = open_with_teacher(config, source=source, by_parts=True).module
        needs = least_needs(module, config, size_bytes=facts.size_bytes)  # before the planner divides the module
        found = plan(config, module, cluster, facts.signature)
        write_record(folder.root / "plan.json", found.model_copy(update={"needs": needs}))
    return 0


def make_quantized(folder: RunDir) -> int:
    """Insert QuantizeLinear into the model of `config.json` in `folder`; write quantized/ there."""
    from onward.trainer.export.variants import quantize_aware
    from onward.trainer.run.outcomes.refusals import exit_with_refusal

    with exit_with_refusal(folder.root):
        config = read_config(folder, "local")
        made = quantize_aware.make_quantized(config, folder.quantized / config.model.path.name)
        write_record(folder.quantized / "quantized.json", made)
    return 0


def make_rehearsal(folder: RunDir) -> int:
    """Rehearse the run of `config.json` in `folder`, and write rehearsal.json there."""
    from onward.trainer.rehearsal.rehearse import rehearse

    rehearse(folder)
    return 0


def make_import(folder: RunDir) -> int:
    """Try what import.json in `folder` asks for, and write imported.json there."""
    from onward.trainer.rehearsal.try_import import try_import

    try_import(folder)
    return 0


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m onward.trainer", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("preflight", "check the machine on every rank"),
        ("train", "train as one rank"),
        ("export", "write the trained ONNX file and verify it"),
        ("training", "write ONNX graphs that continue training without torch"),
        ("variant", "write one variant of the exported file"),
        ("compare", "evaluate the served file beside the exported one"),
        ("plan", "estimate the layout of a run"),
        ("quantize", "insert QuantizeLinear and DequantizeLinear into a float model"),
        ("rehearse", "run a few micro-batches forward and backward, and compare the file with onnxruntime"),
        ("try-import", "run converters, and look for cuts in the imported graph"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("run", type=lambda path: RunDir(Path(path).resolve()))
        if name == "train":
            command.add_argument("--until", type=int, default=0, help="stop after this step; 0 = train to the end")
        if name in ("export", "training", "variant", "compare"):
            command.add_argument("what", help="directory of the checkpoint, kind of variant, or the served file")
            command.add_argument("--folder", type=Path, help="directory of the exported file; default: RUN_DIR/export")
    arguments = parser.parse_args()
    # a rank signs its lines, because all ranks write into one log (`onward logs --rank`)
    signed = f"rank {launched_rank() or 0}: " if arguments.command == "train" else ""
    line = f"{signed}%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr)
    # before any command: converters and loss files are executed by most of them
    allow_code_of(arguments.run)
    if arguments.command == "preflight":
        run_preflight(arguments.run)
        return 0
    if arguments.command == "plan":
        return make_plan(arguments.run)
    if arguments.command == "quantize":
        return make_quantized(arguments.run)
    if arguments.command == "rehearse":
        return make_rehearsal(arguments.run)
    if arguments.command == "try-import":
        return make_import(arguments.run)
    if arguments.command == "variant":
        return make_variant(arguments.run, arguments.what, folder=arguments.folder or arguments.run.export)
    if arguments.command == "compare":
        folder = arguments.folder or arguments.run.export
        return compare_with_served(arguments.run, Path(arguments.what), folder=folder)
    if arguments.command in ("export", "training"):
        training = arguments.command == "training"
        folder = arguments.folder or arguments.run.export
        return export_file(arguments.run, Path(arguments.what), folder=folder, training=training)
    return train_rank(arguments.run, until=arguments.until)


if __name__ == "__main__":
    sys.exit(main())
