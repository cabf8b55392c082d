"""Write down what training did to raw data before the graph read it: preprocessing.json, and the tokenizer beside it.

configuration, manifest of the shards, signature  ->  FOLDER/preprocessing.json, FOLDER/tokenizer.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.images import image_inputs as images
from onward.trainer.data.images.image_inputs import image_inputs
from onward.trainer.data.input_columns import Feed, file_feeds
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.data.tables.table_columns import INDICATOR
from onward.trainer.data.text.text_checks import length_limit
from onward.trainer.data.text.text_columns import TextColumns, text_columns
from onward.trainer.data.text.tokenizer import OpenTokenizer, open_tokenizer
from onward.trainer.errors import ConfigError, ExportRefused
from onward.trainer.export.run_as_read import RunAsRead
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256, write_durably
from onward.trainer.run.recorded.preprocessing_record import (
    AudioInput,
    ImageInput,
    Input,
    Objects,
    OutputMeaning,
    Preprocessing,
    TableColumn,
    TableInput,
    TokenInput,
    Tokenizer,
    ValueInput,
)
from onward.trainer.run.records import ExportedModel, read_record, write_record

RECORD = "preprocessing.json"
TOKENIZER = "tokenizer.json"
"""The names of the files."""


def write_preprocessing(
    run: RunDir, exported: ExportedModel, folder: Path, *, opened: RunAsRead | None = None
) -> tuple[Path, ...]:
    """Write preprocessing.json into `folder`, and the tokenizer if there is one; return the files.

    opened: the run as it was read, None = it is read here. Raises ExportRefused when the tokenizer's file is gone;
    nothing is written then.
    """
    config = opened.config if opened else read_config(run)
    manifest = read_record(run.shards / "manifest.json", ShardManifest)
    signature = opened.signature if opened else read_training_signature(config.model)
    record = describe(
        config.data,
        config.losses,
        config.model,
        manifest,
        signature,
        exported,
        text_limit=opened.text_limit if opened else None,
    )
    files = [folder / RECORD]
    if record.text and config.data.text:
        tokenizer = _opened_tokenizer(config.data.text.tokenizer)
        files.append(folder / TOKENIZER)
        write_durably(folder / TOKENIZER, tokenizer.path.read_bytes())
        if sha256(folder / TOKENIZER) != record.text.sha256:
            raise ExportRefused(f"{tokenizer.path} changed while it was copied")
    write_record(folder / RECORD, record)
    return tuple(files)


def describe(
    data: DataConfig,
    losses: Sequence[LossConfig],
    model: ModelConfig,
    manifest: ShardManifest,
    signature: Signature,
    exported: ExportedModel,
    *,
    text_limit: int | None = None,
) -> Preprocessing:
    """Return what becomes of raw data before the graph reads it.

    text_limit: the tokens that a sample may have, None = they are read from the graph. Raises ExportRefused without the
    tokenizer's file.
    """
    text = text_columns(data, losses, model, signature)
    objects = Objects.model_validate(exported.objects) if exported.objects else None
    inputs: dict[str, Input] = {}
    for name, feed in file_feeds(data, signature).items():
        audio = data.audio if data.audio and feed.columns == (data.audio.column,) else None
        inputs[name] = _audio_input(feed, audio, data) if audio else _table_input(feed, data, manifest)
    for each in image_inputs(data, signature):
        inputs[each.name] = _image_input(each, data, signature)
    if text:
        inputs |= _token_inputs(text, data, manifest)
    for name, bound in signature.bound.items():
        inputs[name] = ValueInput(value=bound.value.tolist(), shape=bound.shape, dtype=bound.value.dtype.name)
    return Preprocessing(
        model=exported.path.name,
        sha256=exported.sha256,
        begins_at=model.start,
        inputs=inputs,
        window_length=data.table.window.length if data.table.window else None,
        text=_tokenizer(text, model, text_limit) if text else None,
        outputs=tuple(_outputs(losses, manifest, signature, objects)),
        objects=objects,
    )


def _image_input(image: images.ImageInput, data: DataConfig, signature: Signature) -> ImageInput:
    from PIL import __version__ as pillow_version

    assert data.image is not None
    settings = data.image
    (dtype,) = (info.dtype for info in signature.fed if info.name == image.name)
    channels: Literal["grey", "rgb", "bgr"] = "bgr" if image.bgr else "rgb"
    if image.channels == 1:
        channels = "grey"
    scale = image.scale
    mean = image.mean
    std = image.std
    if image.takes_integers:
        # the file takes the pixels as they are
        scale = 1.0
        mean = (0.0,) * image.channels
        std = (1.0,) * image.channels
    return ImageInput(
        column=image.column,
        height=image.size[0],
        width=image.size[1],
        resize=settings.fit,
        border_color=settings.border_color(image.channels) if settings.fit == "pad" else (),
        is_in_corner=settings.is_in_corner,
        crop_ratio=settings.crop_ratio,
        interpolation=settings.resampling,
        antialias=settings.antialias,
        pillow=pillow_version,
        scale=scale,
        mean=mean,
        std=std,
        channels=channels,
        layout="nhwc" if image.nhwc else "nchw",
        dtype=dtype,
    )


def _audio_input(feed: Feed, audio: AudioConfig, data: DataConfig) -> AudioInput:
    settings = audio.model_dump(exclude={"seconds", "axes"})
    settings |= {"time_first": audio.time_first, "channel_axis": audio.channel_axis}
    pad = data.pad_values.get(audio.column, 0.0)
    return AudioInput(**settings, samples=audio.length, dtype=feed.dtype, pad_value=pad)


def _table_input(feed: Feed, data: DataConfig, manifest: ShardManifest) -> TableInput:
    known = {column.name: column for column in (*manifest.columns, *manifest.file_columns)}
    varies = any(known[name].variable for name in feed.columns if name in known)
    pads = {**manifest.pad_values, **data.pad_values}
    return TableInput(
        columns=tuple(_column(name, manifest) for name in feed.columns),
        stacked=feed.stacked,
        shape=feed.sample_shape,
        dtype=feed.dtype,
        pad_value=pads.get(feed.columns[0], 0.0) if varies else None,
    )


def _column(name: str, manifest: ShardManifest) -> TableColumn:
    raw = name.removesuffix(INDICATOR)
    of_raw = manifest.fitted.get(raw, Fitted())
    # a column of the table may end like an indicator: that it was fitted shows it
    is_indicator = raw != name and name not in manifest.fitted and raw in manifest.fitted
    # a label has no indicator, whatever another column is called
    if is_indicator and not of_raw.is_label:
        return TableColumn(name=raw, indicates_missing=True)
    fitted = manifest.fitted.get(name, Fitted())
    return TableColumn(
        name=name,
        fill=fitted.fill,
        log1p=fitted.log1p,
        center=fitted.center,
        scale=fitted.scale,
        categories=fitted.vocabulary,
        integers=fitted.integers,
    )


def _token_inputs(text: TextColumns, data: DataConfig, manifest: ShardManifest) -> dict[str, TokenInput]:
    pads = {**manifest.pad_values, **data.pad_values}
    found = {}
    for role, info in text.inputs.items():
        if role != "labels":
            length = text.fixed_length or None
            pad = pads.get(info.name, 0.0)
            side: Literal["left", "right"] = "left" if manifest.fitted.get(info.name, Fitted()).pad_left else "right"
            found[info.name] = TokenInput(role=role, pad_value=pad, pad_side=side, length=length, dtype=info.dtype)
    return found


def _tokenizer(text: TextColumns, model: ModelConfig, limit: int | None) -> Tokenizer:
    opened = _opened_tokenizer(text.config.tokenizer)
    most = length_limit(text, read_model(model.path).graph)[0] if limit is None else limit
    return Tokenizer(
        file=TOKENIZER,
        sha256=opened.digest,
        columns=text.sources,
        words=text.config.task == "tokens",
        lowercase=text.config.lowercase,
        special_tokens=text.config.special_tokens,
        max_length=most,
        stride=text.config.stride,
    )


def _opened_tokenizer(path: Path) -> OpenTokenizer:
    try:
        return open_tokenizer(path)
    except ConfigError as error:
        raise ExportRefused(error.problems) from error


def _outputs(
    losses: Sequence[LossConfig], manifest: ShardManifest, signature: Signature, objects: Objects | None
) -> Iterator[OutputMeaning]:
    for loss in losses:
        of_objects = loss.rule.labels == "objects"
        # several losses of one set of boxes are one output
        if of_objects and objects and loss.name != objects.loss["name"]:
            continue
        output = signature.output(loss.outputs[0])
        name = output.name if output else loss.outputs[0]
        if of_objects and objects:
            place = objects.form["boxes"][0]["output"] if objects.form else 0
            name = objects.outputs[place]
        classes = class_names(loss, manifest.fitted) if loss.has_classes or of_objects else ()
        yield OutputMeaning(
            name=name,
            loss=str(loss.name),
            holds="".join(loss.rule.tasks[:1]),
            label=loss.columns,
            classes=classes,
        )


def class_names(loss: LossConfig, fitted: Mapping[str, Fitted]) -> tuple[str, ...]:
    """Return the names of the classes in the order of the scores; () if the data has none."""
    found = [fitted[name].classes for name in loss.columns if name in fitted]
    return found[0] if found else ()
