"""Every operator rule is right in every case of ONNX's own test suite; what is refused is in one table."""

import subprocess
import sys
import warnings
from collections import Counter
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.lowering import converters
from onward.trainer.onnx_import.lowering.converter_table import RULES
from tests.support import suite
from tests.support.graphs import MODELS, feed
from tests.support.onnx2torch_rules import register_with_onnx2torch

OUT_OF_SCOPE = {
    "optimizers": (7, lambda case: domains(case) & {"ai.onnx.preview.training"}),
    "strings": (26, lambda case: TensorProto.STRING in suite.element_types(case.model)),
    "random": (6, lambda case: operators(case) & RANDOM),
    "image files": (9, lambda case: operators(case) & {"ImageDecoder"}),
}
"""What training has no use for, or no answer to compare with: how many cases, and which."""

RANDOM = {"Bernoulli", "RandomUniformLike", "RandomNormalLike", "RandomUniform", "RandomNormal", "Multinomial"}

REFUSED: dict[str, str] = {
    "test_tfidfvectorizer_*": "it is not implemented",  # counting words prepares data
    "test_ai_onnx_ml_tree_ensemble_*": "it is not implemented",  # onnxruntime computes trees in front of the network
}
"""Cases in scope that are refused all the same, by name or pattern: why."""

BY_DESIGN = {
    "test_batchnorm_example_training_mode",  # train() and eval() decide, not the file
    "test_batchnorm_epsilon_training_mode",
    "test_training_dropout",
    "test_training_dropout_default",
    "test_training_dropout_mask",
    "test_training_dropout_default_mask",
}


def domains(case) -> set[str]:
    return {node.domain for node in case.model.graph.node}


def operators(case) -> set[str]:
    return {node.op_type for node in case.model.graph.node}


def out_of_scope(case) -> str | None:
    return next((name for name, (_, holds) in OUT_OF_SCOPE.items() if holds(case)), None)


def reason_to_refuse(case) -> str | None:
    return next((why for pattern, why in REFUSED.items() if fnmatchcase(case.name, pattern)), None)


def problems(case, device=suite.CPU) -> list[str]:
    """What is not as it should be: with operands as inputs of the graph, and with operands stored in the file."""
    inputs, wanted = case.data_sets[0]
    found = []
    for model in (case.model, suite.with_stored_operands(case)):
        if model is None:
            continue
        verdict = suite.verdict(model, inputs, wanted, device=device, rtol=case.rtol, atol=case.atol)
        if out_of_scope(case):
            expected = verdict == "right" or verdict.startswith("refused") or operators(case) & RANDOM
        elif why := reason_to_refuse(case):
            expected = verdict.startswith("refused") and why in verdict
        else:
            expected = verdict == "right"
        if not expected:
            found.append(f"{case.name}: {verdict}")
    return found


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["an eighth", "all"])
@pytest.mark.parametrize("initial", "abcdefghilmnopqrstuwx")
def test_no_case_of_the_onnx_suite_is_wrong(initial, every):
    judged = [case for case in suite.cases() if case.name[len("test_")] == initial and case.name not in BY_DESIGN]
    judged = judged[::every]
    assert judged
    assert [problem for case in judged for problem in problems(case)] == []


def test_every_entry_of_the_tables_of_exceptions_is_needed():
    cases = suite.cases()
    assert {case.name[len("test_")] for case in cases} == set("abcdefghilmnopqrstuwx")
    kept = Counter(filter(None, map(out_of_scope, cases)))
    assert kept == {name: count for name, (count, _) in OUT_OF_SCOPE.items()}
    assert {case.name for case in cases} >= BY_DESIGN
    for expanded in (False, True):
        names = [case for case in cases if suite.is_expanded(case) == expanded and not out_of_scope(case)]
        refused = [case.name for case in names if reason_to_refuse(case)]
        assert len(refused) <= 0.03 * len(names), f"{len(refused)} of {len(names)} refused"
    unused = [pattern for pattern in REFUSED if not any(fnmatchcase(case.name, pattern) for case in cases)]
    assert unused == []


@pytest.mark.parametrize("name", ["test_batchnorm_example_training_mode", "test_batchnorm_epsilon_training_mode"])
def test_in_training_batch_normalization_normalises_with_the_statistics_of_the_batch(name):
    case = next(case for case in suite.cases() if case.name == name)
    inputs, wanted = case.data_sets[0]
    module = to_module(case.model).train()
    got = module(*map(suite.as_torch, inputs))
    assert suite.difference(got[0], suite.as_torch(wanted[0]), rtol=1e-4, atol=1e-5) == ""
    assert (
        suite.difference(got[1], suite.as_torch(wanted[1]), rtol=1e-4, atol=1e-5) == ""
    )  # the variance: see BatchNorm


EIGHT_BIT = {
    TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ
}  # fmt: skip
"""Floats onnxruntime gives to Python as bytes."""

RUNTIME_DIFFERS = {
    "test_maxunpool_export_with_output_shape*": "it takes the indices as places in the larger output",
    "test_resize_downsample_scales_*_align_corners*": "it rounds the resized length before it aligns the corners",
}
"""Where onnxruntime does not compute what ONNX's own reference does in the newest version, by which ours is judged."""


def greatest(arrays) -> float:
    """The greatest finite absolute value: what rounding errors are measured by."""
    values = [np.abs(array[np.isfinite(array)]) for array in arrays if array.dtype.kind == "f"]
    return float(max((value.max() for value in values if value.size), default=0.0))


@pytest.mark.slow
def test_older_versions_agree_with_onnxruntime():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    right, refused, wrong = 0, [], []
    for case, version, model, inputs in suite.older_cases():
        name = f"{case.name} as {model.graph.node[0].op_type}-{version}"
        judged_by_reference = any(fnmatchcase(case.name, pattern) for pattern in RUNTIME_DIFFERS)
        if (
            case.name in BY_DESIGN
            or out_of_scope(case)
            or judged_by_reference
            or EIGHT_BIT & suite.element_types(model)
        ):
            continue
        try:
            onnx.checker.check_model(model)
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            arrays = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v) for v in inputs]
            feeds = dict(zip((value.name for value in session.get_inputs()), arrays, strict=True))
            wanted = session.run(None, feeds)
        except Exception:  # not valid at that version, or not in onnxruntime
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = suite.verdict(model, inputs, wanted, rtol=1e-3, atol=max(1e-4, 1e-5 * greatest(wanted)))
        if verdict == "right":
            right += 1
        else:
            (refused if verdict.startswith("refused") else wrong).append(f"{name}: {verdict}")
    assert wrong == [], "\n".join(wrong)
    total = right + len(refused)
    assert right >= 0.95 * total, f"{right} of {total}\n" + "\n".join(refused)


# -- the models that come with the onnx package

ON_DISK = ("simple", "pytorch-converted", "pytorch-operator")

NOT_A_MODEL_TO_TRAIN = ("test_gradient_of_*", "test_strnorm_*")


@pytest.mark.parametrize("kind", ON_DISK)
def test_models_of_the_onnx_package_compute_their_stored_results(kind):
    wrong, right = [], 0
    for path in sorted((suite.DATA / kind).glob("*/model.onnx")):
        model = onnx.load(path)
        sets = sorted(path.parent.glob("test_data_set_*"))
        inputs, wanted = (
            [suite.read_value(file, value) for file, value in zip(suite.numbered(sets[0], which), values, strict=True)]
            for which, values in (("input", suite.true_inputs(model)), ("output", model.graph.output))
        )
        verdict = suite.verdict(model, inputs, wanted, rtol=1e-3, atol=1e-5)
        refusable = any(fnmatchcase(path.parent.name, pattern) for pattern in NOT_A_MODEL_TO_TRAIN)
        right += verdict == "right"
        if verdict != "right" and not (refusable and verdict.startswith("refused")):
            wrong.append(f"{path.parent.name}: {verdict}")
    assert wrong == []
    assert right


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((suite.DATA / "light").glob("*.onnx")), ids=lambda path: path.stem)
def test_the_light_models_compute_their_stored_results(path):
    model = onnx.load(path)
    (value,) = suite.true_inputs(model)
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    image = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)  # as onnx's own runner
    wanted = TensorProto.FromString(path.with_name(f"{path.stem}_output_0.pb").read_bytes())
    assert suite.verdict(model, [image], [wanted], rtol=1e-3, atol=1e-5) == "right"


# -- onnx2torch, both ways


@pytest.fixture
def registry():
    """onnx2torch's registry, put back afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = converters.onnx2torch_registry()
    before = dict(found)
    yield found
    found.clear()
    found.update(before)


def test_importing_the_trainer_does_not_import_onnx2torch():
    code = (
        "import sys, onward.trainer.onnx_import.driver; "
        "sys.exit('onnx2torch' in sys.modules or 'torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# onnx2torch gives outputs by node, not by name: nothing a converter can mend
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"tiny_two_outputs"}))
def test_onnx2torch_with_our_rules_registered_computes_the_same(name, registry):
    import onnx2torch

    model = MODELS[name]()
    module = to_module(model).eval()
    register_with_onnx2torch()
    inputs = [torch.from_numpy(feed(model, 3)[key]) for key in module.input_names]
    ours, theirs = module(*inputs), onnx2torch.convert(model).eval()(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def doubling(node, graph):
    from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node

    return OperationConverterResult(torch_module=Doubled(), onnx_mapping=onnx_mapping_from_node(node))


def one_node(kind: str, **attributes) -> onnx.ModelProto:
    node = helper.make_node(kind, ["x"], ["y"], **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("acme", 1)]
    return helper.make_model(helper.make_graph([node], "one", ends[:1], ends[1:]), opset_imports=opsets)


def test_a_converter_registered_by_the_user_comes_first(registry):
    from onnx2torch.node_converters.registry import OperationDescription, add_converter

    add_converter("Double", 1, domain="acme")(doubling)
    registry.pop(OperationDescription("", "Relu", 14))
    add_converter("Relu", 14)(doubling)
    x = torch.tensor([[-1.0, 1.0, 2.0, 3.0]])
    for model in (one_node("Double", domain="acme"), one_node("Relu")):
        assert torch.equal(to_module(model)(x), 2 * x)


def test_an_operator_of_an_unknown_domain_is_refused():
    with pytest.raises(UnsupportedModel, match=r"node 'y': acme\.Double-1: it is not implemented"):
        to_module(one_node("Double", domain="acme"))


def test_operators_onnx_defines_by_simpler_ones_are_imported_through_their_definition():
    g = GraphWriter("definition", opset=28)
    assert ("SwiGLU", 28) not in RULES
    g.op("SwiGLU", g.input("a", ("batch", 4)), g.input("b", ("batch", 4)), outputs="y")
    g.output("y", ("batch", 4))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(to_module(g.model())(a, b), torch.nn.functional.silu(a) * b)


def test_an_attribute_no_rule_read_is_refused():
    model = one_node("Relu")
    model.graph.node[0].attribute.append(helper.make_attribute("ceiling", 6.0))
    with pytest.raises(UnsupportedModel, match="attribute ceiling is not implemented"):
        to_module(model)
