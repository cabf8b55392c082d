"""Rules about what is trained on which data: [model], [graph], [lora], [data] and [quantize]."""

from __future__ import annotations

from collections.abc import Iterable

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import GraphConfig, LoraConfig, ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.config.sections.text import MASK_PROBABILITY, MASKED, PACKED
from onward.trainer.errors import few


def weights(model: ModelConfig) -> Iterable[str]:
    if not model.train:
        yield "model.train is empty: nothing would be trained; ['*'] trains every weight"


def surgery(model: ModelConfig) -> Iterable[str]:
    if model.head and not model.num_classes:
        yield f"model.head {model.head!r} names the layer to replace, but model.num_classes is 0; set it"
    if twice := sorted({name for name in model.start if model.start.count(name) > 1}):
        yield f"model.start names {', '.join(twice)} more than once"


def adapters(lora: LoraConfig, model: ModelConfig) -> Iterable[str]:
    if not lora.weights:
        for name in lora.changed("weights"):
            yield f"lora.{name} has no effect without lora.weights; name the weights that get an adapter"
    elif model.train != ModelConfig.model_fields["train"].default:
        yield (
            f"model.train {list(model.train)} and lora.weights contradict each other: with adapters the model's own "
            "weights are frozen; name those trained whole in lora.also_train"
        )


def dropout(graph: GraphConfig) -> Iterable[str]:
    # its places are found by fused calls: linear layers, norms and attention
    if graph.dropout and not graph.fuse:
        yield f"graph.dropout {graph.dropout:g} needs graph.fuse = true: it is added to the fused graph"


def text(data: DataConfig) -> Iterable[str]:
    text = data.text
    if text is None:
        return
    if text.packing not in ("auto", "none") and text.task not in PACKED:
        yield f"data.text.packing {text.packing!r} is for the tasks {few(PACKED)}, not {text.task}"
    if text.stride is not None and text.task == "causal":
        yield (
            "data.text.stride: the windows of a causal model follow each other, so that each token is predicted once; "
            "leave it out"
        )
    elif text.stride is not None and text.packing not in ("auto", "none"):
        yield f"data.text.stride divides texts, which data.text.packing {text.packing!r} joins; set one of the two"
    if text.stride is not None and not isinstance(text.columns, str) and len(text.columns) > 1:
        yield (
            "data.text.stride: each window of one text of a pair would be combined with each window of the other; "
            "leave it out, so that the longer text is truncated"
        )
    if text.pad_side != "auto" and text.packing not in ("auto", "none"):
        yield f"data.text.pad_side {text.pad_side!r}: windows of data.text.packing {text.packing!r} are not padded so"
    given = {"tokens.mask": text.tokens.get("mask"), "mask_probability": text.mask_probability}
    for name, value in given.items():
        if not text.is_masked and value not in (None, MASK_PROBABILITY):
            yield f"data.text.{name} {value!r} is for the tasks {few(MASKED)}, not {text.task}"


# -- rules about quantization in training: [quantize]


def aware(
    quantize: QuantizeConfig, model: ModelConfig, parallel: ParallelConfig, export: ExportConfig
) -> Iterable[str]:
    if not quantize.aware:
        for name, field in QuantizeConfig.model_fields.items():
            if name not in ("scales", "aware") and getattr(quantize, name) != field.default:
                yield f"quantize.{name} has no effect without quantize.aware = true"
        return
    changed = {
        "model.num_classes": model.num_classes,
        "model.untie": list(model.untie),
        "model.start": list(model.start),
    }
    for name, value in changed.items():
        if value:
            yield (
                f"quantize.aware quantizes the file as it is, and {name} {value!r} changes it; train with {name} "
                "first, and then the exported file with quantize.aware"
            )
    if parallel.tensor > 1:
        yield (
            f"quantize.aware: quantized products are not divided, so that parallel.tensor {parallel.tensor} is not "
            "possible; use parallel.data, parallel.pipeline or parallel.zero"
        )
    for kind in ("fp16", "fp16_compute", "bf16", "int8_dynamic", "int8_static"):
        if kind in export.variants:
            yield f"export.variants {kind!r}: the file that quantize.aware exports is in 8 bits already; remove it"
    if export.training:
        yield "export.variants 'training': the weights that quantize.aware exports are integers; leave it out"
