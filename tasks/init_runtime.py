"""init runtime: start the ranks once under mpirun and check what each of them reports.

A wrong MPI library, a missing GPU or a full disk is found in seconds here, and not an hour later in the training.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra import mpirun
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RankReport, RuntimeReport, read_record, write_record

log = logging.getLogger(__name__)

MEMORY_FACTOR = 4
"""Memory of one rank, at least, as a multiple of the model file's size: weights, gradients, the reducer's buckets and
one copy for a checkpoint. The optimizer's state is added. Activations are not; their size is not known here."""

CHECKPOINT_FACTOR = 1
"""Size of one checkpoint as a multiple of the model file's size: the weights. The state of the optimizer is added."""


@task(name="init runtime", task_run_name="init runtime", cache_policy=NO_CACHE)
def init_runtime(run: RunDir) -> RuntimeReport:
    """Run the preflight on every rank and write `runtime.json`.

    Raises RuntimeUnavailable with all problems: no mpirun, a job of this run that is still running, a world size other
    than the configured one, no GPU for a rank, a wrong all-reduce, too little memory or disk.
    """
    config = read_config(run)
    folder = run.root / "preflight"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # Attempt 0 is the preflight; its errors are those of an earlier start of this run.
    for old in run.errors.glob("000-rank-*.json"):
        old.unlink()
    # The same launcher, hostfile and number of ranks as the training: what fails there fails here first.
    launch_s = _launch(run, config, log=folder / "preflight.log")
    report = RuntimeReport(
        ranks=tuple(read_record(path, RankReport) for path in sorted(folder.glob("rank-*.json"))),
        launch_s=launch_s,
        disk_free_bytes=shutil.disk_usage(run.root).free,
    )
    if found := [*problems(report, config, model_bytes=config.model.path.stat().st_size)]:
        raise RuntimeUnavailable(found)
    write_record(run.runtime, report)
    for line in devices(report.ranks):
        log.info(line)
    return report


def _launch(run: RunDir, config: RunConfig, *, log: Path) -> float:
    """Run the preflight on all ranks; return the seconds it took."""
    job = mpirun.MpiJob(
        module=("onward.trainer", "preflight", str(run.root)),
        num_ranks=config.world_size,
        run_dir=run.root,
        log=log,
        start_timeout_s=config.launch.start_timeout_s,
        hostfile=config.launch.hostfile,
    )
    try:
        outcome = job.run()
    except mpirun.LaunchError as error:
        raise RuntimeUnavailable(str(error)) from error
    if (first := run.first_error(0)) is not None:
        sentence = first.cause.removeprefix("RuntimeUnavailable: ")
        raise RuntimeUnavailable([f"rank {first.rank} on {first.host}: {line}" for line in sentence.splitlines()])
    if outcome.returncode != 0:
        limit = f" within {config.launch.start_timeout_s:g} s" if outcome.reason == "start_timeout" else ""
        tail = "\n  | ".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeUnavailable(
            f"{config.world_size} ranks did not start{limit}: mpirun ended with status {outcome.returncode}; "
            f"the end of {log}:\n  | {tail}"
        )
    return outcome.elapsed_s


def devices(ranks: Sequence[RankReport]) -> Iterable[str]:
    """Yield one sentence for each device: how many ranks compute on it, and what sends their tensors."""
    places = Counter((rank.host, rank.device, rank.gpu, rank.backend) for rank in ranks)
    for (host, device, gpu, backend), count in places.items():
        shared = " through host memory, because several ranks share the GPU" if gpu and backend == "gloo" else ""
        what = f"{device} ({gpu})" if gpu else device
        yield f"{count} rank{'s' * (count > 1)} on {host}, {what}; tensors are sent by {backend}{shared}"


def problems(report: RuntimeReport, config: RunConfig, *, model_bytes: int) -> Iterable[str]:
    """Yield one sentence for each problem of the machine, with the numbers."""
    ranks = report.ranks
    if missing := sorted(set(range(config.world_size)) - {rank.rank for rank in ranks}):
        yield f"the job needs {config.world_size} ranks; no report came from rank {', '.join(map(str, missing))}"
    for rank in ranks:
        where = f"rank {rank.rank} on {rank.host}"
        if rank.world_size != config.world_size:
            yield f"{where} has world size {rank.world_size}, but the job needs {config.world_size} ranks"
        if rank.all_reduce != rank.all_reduce_expected:
            yield f"{where}: all-reduce returned {rank.all_reduce:g}, expected {rank.all_reduce_expected:g}"
    state = UPDATE_RULES[config.optimizer.name].state_copies
    yield from _memory(ranks, need_bytes=(MEMORY_FACTOR + state) * model_bytes)
    # 2: the best one, and the one being written
    copies = (config.checkpoint.keep_newest + 2) * (CHECKPOINT_FACTOR + state)
    if report.disk_free_bytes < copies * model_bytes:
        yield (
            f"{_mb(report.disk_free_bytes)} of disk are free, but {config.checkpoint.keep_newest + 2} checkpoints of "
            f"{_mb((CHECKPOINT_FACTOR + state) * model_bytes)} need {_mb(copies * model_bytes)}; make room or lower "
            "checkpoint.keep_newest"
        )


def _memory(ranks: Sequence[RankReport], *, need_bytes: int) -> Iterable[str]:
    """Yield a sentence for each host or GPU with too little memory. CPU ranks share the memory of their host."""
    # Every rank reports the free memory before training, so ranks on one device must divide it.
    places = [(rank.host, rank.device) for rank in ranks]
    for (host, device), count in Counter(places).items():
        free = min(rank.memory_bytes for rank in ranks if (rank.host, rank.device) == (host, device))
        if free < count * need_bytes:
            yield (
                f"{_mb(free)} of memory are free on {host} ({device}), but its {count} ranks need at least "
                f"{_mb(need_bytes)} each, {_mb(count * need_bytes)} together; free some or start fewer ranks per host"
            )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
