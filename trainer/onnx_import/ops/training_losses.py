"""Rules for losses that the graph itself computes."""

from __future__ import annotations

import torch.nn.functional as F

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value


@lower("SoftmaxCrossEntropyLoss", since=(12, 13))
def softmax_cross_entropy(c: Call, scores: Value, labels: Value, weights: Value = None) -> Value:
    """Return the cross-entropy of scores [batch, classes, ...]; its mean is weighted by class, without ignore_index."""
    log_probabilities = c(F.log_softmax, scores, dim=1)
    loss = _nll(c, log_probabilities, labels, weights)
    return (loss, log_probabilities) if c.wants(1) else loss


@lower("NegativeLogLikelihoodLoss", since=(12, 13, 22))
def negative_log_likelihood(c: Call, log_probabilities: Value, labels: Value, weights: Value = None) -> Value:
    return _nll(c, log_probabilities, labels, weights)


def _nll(c: Call, log_probabilities: Value, labels: Value, weights: Value) -> Value:
    ignored = c.attr("ignore_index", -100)
    reduction = c.attr("reduction", "mean")
    # torch's backward pass takes contiguous scores only; for them this is no operation
    scores = c("contiguous", log_probabilities)
    return c(F.nll_loss, scores, c("long", labels), weights, ignore_index=ignored, reduction=reduction)
