"""Add the formulas of the losses to a graph: those of trainer/model/losses/loss_formulas.py, in their order, as nodes.

Each function returns the names of two scalars, fp32: the sum over the targets that count, and the number of these, as
data/schema/target_counts.py counts them. The operators are those of opset 13 and of every later one; shapes are read
when the graph runs, so that any of them may be dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onward.trainer.config.losses import LossConfig
from onward.trainer.onnx_graph.files.loss_files import read_loss_file
from onward.trainer.onnx_graph.node_builder import GraphExtender


@dataclass(frozen=True)
class LossInputs:
    """What a formula reads: names of values."""

    loss: LossConfig
    outputs: Sequence[str]
    """Those that the loss names, in this order, in fp32."""
    labels: str
    """"" if the loss takes none."""
    rank: int
    """The number of axes of the first output."""

    @property
    def output(self) -> str:
        """The first output, of most losses the only one."""
        return self.outputs[0]


Formula = Callable[[GraphExtender, LossInputs], tuple[str, str]]
"""Add the nodes of a loss; return the names of its sum and of the number of its targets."""


def class_axis(loss: LossConfig, rank: int) -> int:
    """Return the axis of the classes of an output of `rank` axes, from 0."""
    return (-1 if loss.class_axis is None else loss.class_axis) % max(rank, 1)


def as_rows(g: GraphExtender, values: str, axis: int, rank: int) -> str:
    """Scores with the classes on one axis as [rows, C], the rows in the order of the other axes."""
    # the classes become the last axis, so that a row of the matrix has the scores of one target
    if axis != rank - 1:
        values = g.op("Transpose", values, perm=[*range(axis), *range(axis + 1, rank), axis])
    return g.op("Reshape", values, g.op("Concat", g.constant([-1]), _length(g, values, -1), axis=0))


def cross_entropy(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """[..., C, ...] and [...], or of labels that are probabilities both of one shape."""
    axis = class_axis(x.loss, x.rank)
    rows = as_rows(g, x.output, axis, x.rank)
    weights = [_numbers(g, x.loss.class_weights)] if x.loss.class_weights else []
    smoothing = x.loss.label_smoothing
    num_classes = _float(g, _length(g, rows, -1))
    # SoftmaxCrossEntropyLoss takes indices of classes only: for probabilities its definition is written out
    if x.loss.soft_labels:
        targets = as_rows(g, x.labels, axis, x.rank)
        # smoothing mixes the label with the uniform distribution, (1 - s) y + s / C, as torch defines it
        if smoothing:
            targets = g.op("Mul", targets, g.constant(1.0 - smoothing))
            targets = g.op("Add", targets, g.op("Div", g.constant(smoothing), num_classes))
        each = g.op("Mul", g.op("LogSoftmax", rows, axis=-1), targets)
        total = _sum(g, g.op("Mul", each, *weights) if weights else each)
        # each row counts once, whatever its probabilities add up to
        return g.op("Neg", total), _scalar(g, _length(g, rows, 0))
    # the labels in the order of `as_rows`, one for each row
    targets = g.op("Reshape", x.labels, g.constant([-1]))
    total = g.op("SoftmaxCrossEntropyLoss", rows, targets, *weights, reduction="sum", ignore_index=x.loss.ignored)
    counted = g.op("Not", g.op("Equal", targets, g.constant(x.loss.ignored, int)))
    if smoothing:  # the cross-entropy with every class, divided by their number
        each = g.op("LogSoftmax", rows, axis=-1)
        each = _sum(g, g.op("Mul", each, *weights) if weights else each, -1)
        spread = _sum(g, g.op("Where", counted, each, g.constant(0.0)))
        share = _scalar(g, g.op("Div", g.constant(smoothing), num_classes))
        kept = g.op("Mul", total, g.constant(1.0 - smoothing))
        total = g.op("Sub", kept, g.op("Mul", spread, share))
    # the divisor is the sum of the weights of the targets, as of torch's reduction "mean"; without weights, their
    # number
    if not weights:
        return total, _float(g, _sum(g, g.op("Cast", counted, to=TensorProto.INT64)))
    # not the ignored label itself, which is no class and has no weight
    known = g.op("Where", counted, targets, g.constant(0, int))
    return total, _sum(g, g.op("Mul", g.op("Gather", *weights, known), _float(g, counted)))


def mse(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """(x - y)^2."""
    difference = g.op("Sub", x.output, x.labels)
    return _sum(g, g.op("Mul", difference, difference)), _size(g, x.labels)


def l1(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """|x - y|."""
    return _sum(g, g.op("Abs", g.op("Sub", x.output, x.labels))), _size(g, x.labels)


def huber(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """d^2 / 2 where d = |x - y| is at most delta, and delta (d - delta / 2) elsewhere."""
    d = g.op("Abs", g.op("Sub", x.output, x.labels))
    # both branches are computed everywhere and `Where` picks one: they agree in value and slope at d = delta
    delta = g.constant(x.loss.delta)
    square = g.op("Mul", g.op("Mul", d, d), g.constant(0.5))
    line = g.op("Mul", delta, g.op("Sub", d, g.constant(0.5 * x.loss.delta)))
    return _sum(g, g.op("Where", g.op("LessOrEqual", d, delta), square, line)), _size(g, x.labels)


def bce_with_logits(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """Binary cross-entropy; weights are of the last axis."""
    positive = _numbers(g, x.loss.positive_weights) if x.loss.positive_weights else ""
    values = _binary_entropy(g, x.output, x.labels, positive)
    # the weights [C] broadcast from the last axis, which is the one of the labels
    if x.loss.class_weights:
        values = g.op("Mul", values, _numbers(g, x.loss.class_weights))
    return _sum(g, values), _size(g, x.labels)


def dice(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """1 - (2 |P and G| + s) / (|P| + |G| + s), averaged over the classes of a sample: [B, C, ...] and [B, ...].

    P: probabilities, by softmax; of one class (C = 1) by sigmoid, with labels 0 and 1. G: the labels, one-hot.
    """
    scores = x.output
    axis = class_axis(x.loss, x.rank)
    # the elements of a sample, in any number of axes, become one: only the class of each matters
    if axis != 1:
        others = [other for other in range(1, x.rank) if other != axis]
        scores = g.op("Transpose", scores, perm=[0, axis, *others])
    scores = g.op("Reshape", scores, g.constant([0, 0, -1]))  # [B, C, elements]
    labels = g.op("Reshape", x.labels, g.constant([0, 1, -1]))
    counted = _float(g, g.op("Not", g.op("Equal", labels, g.constant(x.loss.ignored, int))))
    # the number of classes may be known only when the graph runs
    num_classes = g.op("Squeeze", _length(g, scores, 1), g.constant([0]))
    single = g.op("Equal", num_classes, g.constant(1, int))
    classes = g.op("Range", g.constant(0, int), num_classes, g.constant(1, int))
    one_hot = g.op("Equal", labels, g.op("Unsqueeze", classes, g.constant([1])))
    # `Where` computes both branches and broadcasts: with one class, the softmax is 1 everywhere and is not chosen
    predicted = g.op("Where", single, g.op("Sigmoid", scores), g.op("Softmax", scores, axis=1))
    actual = g.op("Where", single, _float(g, labels), _float(g, one_hot))
    # ignored elements leave the overlap and the sizes alike, as if they were not in the sample
    predicted = g.op("Mul", predicted, counted)
    actual = g.op("Mul", actual, counted)
    overlap = _sum(g, g.op("Mul", predicted, actual), 2)
    sizes = _sum(g, g.op("Add", predicted, actual), 2)
    smooth = g.constant(x.loss.smooth)
    # smooth also decides what a class without any element has: the ratio 1
    ratio = g.op("Div", g.op("Add", g.op("Add", overlap, overlap), smooth), g.op("Add", sizes, smooth))
    total = g.op("Div", _sum(g, g.op("Sub", g.constant(1.0), ratio)), _float(g, num_classes))
    # the target is the sample: its loss is already the mean over the classes
    return total, _scalar(g, _length(g, scores, 0))


def focal(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """(1 - p)^gamma x binary cross-entropy, p being the probability of the right answer (arXiv:1708.02002)."""
    one = g.constant(1.0)
    probability = g.op("Sigmoid", x.output)

    def chosen(yes: str, no: str) -> str:
        """Yes where the label is 1, no where it is 0, between them for labels between."""
        return g.op("Add", g.op("Mul", yes, x.labels), g.op("Mul", no, g.op("Sub", one, x.labels)))

    # 1 - p is small for answers that are right already, which is what lowers their part in the sum
    wrong = g.op("Sub", one, chosen(probability, g.op("Sub", one, probability)))
    values = g.op("Mul", _binary_entropy(g, x.output, x.labels), g.op("Pow", wrong, g.constant(x.loss.gamma)))
    # alpha balances labels of 1 against labels of 0; below 0 it is not used, as in torchvision
    if x.loss.alpha >= 0:
        values = g.op("Mul", values, chosen(g.constant(x.loss.alpha), g.constant(1.0 - x.loss.alpha)))
    return _sum(g, values), _size(g, x.labels)


def giou(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """1 - generalised intersection over union of boxes [..., 4] as x1, y1, x2, y2 (arXiv:1902.09630)."""
    boxes = [g.op("Reshape", values, g.constant([-1, 4])) for values in (x.output, x.labels)]
    # corners x1, y1 and x2, y2: the corner with the least coordinates, and the one with the greatest
    begins, ends = ([g.op("Gather", each, g.constant(pair), axis=1) for each in boxes] for pair in ([0, 1], [2, 3]))

    def area(begin: str, end: str) -> str:
        sides = g.op("Sub", end, begin)
        return g.op("Mul", *(g.op("Gather", sides, g.constant(side, int), axis=1) for side in (0, 1)))

    # the intersection begins at the greater of the two begins, and ends at the lesser of the two ends
    least = g.op("Max", *begins)
    greatest = g.op("Min", *ends)
    overlap = area(least, g.op("Max", greatest, least))  # no side is below 0
    union = g.op("Sub", g.op("Add", area(begins[0], ends[0]), area(begins[1], ends[1])), overlap)
    # the smallest box around both: it gives boxes without overlap a gradient, which pulls them together
    around = area(g.op("Min", *begins), g.op("Max", *ends))
    epsilon = g.constant(1e-7)  # as in torchvision
    ratio = g.op("Div", overlap, g.op("Add", union, epsilon))
    spare = g.op("Div", g.op("Sub", around, union), g.op("Add", around, epsilon))
    return _sum(g, g.op("Add", g.op("Sub", g.constant(1.0), ratio), spare)), _scalar(g, _length(g, boxes[0], 0))


def quantile(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """max(q d, (q - 1) d) for each quantile q, d = label - output: [..., Q] and [...]."""
    flat = g.op("Reshape", x.labels, g.constant([-1, 1]))
    # [targets, Q]; of one quantile the output may have no axis for it
    shape = g.op("Concat", _length(g, flat, 0), g.constant([-1]), axis=0)
    difference = g.op("Sub", flat, g.op("Reshape", x.output, shape))
    # a difference above 0 costs q of it, one below 0 costs 1 - q: the minimum of the sum is at the quantile q
    above, below = (_numbers(g, [level - less for level in x.loss.quantiles]) for less in (0.0, 1.0))
    values = g.op("Max", g.op("Mul", above, difference), g.op("Mul", below, difference))
    return _sum(g, values), _size(g, values)


def cosine(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """1 - cos for label 1, max(0, cos - margin) for label -1, as torch.nn.functional.cosine_embedding_loss."""
    epsilon = g.constant(1e-12)
    zero = g.constant(0.0)
    # epsilon inside the root, as torch has it
    squares = [g.op("Add", _sum(g, g.op("Mul", each, each), -1), epsilon) for each in x.outputs]
    cosines = g.op("Div", _sum(g, g.op("Mul", *x.outputs), -1), g.op("Sqrt", g.op("Mul", *squares)))
    # labels other than 1 and -1 match neither branch, and add nothing
    labels = g.op("Reshape", x.labels, g.constant([-1]))
    alike, unlike = (g.op("Equal", labels, g.constant(kind)) for kind in (1.0, -1.0))
    distance = g.op("Where", alike, g.op("Sub", g.constant(1.0), cosines), zero)
    beyond = g.op("Relu", g.op("Sub", cosines, g.constant(x.loss.margin or 0.0)))
    values = g.op("Add", distance, g.op("Where", unlike, beyond, zero))
    return _sum(g, values), _scalar(g, _length(g, x.output, 0))


def triplet(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """max(0, margin + |anchor - positive| - |anchor - negative|), as torch.nn.functional.triplet_margin_loss."""
    anchor, *others = x.outputs
    epsilon = g.constant(1e-6)
    # epsilon on each difference, as torch has it
    near, far = (_norm(g, g.op("Add", g.op("Sub", anchor, other), epsilon)) for other in others)
    # torch's default margin is 1
    margin = g.constant(1.0 if x.loss.margin is None else x.loss.margin)
    values = g.op("Relu", g.op("Sub", g.op("Add", margin, near), far))
    return _sum(g, values), _scalar(g, _length(g, anchor, 0))


def info_nce(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """Cross-entropy of finding the key of each query, and the query of each key, among those of the batch; halved."""

    def unit(rows: str) -> str:
        # the least norm keeps a row of zeros from becoming NaN, as torch.nn.functional.normalize does
        return g.op("Div", rows, g.op("Max", _norm(g, rows, keepdims=1), g.constant(1e-12)))

    queries, keys = map(unit, x.outputs)
    scores = g.op("Div", g.op("MatMul", queries, g.op("Transpose", keys)), g.constant(x.loss.temperature))
    number = _length(g, queries, 0)
    # the key of query i is row i
    own = g.op("Range", g.constant(0, int), g.op("Squeeze", number, g.constant([0])), g.constant(1, int))
    # the transposed matrix asks for the query of each key; the two answers count half each (arXiv:2103.00020)
    both = (scores, g.op("Transpose", scores))
    found = [g.op("SoftmaxCrossEntropyLoss", each, own, reduction="sum") for each in both]
    return g.op("Mul", g.op("Add", *found), g.constant(0.5)), _scalar(g, number)


def output(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """The loss that the graph computes, the mean of it where it is no scalar."""
    return g.op("ReduceMean", x.output, keepdims=0), g.constant(1.0)


def file(g: GraphExtender, x: LossInputs) -> tuple[str, str]:
    """The nodes of the user's ONNX file, which computes a loss for each row or their mean."""
    value = g.append(read_loss_file(Path(x.loss.named.location), g.opset).graph, x.output, x.labels)
    return g.op("ReduceMean", g.op("Cast", value, to=TensorProto.FLOAT), keepdims=0), g.constant(1.0)


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "l1": l1,
    "huber": huber,
    "bce_with_logits": bce_with_logits,
    "dice": dice,
    "focal": focal,
    "giou": giou,
    "quantile": quantile,
    "cosine": cosine,
    "triplet": triplet,
    "info_nce": info_nce,
    "output": output,
    "file": file,
}
"""Loss -> what adds its nodes; ONNX has no operator for ctc."""


# -- of several losses


def _binary_entropy(g: GraphExtender, output: str, labels: str, positive: str = "") -> str:
    """Add max(x, 0) - xy + log(1 + exp(-|x|)), which does not overflow for any x; positive: weights of label 1."""
    # log(1 + exp(-|x|)): its argument is never above 0, so that exp cannot overflow
    rest = g.op("Softplus", g.op("Neg", g.op("Abs", output)))
    if not positive:
        return g.op("Add", g.op("Sub", g.op("Relu", output), g.op("Mul", output, labels)), rest)
    one = g.constant(1.0)
    weight = g.op("Add", one, g.op("Mul", g.op("Sub", positive, one), labels))
    entropy = g.op("Add", g.op("Relu", g.op("Neg", output)), rest)  # of label 1: log(1 + exp(-x))
    # (1 - y) x + (1 + (p - 1) y) log(1 + exp(-x)), which is torch's formula for positive weights p
    return g.op("Add", g.op("Mul", g.op("Sub", one, labels), output), g.op("Mul", weight, entropy))


def _norm(g: GraphExtender, rows: str, keepdims: int = 0) -> str:
    return g.op("Sqrt", g.op("ReduceSum", g.op("Mul", rows, rows), g.constant([-1]), keepdims=keepdims))


def _sum(g: GraphExtender, values: str, *axes: int) -> str:
    """Add the sum over these axes, which disappear; over all of them if none is given."""
    return g.op("ReduceSum", values, *([g.constant(list(axes))] if axes else []), keepdims=0)


def _length(g: GraphExtender, values: str, axis: int) -> str:
    """Add the length of an axis, int64 [1]."""
    return g.op("Gather", g.op("Shape", values), g.constant([axis]))


def _size(g: GraphExtender, values: str) -> str:
    return _float(g, g.op("Size", values))


def _float(g: GraphExtender, values: str) -> str:
    return g.op("Cast", values, to=TensorProto.FLOAT)


def _scalar(g: GraphExtender, one: str) -> str:
    """Add a value [1] of any type as an fp32 scalar."""
    return _float(g, g.op("Squeeze", one, g.constant([0])))


def _numbers(g: GraphExtender, values: Sequence[float] | str) -> str:
    return g.op("Constant", value=numpy_helper.from_array(np.asarray(values, np.float32)))
