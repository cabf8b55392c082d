"""Adjustments: what the task `train` has changed of a run's configuration after an attempt failed, where it may.

config.json stays as the user gave it. Every process that reads the configuration gets it with these changes, and trains
like a run that was configured so.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RecordError
from onward.trainer.run.records import Record, read_record
from onward.trainer.run.validation import first_problem


class Adjustments(Record):
    """Changes of a configuration."""

    micro_batch_divisor: PositiveInt = 1
    """A micro-batch has so many times fewer samples, and accumulation so many more micro-batches
    (`launch.on_out_of_memory`)."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are added to `train.skip_steps` (`train.on_non_finite`)."""
    data: NonNegativeInt = 0
    """Replicas, fewer than configured (`launch.on_host_lost`); 0 = as configured."""
    hostfile: str = ""
    """The hosts that are left; "" = as configured."""


def with_adjustments(config: RunConfig, changes: Adjustments) -> RunConfig:
    """Return a configuration with changes. The global batch, and so the samples of every step, stay the same.

    Raises ValueError, or pydantic's ValidationError, where the changed configuration is refused.
    """
    if changes.micro_batch_divisor > config.micro_batch_size:
        micro_batch = config.micro_batch_size
        divisor = changes.micro_batch_divisor
        raise ValueError(f"micro_batch_divisor {divisor} is above the {micro_batch} samples of a micro-batch")
    train = config.train
    parallel = config.parallel
    launch = config.launch
    micro_batch = config.micro_batch_size // changes.micro_batch_divisor
    data = changes.data or parallel.data
    steps = train.gradient_accumulation_steps
    if changes.data or changes.micro_batch_divisor > 1:
        # the global batch stays, so fewer samples at a time mean more micro-batches
        steps = train.global_batch_size // (data * micro_batch)
    ranks = data * parallel.tensor * parallel.pipeline if changes.data else launch.num_ranks
    changed = config.model_copy(
        update={
            "train": train.model_copy(
                update={
                    "gradient_accumulation_steps": steps,
                    "skip_steps": tuple(sorted({*train.skip_steps, *changes.skip_steps})),
                }
            ),
            "parallel": parallel.model_copy(update={"data": data}),
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
    size = micro_batch_size
    divisor = next((number for number in range(2, size + 1) if size % number == 0), None)
    if divisor is None:
        return None
    return changes.model_copy(update={"micro_batch_divisor": changes.micro_batch_divisor * divisor})


def fewer_replicas(config: RunConfig, changes: Adjustments, *, ranks: int, hostfile: str) -> Adjustments | None:
    """Return changes for a layout on `ranks` ranks, with as many replicas as fit; None if there is no such layout.

    config: without changes of its layout. Tensor and pipeline parallelism, and the micro-batch, stay as they are.
    """
    one = config.parallel.tensor * config.parallel.pipeline
    batch = config.train.global_batch_size
    micro_batch = config.micro_batch_size // changes.micro_batch_divisor
    # from the most replicas down: the first layout that fits is the fastest
    for data in range(min(config.parallel.data, ranks // one), 0, -1):
        if batch % (data * micro_batch) == 0:
            found = changes.model_copy(update={"data": data, "hostfile": hostfile})
            try:
                with_adjustments(config, found)
            except ValueError:  # such as a hybrid shard that does not divide the replicas
                continue
            return found
    return None
