"""Every operator rule is right in every case of ONNX's own test suite that it accepts; the rest is refused."""

import copy
import functools
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.graphs import MODELS, feed
from trainer import graph
from trainer.errors import UnsupportedModel
from trainer.ops import foreign
from trainer.ops.table import RULES
from trainer.reference import GraphWriter

BY_DESIGN = {
    "test_batchnorm_example_training_mode",  # train() and eval() decide, not the file
    "test_batchnorm_epsilon_training_mode",
    "test_training_dropout",
    "test_training_dropout_default",
    "test_training_dropout_mask",
    "test_training_dropout_default_mask",
    "test_reduce_max_empty_set",  # torch raises when it runs
    "test_reduce_max_empty_set_bool",
    "test_reduce_min_empty_set",
}


@functools.cache
def suite():
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy, while the suite computes what it expects
        return load_model_tests(kind="node")


def arrays(values):
    """The suite's values as numpy arrays, halves as fp32; None if one is a sequence or optional."""
    if any(isinstance(value, list) or value is None for value in values):
        return None
    found = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v) for v in values]
    return [v.astype(np.float32) if v.dtype.name in ("float16", "bfloat16") else v for v in found]


def with_constant_operands(model: onnx.ModelProto, values) -> onnx.ModelProto:
    """Every input but the first becomes an initializer, as it is in files of trained models."""
    model = copy.deepcopy(model)
    for declared, value in zip(list(model.graph.input)[1:], values[1:], strict=True):
        element_type = declared.type.tensor_type.elem_type
        array = value.astype(helper.tensor_dtype_to_np_dtype(element_type))
        model.graph.initializer.append(numpy_helper.from_array(array, declared.name))
    return model


def import_case(case):
    """(module, inputs), with shape operands as constants if need be; None if refused."""
    values = arrays(case.data_sets[0][0])
    for prepare in (lambda model: model, lambda model: with_constant_operands(model, values)):
        if values is None:
            return None
        model = prepare(case.model)
        try:
            module = graph.to_module(model).eval()
        except UnsupportedModel:
            continue
        return module, [torch.from_numpy(np.array(value)) for value in values[: len(module.input_names)]]
    return None


def is_right(case, imported) -> bool:
    module, inputs = imported
    try:
        got = module(*inputs)
    except (RuntimeError, IndexError):
        return False
    got = got if isinstance(got, tuple) else (got,)
    want = arrays(case.data_sets[0][1])
    if want is None or len(got) != len(want):
        return False
    ends = (*case.model.graph.input, *case.model.graph.output)
    half = any(value.type.tensor_type.elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for value in ends)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": max(case.rtol, 1e-4), "atol": max(case.atol, 1e-6)}
    return all(
        a.shape == b.shape
        and a.numpy().dtype == b.dtype
        and np.allclose(a.detach().numpy(), b, equal_nan=True, **tolerance)
        for a, b in zip((output.detach() for output in got), want, strict=True)
    )


def test_no_case_of_the_onnx_suite_is_wrong():
    right, refused, wrong = 0, 0, []
    for case in suite():
        if any(isinstance(value, list) for value in case.data_sets[0][1]):
            continue  # a graph output that is a sequence
        imported = import_case(case)
        if imported is None:
            refused += 1
        elif is_right(case, imported):
            right += 1
        else:
            wrong.append(case.name)
    assert set(wrong) <= BY_DESIGN
    assert right >= 1290, f"{right} right, {refused} refused"


def older_cases():
    """Single-node cases of float operators, relabelled to the earlier versions a rule claims."""
    for case in suite():
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].domain or not case.name.startswith("test_"):
            continue
        for version in sorted(v for op, v in RULES if op == nodes[0].op_type and v >= 7):
            model = copy.deepcopy(case.model)
            del model.opset_import[:]
            model.opset_import.append(helper.make_opsetid("", version))
            model.ir_version = min(model.ir_version, 8)
            yield case, version, model


@pytest.mark.slow
def test_older_versions_agree_with_onnxruntime():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    agreed, wrong = 0, []
    for case, version, model in older_cases():
        values = arrays(case.data_sets[0][0])
        if values is None or case.name in BY_DESIGN:
            continue
        constant = with_constant_operands(model, values)
        try:
            onnx.checker.check_model(constant)
            session = onnxruntime.InferenceSession(constant.SerializeToString(), options)
            want = session.run(None, {session.get_inputs()[0].name: arrays(case.data_sets[0][0])[0]})
            module = graph.to_module(constant).eval()
        except Exception:  # not valid at that version, not in onnxruntime, or refused by us
            continue
        got = module(torch.from_numpy(np.array(values[0])))
        got = got if isinstance(got, tuple) else (got,)
        same = [
            a.shape == b.shape and np.allclose(a.detach().numpy(), b, rtol=1e-3, atol=1e-4, equal_nan=True)
            for a, b in zip(got, want, strict=True)
        ]
        agreed += all(same)
        if not all(same):
            wrong.append(f"{case.name} as {model.graph.node[0].op_type}-{version}")
    assert wrong == []
    assert agreed > 1000, agreed


# -- onnx2torch, both ways


@pytest.fixture
def registry():
    """onnx2torch's registry, put back afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = foreign._registry()
    before = dict(found)
    yield found
    found.clear()
    found.update(before)


def test_importing_the_trainer_does_not_import_onnx2torch():
    code = "import sys, trainer.graph; sys.exit('onnx2torch' in sys.modules or 'torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# onnx2torch gives outputs by node, not by name: nothing a converter can mend
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"tiny_two_outputs"}))
def test_onnx2torch_with_our_rules_registered_computes_the_same(name, registry):
    import onnx2torch

    foreign.register_with_onnx2torch()
    model = MODELS[name]()
    module = graph.to_module(model).eval()
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
        assert torch.equal(graph.to_module(model)(x), 2 * x)


def test_an_operator_of_an_unknown_domain_is_refused():
    with pytest.raises(UnsupportedModel, match=r"node 'y': acme\.Double-1: it is not implemented"):
        graph.to_module(one_node("Double", domain="acme"))


def test_operators_onnx_defines_by_simpler_ones_are_imported_through_their_definition():
    g = GraphWriter("definition", opset=28)
    assert ("SwiGLU", 28) not in RULES
    g.op("SwiGLU", g.input("a", ("batch", 4)), g.input("b", ("batch", 4)), outputs="y")
    g.output("y", ("batch", 4))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(graph.to_module(g.model())(a, b), torch.nn.functional.silu(a) * b)


def test_an_attribute_no_rule_read_is_refused():
    model = one_node("Relu")
    model.graph.node[0].attribute.append(helper.make_attribute("ceiling", 6.0))
    with pytest.raises(UnsupportedModel, match="attribute ceiling is not implemented"):
        graph.to_module(model)
