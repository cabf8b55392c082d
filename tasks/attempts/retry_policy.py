"""Decide what follows after an attempt: whether it is repeated, from where, and after which pause.

    attempt ends --> classification --> policy of its kind --> final: the error is raised, and the run ends
                                                         +--> retry n of launch.retries, after a growing pause

`n` counts the retries since the newest checkpoint: an attempt that saved a checkpoint beyond all earlier ones has made
progress, and the next failure is the first one again.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.trainer.checkpoint.retention import list_checkpoints, step_in
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.run.adjustments import Adjustments, smaller_micro_batches, with_adjustments
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.outcomes.ending_kinds import ENDINGS
from onward.trainer.run.records import record_if_written, write_record

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
FIRST_STEPS = 2
"""A rank that gets through the first steps has allocated all that it needs, unless shapes change."""


def newest_checkpoint(run: RunDir) -> int:
    """Return the step of the newest checkpoint by its name; 0 if there is none. Its bytes are not read."""
    found = list_checkpoints(run)
    return step_in(found[-1].name) if found else 0


def plan_next(run: RunDir, ending: AttemptEnding, config: RunConfig) -> AttemptEnding:
    """Return the record of an ending with the retry that follows it, if one does. May adjust the configuration."""
    earlier = endings(run)
    # which retry without progress would follow: a new checkpoint is progress, after which they are counted anew
    retry = 1
    former = earlier[-1].retry if earlier else 0
    if former and ending.checkpoint <= max(each.checkpoint for each in earlier):
        retry = former + 1
    changed = ""
    if ending.kind == "out_of_memory" and config.launch.on_out_of_memory == "smaller" and config.launch.retries:
        # each size is tried once, so that this ends by itself
        smaller = smaller_micro_batches(config.micro_batch_size, adjustments(run))
        changed = _adjust(run, smaller, rows=config.micro_batch_size)
        retry = 1 if changed else 0
    elif ending.kind == "out_of_memory":
        # the default policy: one more try where a fresh process may fit
        retry = retry if may_pass(ending, earlier) else 0
    elif ending.kind == "non_finite" and config.train.on_non_finite == "skip":
        changes = adjustments(run)
        skipped = changes.model_copy(update={"skip_steps": (*changes.skip_steps, ending.step)})
        changed = _adjust(run, skipped, rows=config.micro_batch_size) if retry <= config.launch.retries else ""
        retry = retry if changed else 0
    elif ENDINGS[ending.kind].no_retry:
        retry = 0
    # last, because some kinds set the number themselves
    if retry > config.launch.retries:
        retry = 0
    # short, as most faults are over, and four times as long after each in vain
    delay_s = min(FIRST_DELAY_S * 4.0 ** min(retry - 1, 20), LONGEST_DELAY_S) if retry else 0.0
    ending = ending.model_copy(update={"retry": retry, "delay_s": delay_s})
    return ending.model_copy(update={"action": f"{changed}{what_follows(ending, config.launch)}"})


def adjustments(run: RunDir) -> Adjustments:
    """Return what was changed of the run's configuration so far."""
    return record_if_written(run.adjusted, Adjustments) or Adjustments()


def _adjust(run: RunDir, changes: Adjustments | None, *, rows: int) -> str:
    """Write changes and return them in words, as the beginning of a sentence; "" if there are none that are allowed.

    rows: of a micro-batch before.
    """
    try:
        after = with_adjustments(read_config(run, "given"), changes) if changes else None
    except ValueError:
        after = None
    if changes is None or after is None:
        return ""
    passed_over = adjustments(run).skip_steps
    write_record(run.adjusted, changes)
    if changes.skip_steps != passed_over:
        return f"step {changes.skip_steps[-1]} will be passed over (train.on_non_finite): "
    return (
        f"micro-batches of {rows} samples become {after.micro_batch_size}, and "
        f"train.gradient_accumulation_steps {after.train.gradient_accumulation_steps} (launch.on_out_of_memory): "
    )


def may_pass(ending: AttemptEnding, earlier: Sequence[AttemptEnding]) -> bool:
    """Return whether another attempt may have enough memory: a new process begins without fragmentation.

    Not after the first steps, which need what all others need, unless the kernel has chosen a process of the host to
    end; nor when this was tried already.
    """
    tried = any(each.kind == "out_of_memory" and each.retry for each in earlier)
    return not tried and (ending.step - ending.resumed_from > FIRST_STEPS or "SIGKILL" in ending.sentence)


def what_follows(ending: AttemptEnding, launch: LaunchConfig) -> str:
    """Return what follows a failed attempt, in words."""
    if not ending.retry and (reason := ENDINGS[ending.kind].no_retry):
        return reason
    if not ending.retry:
        tried = f"after {launch.retries} retries without a new checkpoint (launch.retries)"
        return f"the run ends {tried}" if launch.retries else "the run ends: launch.retries is 0"
    where = "it starts again from the beginning"
    repeated = ending.step
    if ending.checkpoint:
        repeated = max(0, ending.step - ending.checkpoint)
        where = f"it goes on from the checkpoint of step {ending.checkpoint}"
    steps = f" ({repeated} step{'s are' if repeated != 1 else ' is'} repeated)" if repeated else ""
    return f"{where}{steps} in {ending.delay_s:g} s, retry {ending.retry} of {launch.retries}"
