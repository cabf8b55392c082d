"""Train a few steps in this process, on the first rows: as a proof that a configuration works, or to find a rate.

A step is one micro-batch, one backward pass and one update, as in the training loop on one rank. The learning-rate
range test (Smith 2017, "Cyclical Learning Rates for Training Neural Networks") raises the rate geometrically:

    loss |-------.                         .
         |         `-.                   .
         |             `-.            .'
         |                `-.__.---.-'
         +-------------|--------|--------- rate (logarithmic)
                    chosen    least smoothed loss: a tenth of its rate is chosen
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.text import PACKED
from onward.trainer.data.batches.batches import Batch, one_batch
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.permutation import permutation
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.distributed.arithmetic import resolve_precision
from onward.trainer.errors import ConfigError
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.model.first_output_units import choose_output_units
from onward.trainer.model.layer_scales import layer_scales
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.precision import autocast
from onward.trainer.model.trainable import TrainableModel, open_trainable, open_with_teacher
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.optim.optimizers import build_optimizer, clip_factor, set_learning_rate
from onward.trainer.optim.schedules import learning_rate
from onward.trainer.rehearsal.checks import checks
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from onward.trainer.run.records import Record

CPU = torch.device("cpu")
LEAST_RATE = 1e-6
GREATEST_RATE = 1.0
RANGE_STEPS = 60
PROOF_S = 60.0
"""After so many seconds no other step of a proof begins."""
SMOOTHING = 0.8
"""Share of the smoothed loss that is kept in a step of the range test."""
TOO_HIGH = 4.0
"""The range test ends when the smoothed loss is so many times the least one."""
BELOW_THE_LEAST = 10.0


class Proof(Record):
    """What a short training on the first rows did."""

    steps: int
    rows: int
    """Rows in a step."""
    loss_before: float
    """Mean loss of the first step's rows in training mode, before the first update, and after the last one."""
    loss_after: float
    parity: float
    """Difference of the imported file from onnxruntime, relative to the largest output; NaN if not compared."""
    elapsed_s: float

    @property
    def has_not_moved(self) -> bool:
        """Whether the loss has fallen by less than a hundredth: these steps have learned nothing to speak of."""
        return 0 <= self.loss_before - self.loss_after < 0.01 * abs(self.loss_before)

    @property
    def summary(self) -> str:
        """Return the result in words."""
        return (
            f"{self.steps} steps of {self.rows} rows in {self.elapsed_s:.1f} s: loss {self.loss_before:.4g} -> "
            f"{self.loss_after:.4g}"
        )


class RangeTest(Record):
    """Losses over a rate that rises from step to step."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    chosen: float

    @property
    def summary(self) -> str:
        """Return the result in words."""
        return (
            f"range test: {len(self.rates)} steps from {self.rates[0]:.0e} to {self.rates[-1]:.2g}, loss least near "
            f"{self.chosen * BELOW_THE_LEAST:.2g}; a tenth of it"
        )


def prove(config: RunConfig, steps: int) -> Proof:
    """Rehearse a configuration as a run does, and train `steps` steps on its first rows, for PROOF_S at most.

    Raises the errors of a run: ConfigError with all that is wrong, DataError, UnsupportedModel.
    """
    started_at = time.monotonic()
    config, use = choose_fixed_batch(completed(config))
    config, *_ = choose_output_units(config)
    trainable = open_trainable(config)
    trained = _trained_module(config, trainable)
    findings = Findings(fixed_batch=config.model.fixed_batch)
    # the checks of a rehearsal first: they say what is wrong where a step would only fail
    for _, check in checks(config, trainable, use, findings, with_teacher=trained):
        check()
    rehearsed = findings.record(elapsed_s=0.0)
    training = _Training(config, trained, steps)
    # the same rows before and after all steps: losses of different rows could not be compared
    before = training.first_loss()
    rate_of = partial(learning_rate, optimizer=config.optimizer, schedule=config.schedule, num_steps=steps)
    ends_at = time.monotonic() + PROOF_S
    losses: list[float] = []
    while len(losses) < steps and (not losses or time.monotonic() < ends_at):
        losses.append(training.step(rate_of(len(losses) + 1)))
    after = training.first_loss()
    if not all(map(math.isfinite, (*losses, after))):
        raise ConfigError(
            f"after {len(losses)} steps at learning rate {config.optimizer.learning_rate:g} the loss is {after:g}; "
            "lower optimizer.learning_rate (`onward init --range-test` finds one), or look at the data"
        )
    return Proof(
        steps=len(losses),
        rows=config.micro_batch_size,
        loss_before=before,
        loss_after=after,
        parity=rehearsed.parity,
        elapsed_s=time.monotonic() - started_at,
    )


def find_rate(config: RunConfig) -> RangeTest:
    """Return the learning rate that a range test of `RANGE_STEPS` steps chooses. Raises the errors of `prove`."""
    config, _ = choose_fixed_batch(completed(config))
    config, *_ = choose_output_units(config)
    training = _Training(config, _trained_module(config, open_trainable(config)), RANGE_STEPS)
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    mean = 0.0
    for rate in np.geomspace(LEAST_RATE, GREATEST_RATE, RANGE_STEPS).tolist():
        loss = training.step(rate)
        if not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        rates.append(rate)
        losses.append(loss)
        # the mean starts at 0: without this correction, as Adam has it, the first values would be too small
        smoothed.append(mean / (1 - SMOOTHING ** len(rates)))
        if smoothed[-1] > TOO_HIGH * min(smoothed):
            break
    if not rates:
        raise ConfigError(f"the loss of the first step is not finite at learning rate {LEAST_RATE:g}; look at the data")
    # at the least loss the rate is about to become too high, hence a tenth of it
    least = rates[int(np.argmin(smoothed))]
    return RangeTest(rates=tuple(rates), losses=tuple(losses), chosen=float(f"{least / BELOW_THE_LEAST:.1g}"))


def _trained_module(config: RunConfig, trainable: TrainableModel) -> ImportedGraph:
    """Return the module that is trained, with a teacher beside it if there is one."""
    return open_with_teacher(config).module if config.teacher.path else trainable.module


class _Training:
    """Steps on the first rows, in a random order."""

    def __init__(self, config: RunConfig, module: ImportedGraph, steps: int) -> None:
        signature = read_training_signature(config.model)
        size = config.micro_batch_size
        is_packed = config.data.text is not None and config.data.text.task in PACKED
        rows = read_first_rows(config, signature, steps * size, spread=not is_packed)
        config = resolve(config, rows, signature)
        arithmetic = resolve_precision(config.precision, (0, 0))
        losses = Losses(config.losses, module.output_names, module.output_shapes, soft=config.soft_losses)
        self._graph = RehearsedGraph(module, losses, autocast=partial(autocast, arithmetic, CPU))
        weights = named_weights(module)
        self._trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        scales = layer_scales(module, config.optimizer.layer_decay)
        self._optimizer = build_optimizer(config.optimizer, self._trained.items(), layer_scales=scales)
        self._config = config
        self._number = 0

        def batch(number: int) -> Batch:
            positions = np.arange(number * size, (number + 1) * size)
            # a few rows are read again and again: the positions begin anew at the end
            numbers = permutation(positions % rows.num_rows, rows.num_rows, seed=config.train.seed, epoch="proof")
            return one_batch(rows, config, signature, numbers, training=True)

        self._batch: Callable[[int], Batch] = batch

    def first_loss(self) -> float:
        """Return the loss of the first step's rows with the weights as they are now."""
        return self._loss(0)

    def step(self, rate: float) -> float:
        """Update the weights once at a learning rate; return the loss of the step's rows before it."""
        loss = self._loss(self._number)
        self._number += 1
        with torch.no_grad():
            # a weight that this batch did not reach has a gradient of 0, as in a run
            for weight in self._trained.values():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients = list(_gradients(self._trained.values()))
            norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
            norm = float(torch.linalg.vector_norm(norms))
            factor = clip_factor(norm, self._config.train.clip_norm)
            for gradient in gradients:
                gradient.mul_(factor)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        return loss

    def _loss(self, number: int) -> float:
        torch.manual_seed(self._config.train.seed)  # of dropout
        return self._graph.run("training", self._batch(number)).loss


def _gradients(weights: object) -> Iterator[torch.Tensor]:
    for weight in weights:  # type: ignore[attr-defined]
        if weight.grad is not None:
            yield weight.grad
