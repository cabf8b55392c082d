"""RunConfig: every choice of a run, read from TOML, validated once, frozen, saved as JSON.

Defaults < file < command line. `load_config` reports everything wrong at once: unknown keys, bad
values, and every law between sections whose sections could be read. The docstring under a field is
its `--help`, its text in the Prefect form and its line in the README's table.

This module imports neither torch nor mpi4py: the flow starts fast, and where there is no GPU stack.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from onward.trainer.errors import ConfigError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A group of settings: frozen, closed to unknown keys, documented field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The ONNX file to train and the loss that is put on it."""

    path: Path
    """The ONNX file to train. Relative to the config file; on the command line, to the working directory."""
    loss: Literal["cross_entropy", "mse", "l1", "bce_with_logits", "output"] = "cross_entropy"
    """Cross-entropy (classes on the last axis), mean squared or absolute error, binary cross-entropy on
    logits, or `output`: the graph computes its own scalar loss."""
    output: str = ""
    """What the loss reads (or is): a graph output, or any tensor inside the graph; empty = the first output."""
    start: tuple[str, ...] = ()
    """Tensors inside the graph to begin from: they become the inputs, fed from the data's columns of their names,
    and what comes before them is neither computed nor trained; empty = the graph's own inputs."""
    num_classes: NonNegativeInt = 0
    """Replace the head: its last layer gets this many outputs, newly initialised; 0 = keep it."""
    head: str = ""
    """The weight of the layer to replace; empty = the last one before the output."""
    untie: tuple[str, ...] = ()
    """Glob patterns of initializers that several nodes share and should not (exporters merge equal ones): each
    node gets a copy of its own, which the written file keeps."""
    tie: bool = True
    """Train the copies that an exporter made of one weight (a second, transposed embedding) as that one weight."""
    ignore_index: int = -100
    """Labels with this value do not count, neither in the loss nor in its average (cross-entropy only)."""
    train: tuple[str, ...] = ("*",)
    """Glob patterns of the initializers to train; what no pattern matches stays frozen."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of the initializers to freeze; stronger than `train`."""
    converters: tuple[Path, ...] = ()
    """Python files that teach Onward operators it does not know, through `onnx2torch.add_converter`, and (as
    onnx.reference.op_run.OpRun) onnx.reference those that onnxruntime does not know. Relative to the config
    file; on the command line, to the working directory."""


class GraphConfig(Section):
    """How the imported graph is computed; the file that comes out does not depend on it."""

    fuse: bool = True
    """Rewrite attention, normalisation, GELU and linear layers into torch's fused kernels; false = node by node."""
    compile: bool = False
    """Compile the graph with torch.compile."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Of images inside the graph; `auto` = channels_last for convolution graphs on a GPU."""
    dropout: Decay = 0.0
    """A regulariser where exporters strip dropout: on embeddings, residual branches and attention weights of the
    fused graph. The written file never contains it."""


class LoraConfig(Section):
    """Low-rank adapters: W + (alpha / rank) B A, of which only A and B are trained; merged into W at export."""

    weights: tuple[str, ...] = ()
    """Glob patterns of the MatMul, Gemm and Conv weights that get an adapter; empty = no adapters."""
    rank: PositiveInt = 8
    """Rows of A, columns of B."""
    alpha: PositiveFloat = 16.0
    """The adapters' scale is alpha / rank."""
    dropout: Decay = 0.0
    """Dropout of the adapters' input."""
    also_train: tuple[str, ...] = ()
    """Glob patterns of weights trained whole beside the adapters, such as a new head; all others are frozen."""


class DataConfig(Section):
    """Where samples come from, and which column feeds which input of the model."""

    source: str
    """A file, a directory or a glob; or `digits` (scikit-learn's 1,797 images), or `stdlib` (the text of
    Python's standard library). Relative to the config file; on the command line, to the working directory."""
    format: Literal["auto", "csv", "parquet", "jsonl", "npz", "text", "digits", "arrow", "pb"] = "auto"
    """The format of the source; `auto` goes by its name. `arrow` and `pb` are Onward's and the
    predecessor's own shards."""
    evaluation_source: str = ""
    """Samples to evaluate on; empty = set aside `evaluation_fraction` of the source."""
    evaluation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """The share of rows (of files, for text) set aside for evaluation; which ones depends on the row's
    place in its file (or on the file's name) alone, so appended rows move none to the other side."""
    inputs: dict[str, str | tuple[str, ...]] = {}
    """Graph input -> its column, or several columns stacked into one vector. Inputs not named here read
    the column of their own name."""
    label: str | tuple[str, ...] = "label"
    """The column (or columns) the loss compares with; unused when the loss is a graph output."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What a row that cannot be read does: stop with file and line, or be left out and counted."""
    shard_format: Literal["arrow", "pb"] = "arrow"
    """The format of the shards: Arrow IPC, or the predecessor's length-prefixed TensorProtos."""
    rows_per_shard: PositiveInt = 65536
    """Rows in one shard file; memory while sharding is a small multiple of one shard's chunk."""
    pad_values: dict[str, float] = {}
    """Column -> value that fills its short rows when a variable-length column is made a batch (0 if not
    named here; for labels, `model.ignore_index`)."""
    image_size: PositiveInt = 32
    """Digits only: side in pixels the 8x8 images are resized to."""
    image_channels: PositiveInt = 3
    """Digits only: the grey image is repeated this many times."""
    sequence_length: PositiveInt = 128
    """Text only: bytes in one sample; the label of each byte is the byte that follows it."""
    text_files: str = "*.py"
    """Text only: which files of the directory are read."""


class TrainConfig(Section):
    """How long to train, on how much at a time, and when to look."""

    global_batch_size: PositiveInt = 32
    """Samples in one step (one weight update), over all replicas and micro-batches."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches one replica runs in one step; saves memory, changes nothing else."""
    num_steps: NonNegativeInt = 0
    """Weight updates to make; 0 = as many as `num_epochs` takes."""
    num_epochs: NonNegativeFloat = 0.0
    """Passes over the training data (a fraction is allowed); 0 = `num_steps` decides."""
    shuffle: bool = True
    """Draw each epoch's samples in an order of its own; false = the order of the shards."""
    seed: NonNegativeInt = 0
    """Decides the sample order and the dropout masks; together with the step and nothing else."""
    clip_norm: NonNegativeFloat = 1.0
    """The global L2 norm gradients are clipped to; 0 = no clipping."""
    evaluation_period: NonNegativeInt = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    evaluation_batch_size: NonNegativeInt = 0
    """Samples one replica evaluates at a time; 0 = the size of a micro-batch."""
    log_period: PositiveInt = 1
    """Steps between two lines of metrics in the event log."""


class PrecisionConfig(Section):
    """The arithmetic of forward and backward. Weights and optimizer state are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type of the matrix products and convolutions."""
    loss_scale: NonNegativeFloat = 0.0
    """fp16 only: a static loss scale; 0 = dynamic."""
    initial_scale: PositiveFloat = 65536.0
    """Dynamic scale: where it starts."""
    growth_interval: PositiveInt = 2000
    """Dynamic scale: finite steps after which it doubles; an overflow halves it and skips the step."""
    max_scale: PositiveFloat = 16777216.0
    """Dynamic scale: what it never exceeds; its floor is 1."""


class WeightAttributes(Section):
    """Settings of their own for the weights whose names match."""

    pattern: str
    """Glob pattern over initializer names; of several that match, the last one counts for each setting."""
    learning_rate_scale: Annotated[float, Field(ge=0.0)] | None = None
    """Multiplies the learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """Replaces `optimizer.weight_decay`."""


class OptimizerConfig(Section):
    """The update rule. Formulas: the docstrings of trainer/optim/optimizers.py."""

    name: Literal["adam", "adamw", "lamb", "sgd"] = "adamw"
    """Adam (see `weight_decay_mode`), AdamW, LAMB, or SGD with momentum."""
    learning_rate: PositiveFloat = 1e-3
    """The rate that the schedule's factor multiplies."""
    alpha: Decay = 0.9
    """Decay of the first moment (beta1)."""
    beta: Decay = 0.999
    """Decay of the second moment (beta2)."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Lambda; decoupled in Adam, AdamW and LAMB, added to the gradient in SGD."""
    weight_decay_mode: Literal["pytorch", "huggingface"] = "pytorch"
    """Adam only: decay together with the update (the predecessor's mode 0) or after it (mode 1)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Adam and LAMB only: the type the moments are kept in; bf16 halves them, rounded stochastically."""
    bias_correction: bool = True
    """Adam and LAMB only: divide the moments by 1 - alpha^t and 1 - beta^t."""
    ratio_min: NonNegativeFloat = 0.0
    """LAMB only: least trust ratio."""
    ratio_max: PositiveFloat = 1e30
    """LAMB only: greatest trust ratio."""
    momentum: Decay = 0.0
    """SGD only: velocity kept from the step before."""
    nesterov: bool = False
    """SGD only: look ahead along the velocity."""
    no_decay: tuple[str, ...] = ("*bias*", "*gamma*", "*beta*", "*LayerNorm*")
    """Glob patterns of weights that never decay (the predecessor's rule)."""
    weights: tuple[WeightAttributes, ...] = ()
    """Attributes by name pattern, stronger than the settings above."""


class ScheduleConfig(Section):
    """The learning rate as a function of the step. Tables: tests/trainer/optim/test_optimizers.py."""

    mode: Literal["none", "constant", "cosine", "linear", "poly"] = "none"
    """The shape after warm-up; `none` is 1 always, without warm-up."""
    warmup_ratio: Fraction = 0.0
    """The share of all steps over which the rate grows linearly from 0."""
    shape: Literal["continuous", "compatible"] = "continuous"
    """`continuous` starts its descent where warm-up ends; `compatible` gives the predecessor's numbers,
    which jump there in cosine and poly."""
    floor: Fraction = 0.0
    """Continuous only: the share of the rate that remains at the end."""


class ParallelConfig(Section):
    """How the ranks divide the work: data x tensor x pipeline = ranks. `parallel = "auto"` chooses the sizes."""

    sizes: Literal["given", "auto"] = "given"
    """`auto` = choose data, tensor, pipeline, zero, recomputation and micro-batches for `launch.num_ranks` ranks
    and `memory_gib`; `parallel = "auto"` is short for it."""
    data: PositiveInt = 1
    """Replicas of the model, each with its share of every batch."""
    tensor: PositiveInt = 1
    """Ranks that divide each layer among them (tensor parallelism), wherever the graph allows."""
    pipeline: PositiveInt = 1
    """Ranks that divide the graph into successive stages; micro-batches: `train.gradient_accumulation_steps`."""
    memory_gib: NonNegativeFloat = 0.0
    """What one rank may use: `auto` keeps below it (0 = what is free on its device), and recomputation is of as many
    units as it takes (0 = of all)."""
    vocabulary: bool = True
    """Tensor parallelism: divide embeddings, heads and their cross-entropy by vocabulary."""
    convolutions: Literal["auto", "never", "always"] = "auto"
    """Tensor parallelism: divide pairs of convolutions by channel; `auto` = where it saves more than it sends."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline: the order of forward and backward passes. `zero_bubble` is refused for graphs it would get wrong."""
    stages_per_rank: PositiveInt = 1
    """Pipeline: stages each rank holds; above 1 with `interleaved` and `zero_bubble`."""
    cuts: tuple[str | tuple[str, ...], ...] = ()
    """Pipeline: where the stages end, one entry a cut: the tensors that cross it (for one tensor its name alone,
    the predecessor's `producer-consumer1/consumer2` and `:` included); empty = balanced on arithmetic and bytes."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the replicas divide among them: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights (ZeRO)."""
    shard: NonNegativeInt = 0
    """ZeRO within groups of this many neighbouring replicas, the groups being replicas of each other (hybrid
    sharding); 0 = one group of all."""
    units: NonNegativeInt = 0
    """Units one stage is cut into, for ZeRO and recomputation; 0 = by the graph."""
    reduction: Literal["sum", "adasum"] = "sum"
    """How gradients of replicas become one: their mean over all samples, or Adasum across hosts (ZeRO 0 only)."""
    adasum_ranks: NonNegativeInt = 0
    """Adasum: so many successive ranks sum as one host does; 0 = the ranks of each host, 1 = no ranks at all."""
    transport: Literal["torch", "mpi"] = "torch"
    """Who carries gradients between replicas: torch's backend (NCCL, gloo), or MPI (ZeRO 0 on CPUs)."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """The type gradients are sent in (ZeRO 0 only)."""

    @model_validator(mode="before")
    @classmethod
    def _reads_the_former_name_of_tensor(cls, settings: Any) -> Any:
        """`horizontal` is what `tensor` was called: run directories, deployments and config files may still have it."""
        if not isinstance(settings, Mapping) or "horizontal" not in settings:
            return settings
        if "tensor" in settings:
            raise ValueError("horizontal is the former name of tensor; set one of the two")
        return {"tensor" if key == "horizontal" else key: value for key, value in settings.items()}


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass instead of kept; gradients are the same bits."""

    mode: Literal["none", "whole", "selective"] = "none"
    """What a unit keeps for its backward pass: everything, its inputs alone, or its inputs and matrix products."""
    units: tuple[str, ...] = ()
    """Glob patterns of tensors of the graph: units that compute a match are recomputed; empty = all units, or
    as many as `parallel.memory_gib` needs if that is set."""


class LaunchConfig(Section):
    """How the ranks are started and what is done when they fail."""

    num_ranks: NonNegativeInt = 0
    """Processes mpirun starts; 0 = as many as [parallel] needs."""
    hostfile: str = ""
    """An MPI hostfile; empty = this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = one GPU per rank if the machine has any, else the CPU."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = the machine's cores over its ranks. Part of what makes runs bit-identical."""
    retries: NonNegativeInt = 2
    """Times a job that died is started again from its newest checkpoint."""
    retry_delay_s: NonNegativeFloat = 2.0
    """Pause before a retry."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest a job may take until its first heartbeat."""
    heartbeat_timeout_s: PositiveFloat = 120.0
    """Longest silence of a running job before it is stopped and retried."""
    collective_timeout_s: PositiveFloat = 100.0
    """Longest wait of one rank for the others inside a collective."""
    stop_grace_s: PositiveFloat = 20.0
    """Time a job gets to save and leave when asked to stop, before it is killed."""


class CheckpointConfig(Section):
    """When to save, what to keep, where to start from."""

    period: NonNegativeInt = 0
    """Steps between checkpoints; 0 = only after the last step (and when asked to stop)."""
    keep_newest: PositiveInt = 3
    """Checkpoints kept besides the best."""
    best_metric: str = "evaluation/loss"
    """The metric that decides which checkpoint is the best."""
    best_is: Literal["least", "greatest"] = "least"
    """Whether small or large values of it are good."""
    load: str = ""
    """A checkpoint directory to start from: weights, optimizer and position; empty = the ONNX file's weights."""


class MonitorConfig(Section):
    """What is recorded, and where."""

    experiment: str = "onward"
    """The MLflow experiment."""
    tracking_uri: str = ""
    """The MLflow store; empty = MLFLOW_TRACKING_URI, else Onward's own under its home directory."""
    tensorboard: bool = True
    """Write TensorBoard files beside the event log."""
    histograms: tuple[str, ...] = ()
    """Glob patterns of weights whose values and gradients are recorded as histograms."""
    norms: tuple[str, ...] = ()
    """Glob patterns of weights whose L2 norm and gradient norm are recorded."""
    summary_period: PositiveInt = 100
    """Steps between histograms and norms."""


class ExportConfig(Section):
    """Which weights are written back, and what the file must pass before it is registered."""

    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint's weights are exported."""
    path: str = ""
    """Also copy the exported file here; empty = only the run directory keeps it."""
    tolerance: PositiveFloat = 1e-3
    """Greatest difference of onnxruntime from the trained module, relative to the output's largest value."""
    parity_batches: PositiveInt = 4
    """Evaluation batches on which the two are compared."""
    training: bool = False
    """Also write what trains the model where no torch is: model_with_loss, eval, training and optimizer .onnx."""
    variants: tuple[Literal["optimized", "fp16", "bf16", "int8_dynamic", "int8_static"], ...] = ()
    """Further files for deployment: onnxruntime's graph optimisation, half-precision weights, 8-bit quantization
    (static: calibrated on evaluation data). Each is measured, and has a gate of its own."""
    variant_tolerance: PositiveFloat = 0.02
    """Greatest loss of a variant: of accuracy absolutely, of the evaluation loss relatively if there is no accuracy."""
    register_as: str = ""
    """The name in MLflow's model registry; empty = the run's name."""
    alias: str = "champion"
    """The alias given to the new version; empty = none."""

    @field_validator("register_as")
    @classmethod
    def _is_a_model_name(cls, name: str) -> str:
        if taken := sorted(set(name) & set("/:'\"")):
            raise ValueError(f"the model registry takes no {' '.join(taken)} in a name")
        return name

    @field_validator("alias")
    @classmethod
    def _is_an_alias(cls, alias: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", alias):
            raise ValueError("an alias is made of letters, digits, _ and -")
        if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
            raise ValueError("the model registry keeps `latest` and v1, v2, ... for itself; choose another alias")
        return alias


class RunConfig(Section):
    """One run, whole: what the ranks read, and all they read."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "onward"
    """The run's name in Prefect, MLflow and the run list."""
    model: ModelConfig
    data: DataConfig
    graph: GraphConfig = GraphConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _obeys_the_laws(self) -> RunConfig:
        if problems := broken_laws(dict(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def world_size(self) -> int:
        """Ranks of the job: the product of the parallel sizes."""
        return self.parallel.data * self.parallel.tensor * self.parallel.pipeline

    @property
    def micro_batch_size(self) -> int:
        """Samples one replica runs through the graph at a time."""
        return self.train.global_batch_size // (self.parallel.data * self.train.gradient_accumulation_steps)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples one replica evaluates at a time."""
        return self.train.evaluation_batch_size or self.micro_batch_size

    def total_samples(self, num_rows: int) -> int:
        """Samples the run learns from, given the rows of the training data."""
        if self.train.num_steps:
            return self.train.num_steps * self.train.global_batch_size
        return round(self.train.num_epochs * num_rows)

    def num_steps(self, num_rows: int) -> int:
        """Weight updates of the run; with epochs, the last one may be smaller than a whole batch."""
        return math.ceil(self.total_samples(num_rows) / self.train.global_batch_size)


# -- laws between settings: each reads only the sections it names, and yields its problems

Sections = Mapping[str, Any]


def _world_size(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.sizes == "auto" and not launch.num_ranks:
        yield "parallel = 'auto' divides the work over launch.num_ranks ranks, but that is 0; set how many there are"
    needed = parallel.data * parallel.tensor * parallel.pipeline
    if parallel.sizes == "given" and launch.num_ranks not in (0, needed):
        yield (
            f"data {parallel.data} x tensor {parallel.tensor} x pipeline {parallel.pipeline} needs {needed} "
            f"ranks, but launch.num_ranks is {launch.num_ranks}; change [parallel] or launch.num_ranks (0 = as many as "
            "needed)"
        )


def _pipeline(parallel: ParallelConfig, train: TrainConfig) -> Iterable[str]:
    stages, steps = parallel.pipeline * parallel.stages_per_rank, train.gradient_accumulation_steps
    looped = parallel.schedule in ("interleaved", "zero_bubble")
    if parallel.stages_per_rank > 1 and not looped:
        yield (
            f"parallel.stages_per_rank {parallel.stages_per_rank} needs schedule 'interleaved' or 'zero_bubble', "
            f"not {parallel.schedule!r}"
        )
    if parallel.stages_per_rank > 1 and parallel.pipeline == 1:
        yield f"parallel.stages_per_rank {parallel.stages_per_rank} needs parallel.pipeline above 1"
    if parallel.cuts and len(parallel.cuts) != stages - 1:
        yield f"parallel.cuts has {len(parallel.cuts)} entries, but {stages} stages have {stages - 1} cuts between them"
    if parallel.pipeline > 1 and steps < parallel.pipeline:
        yield (
            f"a pipeline of {parallel.pipeline} ranks needs at least {parallel.pipeline} micro-batches in a step, but "
            f"train.gradient_accumulation_steps is {steps}; 4 x {parallel.pipeline} keeps it busy"
        )
    if looped and steps >= parallel.pipeline and steps % max(1, steps // parallel.pipeline):
        yield (
            f"schedule {parallel.schedule!r} needs micro-batches in whole rounds: train.gradient_accumulation_steps "
            f"{steps} is no multiple of {steps // parallel.pipeline}; take a multiple of {parallel.pipeline}"
        )


def _replicas(parallel: ParallelConfig) -> Iterable[str]:
    if parallel.zero:
        for name, value, default in (
            ("reduction", parallel.reduction, "sum"),
            ("transport", parallel.transport, "torch"),
            ("compression", parallel.compression, "none"),
        ):
            if value != default:
                yield f"parallel.{name} {value!r} needs parallel.zero 0, not {parallel.zero}"
    elif parallel.shard:
        yield f"parallel.shard {parallel.shard} needs parallel.zero 1, 2 or 3: ZeRO 0 divides nothing"
    if parallel.adasum_ranks and parallel.reduction != "adasum":
        yield f"parallel.adasum_ranks {parallel.adasum_ranks} needs parallel.reduction 'adasum'"
    if parallel.shard and parallel.data % parallel.shard:
        yield f"parallel.shard {parallel.shard} does not divide parallel.data {parallel.data} into whole groups"


def _zero_bubble(parallel: ParallelConfig, graph: GraphConfig) -> Iterable[str]:
    obstacles = [f"parallel.zero {parallel.zero}"] if parallel.zero else []
    obstacles += ["graph.compile"] if graph.compile else []
    if parallel.schedule == "zero_bubble" and obstacles:
        yield (
            "parallel.schedule 'zero_bubble' takes backward passes apart and does not go with "
            f"{' and '.join(obstacles)}; use '1f1b'"
        )


def _recomputation(recompute: RecomputeConfig) -> Iterable[str]:
    if recompute.units and recompute.mode == "none":
        yield f"recompute.units {list(recompute.units)} needs recompute.mode 'whole' or 'selective'"


def _device(parallel: ParallelConfig, launch: LaunchConfig) -> Iterable[str]:
    if parallel.transport == "mpi" and launch.device == "cuda":
        yield "parallel.transport 'mpi' carries gradients of CPU ranks; on GPUs use 'torch' (NCCL)"


def _accumulation(train: TrainConfig, parallel: ParallelConfig) -> Iterable[str]:
    share = parallel.data * train.gradient_accumulation_steps
    if train.global_batch_size % share:
        below = train.global_batch_size // share * share
        near = [size for size in (below, below + share) if size]
        yield (
            f"train.global_batch_size {train.global_batch_size} does not divide over {parallel.data} replicas x "
            f"{train.gradient_accumulation_steps} micro-batches = {share}; the nearest that do: "
            + " and ".join(map(str, near))
        )


def _length(train: TrainConfig) -> Iterable[str]:
    if bool(train.num_steps) == bool(train.num_epochs):
        yield (
            f"train.num_steps is {train.num_steps} and train.num_epochs is {train.num_epochs:g}; "
            "set exactly one of them above 0"
        )


def _loss_scale(precision: PrecisionConfig) -> Iterable[str]:
    if precision.loss_scale and precision.compute != "fp16":
        yield (
            f"precision.loss_scale {precision.loss_scale:g} has no meaning in {precision.compute}; "
            "only fp16 gradients underflow: set precision.compute = 'fp16' or remove it"
        )
    if precision.initial_scale > precision.max_scale:
        scale, most = precision.initial_scale, precision.max_scale
        yield f"precision.initial_scale {scale:g} is above precision.max_scale {most:g}"


def _optimizer(optimizer: OptimizerConfig) -> Iterable[str]:
    if optimizer.ratio_min > optimizer.ratio_max:
        yield f"optimizer.ratio_min {optimizer.ratio_min:g} is above optimizer.ratio_max {optimizer.ratio_max:g}"
    if optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov needs optimizer.momentum above 0"
    if optimizer.momentum and optimizer.name != "sgd":
        yield f"optimizer.momentum {optimizer.momentum:g} is for sgd; {optimizer.name} has alpha and beta"
    if optimizer.moments != "fp32" and optimizer.name == "sgd":
        yield f"optimizer.moments {optimizer.moments!r} is for adam, adamw and lamb"
    if optimizer.weight_decay_mode == "huggingface" and optimizer.name != "adam":
        yield f"optimizer.weight_decay_mode 'huggingface' is for adam, not {optimizer.name}"


def _schedule(schedule: ScheduleConfig) -> Iterable[str]:
    if schedule.floor and schedule.shape == "compatible":
        yield f"schedule.floor {schedule.floor:g} needs schedule.shape = 'continuous'; the predecessor ends at 0"
    if schedule.mode == "none" and schedule.warmup_ratio:
        yield f"schedule.warmup_ratio {schedule.warmup_ratio:g} has no effect with mode 'none'; use mode 'constant'"


def _timeouts(launch: LaunchConfig) -> Iterable[str]:
    if launch.collective_timeout_s >= launch.heartbeat_timeout_s:
        yield (
            f"launch.collective_timeout_s {launch.collective_timeout_s:g} must be below "
            f"launch.heartbeat_timeout_s {launch.heartbeat_timeout_s:g}, so that a rank can say who was silent"
        )


def _weights(model: ModelConfig) -> Iterable[str]:
    if not model.train:
        yield "model.train is empty: nothing would be trained; ['*'] trains every weight"


def _surgery(model: ModelConfig) -> Iterable[str]:
    if model.head and not model.num_classes:
        yield f"model.head {model.head!r} says what to replace, but model.num_classes is 0; set how many outputs"
    if model.num_classes == 1 and model.loss == "cross_entropy":
        yield "model.num_classes 1: the cross-entropy of one class is always 0; use bce_with_logits, or 2 classes"
    if twice := sorted({name for name in model.start if model.start.count(name) > 1}):
        yield f"model.start names {', '.join(twice)} more than once"


def _adapters(lora: LoraConfig, model: ModelConfig) -> Iterable[str]:
    if not lora.weights:
        for name in sorted(lora.model_fields_set - {"weights"}):
            if getattr(lora, name) != LoraConfig.model_fields[name].default:
                yield f"lora.{name} has no effect without lora.weights; name the weights that get an adapter"
    elif model.train != ModelConfig.model_fields["train"].default:
        yield (
            f"model.train {list(model.train)} and lora.weights contradict each other: with adapters the model's own "
            "weights are frozen; name those trained whole in lora.also_train"
        )


def _regulariser(graph: GraphConfig) -> Iterable[str]:
    if graph.dropout and not graph.fuse:
        yield f"graph.dropout {graph.dropout:g} is put on the fused graph; it needs graph.fuse = true"


LAWS: tuple[tuple[tuple[str, ...], Callable[..., Iterable[str]]], ...] = (
    (("parallel", "launch"), _world_size),
    (("train", "parallel"), _accumulation),
    (("parallel", "train"), _pipeline),
    (("parallel",), _replicas),
    (("parallel", "launch"), _device),
    (("parallel", "graph"), _zero_bubble),
    (("recompute",), _recomputation),
    (("train",), _length),
    (("precision",), _loss_scale),
    (("optimizer",), _optimizer),
    (("schedule",), _schedule),
    (("launch",), _timeouts),
    (("model",), _weights),
    (("model",), _surgery),
    (("lora", "model"), _adapters),
    (("graph",), _regulariser),
)


def broken_laws(sections: Sections) -> list[str]:
    """One sentence for each contradiction among the sections at hand; absent sections are not judged."""
    return [
        problem
        for needs, law in LAWS
        if all(name in sections for name in needs)
        for problem in law(*(sections[name] for name in needs))
    ]


# -- reading

Check = Callable[[Sections], Iterable[str]]
"""A further source of problems, asked together with the laws: of the sections that could be read."""


def load_config(path: Path, overrides: Sequence[str] = (), *, check: Check = lambda sections: ()) -> RunConfig:
    """Read a TOML file, apply `section.key=value` lines (each value is TOML), validate everything.

    Paths in the file become absolute against the file's directory, those of overrides against the
    working directory. Raises ConfigError with every problem found, those of `check` included.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; the examples are in flows/configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    _anchor(raw, path.resolve().parent)
    layout = raw.get("parallel")
    if isinstance(layout, dict) and "horizontal" in layout and "tensor" not in layout:
        layout["tensor"] = layout.pop("horizontal")  # so that an override under either name replaces it
    raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", path.stem))
    problems: list[str] = []
    for line in overrides:
        try:
            _override(raw, line)
        except ConfigError as error:
            problems += error.problems
    return build_config(raw, problems, check=check)


def build_config(
    raw: Mapping[str, Any], problems: Iterable[str] = (), *, check: Check = lambda sections: ()
) -> RunConfig:
    """Validate a nested mapping of settings; raises ConfigError with `problems` and all found here."""
    found = list(problems)
    read: dict[str, Any] = {}
    for key in raw:
        if key not in RunConfig.model_fields:
            found.append(_unknown(key, RunConfig.model_fields, "section"))
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            continue
        value = raw.get(name, {})
        if name == "parallel" and value == "auto":
            value = {"sizes": "auto"}
        if isinstance(value, section):
            read[name] = value
        elif not isinstance(value, Mapping):
            found.append(f"[{name}] must be a table, not {value!r}")
        else:
            try:
                read[name] = section.model_validate(dict(value))
            except ValidationError as error:
                found += _explain(error, name, section)
    found += [*broken_laws(read), *check(read)]
    if found:
        raise ConfigError(found)
    try:
        return RunConfig(**({"name": raw["name"]} if "name" in raw else {}), **read)
    except ValidationError as error:
        raise ConfigError(_explain(error, "", RunConfig)) from None


def _anchor(raw: dict[str, Any], base: Path) -> None:
    """Make the paths of a settings mapping absolute, in place."""
    for section, key in (
        ("model", "path"),
        ("model", "converters"),
        ("data", "source"),
        ("data", "evaluation_source"),
        ("launch", "hostfile"),
        ("checkpoint", "load"),
        ("export", "path"),
    ):
        table = raw.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            table[key] = [str(base / Path(item).expanduser()) for item in value]  # type: ignore[index]
        if isinstance(value, str) and value and not (section == "data" and value in BUNDLED_SOURCES):
            table[key] = str(base / Path(value).expanduser())  # type: ignore[index]


BUNDLED_SOURCES = ("digits", "stdlib")
"""Data sources that every machine has: names, not paths."""


def _override(raw: dict[str, Any], line: str) -> None:
    key, equals, text = line.partition("=")
    parts = key.strip().split(".")
    if parts == ["parallel", "horizontal"]:
        parts[-1] = "tensor"
    if not equals or not all(parts):
        raise ConfigError(f"override {line!r} is not section.key=value")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: model.loss=mse
    patch: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        patch = {part: patch}
    _anchor(patch, Path.cwd())
    target = raw
    for part in parts[:-1]:
        if (part, target.get(part)) == ("parallel", "auto"):
            target[part] = {"sizes": "auto"}
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {line!r}: {part} is not a table")
        patch = patch[part]
    target[parts[-1]] = patch[parts[-1]]


def _explain(error: ValidationError, section: str, model: type[Section]) -> list[str]:
    """Pydantic's findings as sentences: where, what, and the nearest known key for an unknown one."""
    sentences = []
    for finding in error.errors():
        where = ".".join(str(part) for part in (section, *finding["loc"]) if part != "")
        if finding["type"] == "extra_forbidden" and len(finding["loc"]) == 1:
            sentences.append(_unknown(where, [f"{section}.{name}" for name in model.model_fields], "key"))
        elif finding["type"] == "missing":
            sentences.append(f"{where} is missing; set it")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            given = finding.get("input")
            shown = f", not {given!r}" if isinstance(given, str | int | float | bool) else ""
            sentences.append(f"{where}: {message}{shown}" if where else message)
    return sentences


def _unknown(key: str, known: Iterable[str], kind: str) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"unknown {kind} {key}" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")
