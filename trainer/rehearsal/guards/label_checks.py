"""Warn of a regression whose labels are far from what the model computes: `loss.standardise_label` is for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.data.label_units import are_far
from onward.trainer.data.schema.columns import BYTES, Array
from onward.trainer.data.schema.fitted import LabelledRows
from onward.trainer.data.schema.target_counts import count_targets
from onward.trainer.model.losses.loss_formulas import FORMULAS, LossInputs
from onward.trainer.run.records import ExporterWarning

WORSE_THAN_THE_MEAN = 4.0
"""A loss that is so many times that of predicting the mean of the labels is of a model in other units."""


def label_warnings(losses: Sequence[LossConfig], rows: LabelledRows, loss: float) -> Iterator[ExporterWarning]:
    """Yield a warning if the only loss compares raw labels that are far from 0 and 1, and from the output.

    rows: the first ones of the data. loss: that of the untrained model on some of them.
    """
    if len(losses) != 1 or losses[0].standardise_label != "none":
        return
    (entry,) = losses
    if "standardise_label" not in entry.rule.takes:
        return
    for name in entry.columns:
        column = rows.columns.get(name)
        if column is None or column.variable:
            continue
        if not column.holds_numbers or column.dtype == BYTES:
            continue
        labels = np.asarray(rows.read(np.arange(rows.num_rows))[name], np.float64)
        present = labels[np.isfinite(labels)]
        if not are_far(labels):
            continue
        mean = float(present.mean())
        deviation = float(present.std())
        # the loss of a model that always predicts the mean
        of_the_mean = _loss_of(entry, present, mean)
        if loss > WORSE_THAN_THE_MEAN * of_the_mean:
            key = key_of(losses, 0, "standardise_label")
            yield ExporterWarning(
                key="label_units",
                what=(
                    f"label {name!r} has mean {mean:.4g} and standard deviation {deviation:.4g}, and the untrained "
                    f"model a loss of {loss:.4g}, where predicting the mean has {of_the_mean:.4g}: most of training "
                    "goes into reaching the mean, at usual learning rates"
                ),
                remedy=f'set {key} = "standard", so that the loss compares standardised numbers',
            )
            return


def _loss_of(entry: LossConfig, labels: Array, value: float) -> float:
    """Return the loss of predicting one value for all labels [n]."""
    known = torch.from_numpy(labels)
    inputs = LossInputs(entry, [torch.full_like(known, value)], known, len(known))
    return float(FORMULAS[entry.name](inputs)) / float(count_targets(known, len(known), entry))
