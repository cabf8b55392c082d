"""Compare the exported file with the one that is served: both on the same rows, under onnxruntime.

    rows of the split --served.onnx--> metrics      gain = how much better the new one is, and, with
                      --model.onnx--> metrics       `export.promote_if.confidence`, an interval of the gain

The interval is that of a paired bootstrap (Efron and Tibshirani 1993, chapter 13): rows are drawn with replacement, the
same ones for both files, and the metric is computed anew from the sums of these rows, or from what is matched in these
images (resampled_precision.py). So rows that are difficult for both files widen it little.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.metrics import OF_FILE, MetricConfig
from onward.trainer.data.schema.signature import Signature, TensorInfo, read_signature
from onward.trainer.errors import OnwardError, UnsupportedModel
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.file_precision import file_measures, file_precision
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, trained_part
from onward.trainer.model.metrics.resampled_precision import ResampledPrecision
from onward.trainer.run.records import Comparison, ExportedModel

log = logging.getLogger(__name__)

RESAMPLES = 2000
"""Bootstrap samples: the ends of a 95 % interval are then each decided by 50 of them."""


def compare(config: RunConfig, exported: ExportedModel, served: Path, data: EvaluationData) -> Comparison:
    """Evaluate the served file on the rows on which the exported one was evaluated; return both side by side.

    data: the rows of the split that `export.promote_if.metric` names. A served file that cannot be evaluated on them is
    no error: the comparison says why.
    """
    metric = config.promote_metric
    confidence = config.export.promote_if.confidence
    differences = signature_differences(read_signature(served), read_signature(exported.path))
    new = exported.test if data.split == "test" else exported.after
    found = Comparison(metric=metric, new=new, differences=tuple(differences))
    with tempfile.TemporaryDirectory(prefix="onward-compare-") as name:

        def runner(path: Path, part: str) -> OnnxRunner:
            file = ModelFile.read(path)
            return OnnxRunner(trained_part(file.proto, path, Path(name) / part, config.model), data)

        try:
            theirs = runner(served, "served")
            metrics = theirs.evaluate()
            of_file, reason = file_precision(ModelFile.read(served), theirs, data, config.metrics)
            metrics |= of_file
            if metric not in metrics or metric not in new:
                raise UnsupportedModel(reason or exported.file_not_measured)
            interval = None
            if confidence:
                files = (served, theirs), (exported.path, runner(exported.path, "new"))
                interval = _interval(files, data, config.metrics, metric.partition("/")[2], confidence)
        except (OnwardError, ValueError, KeyError, RuntimeError) as error:
            log.warning("the served file cannot be evaluated on these rows: %s", error)
            return found.model_copy(update={"refused": f"{type(error).__name__}: {error}"})
    sign = 1.0 if config.promote_is_greatest else -1.0
    if interval and sign < 0:
        interval = -interval[1], -interval[0]
    gain = sign * (new[metric] - metrics[metric])
    return found.model_copy(update={"served": metrics, "gain": gain, "interval": interval})


def _interval(
    files: Sequence[tuple[Path, OnnxRunner]],
    data: EvaluationData,
    metrics: Sequence[MetricConfig],
    name: str,
    confidence: float,
) -> tuple[float, float]:
    """Return `gain_interval` of a metric. files: the served one and the new one, each with its trained part."""
    precisions = [_resampled(path, part, data, metrics, name) for path, part in files]
    before, after = precisions
    if before and after:
        own = before.value, after.value
        return gain_interval(before.num_images, lambda times: own[1](times.numpy()) - own[0](times.numpy()), confidence)
    (template, old), (_, new) = (part.row_totals() for _, part in files)

    def value(totals: Tensor) -> float:
        return template.of_totals(totals)[name]

    return gain_interval(len(old), lambda times: value(times @ new) - value(times @ old), confidence)


def _resampled(
    path: Path, part: OnnxRunner, data: EvaluationData, metrics: Sequence[MetricConfig], name: str
) -> ResampledPrecision | None:
    """Return a mean average precision of a file on drawn images; None for a metric of another kind."""
    # the files are run once more: their records keep no detections
    template = data.new_metrics(part.outputs)
    measure = template.precision(name)
    if measure:
        part.evaluate(metrics=template)
    elif name.rpartition("/")[0].endswith(OF_FILE):
        measure = file_measures(ModelFile.read(path), part, data, metrics)[name]
    return ResampledPrecision(measure) if measure else None


def gain_interval(rows: int, gain: Callable[[Tensor], float], confidence: float) -> tuple[float, float]:
    """Return the interval of a gain under a paired bootstrap over the rows.

    gain: how much greater a metric is of the new file than of the served one, if each row counts so many times, fp64
    [rows]. The rows drawn depend on their number alone.
    """
    generator = torch.Generator().manual_seed(0)
    gains = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(rows, (rows,), generator=generator)
        gains.append(gain(torch.bincount(drawn, minlength=rows).double()))
    tail = (1 - confidence) / 2
    # images that are drawn may have no object, and then no gain
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.tensor(gains, dtype=torch.float64).nanquantile(ends)
    return float(low), float(high)


def signature_differences(served: Signature, new: Signature) -> list[str]:
    """Return a sentence for each input and output that one file has and the other has not, or declares differently."""
    problems = []
    for kind, theirs, ours in (("input", served.inputs, new.inputs), ("output", served.outputs, new.outputs)):
        # by name: onnxruntime is fed by name, and reads outputs by name
        before, after = ({info.name: info for info in infos} for infos in (theirs, ours))
        for name in before | after:
            if name not in after:
                problems.append(f"{kind} {name!r} of the served file is gone")
            elif name not in before:
                problems.append(f"{kind} {name!r} is new")
            elif _declared(before[name]) != _declared(after[name]):
                problems.append(f"{kind} {name!r} was {_shown(before[name])}, and is {_shown(after[name])}")
        is_another_order = [info.name for info in theirs] != [info.name for info in ours]
        if is_another_order and set(before) == set(after):
            problems.append(f"the {kind}s have another order: {', '.join(after)}; it was {', '.join(before)}")
    return problems


def _declared(info: TensorInfo) -> tuple[Any, ...]:
    return info.dtype, info.shape


def _shown(info: TensorInfo) -> str:
    if info.shape is None:
        return f"{info.dtype} [?]"
    sizes = ", ".join("any" if size is None else str(size) for size in info.shape)
    return f"{info.dtype} [{sizes}]"
