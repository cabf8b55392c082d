"""Rules about quantization in training: [quantize]."""

from __future__ import annotations

from collections.abc import Iterable

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.quantize import QuantizeConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.results import ExportConfig


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
