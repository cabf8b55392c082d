"""Adjustments: what the task `train` has changed of a run's configuration after an attempt failed, where it may.

config.json stays as the user gave it. Every process that reads the configuration gets it with these changes, and trains
like a run that was configured so.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig, RecomputeConfig
from onward.trainer.errors import RecordError
from onward.trainer.run.record_base import first_problem
from onward.trainer.run.records import Record, read_record


class Adjustments(Record):
    """Changes of a configuration."""

    micro_batch_divisor: PositiveInt = 1
    """A micro-batch has so many times fewer samples, and accumulation so many more micro-batches
    (`launch.on_out_of_memory`)."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are added to `train.skip_steps` (`train.on_non_finite`)."""
    data: NonNegativeInt = 0
    """Replicas, fewer than configured (`launch.on_host_lost`); 0 = as configured."""
    parallel: ParallelConfig | None = None
    recompute: RecomputeConfig | None = None
    """Another layout than the configured one (`launch.on_host_lost`); None = as configured, but for `data`."""
    micro_batch: NonNegativeInt = 0
    """Samples of a micro-batch at most, before `micro_batch_divisor` divides them; 0 = as configured."""
    hostfile: str = ""
    """The hosts that are left; "" = as configured."""

    def with_configured_layout(self) -> Adjustments:
        """Return the changes without those of the layout."""
        return Adjustments(micro_batch_divisor=self.micro_batch_divisor, skip_steps=self.skip_steps)


def with_adjustments(config: RunConfig, changes: Adjustments) -> RunConfig:
    """Return a configuration with changes. The global batch, and so the samples of every step, stay the same.

    Raises ValueError, or pydantic's ValidationError, where the changed configuration is refused.
    """
    most = changes.micro_batch or config.micro_batch_size
    if changes.micro_batch_divisor > most:
        divisor = changes.micro_batch_divisor
        raise ValueError(f"micro_batch_divisor {divisor} is above the {most} samples of a micro-batch")
    train = config.train
    launch = config.launch
    data = changes.data or config.parallel.data
    parallel = changes.parallel or config.parallel.model_copy(update={"data": data})
    steps = train.gradient_accumulation_steps
    if changes.data or changes.micro_batch_divisor > 1:
        # the global batch stays, so fewer samples at a time mean more micro-batches
        samples = train.global_batch_size // parallel.data
        steps = samples // divisors(samples, most // changes.micro_batch_divisor)[-1]
    ranks = parallel.world_size if changes.data else launch.num_ranks
    changed = config.model_copy(
        update={
            "train": train.model_copy(
                update={
                    "gradient_accumulation_steps": steps,
                    "skip_steps": tuple(sorted({*train.skip_steps, *changes.skip_steps})),
                }
            ),
            "parallel": parallel,
            "recompute": changes.recompute or config.recompute,
            "launch": launch.model_copy(
                update={"num_ranks": ranks, "hostfile": changes.hostfile or config.launch.hostfile}
            ),
        }
    )
    # validated anew: a copy is not
    return RunConfig.model_validate_json(changed.model_dump_json())


def adjusted(config: RunConfig, path: Path) -> RunConfig:
    """Return a configuration with the changes of a file. Raises RecordError if it is damaged or does not fit."""
    try:
        return with_adjustments(config, read_record(path, Adjustments))
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RecordError(f"{path} does not fit the run's configuration: {why}") from None


def smaller_micro_batches(micro_batch_size: int, changes: Adjustments) -> Adjustments | None:
    """Return changes after which a micro-batch has half of its present samples; None if it cannot be divided.

    An odd number is divided by its smallest divisor.
    """
    above_1 = divisors(micro_batch_size, micro_batch_size)[1:]
    if not above_1:
        return None
    return changes.model_copy(update={"micro_batch_divisor": changes.micro_batch_divisor * above_1[0]})


def fewer_replicas(config: RunConfig, changes: Adjustments, *, ranks: int, hostfile: str) -> Adjustments | None:
    """Return changes for the fastest layout on `ranks` ranks with fewer replicas; None if there is no such layout.

    config: without changes of its layout. Tensor and pipeline parallelism stay as they are, and so does the batch: of
    fewer replicas each computes more samples, in micro-batches that are no larger than before.

        batch 24, before: 3 replicas x 1 micro-batch of 8       on 2 ranks: 2 x 2 of 6, and not 1 x 3 of 8
    """
    parallel = config.parallel
    batch = config.train.global_batch_size
    most = config.micro_batch_size // changes.micro_batch_divisor
    # a file that declares its rows takes no other micro-batch
    least = most if config.model.keeps_batch else 1
    layouts: list[tuple[float, int, int]] = []
    for data in range(1, min(parallel.data, ranks // (parallel.tensor * parallel.pipeline)) + 1):
        samples, rest = divmod(batch, data)
        sizes = [] if rest else divisors(samples, most)
        # of a small micro-batch the time is that of its operators, and not of its samples
        layouts += [(samples // size * max(size, most / 2), -data, -size) for size in sizes if size >= least]
    for _, data, size in sorted(layouts):
        micro_batch = -size * changes.micro_batch_divisor
        layout = {"data": -data, "micro_batch": micro_batch, "hostfile": hostfile, "parallel": None, "recompute": None}
        found = changes.model_copy(update=layout)
        try:
            with_adjustments(config, found)
        except ValueError:  # such as a hybrid shard that does not divide the replicas
            continue
        return found
    return None


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, from 1 upwards."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
