"""The settings of the updates: [train], [precision], [optimizer], [schedule] and [average]."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from onward.trainer.config.section import (
    COMMON,
    Decay,
    Fraction,
    Length,
    LengthOrZero,
    NonNegativeInt,
    PositiveInt,
    Section,
    plain_word,
)
from onward.trainer.config.update_rules import UPDATE_RULES, OptimizerName


def _ordered(limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] > limits[1]:
        raise ValueError(f"the first of {list(limits)} is the least, and must not be above the second")
    return limits


Limits = Annotated[tuple[NonNegativeFloat, PositiveFloat], AfterValidator(_ordered)]
"""The least and the greatest value of a number."""


class TrainConfig(Section):
    """How long to train, with which batch size, and how often to evaluate and log."""

    global_batch_size: Annotated[Length, COMMON] = 32
    """Samples in one step (one weight update), over all replicas and micro-batches."""
    gradient_accumulation_steps: Length = 1
    """Micro-batches that one replica runs in one step. More of them need less memory and give the same result."""
    num_steps: Annotated[NonNegativeInt, COMMON] = 0
    """Weight updates to make; 0 = as many as `num_epochs` takes."""
    num_epochs: Annotated[NonNegativeFloat, COMMON] = 0.0
    """Passes over the training data (a fraction is allowed); 0 = `num_steps` decides."""
    shuffle: bool | Literal["length", "blocks", "files"] = True
    """Shuffle the samples anew in each epoch; false = the order of the data. `length` = shuffle them so that the
    samples of a step have similar lengths: micro-batches need little padding, and replicas have equal work. Each sample
    is still taken once per epoch, at a place that depends on the seed alone. `blocks` = for data that is larger than
    the memory: shuffle blocks of about 1 MB, and the rows of 256 blocks together, so that an epoch reads the shards
    about once. `files` = for shards at a URL that are larger than the disk: shuffle whole shard files, and the rows of
    16 files together, so that an epoch fetches each file once."""
    seed: NonNegativeInt = 0
    """Seed of the sample order and of the dropout masks. Both are functions of the seed and the step alone."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global L2 norm of the gradients; a larger one is scaled down to it. 0 = no clipping."""
    skip_steps: tuple[PositiveInt, ...] = ()
    """Steps that do not change the weights: their samples are passed over."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What follows when the loss or a gradient is not finite (in fp16: at every loss scale). `stop` = the run ends.
    `skip` = it goes back to its newest checkpoint, and passes over the samples of that step; such a retry counts for
    `launch.retries`."""
    evaluation_period: NonNegativeInt | Literal["epoch"] = "epoch"
    """Steps between evaluations, or "epoch": one after each pass over the training data. 0 = none of these. One is
    always made before the first step and after the last one, where an epoch that ends has none of its own."""
    evaluation_batch_size: LengthOrZero = 0
    """Samples one replica evaluates at a time; 0 = the size of a micro-batch."""
    log_period: PositiveInt = 1
    """Steps between two lines of metrics in the event log."""
    deterministic: bool = False
    """On GPUs use deterministic algorithms only, which may be slower: a resumed run then has the bits of one that was
    never interrupted. An operator that has none is refused by name. On CPUs that holds without it."""

    def micro_batch_rows(self, replicas: int) -> int:
        """Return the samples that one of so many replicas runs through the graph at a time."""
        return self.global_batch_size // (replicas * self.gradient_accumulation_steps)

    def samples_of_run(self, num_rows: int) -> int:
        """Return the samples of the whole run, counted with repetition, for training data of `num_rows` rows."""
        if self.num_steps:
            return self.num_steps * self.global_batch_size
        return round(self.num_epochs * num_rows)

    def steps_of_run(self, num_rows: int) -> int:
        """Return the weight updates of the whole run; with `num_epochs`, the last batch may be smaller than the
        others."""
        return math.ceil(self.samples_of_run(num_rows) / self.global_batch_size)


class PrecisionConfig(Section):
    """The arithmetic of the forward and backward passes. Weights and optimizer state are always fp32."""

    compute: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """The type of the matrix products and convolutions. `tf32` is fp32 with TF32 products on GPUs that have them, from
    compute capability 8.0 on, and fp32 elsewhere. `auto` = bf16 on such GPUs; on CPUs bf16 if the rehearsal measures
    that a micro-batch takes at most 0.9 of its time in fp32, else fp32. The slowest GPU of a job decides for all."""
    loss_scale: NonNegativeFloat | tuple[Literal["dynamic"], Annotated[float, Field(gt=0.0, le=2.0**24)]] = 0.0
    """fp16 only: a static loss scale; 0 = a dynamic one, which begins at 65536, or `["dynamic", 1024]`, one that begins
    at 1024. An overflow halves it, down to 1, and skips the step; 2,000 steps without one double it, up to 2^24."""

    @property
    def static_scale(self) -> float:
        """The loss scale that stays as it is; 0 = it is dynamic."""
        return 0.0 if isinstance(self.loss_scale, tuple) else self.loss_scale

    @property
    def initial_scale(self) -> float:
        """The first value of a dynamic loss scale."""
        return self.loss_scale[1] if isinstance(self.loss_scale, tuple) else 65536.0


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
    trust_ratio: Limits | None = None
    """Replaces `optimizer.trust_ratio`."""
    momentum: Decay | None = None
    """Replaces `optimizer.momentum`."""
    rule: Literal["muon", "adamw"] | None = None
    """Muon only: which of the two updates the weight. By default Muon takes the matrices that nothing but matrix
    products of hidden layers read; AdamW takes embeddings, the layers before the outputs, and all that is no matrix.
    Kernels that are given to Muon are matrices [out, in x height x width]."""


class MuonConfig(Section):
    """Settings of Muon, which updates the matrices of hidden layers; AdamW updates all other weights."""

    adamw_learning_rate: PositiveFloat = 3e-4
    """The learning rate of the weights that AdamW updates; the schedule scales it as it does `optimizer.learning_rate`.
    """
    scale: Literal["original", "match_rms_adamw"] = "original"
    """The step of a matrix [out, in] is multiplied by sqrt(max(1, out / in)), or by 0.2 sqrt(max(out, in)): with
    `match_rms_adamw`, learning rate and weight decay are those of AdamW."""
    arithmetic: Literal["fp32", "bf16"] = "fp32"
    """The type of the Newton-Schulz products. `bf16` is that of torch.optim.Muon, faster on GPUs; results of different
    layouts then differ by its rounding."""


class OptimizerConfig(Section):
    """The update rule. Formulas: the docstrings of trainer/optim/rules/."""

    name: Annotated[OptimizerName, COMMON] = "adamw"
    """Adam (see `weight_decay_mode`), AdamW, LAMB, SGD with momentum, NAdam, RAdam, RMSprop, Adagrad, Lion,
    Adafactor, or Muon for matrices with AdamW for the rest."""
    learning_rate: Annotated[PositiveFloat, COMMON] = 1e-3
    """The learning rate that the learning-rate schedule scales. Usual: Lion 1e-4, a tenth of Adam's; NAdam 2e-3;
    RMSprop, Adagrad and Adafactor 1e-2; Muon 0.02. `onward run` warns where a rule needs another order of magnitude."""
    alpha: Decay = 0.9
    """Decay of the first moment (beta1)."""
    beta: Decay = 0.999
    """Decay of the second moment (beta2); in Lion that of its only moment. Lion and RMSprop: 0.99 where it is not
    given."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the square root of the second moment. Adagrad: 1e-10, Adafactor: 2^-23 where it is not given."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: added to the gradient in SGD, RMSprop and Adagrad, decoupled in all others."""
    weight_decay_mode: Literal["pytorch", "huggingface"] = "pytorch"
    """Adam only: apply the decay with the update (`pytorch`; ONNX Runtime's mode 0) or after it (`huggingface`; mode
    1)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """The type that stores the moments; not for SGD, Adagrad, Adafactor and Muon. bf16 halves their memory; values are
    rounded stochastically."""
    bias_correction: bool = True
    """Adam, AdamW (of Muon too) and LAMB only: divide the moments by 1 - alpha^t and 1 - beta^t."""
    trust_ratio: Limits = (0.0, 1e30)
    """LAMB only: smallest and largest trust ratio."""
    momentum: Decay = 0.0
    """SGD and Muon only: the share of the velocity that is kept from the step before. Muon: 0.95 where it is not given.
    """
    nesterov: bool = False
    """SGD and Muon only: Nesterov momentum. Muon: true where it is not given."""
    muon: MuonConfig = MuonConfig()
    """Muon only: `[optimizer.muon]`."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The factor on the learning rate from one layer of the graph to the one before it, from the outputs backwards;
    0.75 is usual for fine-tuning. `learning_rate_scale` of `optimizer.weights` multiplies it. `onward plan` prints the
    layer and the rate of each weight."""
    no_decay: tuple[str, ...] = ("*bias*", "*gamma*", "*beta*", "*LayerNorm*")
    """Glob patterns of weights without weight decay (the rule of ONNX Runtime's trainer)."""
    weights: tuple[WeightAttributes, ...] = ()
    """Settings for single weights by name pattern; they take precedence over the settings above."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_defaults_of_the_rule(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        # the name may be written in any case here: fields are validated later
        rule = UPDATE_RULES.get(plain_word(name)) if isinstance(name, str) else None
        return {**rule.defaults, **values} if rule else values


class ScheduleConfig(Section):
    """The learning rate as a function of the step. Tables: tests/trainer/optim/test_optimizers.py."""

    mode: Literal[
        "none", "constant", "cosine", "linear", "poly", "cosine_compatible", "linear_compatible", "poly_compatible"
    ] = "none"
    """How the learning rate falls after warm-up, from the rate that warm-up reached; `none` is constant without
    warm-up. The modes that are compatible give the numbers of ONNX Runtime's trainer, which jump at the end of warm-up
    with cosine and poly."""
    warmup_ratio: Fraction = 0.0
    """The share of all steps in which the learning rate grows linearly from 0."""
    floor: Fraction = 0.0
    """The share of the learning rate that is left at the last step; not for compatible modes."""

    @property
    def is_compatible(self) -> bool:
        """Whether the rates are those of ONNX Runtime's trainer."""
        return self.mode.endswith("_compatible")


class AverageConfig(Section):
    """A moving average of the weights: kept beside them, evaluated, saved, and exported where that is set."""

    kind: Literal["none", "ema", "ema_warmup", "swa"] = "none"
    """`ema`: an exponential moving average; `ema_warmup`: the same, of which its update t keeps at most (1 + t) /
    (10 + t), so that early weights are forgotten soon. `swa`: the mean of the weights of many steps (stochastic weight
    averaging). From a checkpoint without this average it begins as the checkpoint's weights."""
    decay: Decay = 0.999
    """EMA only: the share of the average that is kept in each step."""
    start: NonNegativeFloat | None = None
    """The first step whose weights enter the average; below 1 a share of all steps. Until then the average is the
    weights. Not set = 0 for EMA and 0.75 for SWA."""
    period: PositiveInt = 1
    """SWA only: steps from one that enters the mean to the next."""

    @property
    def saved_kind(self) -> Literal["none", "ema", "swa"]:
        """How checkpoints name the average: of an EMA with and without warm-up alike."""
        return "ema" if self.kind == "ema_warmup" else self.kind

    def first_step(self, num_steps: int) -> int:
        """Return the first step whose weights enter the average, in a training of `num_steps` steps."""
        # SWA averages what follows the descent, EMA forgets the beginning by itself
        start = self.start if self.start is not None else 0.75 if self.kind == "swa" else 0.0
        return max(1, math.ceil(start * num_steps) if start < 1.0 else math.ceil(start))
