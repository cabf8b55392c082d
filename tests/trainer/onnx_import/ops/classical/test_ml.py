"""ai.onnx.ml: every rule computes what onnxruntime computes, or ONNX's reference where onnxruntime has no kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights

Array = np.ndarray[Any, np.dtype[Any]]
NAN = float("nan")
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")

X = np.array([[0.4, 0.25], [0.1, 0.05], [0.3, 0.9], [0.6, 0.2], [0.15, 0.85]], np.float32)
SIGNED = np.array([[1.5, -2.0], [0.1, 0.05], [-1.0, 0.0], [0.0, 0.0], [-3.0, 2.0]], np.float32)


def model_of(operator: str, inputs: Sequence[Array], outputs: int = 1, version: int = 1, **attributes: Any) -> Any:
    """A model of one node, with a dynamic first dimension."""
    names, results = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)]
    node = helper.make_node(operator, names, results, domain="ai.onnx.ml", **attributes)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), ["N", *x.shape[1:]])
        for name, x in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "one", declared, [onnx.ValueInfoProto(name=name) for name in results])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", version)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def under_onnxruntime(model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
    names = [value.name for value in model.graph.input]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(zip(names, inputs, strict=True))))


def under_reference(model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
    names = [value.name for value in model.graph.input]
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True))))


def imported(model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
    with torch.no_grad():
        results = to_module(model).eval()(*map(torch.from_numpy, inputs))
    return [each.numpy() for each in (results if isinstance(results, tuple) else (results,))]


def assert_equal(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- features


def features() -> Iterator[tuple[str, str, list[Array], dict[str, Any]]]:
    """(name, operator, operands, attributes) for every operator that onnxruntime has a kernel for."""
    integers = np.array([[1, -2], [0, 3], [3, 0]], np.int64)
    for dtype in (np.float32, np.float64, np.int64, np.int32):
        kind, x = np.dtype(dtype).name, (SIGNED if np.dtype(dtype).kind == "f" else integers).astype(dtype)
        yield f"Scaler {kind}", "Scaler", [x], {"offset": [1.0, 2.0], "scale": [2.0, 0.5]}
        yield f"Scaler of one number {kind}", "Scaler", [x], {"offset": [1.0], "scale": [2.0]}
        for norm in ("MAX", "L1", "L2"):
            yield f"Normalizer {norm} {kind}", "Normalizer", [x], {"norm": norm}
        for widths in ([2, 1], [1, 3]):
            name = f"FeatureVectorizer {widths} {kind}"
            yield name, "FeatureVectorizer", [x, x[:, :1].copy()], {"inputdimensions": widths}
        yield f"ArrayFeatureExtractor {kind}", "ArrayFeatureExtractor", [x, np.array([1, 0, 1])], {}
        if dtype is not np.int32:
            yield f"OneHotEncoder {kind}", "OneHotEncoder", [x], {"cats_int64s": [0, -1, 3]}
    yield "Normalizer of a vector", "Normalizer", [SIGNED[0]], {"norm": "L1"}
    yield "FeatureVectorizer of a vector", "FeatureVectorizer", [SIGNED[0]], {"inputdimensions": [2]}
    yield "ArrayFeatureExtractor of a vector", "ArrayFeatureExtractor", [X[0], np.array([[1], [0]])], {}
    yield "ArrayFeatureExtractor of 3 axes", "ArrayFeatureExtractor", [X[None], np.array([1])], {}
    yield "Binarizer", "Binarizer", [SIGNED], {"threshold": 0.1}
    missing = SIGNED.copy()
    missing[0, 0] = np.nan
    for values, replaced in itertools.product([[9.0, 8.0], [7.0]], [NAN, 0.0]):
        attributes = {"imputed_value_floats": values, "replaced_value_float": replaced}
        yield f"Imputer {values} {replaced}", "Imputer", [missing], attributes
    whole = {"imputed_value_int64s": [9, 8], "replaced_value_int64": 3}
    yield "Imputer int64", "Imputer", [integers], whole


FEATURES = list(features())


@pytest.mark.parametrize(("name", "operator", "inputs", "attributes"), FEATURES, ids=[case[0] for case in FEATURES])
def test_a_feature_operator_equals_onnxruntime(
    name: str, operator: str, inputs: list[Array], attributes: dict[str, Any]
) -> None:
    model = model_of(operator, inputs, **attributes)
    assert_equal(imported(model, inputs), under_onnxruntime(model, inputs))


@pytest.mark.parametrize(
    ("operator", "x", "attributes"),
    [
        ("Binarizer", SIGNED.astype(np.float64), {"threshold": 0.1}),
        ("Binarizer", np.array([[3, -1]]), {"threshold": 0.0}),
        ("Imputer", SIGNED.astype(np.float64), {"imputed_value_floats": [9.0, 8.0], "replaced_value_float": 0.0}),
        ("OneHotEncoder", np.array([[3, 0]], np.int32), {"cats_int64s": [0, 3]}),
    ],
)
def test_what_onnxruntime_has_no_kernel_for_equals_the_reference(
    operator: str, x: Array, attributes: dict[str, Any]
) -> None:
    model = model_of(operator, [x], **attributes)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        under_onnxruntime(model, [x])
    assert_equal(imported(model, [x]), under_reference(model, [x]))


def tensor(values: list[Any], dtype: str) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype))


@pytest.mark.parametrize(
    ("x", "version", "attributes"),
    [
        (np.array([1, 2, 3]), 2, {"keys_int64s": [1, 2], "values_floats": [0.5, 0.6]}),
        (np.array([1, 2, 3]), 2, {"keys_int64s": [2, 1, 2], "values_int64s": [4, 5, 6], "default_int64": -7}),
        (np.array([[1.0, 2.5]], np.float32), 2, {"keys_floats": [2.5, -1.0], "values_int64s": [4, 5]}),
        (np.array([[1.0, 2.5]], np.float32), 4, {"keys_floats": [2.5], "values_floats": [4.0], "default_float": 9.0}),
        (np.array([1.0, NAN, 3.0], np.float32), 2, {"keys_floats": [NAN, 1.0], "values_floats": [7.0, 8.0]}),
        (np.array([1.0, NAN, 3.0], np.float32), 4, {"keys_floats": [NAN, 1.0], "values_floats": [7.0, 8.0]}),
        (np.array([1.0, NAN, 3.0], np.float32), 4, {"keys_floats": [NAN], "values_int64s": [7], "default_int64": -7}),
        *(
            (
                np.array([1, 2, 3], dtype),
                4,
                {
                    "keys_tensor": tensor([1, 2], dtype),
                    "values_tensor": tensor([10, 20], dtype),
                    "default_tensor": tensor([-1], dtype),
                },
            )
            for dtype in ("float64", "float32", "int64")
        ),
    ],
)
def test_a_label_encoder_of_numbers_equals_onnxruntime(x: Array, version: int, attributes: dict[str, Any]) -> None:
    model = model_of("LabelEncoder", [x], version=version, **attributes)
    assert_equal(imported(model, [x]), under_onnxruntime(model, [x]))


def test_a_one_hot_encoder_without_zeros_refuses_an_unknown_category_as_onnxruntime_does() -> None:
    x = np.array([[0], [5]])
    model = model_of("OneHotEncoder", [x], cats_int64s=[0, 1], zeros=0)
    with pytest.raises(Exception, match="Unknown Category"):
        under_onnxruntime(model, [x])
    with pytest.raises(RuntimeError, match="a value has no category"):
        imported(model, [x])


# -- linear models


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_a_linear_classifier_equals_onnxruntime(transform: str, dtype: Any) -> None:
    x = (X if np.dtype(dtype).kind == "f" else np.array([[0, 1], [1, 0], [1, 1]])).astype(dtype)
    rows = {"coefficients": [0.1, 0.2, 0.3, 0.1, 0.0, 0.4], "intercepts": [0.1, 0.2, 0.15]}
    model = model_of("LinearClassifier", [x], 2, post_transform=transform, classlabels_ints=[5, 9, 7], **rows)
    assert_equal(imported(model, [x]), under_onnxruntime(model, [x]))


@pytest.mark.parametrize("transform", TRANSFORMS[:-1])
@pytest.mark.parametrize("labels", [[5, 7], []])
def test_a_linear_classifier_of_one_row_equals_onnxruntime(transform: str, labels: list[int]) -> None:
    row = {"coefficients": [0.5, -0.8], "intercepts": [0.1], **({"classlabels_ints": labels} if labels else {})}
    model = model_of("LinearClassifier", [SIGNED], 2, post_transform=transform, **row)
    assert_equal(imported(model, [SIGNED]), under_onnxruntime(model, [SIGNED]))


def test_probit_of_one_row_is_refused_because_runtimes_disagree() -> None:
    row = {"coefficients": [0.5, -0.8], "intercepts": [0.1], "classlabels_ints": [0, 1], "post_transform": "PROBIT"}
    with pytest.raises(UnsupportedModel, match="no meaning that runtimes agree on"):
        to_module(model_of("LinearClassifier", [X], 2, **row))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("intercepts", [True, False])
def test_a_linear_regressor_equals_onnxruntime(transform: str, targets: int, intercepts: bool) -> None:
    row: dict[str, Any] = {"coefficients": [0.1, 0.2, 0.3, 0.1][: 2 * targets], "targets": targets}
    row |= {"intercepts": [0.1, 0.2][:targets]} if intercepts else {}
    model = model_of("LinearRegressor", [X], post_transform=transform, **row)
    assert_equal(imported(model, [X]), under_onnxruntime(model, [X]))


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_a_linear_regressor_of_other_types_equals_the_reference(dtype: Any) -> None:
    x = np.array([[1, 2], [3, 5]], dtype)
    model = model_of("LinearRegressor", [x], coefficients=[2.0, 3.0], intercepts=[1.0])
    np.testing.assert_allclose(imported(model, [x])[0], under_reference(model, [x])[0])


def test_coefficients_and_intercepts_of_a_linear_model_are_parameters_named_by_its_output() -> None:
    rows = {"coefficients": [0.1, 0.2, 0.3, 0.1, 0.0, 0.4], "intercepts": [0.1, 0.2, 0.15]}
    module = to_module(model_of("LinearClassifier", [X], 2, classlabels_ints=[0, 1, 2], **rows))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(module).items()}
    assert shapes == {"y0/coefficients": (3, 2), "y0/intercepts": (3,)}
    assert all(parameter.requires_grad for parameter in module.parameters())


# -- gradients

SMOOTH = [
    ("Scaler", 1, {"offset": [1.0, 2.0], "scale": [2.0, 0.5]}),
    ("Normalizer", 1, {"norm": "MAX"}),
    ("Normalizer", 1, {"norm": "L1"}),
    ("Normalizer", 1, {"norm": "L2"}),
    ("Imputer", 1, {"imputed_value_floats": [9.0, 8.0], "replaced_value_float": NAN}),
    ("FeatureVectorizer", 1, {"inputdimensions": [3]}),
    *(("LinearRegressor", 1, {"coefficients": [0.1, 0.2, 0.3, 0.1], "intercepts": [0.3, 0.2], "targets": 2,
                              "post_transform": transform}) for transform in TRANSFORMS),
    *(("LinearClassifier", 2, {"coefficients": [0.1, 0.2, 0.3, 0.1], "intercepts": [0.3, 0.2],
                               "classlabels_ints": [0, 1], "post_transform": transform}) for transform in TRANSFORMS),
    *(("LinearClassifier", 2, {"coefficients": [0.1, 0.2], "intercepts": [0.3], "classlabels_ints": [0, 1],
                               "post_transform": transform}) for transform in ("NONE", "LOGISTIC")),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "outputs", "attributes"), SMOOTH)
def test_gradients_equal_finite_differences(operator: str, outputs: int, attributes: dict[str, Any]) -> None:
    module = to_module(model_of(operator, [X], outputs, **attributes)).double()
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    def scores(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        result = torch.func.functional_call(module, dict(zip(weights, values, strict=True)), (x,))
        return result if isinstance(result, torch.Tensor) else result[-1]

    assert torch.autograd.gradcheck(scores, (torch.from_numpy(X).double().requires_grad_(), *weights.values()))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    for norm in ("MAX", "L1", "L2"):
        x = torch.zeros(2, 3, requires_grad=True)
        to_module(model_of("Normalizer", [np.zeros((2, 3), np.float32)], norm=norm))(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
