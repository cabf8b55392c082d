"""The settings of a run, section by section: the tables of a config file.

The docstring under a field is its `--help`, its text in Prefect's form and its entry in the settings
reference. Sections are frozen and refuse unknown keys. Rules that concern several sections are in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    field_validator,
    model_validator,
)

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
