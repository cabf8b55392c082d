"""Keep a moving average of the weights beside them: an exponential one (EMA), or their mean (SWA).

    step               0   1   2   3   4   5   6   7   8        first step 4, period 2

    weights            w0  w1  w2  w3  w4  w5  w6  w7  w8
    average, EMA       w0  w1  w2  w3  w4  .-- decay a + (1 - decay) w, in every step --
    average, SWA       w0  w1  w2  w3  w4  w4  a6  a6  a8       a6 = (w4 + w6) / 2,  a8 = (w4 + w6 + w8) / 3

The arithmetic is that of torch.optim.swa_utils.AveragedModel, element by element, on the part of each weight that the
rank holds: so a layout needs no communication for it, and equal copies of a weight have equal averages. Running
statistics are averaged as weights are. Frozen weights have no average: it would be the weight.

SWA: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407. The cap (1 + t) / (10 + t) of a warm-up: TensorFlow's
ExponentialMovingAverage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from onward.trainer.config.sections.metrics import AVERAGE_METRICS, WEIGHTS_METRICS
from onward.trainer.config.sections.training import AverageConfig
from onward.trainer.distributed.weights import Placement, Weight, average_key, averages_in, weights_in
from onward.trainer.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
PREFIXES = ("average/", "averages/")
"""What the keys of a checkpoint begin with that belong to a moving average."""


class Averages:
    """The averages of the weights that this rank holds; of no weights if `kind` is "none".

    weights: what changes during training, trained weights and running statistics. num_steps: of the whole training.
    swapped: called after the values of weights and averages were exchanged. Every rank makes the same calls. Raises
    ConfigError if no step of the training enters the average.
    """

    def __init__(
        self,
        config: AverageConfig,
        weights: Sequence[Weight],
        *,
        num_steps: int,
        device: torch.device,
        swapped: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._swapped = swapped
        self._first = config.first_step(num_steps)
        if config.kind != "none" and self._first > num_steps:
            raise ConfigError(
                f"average.start: step {self._first} would be the first of the average, but there are {num_steps} steps"
            )
        # without an average the lists stay empty, so that no memory is taken and every loop over them does nothing
        self._of = list(weights) if config.kind != "none" else []
        self._weights = [weight.tensor.detach() for weight in self._of]
        self._averages = [tensor.clone() for tensor in self._weights]
        self.count = 0
        """How many weights have entered the average; as long as it is 0, the average is the weights."""
        # the count as a tensor is what a checkpoint holds; reading it would wait for the device
        self._saved_count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Let the weights after this step enter the average. Not to be called for a step that was skipped."""
        if self._config.kind == "none":
            return
        enters = step >= self._first and (step - self._first) % self._config.period == 0
        # until the first step of the average it follows the weights, and the first one enters as it is
        if self._of and self.count == 0:
            torch._foreach_copy_(self._averages, self._weights)
        elif self._of and enters:
            self._rule()(self._averages, self._weights, self.count)
        # on a rank without weights as well: all ranks evaluate the average, or none does
        self.count += enters
        self._saved_count.fill_(self.count)

    def _rule(self) -> Any:
        """Return torch's function of (averages, weights, how many weights have entered the averages)."""
        if self._config.kind == "swa":
            return get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        # early weights are far from the final ones: a small cap lets the average forget them sooner
        most = (1 + self.count) / (10 + self.count) if self._config.kind == "ema_warmup" else 1.0
        return get_ema_multi_avg_fn(min(self._config.decay, most))  # type: ignore[no-untyped-call]

    def in_turn(self) -> Iterator[tuple[str, ...]]:
        """Yield what is evaluated, as the first part of the names of its metrics, while it is in the weights.

        First the weights themselves, then the averages in their place; both at once as long as they are equal. To be
        iterated to the end: then every weight has the bits that it had before.
        """
        if self._config.kind == "none":
            yield (WEIGHTS_METRICS,)
        elif self.count == 0:
            yield WEIGHTS_METRICS, AVERAGE_METRICS
        else:
            yield (WEIGHTS_METRICS,)
            self._swap()
            yield (AVERAGE_METRICS,)
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the values of weights and averages, one at a time, so that only one is copied at a time."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)
        self._swapped()

    def parts(self) -> dict[str, tuple[Tensor, Placement]]:
        """Return checkpoint key -> (average, the weight's placement); of a weight with several copies, the first."""
        kind = self._config.saved_kind
        parts = dict[str, tuple[Tensor, Placement]]()
        for weight, average in zip(self._of, self._averages, strict=True):
            # interleaved stages of one rank may hold copies of a weight, whose averages are equal
            parts.setdefault(average_key(weight.name, kind), (average, weight.placement))
        return parts if kind == "none" else parts | {_count_key(kind): (self._saved_count, Placement.full(()))}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the averages among the tensors of a checkpoint; without any, begin anew as the weights are now."""
        count = tensors.get(_count_key(self._config.saved_kind))
        self.count = 0 if count is None else int(count)
        self._saved_count.fill_(self.count)
        for weight, average in zip(self._of, self._averages, strict=True):
            key = average_key(weight.name, self._config.saved_kind)
            # a checkpoint of another kind, or of none, has no count: the average begins as the weights now are
            average.copy_(weight.tensor if count is None else tensors[key])


def average_shapes(
    config: AverageConfig, shapes: Shapes, source: str, stored: Shapes
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return (the shapes of a checkpoint without averages that are not read, those of the averages to be read).

    shapes: by initializer name, of all weights that have an average. stored: of the checkpoint. An average of another
    kind is not read, and none without [average]: where the checkpoint has none of this kind, it begins anew.
    """
    kind = config.saved_kind
    wanted = {average_key(name, kind): shape for name, shape in shapes.items()} | {_count_key(kind): ()}
    others = {key: shape for key, shape in stored.items() if not key.startswith(PREFIXES)}
    if kind != "none" and _count_key(kind) in stored:
        return others | {key: stored[key] for key in wanted if key in stored}, wanted
    # the key of the count names the kind of the average
    held = sorted(key.removeprefix("averages/") for key in stored if key.startswith("averages/"))
    if kind != "none":
        found = f"an average of kind {held[0]!r}" if held else "no average of the weights"
        log.warning("%s has %s; that of average.kind %r begins as its weights", source, found, config.kind)
    elif held:
        log.info("%s has an average (%s), which is dropped: average.kind is 'none'", source, held[0])
    return others, {}


def exported_weights(
    average: AverageConfig, tensors: Mapping[str, Tensor], *, exports_average: bool, source: str
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint that are exported, by initializer name: the trained ones, or their average.

    Frozen weights have no average. Raises CheckpointError if the checkpoint has none of the configured kind.
    """
    weights = weights_in(tensors)
    if not exports_average:
        return weights
    averages = averages_in(tensors, average.saved_kind)
    if not averages:
        raise CheckpointError(
            f"{source} has no average of kind {average.kind!r} to export; set export.weights = 'trained', or "
            "choose a checkpoint that was saved with [average]"
        )
    return weights | averages


def _count_key(kind: str) -> str:
    return f"averages/{kind}"
