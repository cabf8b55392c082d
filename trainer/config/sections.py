"""The settings of a run, section by section: the tables of a config file.

The docstring under a field is its `--help`, its text in Prefect's form and its entry in the settings
reference. Sections are frozen and refuse unknown keys. Rules that concern several sections are in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from onward.trainer.config.metric_names import is_greatest
from onward.trainer.config.section import Decay, Fraction, Section
from onward.trainer.config.sections_audio import AudioConfig
from onward.trainer.config.sections_images import ImageConfig
from onward.trainer.config.sections_table import TableConfig
from onward.trainer.config.sections_text import TextConfig
from onward.trainer.config.urls import FilePath, Location

AcceptedWarning = Literal["merged", "separated", "removed"]
"""The keys of the warnings (diagnostics/exporter_warnings.py) that change what is trained."""

FixedBatch = Literal["auto", "any", "own", "joint"]

# fmt: off
LossName = Literal[
    "cross_entropy", "mse", "l1", "bce_with_logits", "output", "huber", "quantile", "focal", "dice", "giou", "ctc",
    "cosine", "triplet", "info_nce", "file",
]
# fmt: on
"""The losses, by name."""


class ModelConfig(Section):
    """The ONNX file to train, which of its weights, and the loss."""

    path: FilePath
    """The ONNX file to train: a path, relative to the config file (on the command line: to the working directory), or a
    URL (s3, gs, az, hf, http, https), as everywhere that a path is taken."""
    loss: LossName = "cross_entropy"
    """Cross-entropy, mean squared or absolute error, binary cross-entropy on logits, `output` (the graph computes its
    own scalar loss), or another one of [loss], which has their settings. Short for `loss.name`."""
    output: str | tuple[str, ...] = ""
    """The tensor that the loss reads: a graph output, or any tensor inside the graph; empty = the first output. With
    `loss = "output"` it is the loss itself. A list has the tensor of each `[[loss]]`. Short for `loss.output`."""
    start: tuple[str, ...] = ()
    """Tensors inside the graph that become its inputs, each read from the data's column of its name. The nodes before
    them are neither computed nor trained. Empty = the graph's own inputs; in a file that begins with strings the
    tensors of numbers behind them, which onnxruntime computes when the data is read."""
    num_classes: NonNegativeInt = 0
    """Replace the head: its last layer gets this many outputs, newly initialised; 0 = keep it."""
    head: str = ""
    """The weight of the layer that `num_classes` replaces; empty = the last one before the output."""
    untie: tuple[str, ...] = ()
    """Glob patterns of initializers that several layers share although they should not (exporters merge equal ones).
    Each parameter that the file names gets its own copy, or each node where it names none; in the exported file too."""
    accept: tuple[AcceptedWarning, ...] = ()
    """Warnings of `onward doctor` that a run accepts although they change what is trained; without, such a run is
    refused. `merged`: weights that an exporter merged are trained as one weight. `separated`: one weight into whose
    uses an exporter folded different things is trained as several. `removed`: biases of zeros that an exporter removed
    stay absent."""
    tie: bool = True
    """Train the copies that an exporter made of one weight (such as a transposed embedding) as one weight."""
    fixed_batch: FixedBatch = "auto"
    """How a file that declares a fixed batch of B rows is trained: `any` = its shapes are rewritten for micro-batches
    of any size; `own` = B rows at a time, fewer are filled up with rows that do not count; `joint` = B rows at a time,
    never filled up, for rows that influence each other. `auto` = the first that running the file proves right."""
    ignore_index: int = -100
    """Targets with this label are left out of the loss and of its mean (cross-entropy only). Short for
    `loss.ignore_index`."""
    train: tuple[str, ...] = ("*",)
    """Glob patterns of the initializers to train; all others are frozen."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of the initializers to freeze; takes precedence over `train`."""
    converters: tuple[FilePath, ...] = ()
    """Python files that define further operators: for training by `onnx2torch.add_converter`, and, where onnxruntime
    lacks them too, for verification as `onnx.reference.op_run.OpRun`. Relative to the config file; on the command
    line, to the working directory."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that the losses read, each once; empty = the first output of the graph."""
        return tuple(dict.fromkeys((self.output,) if isinstance(self.output, str) else self.output))

    def named_outputs(self, first: str) -> tuple[str, ...]:
        """Return `outputs` by name, where `first` is the first output of the graph."""
        return tuple(dict.fromkeys(name or first for name in self.outputs))


class GraphConfig(Section):
    """How the imported graph is computed. The exported file does not depend on these settings."""

    fuse: bool = True
    """Rewrite attention, normalisation, GELU and linear layers into torch's fused kernels; false = node by node."""
    compile: bool = False
    """Compile the graph with torch.compile."""
    shapes: Literal["auto", "static", "dynamic"] = "auto"
    """Shapes of compiled code: `static` = those of a full micro-batch, and others run eagerly; `dynamic` = one code for
    all. `auto` = static if all samples have one shape."""
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "auto"
    """Mode of torch.compile. `reduce-overhead` = CUDA graphs: on a GPU, with static shapes, without pipeline and ZeRO.
    `auto` = these for models so small that launching their kernels takes longer than computing them; else default."""
    compile_regions: Literal["auto", "whole", "repeated"] = "auto"
    """What is compiled as one: the `whole` graph, or each kind of `repeated` block (layer) once, which takes less time
    to compile. `auto` = whole."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory format of images inside the graph; `auto` = channels_last for convolution graphs on a GPU."""
    dropout: Decay = 0.0
    """Probability of dropout that is added where exporters remove it: on embeddings, residual branches and attention
    weights of the fused graph. The exported file never contains it."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA): W + (alpha / rank) B A. Only A and B are trained; export merges them into W."""

    weights: tuple[str, ...] = ()
    """Glob patterns of the MatMul, Gemm and Conv weights that get an adapter; empty = no adapters."""
    rank: PositiveInt = 8
    """Rank of the adapters: rows of A, columns of B."""
    alpha: PositiveFloat = 16.0
    """The adapters' scale is alpha / rank."""
    dropout: Decay = 0.0
    """Probability of dropout on the adapters' input."""
    also_train: tuple[str, ...] = ()
    """Glob patterns of weights that are trained directly, beside the adapters, such as a new head; all other weights
    are frozen."""


class SourceConfig(Section):
    """One of several sources that are mixed."""

    source: Location
    """A file, a directory or a glob, as in `data.source`."""
    weight: PositiveFloat = 1.0
    """How many of the samples are of this source, in proportion to the weights of the others."""


class DataConfig(Section):
    """Where samples come from, and which column feeds which input of the model."""

    source: Location
    """A file, a directory or a glob, also by URL; or `digits` (scikit-learn's 1,797 images), or `stdlib` (the text of
    Python's standard library). Relative to the config file; on the command line, to the working directory."""
    format: Literal[
        "auto", "csv", "parquet", "jsonl", "npz", "text", "digits", "arrow", "pb", "images", "audio", "webdataset"
    ] = "auto"
    """The format of the source; `auto` decides by its name. `images` and `audio` are files in a folder for each class,
    `webdataset` tar files, `arrow` Onward's own shards, `pb` those of ONNX Runtime's trainer."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources in place of `source`, each with a weight, mixed anew in each epoch. An epoch has as many samples
    as all sources together; of a source it has the share of its weight, so that the rows of a source with a large
    weight and few rows are taken several times."""
    image: ImageConfig | None = None
    """How encoded images are read: the table `[data.image]`; without it no column holds encoded images."""
    audio: AudioConfig | None = None
    """A column of audio files: `[data.audio]`."""
    evaluation_source: Location = ""
    """Samples to evaluate on; empty = set aside `evaluation_fraction` of the source, or of each of several."""
    evaluation_rows: NonNegativeInt = 0
    """Evaluate on so many rows only, always the same ones; 0 = on all that are set aside or in `evaluation_source`."""
    test_source: Location = ""
    """Samples on which the exported file is evaluated once, at the end. Nothing is chosen by the result."""
    evaluation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """The share of rows (of files, for text) set aside for evaluation; which ones depends on the row's
    place in its file (or on the file's name) alone, so appended rows move none to the other side."""
    inputs: dict[str, str | tuple[str, ...]] = {}
    """Graph input -> its column, or several columns stacked into one vector. Inputs not named here read
    the column of their own name. A glob pattern, such as "f*", stands for the columns that it matches, in the order of
    the file, and "!f2" leaves columns out; the saved configuration has the columns."""
    label: str | tuple[str, ...] = "label"
    """The column (or columns) the loss compares with; unused when the loss is a graph output. Short for
    `loss.label`."""
    classes: Literal["auto", "sorted"] | tuple[str, ...] = "auto"
    """The class names in the model's order, for a cross-entropy on labels that are names: ["cat", "dog"]. `auto` = the
    names in the data, sorted, where the labels are text; labels that are integers are class ids. `sorted` = integers
    are names, too, such as 3, 5 and 10 for classes 0, 1 and 2."""
    balance: Literal["none", "length"] = "none"
    """`length` = the samples of a step have similar lengths, so that micro-batches need little padding and replicas
    have equal work. Each sample is still taken once per epoch, at a place that depends on the seed alone."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What happens at a row that cannot be read: `fail` stops with its file and line, `skip` counts it and goes on."""
    shard_format: Literal["arrow", "pb"] = "arrow"
    """The format of the shards: Arrow IPC, or length-prefixed TensorProtos as ONNX Runtime's trainer reads them."""
    rows_per_shard: PositiveInt = 65536
    """Rows in one shard file. Sharding needs memory in proportion to it."""
    pad_values: dict[str, float] = {}
    """Column of variable length -> the value that pads its shorter rows in a batch; without an entry 0,
    `model.ignore_index` for labels, and for what is computed from strings the value that the model itself pads with."""
    image_size: PositiveInt = 32
    """Digits only: side in pixels the 8x8 images are resized to."""
    image_channels: PositiveInt = 3
    """Digits only: the grey image is repeated this many times."""
    sequence_length: PositiveInt = 128
    """Text only: bytes in one sample; the label of each byte is the byte that follows it."""
    text_files: str = "*.py"
    """Text only: which files of the directory are read."""

    @model_validator(mode="before")
    @classmethod
    def _has_one_source_or_several(cls, settings: Any) -> Any:
        """Let `source` be the first of `sources`, by which formats and columns are found."""
        if not isinstance(settings, Mapping) or not settings.get("sources"):
            return settings
        first = settings["sources"][0]
        first = first.source if isinstance(first, SourceConfig) else dict(first).get("source")
        if settings.get("source") not in (None, "", first):
            raise ValueError("source and sources exclude each other; put the source among the sources")
        return {**settings, "source": first} if first else settings

    @model_serializer(mode="wrap")
    def _without_a_derived_source(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `source` where it was derived, so that what was saved can be loaded with other `sources`."""
        saved: dict[str, Any] = serialize(self)
        if self.sources:
            saved.pop("source", None)
        return saved

    @property
    def mixture(self) -> tuple[SourceConfig, ...]:
        """Return the sources with their weights, also if there is one."""
        return self.sources or (SourceConfig(source=self.source),)

    text: TextConfig | None = None
    """Columns of raw text and the model's tokenizer: `[data.text]`."""
    table: TableConfig = TableConfig()
    """What is computed of columns of a table: `[data.table]`."""


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
    """Optimizer settings for the weights whose names match a pattern."""

    pattern: str
    """Glob pattern of initializer names. Where several entries match, the last one decides, setting by setting."""
    learning_rate_scale: Annotated[float, Field(ge=0.0)] | None = None
    """Multiplies the learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """Replaces `optimizer.weight_decay`."""


class OptimizerConfig(Section):
    """The update rule. Formulas: the docstrings of trainer/optim/optimizers.py."""

    name: Literal["adam", "adamw", "lamb", "sgd"] = "adamw"
    """Adam (see `weight_decay_mode`), AdamW, LAMB, or SGD with momentum."""
    learning_rate: PositiveFloat = 1e-3
    """The learning rate that the learning-rate schedule scales."""
    alpha: Decay = 0.9
    """Decay of the first moment (beta1)."""
    beta: Decay = 0.999
    """Decay of the second moment (beta2)."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: decoupled in Adam, AdamW and LAMB, added to the gradient in SGD."""
    weight_decay_mode: Literal["pytorch", "huggingface"] = "pytorch"
    """Adam only: apply the decay with the update (`pytorch`; ONNX Runtime's mode 0) or after it (`huggingface`; mode
    1)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Adam and LAMB only: the type that stores the moments. bf16 halves their memory; values are rounded
    stochastically."""
    bias_correction: bool = True
    """Adam and LAMB only: divide the moments by 1 - alpha^t and 1 - beta^t."""
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


class ParallelConfig(Section):
    """How the ranks divide the work: data x tensor x pipeline = ranks. `parallel = "auto"` chooses the sizes."""

    sizes: Literal["given", "auto"] = "given"
    """`auto` = choose data, tensor, pipeline, zero, recomputation and micro-batches for `launch.num_ranks` ranks
    and `memory_gib`; `parallel = "auto"` is short for it."""
    data: PositiveInt = 1
    """Data parallelism: replicas of the model, each with its share of every batch."""
    tensor: PositiveInt = 1
    """Tensor parallelism: ranks that divide single layers, wherever the graph allows it."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: ranks that run successive stages of the graph. Its micro-batches are
    `train.gradient_accumulation_steps`."""
    memory_gib: NonNegativeFloat = 0.0
    """Memory of one rank in GiB. `sizes = "auto"` stays below it (0 = the memory that is free on the device), and
    recomputation recomputes only as many units as needed to stay below it (0 = all units)."""
    vocabulary: bool = True
    """Tensor parallelism: divide embeddings, heads and their cross-entropy by vocabulary."""
    convolutions: Literal["auto", "never", "always"] = "auto"
    """Tensor parallelism: divide pairs of convolutions by channel; `auto` = where this saves more time than its
    messages cost."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline: the order of forward and backward passes. `zero_bubble` is refused for graphs that it computes
    wrongly."""
    stages_per_rank: PositiveInt = 1
    """Pipeline: stages on each rank; above 1 needs `interleaved` or `zero_bubble`."""
    cuts: tuple[str | tuple[str, ...], ...] = ()
    """Pipeline: where the stages end. Each entry is one cut: the name of the tensor that crosses it, or a list of
    names; ONNX Runtime's notation `tensor-consumer1/consumer2:...` is read too. Empty = balanced by arithmetic and
    bytes."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, what the replicas shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    shard: NonNegativeInt = 0
    """ZeRO inside groups of this many neighbouring replicas; the groups replicate each other (hybrid sharding). 0 = one
    group of all replicas."""
    units: NonNegativeInt = 0
    """Units that one stage is cut into, for ZeRO and recomputation; 0 = chosen from the graph."""
    reduction: Literal["sum", "adasum"] = "sum"
    """How the gradients of the replicas are combined: their mean over all samples, or Adasum between hosts (ZeRO 0
    only)."""
    adasum_ranks: NonNegativeInt = 0
    """Adasum: number of successive ranks whose gradients are summed before Adasum; 0 = the ranks of each host, 1 =
    Adasum between all ranks."""
    transport: Literal["torch", "mpi"] = "torch"
    """What sends gradients between replicas: torch's backend (NCCL, gloo), or MPI (ZeRO 0 on CPUs)."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """The type in which gradients are sent; `none` = fp32 (ZeRO 0 only)."""
    bucket_mib: NonNegativeInt = 0
    """Gradients are sent in buckets of up to so many MiB, while the backward pass still computes others; 0 = chosen for
    the link: 4 for gloo and MPI, 25 for NCCL, whose first bucket has 1 (ZeRO 0 only). The log says what was chosen."""

    @model_validator(mode="before")
    @classmethod
    def _accepts_the_former_name_of_tensor(cls, settings: Any) -> Any:
        """Read `horizontal` as `tensor`: run directories, deployments and config files of earlier versions have it."""
        if not isinstance(settings, Mapping) or "horizontal" not in settings:
            return settings
        if "tensor" in settings:
            raise ValueError("horizontal is the former name of tensor; set one of the two")
        return {"tensor" if key == "horizontal" else key: value for key, value in settings.items()}


class RecomputeConfig(Section):
    """Activation checkpointing: activations are recomputed in the backward pass. Gradients have the same bits."""

    mode: Literal["none", "whole", "selective"] = "none"
    """What a unit keeps for its backward pass: all activations (`none`), only its inputs (`whole`), or its inputs and
    the results of matrix products (`selective`)."""
    units: tuple[str, ...] = ()
    """Glob patterns of tensors in the graph: the units that compute them are recomputed. Empty = all units, or, if
    `parallel.memory_gib` is set, as many as needed."""


class LaunchConfig(Section):
    """How the ranks are started, and what happens when one fails."""

    num_ranks: NonNegativeInt = 0
    """Processes mpirun starts; 0 = as many as [parallel] needs."""
    hostfile: Location = ""
    """An MPI hostfile; empty = this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = one GPU per rank if the machine has any, else the CPU."""
    ranks_per_gpu: PositiveInt = 1
    """Ranks that share one GPU. Above 1, gloo sends their tensors through host memory, because NCCL refuses two ranks
    on one GPU: slow, for trying a layout on few GPUs."""
    rehearsal: Literal["auto", "off"] = "auto"
    """`auto` = before a new run is launched, run a few micro-batches of the first rows forward and backward on the CPU,
    and compare the untrained file with onnxruntime; what fails is refused. `off` = do not."""
    rehearsal_timeout_s: PositiveFloat = 60.0
    """Longest time of the rehearsal once the model is open; what was not reached by then is left out and named."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = the machine's cores divided by its ranks. Runs are bit-identical only with the same
    number."""
    retries: NonNegativeInt = 2
    """How often a failed job is started again, from its newest checkpoint or, without one, from step 0 (see
    `checkpoint.period`)."""
    retry_delay_s: NonNegativeFloat = 2.0
    """Pause before a retry."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest time from the start of a job to its first heartbeat."""
    heartbeat_timeout_s: PositiveFloat = 120.0
    """Longest time between two heartbeats; then the job is stopped and retried."""
    collective_timeout_s: PositiveFloat = 100.0
    """Longest time that a rank waits for the others in a collective."""
    compile_timeout_s: PositiveFloat = 1800.0
    """With graph.compile: longest time between two heartbeats while ranks may compile, that is until the first step of
    an attempt is complete, in a last step with fewer samples, and during evaluations. It is the longest time in a
    collective, too, because ranks compile different stages."""
    stop_grace_s: PositiveFloat = 20.0
    """Time that a job has to save a checkpoint and exit when it is asked to stop; then it is killed."""


class CheckpointConfig(Section):
    """When to save checkpoints, which to keep, and where to start from."""

    period: NonNegativeInt = 0
    """Steps between checkpoints; 0 = only after the last step and when the job is asked to stop."""
    keep_newest: PositiveInt = 3
    """Newest checkpoints to keep, beside the best one."""
    background: Literal["auto"] | bool = "auto"
    """Write checkpoints while training goes on, from a copy in host memory of what a rank writes. `auto` = where the
    copy takes at most half of the free memory; on a CPU with `parallel.memory_gib` training waits instead."""
    best_metric: str = "evaluation/loss"
    """The metric that decides which checkpoint is the best."""
    best_is: Literal["auto", "least", "greatest"] = "auto"
    """Whether a smaller or a larger `best_metric` is better; `auto` = what the metric means."""
    load: Location = ""
    """A checkpoint directory to start from: weights, optimizer and position; empty = the ONNX file's weights."""

    @property
    def greatest_is_best(self) -> bool:
        """Whether a larger `best_metric` is better."""
        return bool(is_greatest(self.best_metric)) if self.best_is == "auto" else self.best_is == "greatest"


class MonitorConfig(Section):
    """What is recorded, and where."""

    experiment: str = "onward"
    """The MLflow experiment."""
    tracking_uri: str = ""
    """The MLflow store; empty = MLFLOW_TRACKING_URI, else Onward's own under its home directory."""
    tensorboard: bool = True
    """Write TensorBoard files from the event log."""
    histograms: tuple[str, ...] = ()
    """Glob patterns of weights whose values and gradients are recorded as histograms."""
    norms: tuple[str, ...] = ()
    """Glob patterns of weights whose L2 norm and gradient norm are recorded."""
    summary_period: PositiveInt = 100
    """Steps between histograms and norms."""


class ExportConfig(Section):
    """Which weights are exported, and which checks the file must pass before it is registered."""

    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint's weights are exported."""
    path: Location = ""
    """Also copy the exported file here, to a path or a URL; empty = only the run directory keeps it."""
    tolerance: PositiveFloat = 1e-3
    """Largest allowed difference between onnxruntime and the trained module, relative to the output's largest value."""
    parity_batches: PositiveInt = 4
    """Evaluation batches on which onnxruntime and the trained module are compared."""
    training: bool = False
    """Also write the files that continue training with onnxruntime alone, without torch: model_with_loss.onnx,
    eval.onnx, training.onnx and optimizer.onnx."""
    variants: tuple[
        Literal["optimized", "fp16", "bf16", "int8_dynamic", "int8_static", "without_loss", "with_preprocessing"], ...
    ] = ()
    """Further files for deployment: onnxruntime's graph optimisation, half-precision weights, 8-bit quantization
    (static: calibrated on evaluation data). Each is evaluated, and refused by `variant_tolerance`. `without_loss`: of a
    graph that computes its own loss, the file without the loss and the labels. `with_preprocessing`: the file behind
    nodes that compute its inputs of raw columns, and of the pixels of images in the final size."""
    variant_tolerance: PositiveFloat = 0.02
    """How much worse a variant may be than the exported file: in accuracy, absolute; without an accuracy, in the
    evaluation loss, relative."""
    register_as: str = ""
    """The name in MLflow's model registry; empty = the run's name."""
    alias: str = "champion"
    """The alias given to the new version; empty = none."""

    @field_validator("register_as")
    @classmethod
    def _is_a_model_name(cls, name: str) -> str:
        if taken := sorted(set(name) & set("/:'\"")):
            raise ValueError(f"a name in the model registry must not contain {' '.join(taken)}")
        return name

    @field_validator("alias")
    @classmethod
    def _is_an_alias(cls, alias: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", alias):
            raise ValueError("an alias consists of letters, digits, _ and -")
        if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
            raise ValueError("`latest`, v1, v2, ... are reserved by the model registry; choose another alias")
        return alias
