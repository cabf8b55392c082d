"""Compute one loss against the teacher: how far an output of the model is from the teacher's, summed over targets.

    kl     T^2 x sum over classes of p log(p / q),  p = softmax(teacher / T), q = softmax(model / T)
    bce    T^2 x (p log(p / q) + (1 - p) log((1 - p) / (1 - q))),  with sigmoids in place of the softmax
    mse    (model - teacher)^2

Source: Hinton, Vinyals, Dean 2015 (arXiv:1503.02531), section 2; T^2 keeps the size of the gradients when T changes.

A target is a row of scores where labels or a mask say which rows count, and a sample where nothing does: its value is
then the mean over the rows of the sample. bce and mse are means over the values of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.label_axes import Dims, fits
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.loss_formulas import as_rows


class TeacherLoss:
    """One soft loss over the outputs of one micro-batch.

    output_names: those of the training graph, which has the teacher's; shapes: output -> the declared shape.
    """

    def __init__(self, config: SoftLoss, output_names: Sequence[str], shapes: Mapping[str, Dims | None]) -> None:
        names = list(output_names)
        self.config = config
        self._own = names.index(config.own_output) if config.own_output else 0
        self._teacher = names.index(config.teacher_output)
        self.name = config.student or names[0]
        self._declared = shapes.get(names[self._own])

    def __call__(self, outputs: Tensor | Sequence[Tensor], counted: Tensor | None, size: int) -> Tensor:
        """Return the loss summed over the targets that count: a scalar, differentiable.

        counted: which rows count, bool of the shape of the labels [B, ...]; None = all. size: 0 for padding.
        """
        own = outputs[self._own].float()
        # the teacher is not trained
        teacher = outputs[self._teacher].detach().float()
        teacher = self._like(teacher, own)
        axis = self._axis(own, counted)
        values = _divergence(as_rows(own, axis), as_rows(teacher, axis), self.config)
        if counted is None:
            return values.mean() * size
        return torch.where(counted.flatten(), values, 0.0).sum()

    def count(self, counted: Tensor | None, size: int) -> float | Tensor:
        """Return the number of targets of a micro-batch of `size` samples."""
        return size if counted is None else counted.sum()

    def _like(self, teacher: Tensor, own: Tensor) -> Tensor:
        """Return the teacher's output in the shape of the model's. Raises ConfigError if they differ."""
        if not fits(tuple(own.shape), tuple(teacher.shape)):
            what = "tensor" if self.config.matched else "output"
            raise ConfigError(
                f"teacher: the model's {what} {self.name!r} is {list(own.shape)}, but the teacher's "
                f"{self.config.teacher or what!r} is {list(teacher.shape)}; name another one in "
                + ("teacher.match" if self.config.matched else "teacher.output")
            )
        return teacher.reshape(own.shape)

    def _axis(self, own: Tensor, counted: Tensor | None) -> int:
        given = self.config.class_axis
        if counted is not None:
            return find_class_axis(
                tuple(own.shape), tuple(counted.shape), declared=self._declared, given=given, name=self.name
            )
        if self.config.kind == "kl" and given is None and own.ndim > 2:
            raise ConfigError(
                f"teacher: output {self.name!r} is {list(own.shape)}, and without labels nothing says on which axis "
                "the classes are; set teacher.class_axis, 1 for images [B, C, H, W] and -1 for tokens [B, L, C]"
            )
        return own.ndim - 1 if given is None else given % own.ndim


def _divergence(own: Tensor, teacher: Tensor, config: SoftLoss) -> Tensor:
    """Return how far rows of scores are from the teacher's: both [rows, C] -> [rows]."""
    if config.kind == "mse":
        return (own - teacher).square().mean(-1)
    own = own / config.temperature
    teacher = teacher / config.temperature
    if config.kind == "kl":
        # logarithms of both, so that no probability of 0 is divided by
        wanted = F.log_softmax(teacher, -1)
        found = F.log_softmax(own, -1)
        return config.temperature**2 * (wanted.exp() * (wanted - found)).sum(-1)
    yes = teacher.sigmoid() * (F.logsigmoid(teacher) - F.logsigmoid(own))
    no = (-teacher).sigmoid() * (F.logsigmoid(-teacher) - F.logsigmoid(-own))
    return config.temperature**2 * (yes + no).mean(-1)
