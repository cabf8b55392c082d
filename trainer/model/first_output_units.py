"""Choose what a file computes as it comes in, for the saved configuration: `loss.output_units`.

labels 3500 4200 4900       outputs 0.1 -0.2 0.3     standardised: nodes behind the output make 4214 4185 4243 of them
                            outputs 3600 4100 5000   label: the file stays as it is
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.losses.losses_in_units import label_axis, unstandardised
from onward.trainer.model.trainable import open_trainable

ROWS = 64
"""Rows on which both readings are compared."""


def with_first_units(config: RunConfig, signature: Signature | None = None) -> RunConfig:
    """Return the configuration with units fitted on the first rows, as one with fresh weights has them.

    For estimates, which a few nodes more or fewer do not change. signature: None = the file is read for it. Raises the
    errors of `resolve`.
    """
    if not _standardises(config.losses):
        return config
    signature = signature or read_training_signature(config.model)
    config = resolve(config, read_first_rows(config, signature, ROWS), signature)
    return config.model_copy(update=_units(config.losses, ["standardised"] * len(config.losses)))


def choose_output_units(
    config: RunConfig, signature: Signature | None = None
) -> tuple[RunConfig, tuple[str, ...], tuple[str, ...]]:
    """Return the configuration with units fitted on the first rows, the choice of each loss, and what was compared.

    The configuration is unchanged, and both others are (), if no loss standardises its label. signature: None = the
    file is read for it. Raises the errors of
    `resolve` and `open_trainable`.
    """
    if not _standardises(config.losses):
        return config, (), ()
    signature = signature or read_training_signature(config.model)
    rows = read_first_rows(config, signature, max(ROWS, config.micro_batch_size))
    config = resolve(config, rows, signature)
    # without nodes behind the outputs, so that both readings can be made of one pass
    by_labels = config.model_copy(update=_units(config.losses, ["label"] * len(config.losses)))
    module = open_trainable(by_labels).module.eval()
    fixed = config.model.keeps_batch
    # a file of fixed batch runs with that many rows alone
    number = config.micro_batch_size if fixed else min(ROWS, rows.num_rows)
    batch = one_batch(rows, config, signature, np.arange(number), training=False)
    with torch.no_grad():
        given = module(*batch.inputs)
        outputs = batch.own_rows([given] if isinstance(given, Tensor) else list(given))
    losses = Losses(config.losses, module.output_names, module.output_shapes, soft=config.soft_losses)
    chosen = list[str]()
    said = list[str]()
    for place, loss in enumerate(losses.each):
        units = loss.config.label_units
        labels = batch.labels[place]
        if units is None or labels is None or loss.config.output_units != "auto":
            chosen.append(loss.config.output_units)
            continue
        read = loss.output(outputs)
        turned = unstandardised(read, units, axis=label_axis(units, read.shape))
        by_label, by_standard = (
            float(loss(_replaced(outputs, loss.index, values), labels, batch.size) / loss.count(labels, batch.size))
            for values in (read, turned)
        )
        # NaN, as of labels that are all missing, decides nothing
        chosen.append("label" if by_label < by_standard else "standardised")
        said.append(
            f"the output for label {', '.join(loss.config.columns)} is taken as "
            f"{'in its units' if chosen[-1] == 'label' else 'standardised'}: on {batch.size} rows the loss is "
            f"{by_label:.3g} if it is in the label's units, and {by_standard:.3g} if it is standardised"
        )
    return config.model_copy(update=_units(config.losses, chosen)), tuple(chosen), tuple(said)


def _standardises(losses: Sequence[LossConfig]) -> bool:
    return any(loss.standardise_label != "none" for loss in losses)


def _units(losses: Sequence[LossConfig], chosen: Sequence[str]) -> dict[str, tuple[LossConfig, ...]]:
    """Return what changes of a configuration: its losses, filled in, with choices in place of "auto"."""
    chosen_losses = (
        loss.model_copy(update={"output_units": units}) if loss.output_units == "auto" else loss
        for loss, units in zip(losses, chosen, strict=True)
    )
    return {"loss": tuple(chosen_losses)}


def _replaced(outputs: Sequence[Tensor], place: int, values: Tensor) -> list[Tensor]:
    return [values if number == place else each for number, each in enumerate(outputs)]
