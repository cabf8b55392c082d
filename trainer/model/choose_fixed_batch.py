"""Choose how a file that declares a fixed batch is trained, for the saved configuration: `model.fixed_batch`."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import LoraConfig, ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.surgery import surgery
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.row_layout import rows_first
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.onnx_import.fixed_batch.fixed_batch import BatchUse, batch_use
from onward.trainer.onnx_import.lowering.converters import load_converters
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch

LIMITS = {
    "any": "in micro-batches of any size",
    "own": "at its own size, the last rows filled up",
    "joint": "at its own size, never filled up",
}
"""Choice -> what it is, for messages."""


def choose_fixed_batch(config: RunConfig, signature: Signature | None = None) -> tuple[RunConfig, BatchUse]:
    """Return the configuration with `model.fixed_batch` chosen, and why; unchanged for a file with a dynamic batch.

    signature: that of the trained part, None = the file is read for it; it does not depend on the choice.
    Raises ConfigError when the file cannot be trained as configured, with the numbers to set, and UnsupportedModel.
    """
    signature = signature or read_training_signature(config.model)
    shapes = [value.shape for value in signature.inputs if value.shape]
    # most files have a dynamic batch, and need not be run
    if len({shape[0] for shape in shapes}) != 1 or not shapes[0][0]:
        return config, BatchUse("any", 0)
    load_converters(config.model.converters)
    model = load_model(config.model.path)
    surgery.apply_surgery(model, config.model, seed=config.train.seed)
    settings = begin_at_numbers(model, config.model)
    # the same steps as those of training (trainable.py), since the answer holds for this part alone
    part = rows_first(surgery.extract_subgraph(model, settings), settings)
    if not declared_batch(part.graph):
        return config, BatchUse("any", 0)
    use = use_of_part(part, config.model, config.lora)
    if problems := list(batch_size_problems(config.model, config.train, config.parallel, use)):
        raise ConfigError(problems)
    chosen = config.model.model_copy(update={"fixed_batch": _choice(config.model, use)})
    return config.model_copy(update={"model": chosen}), use


def use_of_part(part: onnx.ModelProto, model: ModelConfig, lora: LoraConfig) -> BatchUse:
    """Return how the trained part of a file is used, found by running it."""
    chosen = (*model.train, *lora.also_train)
    return batch_use(part, model.path.parent, train=chosen, outputs=model.outputs)


def _choice(model: ModelConfig, use: BatchUse) -> str:
    return use.kind if model.fixed_batch == "auto" else model.fixed_batch


def batch_size_problems(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, use: BatchUse
) -> Iterator[str]:
    """Yield what is wrong with `model.fixed_batch` and with the sizes of micro-batches, for a fixed batch."""
    choice = _choice(model, use)
    declared = use.declared
    micro_batch_rows = train.micro_batch_rows(parallel.data)
    allowed = {"any": ("any", "own", "joint"), "own": ("own", "joint"), "joint": ("joint",)}[use.kind]
    if choice not in allowed and use.proved:
        yield (
            f"model.fixed_batch {choice!r} would train {LIMITS[choice]}, but the file, which declares a batch of "
            f"{declared}, is right only {LIMITS[use.kind]}: {use.reason}; remove the setting"
        )
    if choice == "any":
        return
    why = f"the file is trained {declared} row{'s' if declared > 1 else ''} at a time: {use.reason}"
    rows = train.global_batch_size
    share = parallel.data * declared
    # sizes that the planner chooses fit the declared batch (planner.py)
    if parallel.sizes == "given" and micro_batch_rows != declared:
        # the greatest batch size up to the given one, else the least, that replicas and declared batches divide
        near = max(rows // share, 1) * share
        sizes = f"train.global_batch_size = {near} and " if near != rows else ""
        yield (
            f"{why}; a micro-batch is train.global_batch_size {rows} / ({parallel.data} replicas x "
            f"train.gradient_accumulation_steps {train.gradient_accumulation_steps}) = {micro_batch_rows} rows; "
            f"set {sizes}train.gradient_accumulation_steps = {near // share}, or export with a dynamic batch"
        )
    if train.evaluation_batch_size not in (0, declared):
        yield f"{why}; train.evaluation_batch_size is {train.evaluation_batch_size}: set it to {declared}, or to 0"
