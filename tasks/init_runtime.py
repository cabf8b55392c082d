"""init runtime: start the ranks once by the launcher and check what each of them reports.

A wrong MPI library, a missing GPU or a full disk is found in seconds here, and not an hour later in the training.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from onward.infra.job.hosts import silence
from onward.infra.job.launcher import LaunchError
from onward.tasks.attempts.wait_before_retry import wait_for_hosts
from onward.tasks.checks.disk_space import shares, space_problems
from onward.tasks.checks.host_table import ask_hosts, files_of_ranks
from onward.tasks.checks.machine_check import ranks_of_weights
from onward.tasks.launching.jobs import chosen_launcher, job_of, launcher_of
from onward.tasks.launching.own_homes import bring_run
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.data.schema.signature import model_bytes
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.quantities import mb
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.outcomes.ending_kinds import memory_advice
from onward.trainer.run.records import (
    Needs,
    Networks,
    RankReport,
    Rehearsal,
    RunIdentity,
    RuntimeReport,
    read_record,
    write_record,
)

log = logging.getLogger(__name__)


@task(name="init runtime", task_run_name="init runtime", cache_policy=NO_CACHE)
def init_runtime(run: RunDir) -> RuntimeReport:
    """Run the preflight on every rank and write `runtime.json` and `packages.txt`.

    Raises RuntimeUnavailable with all problems: a host that does not answer or has other software, no launcher, a
    job of this run that is still running, a world size other than the configured one, no GPU for a rank, a wrong
    all-reduce, too little memory or disk.
    """
    # of a run that goes on a host may be lost, which it may wait for, or go on without
    if run.current_attempt and read_config(run, "given").launch.hostfile:
        wait_for_hosts(run)
    config = read_config(run)
    if config.launch.hostfile:
        _check_hosts(run, config.launch, files_of_ranks(config), has_store=bool(config.checkpoint.store))
    folder = run.root / "preflight"
    # reports of an earlier start would be counted as ranks of this one
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # Attempt 0 is the preflight; its errors are those of an earlier start of this run.
    for old in run.errors.glob("000-rank-*.json"):
        old.unlink()
    if why := chosen_launcher(config.launch)[1]:
        log.info("%s starts the ranks: %s", launcher_of(config.launch).name, why)
    # The same launcher, hostfile and number of ranks as the training: what fails there fails here first.
    launch_s = _launch(run, config.launch, config.world_size, log=folder / "preflight.log")
    report = RuntimeReport(
        ranks=tuple(read_record(path, RankReport) for path in sorted(folder.glob("rank-*.json"))),
        launch_s=launch_s,
        disk_free_bytes=shutil.disk_usage(run.root).free,
    )
    needs = needs_of(run, config.model.path, config.parallel)
    tracking_uri = read_record(run.identity, RunIdentity).tracking_uri if run.identity.exists() else ""
    written = space_problems(shares(run, config, needs, tracking_uri=tracking_uri))
    advice = memory_advice(config)
    # all at once: memory, devices and disk are independent of each other
    if found := [*problems(report, config.world_size, needs, advice), *written]:
        raise RuntimeUnavailable(found)
    write_durably(run.packages, packages().encode())
    write_record(run.runtime, report)
    for line in devices(report.ranks):
        log.info(line)
    for line in memory_warnings(report.ranks, needs, advice):
        log.warning(line)
    return report


def _check_hosts(run: RunDir, launch: LaunchConfig, files: Mapping[str, str], *, has_store: bool) -> None:
    """Ask the hosts of the hostfile and write networks.json. Raises RuntimeUnavailable with all of their problems.

    Those with a home of their own get the records of the run.
    """
    table = ask_hosts(launch, run.root, files, has_store=has_store)
    for row in table.rows:
        log.info("%s", row)
    for line in table.warnings:
        log.warning(line)
    if found := table.problems:
        raise RuntimeUnavailable(found)
    write_record(run.networks, Networks(networks=table.networks, own_homes=table.own_homes))
    bring_run(run, with_data=False)


def needs_of(run: RunDir, model: Path, parallel: ParallelConfig) -> Needs:
    """Return what the rehearsal has computed; of a run that was not rehearsed, the weights alone."""
    known = read_record(run.rehearsal, Rehearsal).needs if run.rehearsal.exists() else None
    if known:
        return known
    size = model_bytes(model)
    return Needs(rank_bytes=size // ranks_of_weights(parallel), checkpoint_bytes=size, model_bytes=size)


def _launch(run: RunDir, launch: LaunchConfig, world_size: int, *, log: Path) -> float:
    """Run the preflight on all ranks; return the seconds it took."""
    module = ("onward.trainer", "preflight", str(run.root))
    job = job_of(launch, module, num_ranks=world_size, run_dir=run.root, log=log)
    try:
        outcome = job.run()
    except LaunchError as error:
        raise RuntimeUnavailable(str(error)) from error
    if outcome.lost_hosts:
        raise RuntimeUnavailable(f"{silence(outcome.lost_hosts)}, while the ranks started; resume when they do")
    if first := run.first_error(0):
        sentence = first.cause.removeprefix("RuntimeUnavailable: ")
        where = f"rank {first.rank} on {first.host}: "
        # one rank reports what it has found of all: a line that names a rank is about that one
        raise RuntimeUnavailable(
            [line if re.search(r"\brank \d", line) else where + line for line in sentence.splitlines()]
        )
    if outcome.returncode != 0:
        limit = f" within {launch.start_timeout_s:g} s" if outcome.reason == "start_timeout" else ""
        tail = "\n  | ".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeUnavailable(
            f"{world_size} ranks did not start{limit}: {job.launcher.name} ended with status "
            f"{outcome.returncode}; the end of {log}:\n  | {tail}"
        )
    return outcome.elapsed_s


def devices(ranks: Sequence[RankReport]) -> Iterable[str]:
    """Yield one sentence for each device: how many ranks compute on it, and what sends their tensors."""
    places = Counter((rank.host, rank.device, rank.gpu, rank.backend) for rank in ranks)
    for (host, device, gpu, backend), count in places.items():
        shared = " through host memory, because several ranks share the GPU" if gpu and backend == "gloo" else ""
        what = f"{device} ({gpu})" if gpu else device
        yield f"{count} rank{'s' * (count > 1)} on {host}, {what}; tensors are sent by {backend}{shared}"


def problems(report: RuntimeReport, world_size: int, needs: Needs, advice: str) -> Iterable[str]:
    """Yield one sentence for each problem of the machine, with the numbers."""
    ranks = report.ranks
    if missing := sorted(set(range(world_size)) - {rank.rank for rank in ranks}):
        yield f"the job needs {world_size} ranks; no report came from rank {', '.join(map(str, missing))}"
    for rank in ranks:
        where = f"rank {rank.rank} on {rank.host}"
        if rank.world_size != world_size:
            yield f"{where} has world size {rank.world_size}, but the job needs {world_size} ranks"
        if rank.all_reduce != rank.all_reduce_expected:
            yield f"{where}: all-reduce returned {rank.all_reduce:g}, expected {rank.all_reduce_expected:g}"
    yield from _different_versions(ranks)
    for place in places(ranks):
        if place.free_bytes < (needed := place.num_ranks * needs.rank_bytes):
            yield (
                f"{mb(place.free_bytes)} of memory are free on {place.name}, but the weights, gradients and optimizer "
                f"state of {place.of_ranks} need {mb(needed)}, {mb(needs.rank_bytes)} per rank, without activations; "
                f"free some, or start fewer ranks per host. {advice}"
            )


def _different_versions(ranks: Sequence[RankReport]) -> Iterable[str]:
    """Yield a sentence for each library, or for Onward itself, of which hosts have different versions.

    Ranks with other code compute other numbers, or wait for each other in other collectives.
    """
    for name in sorted({name for rank in ranks for name in rank.versions} - {"Python"}):
        hosts: dict[str, set[str]] = {}
        for rank in ranks:
            hosts.setdefault(rank.versions.get(name, "none"), set()).add(rank.host)
        if len(hosts) > 1:
            found = "; ".join(f"{version} on {', '.join(sorted(names))}" for version, names in hosts.items())
            yield f"the hosts have different versions of {name}: {found}. Install the same one on all hosts"


def memory_warnings(ranks: Sequence[RankReport], needs: Needs, advice: str) -> Iterable[str]:
    """Yield a sentence for each place where the weights fit, but perhaps not with the activations."""
    each = needs.rank_bytes + needs.activation_bytes
    for place in places(ranks):
        if place.free_bytes < (needed := place.num_ranks * each):
            yield (
                f"{mb(place.free_bytes)} of memory are free on {place.name}, but {place.of_ranks} may need "
                f"{mb(needed)}: {mb(needs.rank_bytes)} per rank, and {mb(needs.activation_bytes)} for the "
                f"activations of a micro-batch. {advice}"
            )


@dataclass(frozen=True)
class Place:
    """A GPU, or the CPUs of a host, whose memory its ranks share."""

    name: str
    num_ranks: int
    free_bytes: int
    """Before training; every rank reports it of the whole place."""

    @property
    def of_ranks(self) -> str:
        return f"its {self.num_ranks} ranks" if self.num_ranks > 1 else "its rank"


def places(ranks: Sequence[RankReport]) -> Iterable[Place]:
    """Yield each place that computes, with its ranks."""
    for (host, device), count in Counter((rank.host, rank.device) for rank in ranks).items():
        free = min(rank.memory_bytes for rank in ranks if (rank.host, rank.device) == (host, device))
        yield Place(f"{host} ({device})", count, free)


def packages() -> str:
    """Return the installed Python packages with their versions, one in a line, as `pip freeze` lists them."""
    # the two lines alone: parsing the descriptions of 300 packages takes most of a second
    texts = (each.read_text("METADATA") or each.read_text("PKG-INFO") for each in metadata.distributions())
    heads = ((text or "").split("\n\n", 1)[0] for text in texts)
    names = (dict(re.findall(r"^(Name|Version): *(.*?) *$", head, re.MULTILINE)) for head in heads)
    found = {each["Name"]: each["Version"] for each in names if len(each) == 2}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items(), key=lambda pair: pair[0].lower()))
