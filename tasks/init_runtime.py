"""init runtime: start the real ranks under the real launcher once, and judge what they find.

A wrong MPI, a missing GPU or a full disk costs seconds here instead of an hour later.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra import mpirun
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RankReport, RuntimeReport, read_record, write_record

MEMORY_FACTOR = 6
"""Memory one rank needs at least, in sizes of the model file: weights, gradients, two moments, the reducer's
buckets, one more for a checkpoint. Activations come on top and are not known here."""

CHECKPOINT_FACTOR = 3
"""Size of one checkpoint in sizes of the model file: weights and two moments."""


@task(name="init runtime", task_run_name="init runtime", cache_policy=NO_CACHE)
def init_runtime(run: RunDir) -> RuntimeReport:
    """Run the preflight on every rank; leaves `runtime.json`.

    Raises RuntimeUnavailable with everything that is wrong: no launcher, a living job, another world than the
    configured one, no GPU for a rank, a wrong sum, too little memory or disk.
    """
    config = read_config(run)
    folder = run.root / "preflight"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for old in run.errors.glob("000-rank-*.json"):
        old.unlink()
    launch_s = _launch(run, config, log=folder / "preflight.log")
    report = RuntimeReport(
        ranks=tuple(read_record(path, RankReport) for path in sorted(folder.glob("rank-*.json"))),
        launch_s=launch_s,
        disk_free_bytes=shutil.disk_usage(run.root).free,
    )
    if found := [*problems(report, config, model_bytes=config.model.path.stat().st_size)]:
        raise RuntimeUnavailable(found)
    write_record(run.runtime, report)
    return report


def _launch(run: RunDir, config: RunConfig, *, log: Path) -> float:
    """Start the preflight and wait for it; returns the seconds it took."""
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
    if (first := run.first_error(0)) is not None:  # attempt 0 is the preflight
        sentence = first.cause.removeprefix("RuntimeUnavailable: ")
        raise RuntimeUnavailable([f"rank {first.rank} on {first.host}: {line}" for line in sentence.splitlines()])
    if outcome.returncode != 0:
        limit = f" within {config.launch.start_timeout_s:g} s" if outcome.reason == "start_timeout" else ""
        tail = "\n  | ".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeUnavailable(
            f"{config.world_size} ranks did not start{limit}: mpirun ended with status {outcome.returncode}\n  | {tail}"
        )
    return outcome.elapsed_s


def problems(report: RuntimeReport, config: RunConfig, *, model_bytes: int) -> Iterable[str]:
    """What is wrong with the machine, one sentence each, with the numbers."""
    ranks = report.ranks
    if missing := sorted(set(range(config.world_size)) - {rank.rank for rank in ranks}):
        yield f"the job needs {config.world_size} ranks; there is no report of rank {', '.join(map(str, missing))}"
    for rank in ranks:
        where = f"rank {rank.rank} on {rank.host}"
        if rank.world_size != config.world_size:
            yield f"{where} sees a world of {rank.world_size}, but the job needs {config.world_size} ranks"
        if rank.all_reduce != rank.all_reduce_expected:
            yield f"{where} got {rank.all_reduce:g} for a sum over all ranks that is {rank.all_reduce_expected:g}"
    yield from _memory(ranks, need_bytes=MEMORY_FACTOR * model_bytes)
    copies = (config.checkpoint.keep_newest + 2) * CHECKPOINT_FACTOR  # the best, and the one being written
    if report.disk_free_bytes < copies * model_bytes:
        yield (
            f"{_mb(report.disk_free_bytes)} of disk are free, but {config.checkpoint.keep_newest + 2} checkpoints of "
            f"{_mb(CHECKPOINT_FACTOR * model_bytes)} need {_mb(copies * model_bytes)}; make room or lower "
            "checkpoint.keep_newest"
        )


def _memory(ranks: Sequence[RankReport], *, need_bytes: int) -> Iterable[str]:
    """Ranks on CPUs share their host's memory; each GPU has its own."""
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
