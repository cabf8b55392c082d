"""Compute the configured losses as sums over targets, beside the numbers of targets.

A loss here is never a mean. The mean over a step is the sum over all replicas and micro-batches divided by the number
of targets over all of them; a mean of means differs from it as soon as a label is ignored or one micro-batch is
smaller. This is why two replicas equal one replica with twice the batch.

    loss of a step  =  sum over [[loss]] i of  weight_i x (sum over targets of loss i) / (targets of loss i)

A loss may have several terms, each with its own number of targets (yolov5: one for the images, and one for each level
of a grid). Each term is then an entry of this sum, with the weight of its loss.

With a teacher its losses are further terms of this sum, behind the others (teacher_loss.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.losses import LossConfig, titles
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.detection_grids import size_of
from onward.trainer.data.schema.label_axes import Dims, check_axes, check_elements
from onward.trainer.data.schema.target_counts import soft_axis, target_counter, without_lengths
from onward.trainer.data.sequence_lengths import sequence_problems
from onward.trainer.errors import ConfigError, DataError, few
from onward.trainer.model.losses import chunked_loss
from onward.trainer.model.losses.chunked_loss import at_least_fp32
from onward.trainer.model.losses.loss_file import load_loss
from onward.trainer.model.losses.loss_formulas import FORMULAS, Formula, LossInputs, as_rows, dense
from onward.trainer.model.losses.losses_in_units import label_axis, standardised
from onward.trainer.model.losses.teacher_loss import TeacherLoss
from onward.trainer.model.losses.vocabulary_loss import ClassShard

MAX_NAMED_ROWS = 5
"""Rows that a message names."""


class Losses:
    """All losses of a run over the outputs of one micro-batch: those of `RunConfig.losses`, then the soft ones.

    output_names: the graph's outputs in order; shapes: output -> the shape that the file declares. classes: as of
    `Loss`, for a run with one loss. replicas: the group over which losses of whole batches reach (info_nce). soft: the
    losses against the teacher, whose outputs the graph must have then. compiled: compute the cross-entropy of
    half-precision logits with torch.compile.
    """

    def __init__(
        self,
        losses: Sequence[LossConfig],
        output_names: Sequence[str],
        shapes: Mapping[str, Dims | None] | None = None,
        *,
        classes: ClassShard | None = None,
        replicas: dist.ProcessGroup | None = None,
        soft: Sequence[SoftLoss] = (),
        compiled: bool = False,
    ) -> None:
        assert classes is None or len(losses) + len(soft) == 1
        known = shapes or {}
        self.each = tuple(
            Loss(config, output_names, known, classes=classes, replicas=replicas, compiled=compiled)
            for config in losses
        )
        """Those against labels."""
        self.soft = tuple(TeacherLoss(config, output_names, known) for config in soft)
        """Those against the teacher."""
        self.titles = titles(losses, output_names)
        """What the metrics of each loss against labels are named after."""
        self._weights = [config.weight for config in losses for _ in range(config.num_terms)]
        self._weights += [config.weight for config in soft]

    def __len__(self) -> int:
        """Return the number of terms of all losses."""
        return len(self._weights)

    def __call__(
        self, outputs: Tensor | Sequence[Tensor], labels: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        """Return each term of each loss summed over its targets: scalars, differentiable. size: 0 for a padding
        micro-batch."""
        # the labels of the losses against the teacher are behind those of the others
        soft = zip(self.soft, labels[len(self.each) :], strict=True)
        hard = zip(self.each, labels[: len(self.each)], strict=True)
        terms: list[Tensor] = []
        for loss, own in hard:
            terms += loss.terms(outputs, own, size)
        return (*terms, *(against_teacher(outputs, own, size) for against_teacher, own in soft))

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        """Raise DataError for labels that are no classes, see `Loss.check_labels`."""
        for place, loss in enumerate(self.each):
            loss.check_labels(batch, outputs, place)

    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor:
        """Return the sum of values x weight x scale, a scalar. values, scale: one for each term, or the first ones."""
        scales: Sequence[float | Tensor] = [scale] * len(values) if isinstance(scale, float) else scale
        total = values[0] * (scales[0] * self._weights[0])
        for value, own, weight in zip(values[1:], scales[1:], self._weights[1 : len(values)], strict=True):
            total = total + value * (own * weight)
        return total

    @property
    def counts_itself(self) -> bool:
        """Whether the loss of the run, its only one, counts by what its sum is divided."""
        return any(loss.config.rule.own_divisor for loss in self.each)

    @property
    def own_divisor(self) -> Tensor | None:
        """What the sum of the last call is divided by, of a run whose loss counts that itself; else None."""
        return self.each[0].own_divisor if self.counts_itself else None


class Loss:
    """One loss over the outputs of one micro-batch.

    output_names: the graph's outputs in order; shapes: output -> the shape that the file declares. classes: the classes
    whose logits this rank computes, if tensor parallelism sharded them (tensor/vocabulary.py); then every rank of the
    group must call each method that takes outputs, and all get the same result. replicas, compiled: see `Losses`.
    Raises ConfigError for an unknown output and for a file that holds no loss.
    """

    def __init__(
        self,
        config: LossConfig,
        output_names: Sequence[str],
        shapes: Mapping[str, Dims | None] | None = None,
        *,
        classes: ClassShard | None = None,
        replicas: dist.ProcessGroup | None = None,
        compiled: bool = False,
    ) -> None:
        self.indices = [output_index(name, output_names) for name in config.outputs]
        """Positions of the outputs that the loss reads."""
        self.index = self.indices[0]
        self.config = config
        self.ignore_index = config.ignored
        self.classes = classes
        self.name = config.name
        self._names = [output_names[place] for place in self.indices]
        self._output_name = self._names[0]
        self._declared = (shapes or {}).get(self._output_name)
        self._replicas = replicas
        # read once: a file of the user's is neither loaded nor checked again for each micro-batch
        self._formula = self._formula_of(config)
        self._counter = target_counter(config)
        self._cross_entropy = chunked_loss.compiled_cross_entropy if compiled else chunked_loss.cross_entropy
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}
        self.own_divisor: Tensor | None = None
        """Of a loss with a grid: that of the last call, of the shape of the loss; 0 of a padding micro-batch."""

    def terms(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> tuple[Tensor, ...]:
        """Return each term of the loss summed over its targets: scalars, differentiable. size: 0 for padding."""
        value = self(outputs, labels, size)
        return value.unbind() if self.config.num_terms > 1 else (value,)

    def __call__(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> Tensor:
        """Return the loss summed over the targets that count: a scalar, differentiable; of a loss of several terms a
        vector of them. size: 0 for padding."""
        config = self.config
        self._check_axes(outputs, labels, size)
        if config.is_plain and labels is not None:
            own = self._own(outputs)
            is_soft = labels.is_floating_point()
            # with sharded classes the sum over classes is one over ranks, which the shard computes
            if self.classes and is_soft:
                return self.classes.soft_cross_entropy(own, labels)
            if self.classes:
                self._last_axis_only(own, labels)
                return self.classes.cross_entropy(own, labels, self.ignore_index)
            # in chunks, without an fp32 copy of all logits
            if not is_soft and own.dtype in (torch.float16, torch.bfloat16):
                rows = as_rows(own, self.axis(outputs, labels))
                return self._cross_entropy(rows, labels, self.ignore_index)
        # a single output goes through `output`, which gathers sharded classes
        several = len(self.indices) > 1
        read = [at_least_fp32(outputs[place]) for place in self.indices] if several else [self.output(outputs)]
        axis = -1
        if labels is not None and config.rule.labels == "classes":
            axis = self.axis(outputs, labels)
        if labels is not None and (units := config.label_units):
            places = label_axis(units, labels.shape), label_axis(units, read[0].shape)
            labels = standardised(labels.to(read[0].dtype), units, axis=places[0])
            # both in the same units, so that the loss compares like with like
            read = [standardised(read[0], units, axis=places[1])]
        inputs = LossInputs(
            config,
            read,
            labels,
            size,
            axis=axis,
            class_weights=self._weights("class_weights", read[0]),
            positive_weights=self._weights("positive_weights", read[0]),
            replicas=self._replicas,
        )
        return self._formula(inputs)

    def _formula_of(self, config: LossConfig) -> Formula:
        if config.rule.has_grid:
            return self._dense
        return load_loss(config.file) if config.is_own else FORMULAS[config.name]

    def _dense(self, inputs: LossInputs) -> Tensor:
        total, divisor = dense(inputs)
        self.own_divisor = divisor.detach().double()
        return total

    def _check_axes(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None, size: int) -> None:
        """Raise ConfigError unless the outputs and the labels pair, axis by axis (data/schema/label_axes.py)."""
        shape = self._shape(outputs)
        if labels is not None and labels.is_floating_point() and self.config.rule.labels == "classes":
            self._check_soft_labels(shape, tuple(labels.shape))
            return
        others = () if isinstance(outputs, Tensor) else (tuple(outputs[place].shape) for place in self.indices[1:])
        own = None if labels is None else tuple(labels.shape)
        check_axes(self.config, (shape, *others), own, names=self._names, size=size)

    def _check_soft_labels(self, output: tuple[int, ...], labels: tuple[int, ...]) -> None:
        check_elements(self.config, output, labels, name=self._output_name)
        lengths = [dims[soft_axis(self.config, len(dims))] for dims in (output, labels)]
        if lengths[0] != lengths[1]:  # an axis of length 1 is absent in front of the classes
            raise ConfigError(
                f"output {self._output_name!r} is {list(output)} and the labels are {list(labels)}: loss.class_axis "
                f"{self.config.class_axis} has {lengths[0]} classes in the output, but {lengths[1]} in the labels; "
                "give both the same axes"
            )

    def _shape(self, outputs: Tensor | Sequence[Tensor]) -> tuple[int, ...]:
        """Return the shape of the output, with the classes of all ranks."""
        # on this rank the last axis has a part of the classes alone
        shape = tuple(self._own(outputs).shape)
        return (*shape[:-1], self.classes.total) if self.classes else shape

    def like_output(self, outputs: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return labels in the shape of the output, as metrics of numbers compare them.

        Raises ConfigError where other axes than those of length 1 differ.
        """
        shape = self._shape(outputs)
        check_elements(self.config, shape, tuple(labels.shape), name=self._output_name)
        return labels.reshape(shape)

    def count(self, labels: Tensor | None, size: int) -> float | Tensor:
        """Return the number of targets of a micro-batch of `size` samples, without a forward pass."""
        return self._counter(labels, size)

    def divisor(self, labels: Tensor | None, size: int) -> float | Tensor:
        """Return what the sum of the last call, of these labels, is divided by; 0 if nothing counts."""
        return self.count(labels, size) if self.own_divisor is None else self.own_divisor

    def check_labels(self, batch: Batch, outputs: Tensor | Sequence[Tensor], place: int = 0) -> None:
        """Raise DataError if a label that is a class is neither a class of the outputs nor the ignored label, and for
        labels that a CTC cannot reach.

        place: which of the batch's labels are this loss's.
        It compares numbers of the host. On a GPU such a label would stop the device, in a later and unrelated call.
        """
        if self.config.rule.has_grid:
            self._check_grid(batch, outputs)
        own = batch.labels[place]
        # labels of numbers, probabilities and absent labels have no range
        if not self.config.has_classes or own is None or own.is_floating_point():
            return
        # the lengths of inputs, which the labels of a CTC may have beside them, are no classes
        own, lengths = without_lengths(own, self.config)
        num_classes = self.config.rule.num_classes(self.num_classes(outputs, own))
        weights = self.config.class_weights
        if weights and len(weights) != num_classes:
            raise ConfigError(
                f"loss.class_weights has {len(weights)} weights, but output {self._output_name!r} {num_classes} classes"
            )
        # the range was computed on the host when the batch was made, so that no device is waited for
        least, greatest = batch.label_ranges[place]
        if least < 0 or greatest >= num_classes:
            self._refuse_labels(batch, own, num_classes)
        if self.config.rule.labels == "sequences":
            self._check_sequences(batch, own, lengths, self._own(outputs).shape[1])

    def _check_grid(self, batch: Batch, outputs: Tensor | Sequence[Tensor]) -> None:
        # height and width are in front of the channels or behind them
        images = [tuple(each.shape[1:]) for each in batch.inputs if each.dim() == 4]
        read = [outputs] if isinstance(outputs, Tensor) else [outputs[place] for place in self.indices]
        strides = self.config.strides
        of_level = read[:: len(read) // len(strides)]
        height, width = size_of([(each.shape[2], each.shape[3]) for each in of_level], strides)
        off = [max(abs(side[0] - height), abs(side[1] - width)) for dims in images for side in (dims[1:], dims[:2])]
        if off and min(off) >= max(strides):
            raise ConfigError(
                f"loss.strides {list(strides)}: with them the raw outputs are of images of {height:g} x {width:g} "
                f"pixels, but the input is {list(images[0])}; correct them (`onward init` reads them in the file)"
            )

    def _check_sequences(self, batch: Batch, own: Tensor, lengths: Tensor | None, steps: int) -> None:
        # F.ctc_loss reads these numbers on the host, too
        labels = own.reshape(batch.size, -1).cpu().numpy()
        given = None if lengths is None else lengths.cpu().numpy()
        if given is None and torch.is_grad_enabled():  # an infinite loss of an evaluation is only reported
            given = np.full(batch.size, steps)
        if found := sequence_problems(labels, given, self.config, steps=steps):
            rows = [f"row {batch.rows[row]} of the split: {why}" for row, why in sorted(found.items())]
            where = f"loss {self.name!r} of output {self._output_name!r}"
            raise DataError([f"{where}, {row}" for row in rows[:MAX_NAMED_ROWS]])

    def _refuse_labels(self, batch: Batch, own: Tensor, num_classes: int) -> None:
        labels = own.reshape(batch.size, -1).cpu()
        # an ignored label is no class by design
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= num_classes))
        values = sorted(set(labels[wrong].tolist()))
        rows = batch.rows[wrong.any(1).numpy()].tolist()
        raise DataError(
            f"labels {few(values)} in rows {few(rows)} of the split are not classes: the "
            f"output that the loss reads has {num_classes} of them, 0..{num_classes - 1}. Correct the labels "
            f"(data.label), replace the head (model.num_classes), or exclude one label from the loss "
            f"(model.ignore_index, now {self.ignore_index})"
        )

    def output(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the output [B, ...] that the loss reads, at least in fp32; sharded classes all, without gradient."""
        output = at_least_fp32(self._own(outputs))
        return self.classes.gathered(output) if self.classes else output

    def predicted(self, outputs: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the class with the greatest logit for each target: [..., C, ...] -> [...]. Does not gather logits."""
        output = self._own(outputs)
        return self.classes.argmax(output) if self.classes else output.argmax(self.axis(outputs, labels))

    def num_classes(self, outputs: Tensor | Sequence[Tensor], labels: Tensor) -> int:
        """Return the length of the axis of the classes, over all ranks that share it."""
        return self.classes.total if self.classes else self._own(outputs).shape[self.axis(outputs, labels)]

    def axis(self, outputs: Tensor | Sequence[Tensor], labels: Tensor) -> int:
        """Return the axis of the classes, from 0. Raises ConfigError if none fits the labels, or several do."""
        output = self._own(outputs)
        if self.config.rule.labels == "sequences":
            return output.ndim - 1
        if labels.is_floating_point():
            return soft_axis(self.config, output.ndim)
        given = self.config.class_axis
        shapes = (tuple(output.shape), tuple(labels.shape))
        return find_class_axis(*shapes, declared=self._declared, given=given, name=self._output_name)

    def _last_axis_only(self, own: Tensor, labels: Tensor) -> None:
        assert self.classes
        shape = (*own.shape[:-1], self.classes.total)
        given = self.config.class_axis
        axis = find_class_axis(shape, tuple(labels.shape), declared=self._declared, given=given, name=self._output_name)
        if axis != own.ndim - 1:
            raise ConfigError(
                f"the classes of output {self._output_name!r} are on axis {axis}, and tensor parallelism has sharded "
                f"the last axis; set loss.class_axis = {axis}"
            )

    def _weights(self, setting: str, like: Tensor) -> Tensor | None:
        """Return `class_weights` or `positive_weights` on the device of a tensor; None if there are none."""
        values = getattr(self.config, setting)
        if not values:
            return None
        # copied to a device once, and not in every micro-batch
        key = (setting, like.device)
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(values, device=like.device)
        return self._tensors[key]

    def _own(self, outputs: Tensor | Sequence[Tensor]) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs[self.index]


def output_index(output: str, output_names: Sequence[str]) -> int:
    """Return the index of the output that a loss reads. Raises ConfigError for an unknown name."""
    if output and output not in output_names:
        raise ConfigError(f"model.output {output!r} is not an output of the graph: {', '.join(output_names)}")
    return list(output_names).index(output) if output else 0
