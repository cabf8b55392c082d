"""The settings of the model: [model], [model.lora] and [graph]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field, PositiveFloat, field_validator

from onward.trainer.config.loss_rules import LossName
from onward.trainer.config.section import COMMON, Decay, Length, LengthOrZero, Section, as_tuple
from onward.trainer.config.urls import FilePath

AcceptedWarning = Literal["merged", "separated", "removed", "mostly_frozen"]
"""The keys of the warnings (diagnostics/exporter_warnings.py) that change what is trained."""

FixedBatch = Literal["auto", "any", "own", "joint"]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Axis = Annotated[int, Field(ge=-64, le=63)]


class ModelConfig(Section):
    """The ONNX file to train, which of its weights, and the loss."""

    path: Annotated[FilePath, COMMON]
    """The ONNX file to train: a path, relative to the config file (on the command line: to the working directory), or a
    URL (s3, gs, az, hf, http, https), as everywhere that a path is taken."""
    loss: Annotated[LossName, COMMON] = "cross_entropy"
    """Cross-entropy, mean squared or absolute error, binary cross-entropy on logits, `output` (the graph computes its
    own scalar loss), `teacher` (none against labels: the outputs of [teacher] are learnt alone), or another one of
    [loss], which has their settings. Short for `loss.name`."""
    output: str | tuple[str, ...] = ""
    """The tensor that the loss reads: a graph output, or any tensor inside the graph; empty = the first output, or the
    scores behind it where it holds the probabilities that the loss computes from them. With `loss = "output"` it is the
    loss itself. A list has the tensor of each `[[loss]]`. Short for `loss.output`."""
    start: tuple[str, ...] = ()
    """Tensors inside the graph that become its inputs, each read from the data's column of its name. The nodes before
    them are neither computed nor trained. Empty = the graph's own inputs; in a file that begins with strings the
    tensors of numbers behind them, which onnxruntime computes when the data is read."""
    bind: dict[str, bool | Int64 | float | tuple[Any, ...]] = {}
    """Inputs of the model that no column feeds -> their value, a number or a list: {sr = 16000, h = 0, scales = [0.667,
    1, 0.8]}. It is repeated to the declared shape, and for each row where an axis is the batch. They stay inputs of the
    exported file."""
    batch_axes: dict[str, Axis] = {}
    """Input or output -> the axis of its rows. Without an entry the axis whose length has the name of the batch of the
    other inputs, such as axis 1 of h [1, batch, 8], else axis 0. The columns of the data have one row a sample: of such
    an h the column is [1, 8]."""
    num_classes: LengthOrZero = 0
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
    stay absent. `mostly_frozen`: more than a tenth of the numbers of weights cannot be trained, as they are stored."""
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

    @field_validator("bind", mode="before")
    @classmethod
    def _are_arrays_of_numbers(cls, bound: Any) -> Any:
        if isinstance(bound, Mapping):
            for name, value in bound.items():
                try:
                    kind = np.array(value).dtype.kind
                except ValueError:  # lists of different lengths
                    kind = "O"
                if kind not in "biuf" or np.size(value) == 0:
                    raise ValueError(
                        f"{name} is {value!r}, neither a number nor a list of numbers, all rows of one length"
                    )
        return bound

    @property
    def keeps_batch(self) -> bool:
        """Whether each micro-batch has as many rows as the file declares."""
        return self.fixed_batch in ("own", "joint")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that the losses read, each once; empty = the first output of the graph."""
        return tuple(dict.fromkeys(as_tuple(self.output)))

    def named_outputs(self, first: str) -> tuple[str, ...]:
        """Return `outputs` by name, where `first` is the first output of the graph."""
        return tuple(dict.fromkeys(name or first for name in self.outputs))


CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
"""Modes of torch.compile."""


class GraphConfig(Section):
    """How the imported graph is computed. The exported file does not depend on these settings."""

    fuse: bool = True
    """Rewrite attention, normalisation, GELU and linear layers into torch's fused kernels; false = node by node."""
    compile: bool | Literal["auto", CompileMode, "dynamic", "repeated"] = False
    """Compile the graph with torch.compile. `auto` = if the steps of the run pay for it: the rehearsal compiles it and
    times a step's passes both ways, and the run keeps the choice. On CPUs; elsewhere, and where something forbids
    compiling, `auto` is false and says why. A mode of torch.compile: `reduce-overhead` = CUDA graphs, on a GPU, for
    samples of one shape, without pipeline and ZeRO; true = these for models so small that launching their kernels takes
    longer than computing them, else `default`. Code is for the shapes of a full micro-batch, and others run eagerly;
    `dynamic` = one code for all shapes, as it always is where samples differ in shape. `repeated` = each kind of
    repeated block (layer) is compiled once, which takes less time, in place of the whole graph."""
    memory_format: Literal["fastest", "contiguous", "channels_last", "auto"] = "fastest"
    """Memory format of images inside the graph. `fastest` = channels_last for convolutions on a GPU; on a CPU if their
    results in a micro-batch outnumber the weights to convert, which is so unless many weights with large kernels read a
    few small images; with Adam their weights are stored in that format, too. `auto` = channels_last on a GPU,
    contiguous on a CPU, as in runs of earlier versions."""
    dropout: Decay = 0.0
    """Probability of dropout that is added where exporters remove it: on embeddings, residual branches and attention
    weights of the fused graph. The exported file never contains it."""

    @property
    def compiles(self) -> bool:
        """Whether a run compiles: "auto" which no rehearsal has resolved, as in a job started by hand, does not."""
        return self.compile not in (False, "auto")

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode of torch.compile; None = chosen from the graph."""
        return self.compile if self.compile in get_args(CompileMode) else None  # type: ignore[return-value]

    def with_compile(self, compiles: bool) -> GraphConfig:
        """Return the settings with the "auto" of `compile` resolved."""
        return self.model_copy(update={"compile": compiles})


class LoraConfig(Section):
    """Low-rank adapters (LoRA): W + (alpha / rank) B A. Only A and B are trained; export merges them into W. Beside a
    quantized W the exported file has them as nodes."""

    weights: tuple[str, ...] = ()
    """Glob patterns of the MatMul, Gemm and Conv weights that get an adapter; empty = no adapters."""
    rank: Length = 8
    """Rank of the adapters: rows of A, columns of B."""
    alpha: PositiveFloat = 16.0
    """The adapters' scale is alpha / rank."""
    dropout: Decay = 0.0
    """Probability of dropout on the adapters' input."""
    also_train: tuple[str, ...] = ()
    """Glob patterns of weights that are trained directly, beside the adapters, such as a new head; all other weights
    are frozen."""
