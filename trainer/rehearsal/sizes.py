"""List the micro-batches that a run computes: the full ones, and the smaller ones at the end of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.batches.step_shares import micro_batch_sizes

Kind = Literal["training", "evaluation", "padding"]


@dataclass(frozen=True)
class Size:
    """A micro-batch of some rows that occurs in the run."""

    kind: Kind
    rows: int
    what: str
    """What it is, for messages."""
    remedy: str
    """What to change if it alone does not run."""


def sizes_of_run(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, counts: tuple[int, int] | None
) -> list[Size]:
    """Return each kind and number of rows once, full micro-batches first.

    counts: the rows for training and for evaluation; None if they are not known, which leaves out the smaller ones.
    """
    full = train.micro_batch_rows(parallel.data)
    evaluated = train.evaluation_batch_size or full
    found = [
        Size(
            "training",
            full,
            f"a micro-batch of {_rows(full)}",
            "choose another size of micro-batches (train.global_batch_size, train.gradient_accumulation_steps), or "
            "export the model with a dynamic batch",
        )
    ]
    if counts and train.num_epochs:
        rest = train.samples_of_run(counts[0]) % train.global_batch_size
        remedy = (
            f"choose a train.global_batch_size that divides the {counts[0]} training rows, or train.num_steps in place "
            "of train.num_epochs"
        )
        for rows, is_padding in micro_batch_sizes(model, parallel, rest, full):
            what = f"the {'padding' if is_padding else 'last'} micro-batch of the training, of {_rows(rows)},"
            found.append(Size("padding" if is_padding else "training", rows, what, remedy))
    if counts and model.fixed_batch == "joint":  # incomplete evaluation batches are left out
        counts = counts[0], counts[1] // evaluated * evaluated
    remedy = "choose another train.evaluation_batch_size"
    if counts:
        remedy += f", such as one that divides the {counts[1]} evaluation rows"
    ends = [rows for rows, _ in micro_batch_sizes(model, parallel, counts[1], evaluated)] if counts else [evaluated]
    found += [Size("evaluation", rows, f"an evaluation batch of {_rows(rows)}", remedy) for rows in ends]
    # reversed twice: of equal sizes the first one stays, in its place
    return list({(size.kind, size.rows): size for size in reversed(found)}.values())[::-1]


def _rows(number: int) -> str:
    return f"{number} row{'s' if number > 1 else ''}"
