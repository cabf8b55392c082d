"""Rules for BatchNormalization, whose mean and variance are stored in the file or computed in the graph.

    mean, variance     are                                in training                          in evaluation
    stored             read as they are in the file       BatchNorm: those of the batch;       the stored ones
                                                          the stored ones are updated
    computed           results of other nodes             the computed ones, with gradients    the computed ones
    computed           and the file says training_mode    BatchStatistics: those of the batch  the computed ones
    placeholders       not running statistics, as         BatchStatistics: those of the input  those of the input
                       training_norms.py decides

Keras's LayerNormalization is exported as the second kind: ReduceMean and a variance feed a BatchNormalization. Stored
statistics behind arithmetic, such as a variance to which a number is added, are of this kind too: there is no tensor
that an update could be written to. roles.py makes these frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from onward.trainer.onnx_graph.surgery.training_norms import BATCH_STATISTICS
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value

Tensor = torch.Tensor


class BatchNorm(nn.Module):
    """Normalise by the statistics of the batch in training, and update the running ones; by these in evaluation.

    It holds no weights: scale, bias and the running statistics are operands, named after their initializers.
    As in torch, the running variance is updated with the unbiased estimate. spatial: whether all positions of a channel
    share scale, bias and statistics; otherwise each has its own, and these have the shape of a row of x.
    """

    def __init__(self, momentum: float, epsilon: float, *, spatial: bool = True) -> None:
        super().__init__()
        self.spatial = spatial
        self.momentum = momentum
        self.epsilon = epsilon
        self.frozen = False
        """Its scale and bias are not trained, so its statistics are not updated either."""

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """x: [batch, channels, ...]; the others: [channels], or [channels, ...] if not spatial."""
        if not self.spatial:
            # each position as a channel; the views share the memory of the running statistics
            x, shape = x.flatten(1), x.shape
            scale, bias, mean, variance = (operand.view(-1) for operand in (scale, bias, mean, variance))
            return self._normalise(x, scale, bias, mean, variance).reshape(shape)
        return self._normalise(x, scale, bias, mean, variance)

    def _normalise(self, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # a single value in each channel has no variance: a ragged last batch of one sample
        learns = self.training and not self.frozen
        if learns and x.numel() <= x.shape[1]:  # a branch: torch.compile takes no symbol for a flag
            learns = False
        # With a length of 1 an order in memory has several strides. Torch's gradient on the CPU is wrong (2.13) where
        # those of x and of the gradient of the result differ; with one axis behind the channels it is right.
        rows = x.flatten(2) if x.ndim > 3 and 1 in (x.shape[0], *x.shape[2:]) else x
        y = F.batch_norm(rows, mean, variance, scale, bias, learns, self.momentum, self.epsilon)
        return y if rows is x else y.reshape(x.shape)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}, epsilon={self.epsilon:g}" + ("" if self.spatial else ", spatial=False")


class BatchStatistics(nn.Module):
    """Return mean and variance of the batch in training, and the given ones in evaluation.

    always: return those of the batch in evaluation, too. The third and fourth result are the running statistics after
    this batch, as ONNX defines them.
    """

    def __init__(self, momentum: float, *, always: bool = False) -> None:
        super().__init__()
        self.momentum = momentum
        self.always = always

    def forward(self, x: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [batch, channels, ...]; the others: [channels]."""
        learns = self.training
        if learns and x.numel() <= x.shape[1]:  # as in BatchNorm
            learns = False
        if not (learns or self.always):
            return mean, variance, mean, variance
        dims = [dim for dim in range(x.ndim) if dim != 1]
        # ONNX's running variance is updated with the biased one, unlike torch's
        new_variance, new_mean = torch.var_mean(x, dims, correction=0)
        after_mean, after_variance = (
            torch.lerp(old, new, self.momentum).detach() for old, new in ((mean, new_mean), (variance, new_variance))
        )
        return new_mean, new_variance, after_mean, after_variance

    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}, always={self.always}"


@lower("BatchNormalization", since=(1, 6, 7, 9, 14, 15))
def batch_normalization(c: Call, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    """Ignore training_mode (once is_test) where running statistics are stored: train() and eval() decide."""
    if c.version < 7:
        c.attr("is_test"), c.attr("consumed_inputs")
    weights = (scale, bias)
    momentum = 1.0 - c.attr("momentum", 0.9)  # ONNX: the weight of the old value; torch: of the new one
    epsilon = c.attr("epsilon", 1e-5)
    by_batch = bool(c.attr("training_mode", 0))
    spatial = bool(c.attr("spatial", 1))  # of versions before 9
    always = bool(c.attr(BATCH_STATISTICS, 0))
    # without training mode the outputs of running statistics are those of the file
    updated: Sequence[Value] = (mean, variance)
    if not always and all(map(c.tracer.is_running_statistic, updated)):
        y = c.module(BatchNorm(momentum, epsilon, spatial=spatial), x, *weights, mean, variance)
    elif not spatial:
        y = _normalised(c, x, weights, (mean, variance), epsilon, shape=c.sizes(mean))
    else:
        if by_batch or always:
            mean, variance, *updated = c.module(BatchStatistics(momentum, always=always), x, mean, variance)
        y = _normalised(c, x, weights, (mean, variance), epsilon)
    return (y, *updated, mean, variance)[: max(c.num_outputs, 1)]


def _normalised(
    c: Call,
    x: Value,
    weights: tuple[Value, Value],
    statistics: tuple[Value, Value],
    epsilon: float,
    shape: Sequence[Value] = (),
) -> Value:
    """Return (x - mean) scale / sqrt(variance + epsilon) + bias, with one of each for every channel.

    shape: of the four, if they have one for every position.
    """
    own = list(shape) or [-1] + [1] * (x.ndim - 2)
    scale, bias, mean, variance = (c("reshape", value, own) for value in (*weights, *statistics))
    factor = c(torch.mul, c(torch.rsqrt, c(torch.add, variance, epsilon)), scale)
    y = c(torch.add, c(torch.mul, c(torch.sub, x, mean), factor), bias)
    return y if y.dtype == x.dtype else c("to", y, x.dtype)  # statistics may be wider than x
