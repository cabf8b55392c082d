"""Settings of earlier versions that are gone, and what takes their place.

A configuration that has one is refused with the sentence of this table. The saved configuration of an older run has all
settings of its time, and stays readable: what a setting that is gone said is said by those of now, or changes nothing.
A value that only the version that began the run can compute is left out; the run is shown, and does not go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onward.trainer.config.metric_names import has_no_direction, is_greatest

Settings = dict[str, Any]
Rule = Callable[[Any, Settings, Settings], object]
"""Of a value, its table and all settings: let the settings of now say it. True = only an earlier version computes it.
"""


def _without_effect(value: Any, table: Settings, settings: Settings) -> None:
    """Pass over limits of time, how often ranks look, sizes of messages, and what was done when the run began."""


def _said(by: str, value: Any = None) -> Rule:
    """Return the rule of what another setting says: by the same value, or by `value`."""

    def rule(given: Any, table: Settings, settings: Settings) -> None:
        *path, name = by.split(".")
        for each in path:
            settings = settings.setdefault(each, {})
        settings[name] = value or given

    return rule


def _as_limit(place: int) -> Rule:
    """Return the rule of one of the two limits of a trust ratio."""

    def has_the_other(entry: Settings, whole: Sequence[float]) -> bool:
        # greatest values are read before least ones
        return entry.get("ratio_min") is not None if place else (entry.get("trust_ratio") or whole)[1] != whole[1]

    def rule(value: float, table: Settings, settings: Settings) -> bool:
        optimizer = settings["optimizer"]
        whole = optimizer.get("trust_ratio") or (0.0, 1e30)
        limits = [*(table.get("trust_ratio") or whole)]
        limits[place] = value
        is_one_of_two = table is not optimizer and (table.get("trust_ratio") or table.get("ratio_min")) is None
        # of several patterns that match a weight, each limit was that of the last one that has it
        is_mixed = is_one_of_two and any(has_the_other(each, whole) for each in optimizer["weights"])
        table["trust_ratio"] = limits
        return is_mixed

    return rule


def _compiled(value: str, graph: Settings, settings: Settings) -> bool:
    """Say what is not the default of how to compile; no two of these are one word now."""
    if graph["compile"] in (True, "default"):
        graph["compile"] = value
    return graph["compile"] not in (value, False, "auto")


def _quantized(start: int, letters: str) -> Rule:
    """Return the rule of a part of `quantize.aware`."""

    def rule(value: Any, quantize: Settings, settings: Settings) -> None:
        if types := quantize["aware"]:
            types = "u8s7" if types is True else types
            quantize["aware"] = types[:start] + letters + types[start + 1 :]

    return rule


def _adasum(ranks: int, parallel: Settings, settings: Settings) -> bool:
    if ranks == 1:
        parallel["reduction"] = "adasum_all"
    world = parallel["data"] * parallel["tensor"] * parallel["pipeline"]
    # all of one machine, as without this setting
    return ranks > 1 and (ranks < world or bool(settings["launch"]["hostfile"]))


def _time_first(value: bool, audio: Settings, settings: Settings) -> None:
    audio["axes"] = "channel_time_first" if audio.get("axes") == "channel" else "time_first"


def _masks_in_a_folder(folder: str, image: Settings, settings: Settings) -> bool:
    # masks in columns, too, would be of a table, and a folder of images is none
    is_both = bool(set(image["masks"]) - {"mask"})
    image["masks"] = folder if "/" in folder else f"./{folder}"
    return is_both


def _text_files(pattern: str, data: Settings, settings: Settings) -> bool:
    """Name the files of directories by a glob. Other files than before would be refused when the run is resumed."""
    if data["format"] not in ("auto", "text") or (pattern == "*.txt" and data["text"]):
        return False
    for each in (data, *data["sources"]):
        for key in ("source", "evaluation_source", "test_source"):
            if (source := each.get(key)) and Path(source).is_dir():
                each[key] = f"{source}/**/{pattern}"
    return data.get("source") == "stdlib"


def _first_scale(value: float, precision: Settings, settings: Settings) -> None:
    # a static scale has no first value, and other types have no scale
    if precision["compute"] == "fp16" and not precision["loss_scale"]:
        precision["loss_scale"] = ["dynamic", min(value, 2.0**24)]


def _of_loss_scale(value: float, precision: Settings, settings: Settings) -> bool:
    return precision["compute"] == "fp16" and not precision["loss_scale"]


def _matched(pairs: Any, teacher: Settings, settings: Settings) -> bool:
    """Read the table that each pair had."""
    if isinstance(pairs, Mapping):
        teacher["match"] = pairs
        return False
    teacher["match"] = {each["student"]: [each["teacher"], each["weight"]] for each in pairs}
    return len(teacher["match"]) < len(pairs)


def _compatible(value: Any, schedule: Settings, settings: Settings) -> None:
    # the others are alike in both shapes
    if schedule["mode"] in ("cosine", "linear", "poly"):
        schedule["mode"] += "_compatible"


def _type_of_labels(is_soft: bool, loss: Settings, settings: Settings) -> None:
    # float32 was also written down for losses that do not read it
    name = loss["name"] or ("file" if loss["file"] else settings["model"]["loss"])
    if name != "file":
        loss["label_type"] = "float32" if is_soft else "auto"


def _is_other_way(value: Literal["least", "greatest"], checkpoint: Settings, settings: Settings) -> bool:
    if has_no_direction(checkpoint["best_metric"]):
        checkpoint["best_metric"] = "evaluation/loss"
        return True
    return is_greatest(checkpoint["best_metric"]) != (value == "greatest")


def _is_muon(value: Any, muon: Settings, settings: Settings) -> bool:
    return bool(settings["optimizer"]["name"] == "muon")


@dataclass(frozen=True)
class Removed:
    """A setting that is gone."""

    instead: str
    """A clause: what takes its place."""
    same: tuple[Any, ...]
    """Values that say what a run does now, the former default first; () = each is read by `now`."""
    now: Rule
    """What becomes of another value in a saved configuration."""


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
        "from a checkpoint without this average it always begins as the checkpoint's weights",
        (False, True),
        _without_effect,
    ),
    "average.warmup": Removed('set average.kind = "ema_warmup"', (False,), _said("average.kind", "ema_warmup")),
    "checkpoint.best_is": Removed(
        "of each metric it is known whether the least or the greatest value is the best", ("auto",), _is_other_way
    ),
    "data.audio.channel_axis": Removed(_AXES, (False,), _said("data.audio.axes", "channel")),
    "data.audio.time_first": Removed(_AXES, (False,), _time_first),
    "data.balance": Removed('set train.shuffle = "length"', ("none",), _said("train.shuffle")),
    "data.image.antialias": Removed(
        'data.image.interpolation says it: "bilinear_aliased" and "bicubic_aliased" do not average',
        (True,),
        lambda _, image, __: image.update(interpolation=f"{image['interpolation']}_aliased"),
    ),
    "data.image.augment.vertical_flip": Removed(
        "give data.image.augment.flip two numbers: [from left to right, from top to bottom]",
        (0.0,),
        lambda value, augment, _: augment.update(flip=[augment["flip"], value]),
    ),
    "data.image_channels": Removed(
        "set data.image_size = [channels, side]",
        (3,),
        lambda number, data, _: data.update(image_size=[number, data["image_size"]]),
    ),
    "data.image.mask_folder": Removed(
        'name the folder in data.image.masks, with a slash, such as "../masks" or "./masks"', ("",), _masks_in_a_folder
    ),
    "data.shard_format": Removed(
        'shards are written as Arrow files only; files in .pb are read as before (data.format = "pb")',
        ("arrow", "pb"),
        _without_effect,
    ),
    "data.table.vocabularies": Removed(
        'give the texts in data.table.categories, such as { city = ["", "Oslo"], "s*" = "sorted" }',
        ({},),
        lambda texts, table, _: table.update(categories=dict.fromkeys(table["categories"], "sorted") | texts),
    ),
    "data.table.window.split": Removed(
        'set data.split = "series" for whole series',
        ("time",),
        _said("data.split"),
    ),
    "data.text.end_token": Removed(_TOKENS % "end", ("",), _said("data.text.tokens.end")),
    "data.text.mask_token": Removed(_TOKENS % "mask", ("",), _said("data.text.tokens.mask")),
    "data.text.pad_token": Removed(_TOKENS % "pad", ("",), _said("data.text.tokens.pad")),
    "data.text.whole_words": Removed(
        'set data.text.task = "masked_words"', (False,), _said("data.text.task", "masked_words")
    ),
    "data.text_files": Removed(
        'name the files by a glob, such as data.source = "notes/**/*.md"; of a directory those in .py are read, or '
        "else those in .txt",
        ("*.py",),
        _text_files,
    ),
    "export.parity_batches": Removed("4 evaluation batches are compared", (4,), _without_effect),
    "export.promote_if.signature": Removed(
        "a file whose inputs or outputs differ from those of the served one stays a candidate, and `onward promote` "
        "moves the alias by hand",
        ("same",),
        _without_effect,
    ),
    "export.training": Removed(
        'name "training" in export.variants',
        (False,),
        lambda _, export, __: export.update(variants=[*export["variants"], "training"]),
    ),
    "graph.compile_mode": Removed(_COMPILE, ("auto",), _compiled),
    "graph.compile_regions": Removed(_COMPILE, ("auto", "whole"), _compiled),
    "graph.shapes": Removed(_COMPILE, ("auto", "static"), _compiled),
    "launch.collective_timeout_s": Removed(
        "a rank waits for the others for five sixths of launch.heartbeat_timeout_s", (100.0,), _without_effect
    ),
    "launch.compile_timeout_s": Removed(
        "while it compiles, a rank may be silent for launch.start_timeout_s, and at least half an hour",
        (1800.0,),
        _without_effect,
    ),
    "launch.rehearsal_timeout_s": Removed("the rehearsal takes a minute at most", (60.0,), _without_effect),
    "launch.retry_delay_s": Removed(
        "a retry begins after half a second, and after four times as long each further time without progress",
        (0.5, 2.0),
        _without_effect,
    ),
    "launch.storage_wait_s": Removed(
        "a retry waits up to 10 minutes for the disk; launch.retries = 0 does not wait", (600.0,), _without_effect
    ),
    "loss.soft_labels": Removed(
        'set loss.label_type = "float32" for labels that are probabilities', (), _type_of_labels
    ),
    "monitor.cpu_peak": Removed(
        "the peak of CPUs is always measured, in a tenth of a second", (True,), _without_effect
    ),
    "monitor.summary_period": Removed(
        "histograms and norms are recorded every 100 steps, and in the last step", (100,), _without_effect
    ),
    "monitor.tensorboard": Removed(
        'set monitor.report_to = ["tensorboard"], or []',
        (True,),
        lambda _, monitor, __: monitor.update(report_to=[]),
    ),
    "optimizer.adafactor": Removed(
        "Adafactor has the numbers of its paper, as torch.optim.Adafactor",
        (ADAFACTOR,),
        lambda _, optimizer, __: optimizer["name"] == "adafactor",
    ),
    "optimizer.muon.convolutions": Removed(
        'give kernels to Muon with [[optimizer.weights]] pattern = "...", rule = "muon"', ("adamw",), _is_muon
    ),
    "optimizer.muon.steps": Removed("Muon makes 5 Newton-Schulz iterations", (5,), _is_muon),
    "optimizer.ratio_max": Removed(_RATIO.format("optimizer"), (1e30,), _as_limit(1)),
    "optimizer.ratio_min": Removed(_RATIO.format("optimizer"), (0.0,), _as_limit(0)),
    "optimizer.weights.bias_correction": Removed(
        "optimizer.bias_correction is for all weights",
        (None,),
        lambda given, _, settings: given != settings["optimizer"]["bias_correction"],
    ),
    "optimizer.weights.ratio_max": Removed(_RATIO.format("optimizer.weights"), (None,), _as_limit(1)),
    "optimizer.weights.ratio_min": Removed(_RATIO.format("optimizer.weights"), (None,), _as_limit(0)),
    "parallel.adasum_ranks": Removed(
        'set parallel.reduction = "adasum_all" for Adasum between all replicas', (0,), _adasum
    ),
    "parallel.bucket_mib": Removed("buckets have the size that is right for the link", (0,), _without_effect),
    "parallel.horizontal": Removed("it is parallel.tensor now", (1,), _said("parallel.tensor")),
    "parallel.vocabulary": Removed(
        "embeddings and heads are always divided by vocabulary, but where loss.class_axis is not the last axis",
        (True,),
        lambda _, parallel, __: parallel["tensor"] > 1,
    ),
    "precision.growth_interval": Removed(
        "a dynamic loss scale doubles after 2,000 steps without overflow", (2000,), _of_loss_scale
    ),
    "precision.max_scale": Removed("a dynamic loss scale is at most 2^24", (2.0**24,), _of_loss_scale),
    # after the others of the scale, which ask whether it was dynamic
    "precision.initial_scale": Removed('set precision.loss_scale = ["dynamic", FIRST VALUE]', (65536.0,), _first_scale),
    "quantize.activations": Removed(_QUANTIZED, ("uint8",), _quantized(0, "s")),
    "quantize.calibration_rows": Removed("ranges are measured on 256 training rows", (256,), _without_effect),
    "quantize.per_channel": Removed("weights always have a scale for each output channel", (True,), _without_effect),
    "quantize.reduce_range": Removed(_QUANTIZED, (True,), _quantized(3, "8")),
    "quantize.weights": Removed(_QUANTIZED, ("int8",), _quantized(2, "u")),
    "recompute.stash": Removed(
        'set recompute.mode = "compressed_bf16" or "compressed_fp8"',
        ("exact",),
        lambda kind, recompute, _: recompute.update(mode=f"compressed_{kind}"),
    ),
    "schedule.shape": Removed(
        'set schedule.mode = "cosine_compatible", "linear_compatible" or "poly_compatible"',
        ("continuous",),
        _compatible,
    ),
    "stop.metric": Removed(
        "patience and target follow checkpoint.best_metric",
        ("",),
        lambda metric, _, settings: metric != settings["checkpoint"]["best_metric"],
    ),
    "teacher.compute": Removed(
        "the teacher computes in precision.compute, as the model does",
        ("auto",),
        lambda compute, teacher, settings: bool(teacher["path"]) and compute != settings["precision"]["compute"],
    ),
    "train.desync_check_period": Removed("copies of the weights are compared every 100 steps", (100,), _without_effect),
}
"""`section.key`, in a list without the number of its entry -> what became of it."""
_MATCH = Removed("a tensor of the model has one partner now, and may be the partner of several", (), _matched)


def sentence_of(key: str) -> str:
    """Return the refusal of a setting that is gone, such as `optimizer.weights.0.ratio_min`; "" for any other key."""
    removed = REMOVED.get(_without_numbers(key))
    return f"{key} is no setting any more: {removed.instead}" if removed else ""


def refusals(left_out: Settings) -> list[str]:
    """Return why a run does not go on, a sentence for each setting that `as_of_now` has left out."""
    return [
        f"{key} was {value!r} in this run of an earlier version, and only that version computes it: "
        f"{REMOVED.get(_without_numbers(key), _MATCH).instead}; go on with that version, or start a new run"
        for key, value in left_out.items()
    ]


def as_of_now(saved: Mapping[str, Any]) -> tuple[Settings, Settings]:
    """Return a saved configuration in the settings of now, and what they cannot say: `section.key` -> value."""
    settings = _copied(saved)
    left_out = {}
    for key, removed in {**REMOVED, "teacher.match": _MATCH}.items():
        *path, name = key.split(".")
        for where, table in _tables(settings, path):
            if name not in table:
                continue
            value = table.pop(name)
            try:
                is_said = value in removed.same or not removed.now(value, table, settings)
            # config.json was damaged, which its other settings may tell
            except (LookupError, TypeError, AttributeError):
                is_said = False
            if not is_said:
                left_out[f"{where}{name}"] = value
    return settings, left_out


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _tables(value: Any, path: Sequence[str], where: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield the tables at a path, of a list each entry, with their keys."""
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from _tables(each, path, f"{where}{place}.")
    elif not isinstance(value, dict):
        return
    elif path:
        yield from _tables(value.get(path[0]), path[1:], f"{where}{path[0]}.")
    else:
        yield where, value


def _without_numbers(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdecimal())
