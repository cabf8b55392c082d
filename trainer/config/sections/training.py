"""The settings of the updates: [train], [precision], [optimizer], [schedule] and [average]."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from onward.trainer.config.section import Decay, Fraction, Section
from onward.trainer.config.update_rules import UPDATE_RULES, OptimizerName


class TrainConfig(Section):
    """How long to train, with which batch size, and how often to evaluate and log."""

    global_batch_size: PositiveInt = 32
    """Samples in one step (one weight update), over all replicas and micro-batches."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches that one replica runs in one step. More of them need less memory and give the same result."""
    num_steps: NonNegativeInt = 0
    """Weight updates to make; 0 = as many as `num_epochs` takes."""
    num_epochs: NonNegativeFloat = 0.0
    """Passes over the training data (a fraction is allowed); 0 = `num_steps` decides."""
    shuffle: bool = True
    """Shuffle the samples anew in each epoch; false = the order of the data."""
    seed: NonNegativeInt = 0
    """Seed of the sample order and of the dropout masks. Both are functions of the seed and the step alone."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global L2 norm of the gradients; a larger one is scaled down to it. 0 = no clipping."""
    evaluation_period: NonNegativeInt = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    evaluation_batch_size: NonNegativeInt = 0
    """Samples one replica evaluates at a time; 0 = the size of a micro-batch."""
    log_period: PositiveInt = 1
    """Steps between two lines of metrics in the event log."""
    deterministic: bool = False
    """On GPUs use deterministic algorithms only, which may be slower: a resumed run then has the bits of one that was
    never interrupted. An operator that has none is refused by name. On CPUs that holds without it."""


class PrecisionConfig(Section):
    """The arithmetic of the forward and backward passes. Weights and optimizer state are always fp32."""

    compute: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """The type of the matrix products and convolutions. `tf32` is fp32 with TF32 products on GPUs that have them, from
    compute capability 8.0 on, and fp32 elsewhere. `auto` = bf16 on such GPUs, fp32 elsewhere. The slowest GPU of a job
    decides for all."""
    loss_scale: NonNegativeFloat = 0.0
    """fp16 only: a static loss scale; 0 = dynamic."""
    initial_scale: PositiveFloat = 65536.0
    """Dynamic loss scale: its first value."""
    growth_interval: PositiveInt = 2000
    """Dynamic loss scale: steps without overflow after which it doubles. An overflow halves it and skips the step."""
    max_scale: PositiveFloat = 16777216.0
    """Dynamic loss scale: its largest value; the smallest is 1."""


class WeightAttributes(Section):
    """Optimizer settings for the weights whose names match a pattern; those of another update rule are refused."""

    pattern: str
    """Glob pattern of initializer names. Where several entries match, the last one decides, setting by setting."""
    learning_rate_scale: NonNegativeFloat | None = None
    """Multiplies the learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Replaces `optimizer.weight_decay`."""
    alpha: Decay | None = None
    """Replaces `optimizer.alpha`."""
    beta: Decay | None = None
    """Replaces `optimizer.beta`."""
    epsilon: NonNegativeFloat | None = None
    """Replaces `optimizer.epsilon`."""
    bias_correction: bool | None = None
    """Replaces `optimizer.bias_correction`."""
    ratio_min: NonNegativeFloat | None = None
    """Replaces `optimizer.ratio_min`."""
    ratio_max: PositiveFloat | None = None
    """Replaces `optimizer.ratio_max`."""
    momentum: Decay | None = None
    """Replaces `optimizer.momentum`."""


class OptimizerConfig(Section):
    """The update rule. Formulas: the docstrings of trainer/optim/rules/."""

    name: OptimizerName = "adamw"
    """Adam (see `weight_decay_mode`), AdamW, LAMB, SGD with momentum, NAdam, RAdam, RMSprop, Adagrad, or Lion."""
    learning_rate: PositiveFloat = 1e-3
    """The learning rate that the learning-rate schedule scales. Usual: Lion 1e-4, a tenth of Adam's; NAdam 2e-3;
    RMSprop and Adagrad 1e-2. `onward run` warns where a rule needs another order of magnitude."""
    alpha: Decay = 0.9
    """Decay of the first moment (beta1)."""
    beta: Decay = 0.999
    """Decay of the second moment (beta2); in Lion that of its only moment. Lion and RMSprop: 0.99 where it is not
    given."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the square root of the second moment. Adagrad: 1e-10 where it is not given."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: added to the gradient in SGD, RMSprop and Adagrad, decoupled in all others."""
    weight_decay_mode: Literal["pytorch", "huggingface"] = "pytorch"
    """Adam only: apply the decay with the update (`pytorch`; ONNX Runtime's mode 0) or after it (`huggingface`; mode
    1)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """The type that stores the moments; not for SGD and Adagrad. bf16 halves their memory; values are rounded
    stochastically."""
    bias_correction: bool = True
    """Adam, AdamW and LAMB only: divide the moments by 1 - alpha^t and 1 - beta^t."""
    ratio_min: NonNegativeFloat = 0.0
    """LAMB only: smallest trust ratio."""
    ratio_max: PositiveFloat = 1e30
    """LAMB only: largest trust ratio."""
    momentum: Decay = 0.0
    """SGD only: the share of the velocity that is kept from the step before."""
    nesterov: bool = False
    """SGD only: Nesterov momentum."""
    no_decay: tuple[str, ...] = ("*bias*", "*gamma*", "*beta*", "*LayerNorm*")
    """Glob patterns of weights without weight decay (the rule of ONNX Runtime's trainer)."""
    weights: tuple[WeightAttributes, ...] = ()
    """Settings for single weights by name pattern; they take precedence over the settings above."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_defaults_of_the_rule(cls, values: Any) -> Any:
        rule = UPDATE_RULES.get(str(values.get("name"))) if isinstance(values, dict) else None
        return {**rule.defaults, **values} if rule else values


class ScheduleConfig(Section):
    """The learning rate as a function of the step. Tables: tests/trainer/optim/test_optimizers.py."""

    mode: Literal["none", "constant", "cosine", "linear", "poly"] = "none"
    """How the learning rate falls after warm-up; `none` is constant without warm-up."""
    warmup_ratio: Fraction = 0.0
    """The share of all steps in which the learning rate grows linearly from 0."""
    shape: Literal["continuous", "compatible"] = "continuous"
    """`continuous` falls from the rate that warm-up reached; `compatible` gives the numbers of ONNX Runtime's trainer,
    which jump at the end of warm-up in `cosine` and `poly`."""
    floor: Fraction = 0.0
    """Continuous only: the share of the learning rate that is left at the last step."""


class AverageConfig(Section):
    """A moving average of the weights: kept beside them, evaluated, saved, and exported where that is set."""

    kind: Literal["none", "ema", "swa"] = "none"
    """`ema`: an exponential moving average. `swa`: the mean of the weights of many steps (stochastic weight
    averaging)."""
    decay: Decay = 0.999
    """EMA only: the share of the average that is kept in each step."""
    warmup: bool = False
    """EMA only: keep at most (1 + t) / (10 + t) of it at its update t, so that early weights are forgotten soon."""
    start: NonNegativeFloat | None = None
    """The first step whose weights enter the average; below 1 a share of all steps. Until then the average is the
    weights. Not set = 0 for EMA and 0.75 for SWA."""
    period: PositiveInt = 1
    """SWA only: steps from one that enters the mean to the next."""
    begin_anew: bool = False
    """Continue from a checkpoint without this average: it begins as the checkpoint's weights. Else that is refused."""

    def first_step(self, num_steps: int) -> int:
        """Return the first step whose weights enter the average, in a training of `num_steps` steps."""
        start = self.start if self.start is not None else {"none": 0.0, "ema": 0.0, "swa": 0.75}[self.kind]
        return max(1, math.ceil(start * num_steps) if start < 1.0 else math.ceil(start))
