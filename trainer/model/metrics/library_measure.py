"""Metrics of torchmetrics, computed from the states of all ranks.

torchmetrics sees one process. Its `update` reads the batches of this rank, its `compute` the states of all ranks, which
`EvaluationMetrics` has added up or concatenated; it synchronises nothing itself. Floating-point states are fp64, so
that sums do not depend on how the data was divided.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onward.trainer.config.metric_names import METRICS, Task
from onward.trainer.errors import ConfigError
from onward.trainer.extras import how_to_install
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.run.directory import onward_home

if TYPE_CHECKING:
    from onward.trainer.config.sections.metrics import MetricConfig
    from onward.trainer.model.metrics.measured import Measured

log = logging.getLogger(__name__)

OF_SCORES = ("auroc", "average_precision", "calibration_error")
"""Metrics of classes that need the scores; all others need the predicted class."""


class LibraryMeasure:
    """A metric whose states are sums or lists of tensors."""

    on_first_rank = True

    def __init__(self, metric: MetricConfig, task: Task, device: torch.device, *, ignore_index: int) -> None:
        self.key = metric.key
        self._metric = metric
        self._task = task
        self._device = device
        self._ignore_index = ignore_index
        self._library = import_torchmetrics()
        self._made: Any = None

    def update(self, batch: Measured) -> None:
        made = self._made = self._made or self._make(batch.size)
        predictions, targets = self._read(batch)
        if len(targets):
            # the class's own method: that of the object also counts calls and synchronises
            type(made).update(made, predictions, targets)

    def sums(self, size: int) -> list[Tensor]:
        self._made = self._made or self._make(size)
        return [value for value in self._made.metric_state.values() if isinstance(value, Tensor)]

    def lists(self) -> list[Tensor]:
        states = [state for state in self._made.metric_state.values() if not isinstance(state, Tensor)]
        # a rank without targets gives an empty tensor, since all ranks gather the same number of them
        return [torch.cat(parts) if parts else torch.empty(0, device=self._device) for parts in states]

    def value(self, sums: Sequence[list[float]], lists: Sequence[Tensor], size: int) -> float:
        if any(scores.is_floating_point() and scores.isnan().any() for scores in lists):
            return math.nan  # torchmetrics would sort it among the numbers
        # the states of all ranks take the place of this rank's own, in the order in which they were given
        sum_of = iter(sums)
        list_of = iter(lists)
        for name, value in self._made.metric_state.items():
            if isinstance(value, Tensor):
                setattr(self._made, name, value.new_tensor(next(sum_of)).view_as(value))
            else:
                setattr(self._made, name, [next(list_of)])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # the class's own method, as in `update`
            result = type(self._made).compute(self._made)
        for warning in warned:
            log.warning("%s: %s", self.key, warning.message)
        # with average "none" there is a value for each class, of which one was asked for
        return float(result if self._metric.of_class is None else result[self._metric.of_class])

    def _read(self, batch: Measured) -> tuple[Tensor, Tensor] | tuple[list[str], list[str]]:
        """Return predictions and targets as the metric takes them."""
        if self._task == "sequences":
            found, labels = batch.sequences
            return [self._text(row) for row in found], [self._text(row) for row in labels]
        if self._metric.name == "ssim":
            return batch.images
        if self._task == "values":
            return batch.scores.flatten().double(), batch.targets.flatten().double()
        if self._task in ("labels", "pairs"):
            # torchmetrics' binary metrics take vectors, the others matrices
            alone = batch.size == 1
            return (batch.probabilities[:, 0], batch.targets[:, 0]) if alone else (batch.probabilities, batch.targets)
        predictions = batch.probabilities if self._metric.name in OF_SCORES else batch.predicted
        return predictions[batch.counted], batch.targets[batch.counted]

    def _text(self, symbols: Sequence[int]) -> str:
        """Return words with spaces between them, each its symbols; of an error rate of characters, one for each."""
        if self._metric.name == "char_error_rate":
            return "".join(map(chr, symbols))
        # without a separator each symbol is a word
        separator = self._metric.separator
        if separator is None:
            return " ".join(map(str, symbols))
        groups = itertools.groupby(symbols, lambda symbol: symbol == separator)
        return " ".join("-".join(map(str, word)) for is_separator, word in groups if not is_separator)

    def _make(self, size: int) -> Any:
        """Return the torchmetrics object for so many classes or labels."""
        metric = self._metric
        library = METRICS[self._metric.name].library
        parameters: dict[str, Any] = {"sync_on_compute": False}
        if self._task == "sequences":
            module = self._library.text
        elif self._task == "values":
            module = self._library.image if metric.name == "ssim" else self._library.regression
            parameters |= {"data_range": metric.data_range} if metric.data_range else {}
        else:
            module = self._library.classification
            # of one label there is no class to choose
            is_missing = size == 1 or (metric.of_class or 0) >= size
            if metric.of_class is not None and size and is_missing:
                raise ConfigError(f"metrics: {self.key}: the output has {size} classes or labels, 0..{size - 1}")
            parameters |= {"validate_args": False}  # else it searches each batch for labels that are no classes
            parameters |= {name: given for name in ("beta", "thresholds") if (given := getattr(metric, name))}
            if self._task in ("labels", "pairs") and size == 1:
                library = f"Binary{library}"
            else:
                is_classes = self._task == "classes"
                library = f"{'Multiclass' if is_classes else 'Multilabel'}{library}"
                parameters["num_classes" if is_classes else "num_labels"] = max(size, 2)
                if is_classes and 0 <= self._ignore_index < size:
                    parameters["ignore_index"] = self._ignore_index  # a class that an average leaves out
                if "average" in METRICS[metric.name].parameters:
                    parameters["average"] = "none" if metric.of_class is not None else metric.average or "macro"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it keeps all scores
            return getattr(module, library)(**parameters).to(self._device).set_dtype(torch.float64)


def import_torchmetrics() -> Any:
    """Import torchmetrics, which takes 2 s. Raises ConfigError with the command that installs it."""
    import_torchvision()
    with _fonts_at_home():
        return _import_all()


@contextlib.contextmanager
def _fonts_at_home() -> Iterator[None]:
    """Import matplotlib inside, which else keeps its list of fonts in the user's home.

    Before there is a home of Onward's the list is not kept: a configuration that is refused must leave nothing.
    """
    if "MPLCONFIGDIR" in os.environ or onward_home().is_dir():
        os.environ.setdefault("MPLCONFIGDIR", str(onward_home() / "matplotlib"))
        yield
        return
    with tempfile.TemporaryDirectory(prefix="onward-fonts-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]


def _import_all() -> Any:
    try:
        import torchmetrics
        import torchmetrics.classification
        import torchmetrics.image
        import torchmetrics.regression
        import torchmetrics.text
    except ImportError as error:
        raise ConfigError(f"torchmetrics cannot be imported ({error}): {how_to_install('metrics')}") from error
    return torchmetrics
