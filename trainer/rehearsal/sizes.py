"""List the micro-batches that a run computes: the full ones, and the smaller ones at the end of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.trainer.config.run_config import RunConfig
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


def sizes_of_run(config: RunConfig, counts: tuple[int, int] | None) -> list[Size]:
    """Return each kind and number of rows once, full micro-batches first.

    counts: the rows for training and for evaluation; None if they are not known, which leaves out the smaller ones.
    """
    full = config.micro_batch_size
    evaluated = config.evaluation_batch_size
    found = [
        Size(
            "training",
            full,
            f"a micro-batch of {_rows(full)}",
            "choose another size of micro-batches (train.global_batch_size, train.gradient_accumulation_steps), or "
            "export the model with a dynamic batch",
        )
    ]
    if counts and config.train.num_epochs:
        rest = config.total_samples(counts[0]) % config.train.global_batch_size
        remedy = (
            f"choose a train.global_batch_size that divides the {counts[0]} training rows, or train.num_steps in place "
            "of train.num_epochs"
        )
        for rows, is_padding in micro_batch_sizes(config.model, config.parallel, rest, full):
            what = f"the {'padding' if is_padding else 'last'} micro-batch of the training, of {_rows(rows)},"
            found.append(Size("padding" if is_padding else "training", rows, what, remedy))
    if counts and config.model.fixed_batch == "joint":  # incomplete evaluation batches are left out
        counts = counts[0], counts[1] // evaluated * evaluated
    remedy = "choose another train.evaluation_batch_size"
    if counts:
        remedy += f", such as one that divides the {counts[1]} evaluation rows"
    ends = (
        [rows for rows, _ in micro_batch_sizes(config.model, config.parallel, counts[1], evaluated)]
        if counts
        else [evaluated]
    )
    found += [Size("evaluation", rows, f"an evaluation batch of {_rows(rows)}", remedy) for rows in ends]
    # reversed twice: of equal sizes the first one stays, in its place
    return list({(size.kind, size.rows): size for size in reversed(found)}.values())[::-1]


def _rows(number: int) -> str:
    return f"{number} row{'s' if number > 1 else ''}"
