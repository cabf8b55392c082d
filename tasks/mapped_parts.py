"""Make the parts of shards as mapped tasks of Prefect, on the workers of Dask or Ray: `data.shard_on`.

    shard-data  ──>  part-0, part-1, ... part-299  ──>  files-0 ... files-149     fewer than 500 tasks, of any size
                        workers of the cluster, which see the directories of the data and of ONWARD_HOME

Dask and Ray make the tasks of a lost worker again. A task that fails otherwise is submitted anew here, a few times.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import as_completed

from onward.trainer.config.sections.data import engine_of
from onward.trainer.data.storage.recipe import Recipe
from onward.trainer.data.storage.written_parts import PartMaker, PartStep, RunSteps, StepResult, open_maker
from onward.trainer.errors import DataError, RuntimeUnavailable
from onward.trainer.run.machine.this_machine import usable_cores

log = logging.getLogger(__name__)

MOST_TRIES = 3
"""Of a step."""
LOCAL = {"dask", "ray"}
"""Values of data.shard_on that stand for a cluster on this machine, which ends with the task."""


class MappedParts:
    """Runs steps as tasks, in the cluster that data.shard_on names, once there are any."""

    most_parts = 150

    def __init__(self, shard_on: str) -> None:
        self._shard_on = shard_on
        self._opened = ExitStack()
        self._runner: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    def can_divide(self, recipe: Recipe) -> bool:
        """Return True: the cluster has cores that this process does not use."""
        return True

    def opened(self, maker: PartMaker) -> AbstractContextManager[RunSteps]:
        """Return what runs steps as tasks; the cluster ends with this object."""
        self._runner = self._runner or self._opened.enter_context(_task_runner(self._shard_on))
        return nullcontext(partial(self._run, maker))

    def _run(self, maker: PartMaker, steps: Iterable[PartStep]) -> Iterator[tuple[int, StepResult]]:
        """Yield the number of each step with its result. Raises RuntimeUnavailable after MOST_TRIES failures."""
        stop = maker.folder / "stop"
        tries = {}
        for number, step in enumerate(steps):
            tries[self._submit(maker.folder, number, step)] = (number, step, 1)
        while tries:
            failed = []
            for future in as_completed(list(tries)):
                number, step, count = tries.pop(future)
                try:
                    result = StepResult.model_validate_json(future.result())
                except Exception as error:
                    if count == MOST_TRIES:
                        stop.touch()
                        raise RuntimeUnavailable(
                            f"part {number} of the data failed {MOST_TRIES} times on {self._shard_on} (data.shard_on): "
                            f"{type(error).__name__}: {error}"
                        ) from error
                    log.warning("part %d of the data failed, and is made again: %s", number, error)
                    # submitted again behind this loop, which waits for a fixed list of tasks
                    failed.append((number, step, count + 1))
                    continue
                if result.problems:
                    # steps that have not begun do nothing any more
                    stop.touch()
                yield number, result
            for number, step, count in failed:
                tries[self._submit(maker.folder, number, step)] = (number, step, count)

    def _submit(self, folder: Path, number: int, step: PartStep) -> Any:
        named = make_part.with_options(task_run_name=f"{'files' if step.join else 'part'}-{number}")
        return self._runner.submit(named, {"folder": str(folder), "step": step.model_dump_json()})


@task(name="shard-part", cache_policy=NO_CACHE)
def make_part(folder: str, step: str) -> str:
    """Make a step in the process of a worker; return its StepResult as JSON."""
    # by a file, because a worker may be on another machine, which sees this folder
    if (Path(folder) / "stop").exists():
        return StepResult().model_dump_json()
    try:
        result = _maker(Path(folder)).make(PartStep.model_validate_json(step))
    except DataError as error:
        result = StepResult(problems=error.problems)
    return result.model_dump_json()


@lru_cache(maxsize=1)
def _maker(folder: Path) -> PartMaker:
    # a worker makes many parts of one job
    return open_maker(folder)


def _task_runner(shard_on: str) -> Any:
    """Return the task runner, which is not started yet; its types need the package."""
    address = "" if shard_on in LOCAL else shard_on
    engine = engine_of(shard_on)
    # an extra, and imported only here
    library = importlib.import_module(f"prefect_{engine}")
    if engine == "ray":
        here = {"num_cpus": usable_cores(), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        return library.RayTaskRunner(address=address) if address else library.RayTaskRunner(init_kwargs=here)
    # a thread for each process, because readers in Python only take turns
    workers = {"n_workers": usable_cores(), "threads_per_worker": 1, "dashboard_address": None}
    return library.DaskTaskRunner(address=address) if address else library.DaskTaskRunner(cluster_kwargs=workers)
