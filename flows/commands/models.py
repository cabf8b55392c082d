"""Commands that write ONNX files and decide which one is served: export, bundle, promote, example, reference."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onward.flows import api
from onward.flows.commands.common import MAX_SEED, Json, Output, print_facts, print_json
from onward.flows.run_state import exports
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import gib
from onward.trainer.run.machine import this_machine

# The kinds of export.variants, repeated because importing the configuration would slow `--help` down; a test compares.
VariantKind = StrEnum(
    "VariantKind", "optimized fp16 bf16 fp16_compute int8_dynamic int8_static without_loss with_preprocessing training"
)


def export(
    source: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT_OR_RUN",
            help="A checkpoint directory, a bundle, or a run as in `onward status`, for example last.",
        ),
    ],
    output: Output,
    variant: Annotated[
        list[VariantKind] | None,
        Option(
            help="Also write this variant, if its accuracy is within export.variant_tolerance. `training`: loss, "
            "gradients and update as ONNX graphs. Repeatable."
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Also replace files that no export has written, or that were changed.")
    ] = False,
    run_code: Annotated[
        bool, Option("--run-code", help="Accept a bundle with Python code, which runs with your rights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights into its ONNX file and verify the result.

    The file has the names, opset, inputs and outputs of the original. It is compared with the trained module under
    onnxruntime, on the evaluation data; a file that fails a check is not written.
    """
    from onward.flows.run_state.runs import find_checkpoint
    from onward.flows.shown.terminal_tables import variant_rows

    checkpoint = Path(source) if Path(source).is_file() else find_checkpoint(source)[1]
    exported = exports.export(checkpoint, output, variants=variant or (), overwrite=overwrite, run_code=run_code)
    training_files: dict[str, Any] = {}
    if exported.training:
        training_files = {"training": [str(path) for path in exported.training]}
    if exported.training_refused:
        training_files = {"training": "", "training_refused": exported.training_refused}
    facts = {
        "path": str(exported.path),
        "sha256": exported.sha256,
        "checkpoint": str(checkpoint),
        "step": exported.step,
        "parity": exported.parity,
        **({"rounding": exported.rounding} if exported.rounding else {}),
        "before": exported.before,
        "after": exported.after,
        **({"test": exported.test} if exported.test else {}),
        **training_files,
    }
    if as_json:
        print_json({**facts, "variants": [each.model_dump(mode="json") for each in exported.variants]})
    else:
        both = [name for name in exported.after if name in exported.before]
        metrics = {name: f"{exported.before[name]:.4f} -> {exported.after[name]:.4f}" for name in both}
        metrics |= {name: f"{value:.4f}" for name, value in exported.test.items()}
        plain = {name: value for name, value in facts.items() if name not in ("before", "after", "test")}
        print_facts({**plain, **metrics, **dict(variant_rows(exported))}, as_json=False)


def bundle(
    source: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT_OR_RUN",
            help="A checkpoint directory, or a run as in `onward status`, for example last.",
        ),
    ],
    file: Annotated[Path, Argument(metavar="FILE", help="The file to write, for example digits.bundle.")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint with everything that its export needs into one file.

    `onward export FILE -o model.onnx` makes the trained file from it on any machine, without the original paths. It
    holds the ONNX file, the code of losses and converters, and the evaluation rows: give it to those who may see them.
    """
    from onward.flows.run_state.exports import bundle as write

    listing = write(source, file)
    size = file.stat().st_size
    facts = {"path": str(file.absolute()), "bytes": size, "run": listing.run, "step": listing.step}
    facts["files"] = len(listing.files)
    print_facts(facts, as_json=as_json)


def promote(
    name: Annotated[str, Argument(metavar="NAME", help="The registered model.")],
    version: Annotated[str, Argument(metavar="VERSION", help="The number of the version, or `latest`.")],
    alias: Annotated[str, Option(help="The alias that moves.")] = "champion",
    tracking_uri: Annotated[
        str, Option(help="The MLflow store; default: MLFLOW_TRACKING_URI, else Onward's own.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Let the alias of the served model name a version, whatever was decided by metrics.

    A run moves the alias itself where `export.promote_if` allows it. Going back to a former version is done with this
    command, too.
    """
    former = api.promote(name, version, alias=alias, tracking_uri=tracking_uri)
    print_facts({"model": name, "alias": alias, "version": version, "before": former or "none"}, as_json=as_json)


def example(
    name: Annotated[str | None, Argument(metavar="NAME", help="The example; without it they are listed.")] = None,
    folder: Annotated[
        Path | None, Argument(metavar="FOLDER", help="The folder to make; without it the example's name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an example: a folder with a model, data and a configuration that trains it.

    Models and data are made on this machine, and the same each time. Nothing is downloaded.
    """
    from onward.flows.examples.folders import FOLDERS, write_example
    from onward.flows.shown.terminal_tables import table

    if name is None:
        described = {each: what for each, (_, what) in FOLDERS.items()}
        print_json({"examples": described}) if as_json else table(described.items())
        return
    config = write_example(name, folder or Path(name))
    print_facts({"config": str(config), "to_train_it": f"onward run {shlex.quote(str(config))}"}, as_json=as_json)


Seed = Annotated[int, Option(min=0, max=MAX_SEED, help="Seed of the initial weights.")]


def squeezenet(
    output: Output,
    num_classes: Annotated[int, Option(min=1, max=10_000_000, help="Number of classes of the output.")] = 1000,
    image_size: Annotated[int, Option(min=17, max=65_536, help="Height and width of the images, in pixels.")] = 224,
    channels: Annotated[int, Option(min=1, max=65_536, help="Channels of the images.")] = 3,
    dropout: Annotated[float, Option(min=0.0, max=1.0, help="Dropout ratio before the last layer.")] = 0.5,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write SqueezeNet v1.1: image to logits."""
    from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet

    # about as many as the body has; the first and the last layer depend on the options
    _refuse_large(750_000 + 64 * 9 * channels + 512 * num_classes)
    model = build_squeezenet(
        num_classes=num_classes, image_size=image_size, channels=channels, dropout=dropout, seed=seed
    )
    _write_model(model, output, as_json=as_json)


def gpt2(
    output: Output,
    vocab_size: Annotated[int, Option(min=2, max=10_000_000, help="Number of tokens; 256 for bytes.")] = 50257,
    sequence_length: Annotated[int, Option(min=1, max=10_000_000, help="Tokens of the longest sequence.")] = 1024,
    num_layers: Annotated[int, Option(min=1, max=10_000, help="Number of transformer blocks.")] = 12,
    num_heads: Annotated[int, Option(min=1, max=65_536, help="Attention heads of each block.")] = 12,
    width: Annotated[int, Option(min=1, max=65_536, help="Width of the hidden state.")] = 768,
    dropout: Annotated[float, Option(min=0.0, max=1.0, help="Dropout ratio.")] = 0.1,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write GPT-2: input_ids to logits. The default sizes are those of the 124M model."""
    from onward.trainer.onnx_graph.examples.reference_models import build_gpt2

    # embeddings, and 12 width^2 of each block: 4 for attention, 8 for the layers behind it
    _refuse_large(width * (vocab_size + sequence_length + 12 * num_layers * width))
    model = build_gpt2(
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        dropout=dropout,
        seed=seed,
    )
    _write_model(model, output, as_json=as_json)


def _refuse_large(weights: int) -> None:
    """Refuse a model that the memory cannot hold, before it is taken. weights: about how many it has."""
    if 4 * weights > (free := this_machine.free_host_memory()):
        raise ConfigError(
            f"the model would take {gib(4 * weights)} of memory, and {gib(free)} are free; choose smaller numbers"
        )


def _write_model(model: Any, output: Path, *, as_json: bool) -> None:
    from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

    from onward.trainer.onnx_graph.files.whole_models import data_file_of, whole_file, write_whole
    from onward.trainer.run.durable_files import sha256

    try:
        with whole_file(output) as made:
            data = write_whole(model, made)
    except EncodeError as error:
        raise MemoryError from error  # its size was checked: protobuf did not get the memory
    # the names are what a configuration needs next
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    facts = {"path": str(output), "bytes": output.stat().st_size, "sha256": sha256(output)}
    if data:
        facts |= {"data": str(data_file_of(output)), "data_bytes": data_file_of(output).stat().st_size}
    print_facts({**facts, "inputs": inputs, "outputs": outputs}, as_json=as_json)
