"""Find out, from the configuration and this machine alone, what would end a run before its first step.

The command line asks this before it starts anything, and so does `configure`, on the machine of the worker. What only
the ranks can find out (their hosts, MPI, the memory of a GPU) `init_runtime` finds out later.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from onward.infra import weights_and_biases
from onward.infra.job.hosts import read_hostfile
from onward.infra.mlflow.mlflow_store import with_password
from onward.infra.servers.databases import is_database_server, mlflow_problem
from onward.tasks.checks.disk_space import shares, space_problems
from onward.tasks.checks.registered_models import store_of
from onward.tasks.launching.jobs import launcher_of, ranks_of
from onward.trainer.config.rules import Sections
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import engine_of
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.config.urls import redacted, url_of
from onward.trainer.data.schema.signature import model_bytes
from onward.trainer.errors import Refused
from onward.trainer.extras import how_to_install
from onward.trainer.quantities import mb
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.home import nearest_existing
from onward.trainer.run.machine.this_machine import free_host_memory, missing_compiler, most_gpus, usable_cores
from onward.trainer.run.outcomes.storage import broken_storage
from onward.trainer.run.records import Needs

CONNECT_S = 2.0
"""Longest time in which a server must accept a connection."""


def machine_problems(sections: Sections, *, resumed: bool = False) -> list[str]:
    """Return a sentence for each thing that this machine lacks; sections that could not be read may be missing.

    resumed: the run has begun, and goes on without its MLflow server; its files take up disk already. Raises
    StorageUnavailable when the disk of Onward's home or of temporary files takes no file.
    """
    if broken := broken_storage():
        raise broken  # whatever else is wrong would have to be looked for on that disk
    launch = sections.get("launch")
    parallel = sections.get("parallel")
    # sections that were refused are checked with their defaults, to name what is wrong besides
    known = launch if isinstance(launch, LaunchConfig) else LaunchConfig()
    layout = parallel if isinstance(parallel, ParallelConfig) else ParallelConfig()
    problems = [*_launcher_problems(known, num_ranks(layout, known))]
    if isinstance(launch, LaunchConfig) and isinstance(parallel, ParallelConfig):
        problems += _device_problems(launch, parallel)
        problems += _hostfile_problems(launch, num_ranks(parallel, launch))
    graph = sections.get("graph")
    # the compiler of this host says nothing about those of other hosts
    runs_here = not (launch and launch.hostfile)
    compiles = graph and graph.compiles
    if compiles and runs_here and (missing := missing_compiler()):
        problems.append(missing)
    if data := sections.get("data"):
        problems += engine_problems(data.shard_on)
    if resumed:
        return problems
    if monitor := sections.get("monitor"):
        problems += store_problems(store_of(monitor))
        problems += reporting_problems(monitor.report_to)
    # memory and disk follow from several sections, and are estimated only if all of them are valid
    if {"model", "train", "checkpoint", "monitor", "export", "parallel", "launch"} <= sections.keys():
        problems += _space_problems(RunConfig.model_construct(**dict(sections)))
    return problems


def engine_problems(shard_on: str) -> Iterator[str]:
    """Yield why the parts cannot be mapped: a package is missing."""
    if shard_on and importlib.util.find_spec(f"prefect_{engine_of(shard_on)}") is None:
        engine = engine_of(shard_on)
        yield f"data.shard_on is {shard_on!r}, which needs prefect-{engine}: {how_to_install(engine)}"


def num_ranks(parallel: ParallelConfig, launch: LaunchConfig) -> int:
    """Return the ranks of the job, also before `parallel = "auto"` has chosen sizes."""
    return launch.num_ranks or parallel.world_size


def ranks_of_weights(parallel: ParallelConfig) -> int:
    """Return how many ranks hold one copy of the weights together."""
    replicas = (parallel.shard or parallel.data) if parallel.zero == 3 else 1
    # ZeRO stage 3 also divides the weights among replicas, or among those of one shard group
    return parallel.tensor * parallel.pipeline * replicas


def crowded_cores(launch: LaunchConfig, ranks: int) -> str:
    """Return that the ranks on the CPUs of this machine are more than its cores; "" if they are not."""
    cores = usable_cores()
    elsewhere = launcher_of(launch).uses_other_hosts(launch.hostfile, os.environ)
    if launch.device == "cuda" or elsewhere or ranks <= cores:
        return ""
    return (
        f"{ranks} ranks share the {cores} cores of this machine: a step takes longer than with {cores} ranks, since "
        "they wait for each other; start fewer ([parallel], launch.num_ranks) unless this is a trial of the layout"
    )


def _launcher_problems(launch: LaunchConfig, ranks: int) -> Iterator[str]:
    launcher = launcher_of(launch)
    install = f": {how_to_install('mpi')}" if launcher.name == "mpirun" else ""
    for problem in launcher.problems(ranks_of(launch, ranks), os.environ):
        yield f"{problem}{install}"


def _device_problems(launch: LaunchConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield why the ranks of this machine have no GPU each. Those of other hosts are not known."""
    if launch.device != "cuda" or launcher_of(launch).uses_other_hosts(launch.hostfile, os.environ):
        return
    found, why = most_gpus()
    ranks = num_ranks(parallel, launch)
    # None: the number of GPUs is not known
    if found is not None and found * launch.ranks_per_gpu < ranks:
        several = f", and each may serve {launch.ranks_per_gpu} (launch.ranks_per_gpu)" if found else ""
        remedy = "start fewer ranks, raise launch.ranks_per_gpu (slow), or set" if found else "set"
        needed = f"{ranks} rank{'s need' if ranks > 1 else ' needs'} a GPU"
        yield (
            f"launch.device is 'cuda', and {needed}, but this machine has {found or 'none'} ({why}){several}; {remedy} "
            "launch.device = 'cpu'"
        )


def _hostfile_problems(launch: LaunchConfig, ranks: int) -> Iterator[str]:
    path = Path(launch.hostfile)
    if not launch.hostfile or url_of(launch.hostfile) or not path.is_file():  # an absent one is reported elsewhere
        return
    try:
        hosts = read_hostfile(path)
    except (OSError, UnicodeDecodeError) as error:
        yield f"launch.hostfile: {path} cannot be read: {error}"
        return
    slots = sum(hosts.values())
    if not hosts:
        yield f"launch.hostfile: {path} names no host; write one in each line, such as `node1 slots=4`"
    elif slots < ranks:
        yield (
            f"launch.hostfile: {path} has {slots} slots on {len(hosts)} host{'s' * (len(hosts) > 1)}, but the job "
            f"needs {ranks} ranks; raise `slots=` (a line without it is one rank), add hosts, or start fewer ranks"
        )


def store_problems(uri: str) -> Iterator[str]:
    """Yield why nothing listens where the MLflow server should be, or why its database cannot be used."""
    if is_database_server(uri) and (problem := mlflow_problem(with_password(uri))):
        install = f": {how_to_install('postgres')}" if "not installed" in problem else ""
        yield problem + install
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        if not any(name.lower().endswith("_proxy") for name in os.environ):  # a proxy may reach it
            yield (
                f"the MLflow server {redacted(uri)} does not answer ({error}); start it, or set MLFLOW_TRACKING_URI or "
                "monitor.tracking_uri (empty = Onward's own store)"
            )


def reporting_problems(report_to: Iterable[str]) -> Iterator[str]:
    """Yield why nothing could be reported to Weights & Biases."""
    if "wandb" not in report_to:
        return
    if not weights_and_biases.is_installed():
        yield f'monitor.report_to has "wandb", whose package is not installed here: {how_to_install("wandb")}'
    elif problem := weights_and_biases.login_problem():
        yield f"monitor.report_to: {problem}"


def _space_problems(config: RunConfig) -> Iterator[str]:
    """Yield why the weights alone do not fit into memory or on the disk; `rehearse` computes what else is needed."""
    with suppress(Refused, OSError):  # of a model that is absent or cannot be read, which is reported elsewhere
        size = model_bytes(config.model.path)
        parallel = config.parallel
        needs = Needs(rank_bytes=size, checkpoint_bytes=0, model_bytes=size)  # LoRA saves less than the model
        # the home may not exist yet; its disk is that of the nearest directory that does
        home = RunDir(nearest_existing(onward_home()))
        yield from space_problems(shares(home, config, needs, tracking_uri=store_of(config.monitor)))
        ranks = num_ranks(parallel, config.launch)
        free = free_host_memory()
        if parallel.sizes == "given" and config.launch.device == "cpu" and not config.launch.hostfile:
            needed = ranks * size // ranks_of_weights(parallel)
            if free < needed:
                yield (
                    f"{mb(free)} of memory are free, but the weights of {ranks} ranks need "
                    f"{mb(needed)}, without gradients and optimizer; free some, or start fewer ranks"
                )
