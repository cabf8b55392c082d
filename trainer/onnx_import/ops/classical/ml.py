"""Rules for ai.onnx.ml, the operators of classical models: scaling, encoding and linear models.

Where onnxruntime and ONNX's reference implementation differ, the rules compute what onnxruntime does, because the
exported file is run by it. Numbers are fp32 unless the result has the type of the operand. Strings and maps have no
torch type: the import leaves out the outputs that hold them (onnx_graph/outputs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.tensor_protos import read_tensor
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value

Tensor = torch.Tensor


def as_float(c: Call, x: Value) -> Value:
    """Convert an operand to fp32, the type in which these operators compute and of most of their results."""
    return x if x.dtype == torch.float32 else c("to", x, torch.float32)


# -- one number for each feature


@lower("ai.onnx.ml.Scaler", since=(1,))
def scaler(c: Call, x: Value, offset: Value = None, scale: Value = None) -> Value:
    offset, scale = (_held(c, name, given) for name, given in (("offset", offset), ("scale", scale)))
    x = as_float(c, x)
    x = x if offset is None else c(torch.sub, x, offset)
    return x if scale is None else c(torch.mul, x, scale)


def _held(c: Call, name: str, given: Value) -> Value:
    """Return an attribute that the import passes as an operand; inside functions and inner graphs it does not."""
    floats = c.attr(name)
    return given if given is not None or not floats else torch.tensor(floats, dtype=torch.float32)


@lower("ai.onnx.ml.Normalizer", since=(1,))
def normalizer(c: Call, x: Value) -> Value:
    c.require("norm", "MAX", "L1", "L2")
    return c(normalized, as_float(c, x), c.attr("norm", "MAX"))


def normalized(x: Tensor, norm: str) -> Tensor:
    """Divide rows [..., features] by their greatest element (MAX, with its sign), L1 or L2 norm; zeros stay zeros."""
    if norm == "MAX":
        length = x.amax(-1, keepdim=True)
    else:
        # not torch's norms, whose gradient at zero is NaN
        length = x.abs().sum(-1, keepdim=True) if norm == "L1" else x.square().sum(-1, keepdim=True)
    # before the root, whose gradient at zero would be infinite
    length = torch.where(length == 0, torch.ones_like(length), length)
    return x / (length.sqrt() if norm == "L2" else length)


@lower("ai.onnx.ml.Binarizer", since=(1,))
def binarizer(c: Call, x: Value) -> Value:
    return c("to", c(torch.gt, x, c.attr("threshold", 0.0)), x.dtype)


@lower("ai.onnx.ml.Imputer", since=(1,))
def imputer(c: Call, x: Value) -> Value:
    floats = x.dtype.is_floating_point
    values = c.attr("imputed_value_floats" if floats else "imputed_value_int64s")
    replaced = c.attr("replaced_value_float" if floats else "replaced_value_int64", 0)
    for name in ("imputed_value_int64s", "replaced_value_int64", "imputed_value_floats", "replaced_value_float"):
        c.attr(name)  # those of the other type may be written too, and are not used
    if not values:
        raise UnsupportedNode(f"it has no values for operands of {str(x.dtype).removeprefix('torch.')}")
    return c(imputed, x, torch.tensor(values, dtype=x.dtype), replaced)


def imputed(x: Tensor, values: Tensor, replaced: float) -> Tensor:
    """Replace what equals `replaced` (may be NaN) in x [..., features] by the feature's value, or by the only one."""
    return torch.where(x.isnan() if math.isnan(replaced) else x == replaced, values.to(x.dtype), x)


# -- columns


@lower("ai.onnx.ml.FeatureVectorizer", since=(1,))
def feature_vectorizer(c: Call, *parts: Value) -> Value:
    widths = c.attr("inputdimensions") or [c.size(part, -1) for part in parts]
    if len(widths) != len(parts):
        raise UnsupportedNode(f"inputdimensions has {len(widths)} entries for {len(parts)} operands")
    return c(beside, [as_float(c, part) for part in parts], widths)


def beside(parts: list[Tensor], widths: list[int]) -> Tensor:
    """Concatenate columns to [rows, sum of widths], each part cut or padded with zeros to its width.

    parts: [rows, columns]; one dimension is one row.
    """
    rows = [part if part.ndim == 2 else part.reshape(1, -1) for part in parts]
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part, width in zip(rows, widths, strict=True)], 1)


@lower("ai.onnx.ml.ArrayFeatureExtractor", since=(1,))
def array_feature_extractor(c: Call, x: Value, indices: Value) -> Value:
    return c(selected_columns, x, indices)


def selected_columns(x: Tensor, indices: Tensor) -> Tensor:
    """Return the columns of these numbers: [..., columns] -> [..., numbers]; a vector gives one row."""
    found = x.index_select(-1, indices.flatten())
    return found if x.ndim > 1 else found[None]


# -- codes


@lower("ai.onnx.ml.OneHotEncoder", since=(1,))
def one_hot_encoder(c: Call, x: Value) -> Value:
    if c.attr("cats_strings"):
        raise UnsupportedNode("its categories are strings")
    return c(one_hot, x, torch.tensor(c.attr("cats_int64s"), dtype=torch.int64), bool(c.attr("zeros", 1)))


def one_hot(x: Tensor, categories: Tensor, zeros: bool) -> Tensor:
    """Return 1 where an integer (floats are truncated) is the category, else 0: [...] -> [..., categories].

    Raises RuntimeError for an integer without a category, unless `zeros`.
    """
    is_category = x.to(torch.int64)[..., None] == categories
    if not zeros:
        torch._assert_async(is_category.any(-1).all(), "OneHotEncoder: a value has no category, and zeros is 0")
    return is_category.float()


@lower("ai.onnx.ml.LabelEncoder", since=(1, 2, 4))
def label_encoder(c: Call, x: Value) -> Value:
    keys, values, default = (_codes(c, kind) for kind in ("keys", "values", "default"))
    if keys is None or values is None or c.attr("classes_strings"):
        raise UnsupportedNode("it encodes strings")
    if default is None:
        default = torch.tensor(-1 if values.dtype == torch.int64 else 0).to(values.dtype)
    default = default.reshape(())
    missing = keys.isnan()
    # as in onnxruntime, where NaN is a key from version 4 on
    of_nan = values[missing][0] if bool(missing.any()) and c.version >= 4 else default
    keys = keys[~missing]
    values = values[~missing]
    # likewise: the first of equal keys is used
    first = torch.tensor(list({key: i for i, key in reversed(list(enumerate(keys.tolist())))}.values())).long()
    keys, order = keys[first].sort()
    return c(looked_up, x, keys.to(x.dtype), values[first][order], default, of_nan)


def _codes(c: Call, what: str) -> Tensor | None:
    """Return the keys, the values or the default in the only type that is given; None for strings."""
    tensor = c.attr(f"{what}_tensor")
    plural = "" if what == "default" else "s"
    found: dict[torch.dtype, object] = {
        torch.int64: c.attr(f"{what}_int64{plural}"),
        torch.float32: c.attr(f"{what}_float{plural}"),
    }
    c.attr(f"{what}_string{plural}")
    if tensor is not None:
        return read_tensor(tensor) if tensor.data_type != tensor.STRING else None
    given = [torch.tensor(value, dtype=dtype) for dtype, value in found.items() if value not in (None, [])]
    return given[0] if given else None


def looked_up(x: Tensor, keys: Tensor, values: Tensor, default: Tensor, of_nan: Tensor) -> Tensor:
    """Return the value of each element's key, `of_nan` for NaN, or the default: x [...] -> [...].

    keys: [keys], sorted; values: [keys], of the same order.
    """
    other = torch.where(x.isnan(), of_nan, default)
    if not len(keys):
        return other
    # the first key that is not less; another key there means that the element has none
    place = torch.searchsorted(keys, x.contiguous()).clamp(max=len(keys) - 1)
    return torch.where(keys[place] == x, values[place], other)


# -- linear models


@lower("ai.onnx.ml.LinearRegressor", since=(1,))
def linear_regressor(c: Call, x: Value, coefficients: Value = None, intercepts: Value = None) -> Value:
    targets = c.attr("targets", 1)
    transform = c.attr("post_transform", "NONE")
    return transformed_targets(c, _linear(c, x, coefficients, intercepts, targets), targets, transform)


def transformed_targets(c: Call, scores: Value, targets: int, transform: str) -> Value:
    """Apply `post_transform` to the results of a regression; onnxruntime leaves a single target as it is."""
    return scores if targets == 1 and transform != "PROBIT" else post_transform(c, scores, transform)


def _linear(c: Call, x: Value, coefficients: Value, intercepts: Value, rows: int) -> Value:
    count = len(c.attr("coefficients") or ())
    if not rows or not count or count % rows:
        raise UnsupportedNode(f"it has {count} coefficients for {rows} scores")
    coefficients = _held(c, "coefficients", coefficients)
    intercepts = _held(c, "intercepts", intercepts)
    # as an operand it is a matrix already (onnx_graph/attribute_weights.py)
    weight = coefficients if coefficients.ndim == 2 else c("reshape", coefficients, rows, -1)
    return c(F.linear, as_float(c, x if x.ndim == 2 else c("reshape", x, 1, -1)), weight, intercepts)


@lower("ai.onnx.ml.LinearClassifier", since=(1,))
def linear_classifier(c: Call, x: Value, coefficients: Value = None, intercepts: Value = None) -> Value:
    c.attr("multi_class")  # onnxruntime does not use it
    transform = c.attr("post_transform", "NONE")
    labels = class_labels(c)
    rows = len(c.attr("intercepts") or ()) or len(labels)
    scores = _linear(c, x, coefficients, intercepts, rows)
    if rows == 1:
        return _two_classes(c, scores, labels, transform)
    if rows != len(labels):
        raise UnsupportedNode(f"it has {len(labels)} class labels for {rows} scores")
    chosen_labels = c(label_of, c(torch.argmax, scores, -1), labels) if c.wants(0) else None
    return chosen_labels, post_transform(c, scores, transform)


def _two_classes(c: Call, score: Value, labels: Tensor, transform: str) -> Value:
    """Return the label and the scores of a classifier with one score, which is positive for the second class."""
    if transform == "PROBIT":
        raise UnsupportedNode("post_transform PROBIT of a single score has no meaning that runtimes agree on")
    if len(labels) not in (0, 2):
        raise UnsupportedNode(f"it has {len(labels)} class labels for a single score")
    chosen_labels = c(label_of, c("long", c(torch.gt, c(torch.squeeze, score, -1), 0)), labels) if c.wants(0) else None
    if not len(labels):
        return chosen_labels, score
    return chosen_labels, c(both_scores, score, transform == "LOGISTIC")


def both_scores(score: Tensor, logistic: bool) -> Tensor:
    """Return the scores of both classes, [N, 1] -> [N, 2]."""
    return torch.cat([-score, score], -1).sigmoid() if logistic else torch.cat([1 - score, score], -1)


def class_labels(c: Call) -> Tensor:
    """Return the class labels, int64 [classes]. Raises UnsupportedNode for strings, if the labels are read at all."""
    strings = c.attr("classlabels_strings")
    integers = c.attr("classlabels_ints")
    if strings and c.wants(0):
        raise UnsupportedNode("its class labels are strings")
    return torch.tensor(integers or list(range(len(strings or ()))), dtype=torch.int64)


def label_of(position: Tensor, labels: Tensor) -> Tensor:
    """Return the label of each class, position [...] -> [...]; the position itself if there are no labels."""
    return labels[position] if len(labels) else position


def post_transform(c: Call, scores: Value, transform: str) -> Value:
    """Apply an attribute `post_transform` to the scores of each row."""
    if transform == "NONE":
        return scores
    if transform == "SOFTMAX":
        return c(torch.softmax, scores, -1)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "LOGISTIC": torch.sigmoid,
        "SOFTMAX_ZERO": softmax_zero,
        "PROBIT": probit,
    }
    if transform not in functions:
        raise UnsupportedNode(f"post_transform={transform!r} is not implemented")
    return c(functions[transform], scores)


def softmax_zero(scores: Tensor) -> Tensor:
    """Return the softmax over the scores of a row [..., classes] that are not zero; zeros stay zero."""
    weights = torch.where(scores.abs() > 1e-7, (scores - scores.amax(-1, keepdim=True)).exp(), 0)
    return weights / weights.sum(-1, keepdim=True)


def probit(probabilities: Tensor) -> Tensor:
    """Return the inverse of the normal distribution, by onnxruntime's approximation of the inverse error function.

    The approximation is that of Winitzki with a = 0.147.
    """
    x = 2 * probabilities - 1
    log = ((1 - x) * (1 + x)).log()
    half = 2 / (math.pi * 0.147) + 0.5 * log
    return math.sqrt(2) * x.sign() * (-half + (half.square() - log / 0.147).sqrt()).sqrt()
