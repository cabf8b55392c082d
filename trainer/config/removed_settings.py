"""Settings of earlier versions that are gone, and what takes their place.

A configuration that has one is refused with the sentence of this table. The saved configuration of an older run has all
settings of its time: there a setting that is gone is left out if a run now does what it said, and refused otherwise,
because the run would go on with another computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """A setting that is gone."""

    instead: str
    """A clause: what takes its place."""
    same: tuple[Any, ...]
    """What a saved configuration may have, because a run does the same now: the former default first."""


ADAFACTOR = {"decay_exponent": 0.8, "epsilon_scale": 1e-3, "clip": 1.0}
_TOKENS = 'special tokens are in one table, such as data.text.tokens = { %s = "..." }'
_COMPILE = 'graph.compile says how: "default", "reduce-overhead", "max-autotune-no-cudagraphs", "dynamic" or "repeated"'
_QUANTIZED = (
    'the types are one word in quantize.aware: true = "u8s7", computed values in uint8, weights in 7 bits of int8'
)
_AXES = 'set data.audio.axes to "channel", "time_first" or "channel_time_first"'
_RATIO = "the two limits are one setting: {0}.trust_ratio = [least, greatest]"

REMOVED: Mapping[str, Removed] = {
    "average.begin_anew": Removed(
        "from a checkpoint without this average it always begins as the checkpoint's weights", (False, True)
    ),
    "average.warmup": Removed('set average.kind = "ema_warmup"', (False,)),
    "data.audio.channel_axis": Removed(_AXES, (False,)),
    "data.audio.time_first": Removed(_AXES, (False,)),
    "data.balance": Removed('set train.shuffle = "length"', ("none",)),
    "data.image.antialias": Removed(
        'data.image.interpolation says it: "bilinear_aliased" and "bicubic_aliased" do not average', (True,)
    ),
    "data.image_channels": Removed("set data.image_size = [channels, side]", (3,)),
    "data.table.vocabularies": Removed(
        'give the texts in data.table.categories, such as { city = ["", "Oslo"], "s*" = "sorted" }', ({},)
    ),
    "data.table.window.split": Removed('set data.split = "series" for whole series', ("time",)),
    "data.text.end_token": Removed(_TOKENS % "end", ("",)),
    "data.text.mask_token": Removed(_TOKENS % "mask", ("",)),
    "data.text.pad_token": Removed(_TOKENS % "pad", ("",)),
    "data.text_files": Removed(
        'name the files by a glob, such as data.source = "notes/**/*.md"; of a directory those in .py are read, or '
        "else those in .txt",
        ("*.py",),
    ),
    "export.parity_batches": Removed("4 evaluation batches are compared", (4,)),
    "graph.compile_mode": Removed(_COMPILE, ("auto",)),
    "graph.compile_regions": Removed(_COMPILE, ("auto", "whole")),
    "graph.shapes": Removed(_COMPILE, ("auto",)),
    "launch.collective_timeout_s": Removed(
        "a rank waits for the others for five sixths of launch.heartbeat_timeout_s", (100.0,)
    ),
    "launch.compile_timeout_s": Removed(
        "while it compiles, a rank may be silent for launch.start_timeout_s, and at least half an hour", (1800.0,)
    ),
    "launch.rehearsal_timeout_s": Removed("the rehearsal takes a minute at most", (60.0,)),
    "launch.storage_wait_s": Removed(
        "a retry waits up to 10 minutes for the disk; launch.retries = 0 does not wait", (600.0,)
    ),
    "monitor.cpu_peak": Removed("the peak of CPUs is always measured, in a tenth of a second", (True,)),
    "optimizer.adafactor": Removed("Adafactor has the numbers of its paper, as torch.optim.Adafactor", (ADAFACTOR,)),
    "optimizer.muon.convolutions": Removed(
        'give kernels to Muon with [[optimizer.weights]] pattern = "...", rule = "muon"', ("adamw",)
    ),
    "optimizer.muon.steps": Removed("Muon makes 5 Newton-Schulz iterations", (5,)),
    "optimizer.ratio_max": Removed(_RATIO.format("optimizer"), (1e30,)),
    "optimizer.ratio_min": Removed(_RATIO.format("optimizer"), (0.0,)),
    "optimizer.weights.bias_correction": Removed("optimizer.bias_correction is for all weights", (None,)),
    "optimizer.weights.ratio_max": Removed(_RATIO.format("optimizer.weights"), (None,)),
    "optimizer.weights.ratio_min": Removed(_RATIO.format("optimizer.weights"), (None,)),
    "parallel.adasum_ranks": Removed('set parallel.reduction = "adasum_all" for Adasum between all replicas', (0,)),
    "parallel.bucket_mib": Removed("buckets have the size that is right for the link", (0,)),
    "parallel.vocabulary": Removed(
        "embeddings and heads are always divided by vocabulary, but where loss.class_axis is not the last axis", (True,)
    ),
    "precision.growth_interval": Removed("a dynamic loss scale doubles after 2,000 steps without overflow", (2000,)),
    "precision.max_scale": Removed("a dynamic loss scale is at most 2^24", (2.0**24,)),
    "quantize.activations": Removed(_QUANTIZED, ("uint8",)),
    "quantize.calibration_rows": Removed("ranges are measured on 256 training rows", (256,)),
    "quantize.per_channel": Removed("weights always have a scale for each output channel", (True,)),
    "quantize.reduce_range": Removed(_QUANTIZED, (True,)),
    "quantize.weights": Removed(_QUANTIZED, ("int8",)),
    "recompute.stash": Removed('set recompute.mode = "compressed_bf16" or "compressed_fp8"', ("exact",)),
    "stop.metric": Removed("patience and target follow checkpoint.best_metric", ("",)),
    "teacher.compute": Removed("the teacher computes in precision.compute, as the model does", ("auto",)),
    "train.desync_check_period": Removed("copies of the weights are compared every 100 steps", (100,)),
}
"""`section.key`, in a list without the number of its entry -> what became of it."""


def sentence_of(key: str) -> str:
    """Return the refusal of a setting that is gone, such as `optimizer.weights.0.ratio_min`; "" for any other key."""
    removed = REMOVED.get(_without_numbers(key))
    return f"{key} is no setting any more: {removed.instead}" if removed else ""


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved configuration without those that are gone.

    Raises ValueError with a sentence for each that said what no run does now.
    """
    refused = list[str]()
    kept: dict[str, Any] = _kept(saved, "", refused)
    if refused:
        raise ValueError("\n".join(refused))
    return kept


def _kept(value: Any, key: str, refused: list[str]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_kept(each, f"{key}.{place}", refused) for place, each in enumerate(value))
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, inner in value.items():
        path = f"{key}.{name}" if key else str(name)
        removed = REMOVED.get(_without_numbers(path))
        if removed is None:
            kept[name] = _kept(inner, path, refused)
        elif inner not in removed.same:
            refused.append(
                f"{path} was {inner!r} in this run of an earlier version, and is no setting any more: "
                f"{removed.instead}; go on with the version that began the run, or start a new run"
            )
    return kept


def _without_numbers(key: str) -> str:
    return ".".join(_names(key))


def _names(key: str) -> Iterator[str]:
    yield from (part for part in key.split(".") if not part.isdecimal())
