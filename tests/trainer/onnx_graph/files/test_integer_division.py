"""The least integer divided by -1 ends no process: neither torch's nor onnxruntime's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from onward.flows.predict import open_model
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.served.predictor import Predictor
from onward.trainer.onnx_graph.files.integer_division import guard_integer_divisions
from onward.trainer.onnx_graph.files.onnxruntime_session import guarded_content, open_session
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.elementwise import divide
from onward.trainer.rehearsal.guards.guarded_files import guard_of_file


def of_inputs(operator: str, kind: str, opset: int = 14) -> onnx.ModelProto:
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        net ({kind}[n] a, {kind}[n] b) => ({kind}[n] y) {{ y = {operator} (a, b) }}""")


def of_constants(operator: str, kind: str, divisor: int) -> onnx.ModelProto:
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[4, 4] x) => (float[4, 4] y)
        <{kind}[1] a = {{{np.iinfo(kind).min}}}, {kind}[1] b = {{{divisor}}},
         float[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}>
        {{
            c = {operator} (a, b)
            f = Cast <to = 1> (c)
            h = MatMul (x, w)
            y = Add (h, f)
        }}""")


def of_sums(operator: str) -> onnx.ModelProto:
    """Divide the least integer, which is computed when the file runs: no constant that could be folded has it."""
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[batch, 4] x) => (float[batch, 4] y)
        <int64[1] least = {{{np.iinfo("int64").min}}}, int64[1] b = {{-1}}, int64[1] zero = {{0}},
         float[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}>
        {{
            i = Cast <to = 7> (x)
            nothing = Mul (i, zero)
            a = Add (nothing, least)
            c = {operator} (a, b)
            f = Cast <to = 1> (c)
            h = MatMul (x, w)
            y = Add (h, f)
        }}""")


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_divisions_inside_branches_inside_branches_are_guarded(operator: str) -> None:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 14]>
        net (int64[n] a, int64[n] b, bool c) => (int64[n] y) {{
            y = If (c) <
                then_branch = t () => (int64[n] p) {{
                    p = If (c) <
                        then_branch = tt () => (int64[n] pp) {{ pp = {operator} (a, b) }},
                        else_branch = te () => (int64[n] pe) {{ pe = {operator} (b, a) }}
                    >
                }},
                else_branch = e () => (int64[n] q) {{ q = {operator} (a, b) }}
            >
            z = {operator} (a, b)
        }}""")
    feed = {"a": np.array([np.iinfo("int64").min, -7]), "b": np.array([-1, -1])}
    for condition in (True, False):
        [found] = open_session(model).run(None, {**feed, "c": np.array(condition)})
        assert found.tolist() == {"Div": [np.iinfo("int64").min, 7], "Mod": [0, 0]}[operator]


@pytest.mark.parametrize("opset", [7, 14])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_onnxruntime_divides_as_before_but_for_the_quotient_that_there_is_not(kind: str, opset: int) -> None:
    least = np.iinfo(kind).min
    a, b = np.array([least, -7, 7, 9, 9], kind), np.array([-1, -1, 2, -2, 1], kind)
    quotients = open_session(of_inputs("Div", kind, opset)).run(None, {"a": a, "b": b})[0]
    assert quotients.tolist() == [least, 7, 3, -4, 9]


@pytest.mark.parametrize("operator", ["Mod", "Mod <fmod = 1>"])
def test_onnxruntime_gives_the_remainder_of_the_least_integer(operator: str) -> None:
    a, b = np.array([-(2**31), -7, 7], np.int32), np.array([-1, -1, 2], np.int32)
    assert open_session(of_inputs(operator, "int32")).run(None, {"a": a, "b": b})[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("external", [False, True])
def test_a_file_that_is_opened_by_its_path_divides_as_well(external: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(of_sums("Div"), path, save_as_external_data=external, size_threshold=0)
    x = np.ones((3, 4), np.float32)
    [found] = open_session(path).run(None, {"x": x})
    assert found.tolist() == (x + np.float32(np.iinfo("int64").min)).tolist()
    predictor = Predictor(path, None, tmp_path, content=guarded_content(path))
    columns = predictor.predict({"x": x})
    assert np.stack([*columns.values()], axis=1).tolist() == found.tolist()


def test_the_guard_of_the_rehearsal_does_not_end_the_process(tmp_path: Path) -> None:
    onnx.save_model(of_sums("Mod"), tmp_path / "model.onnx")
    found, _ = guard_of_file(tmp_path / "model.onnx")
    assert found is not None
    assert found.sizes


def test_a_file_whose_divisors_are_other_constants_is_opened_as_it_is(tmp_path: Path) -> None:
    onnx.save_model(of_constants("Div", "int64", 2), tmp_path / "model.onnx")
    assert guarded_content(tmp_path / "model.onnx") is None


def test_an_attribute_that_ends_onnxruntime_is_refused_before_a_file_is_opened_by_its_path(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        net (float[batch, 3] x) => (float[] y) <int64[1] i = {1}> { y = own.f <passed = -2> (x, i) }
        <domain: "own", opset_import: ["" : 20]>
        f <passed> (x, i) => (c) { c = GatherND <batch_dims: int = @passed> (x, i) }""")
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="GatherND has batch_dims = -2"):
        open_session(tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="GatherND has batch_dims = -2"):
        open_model(tmp_path / "model.onnx")


def test_a_model_whose_divisors_are_other_constants_stays_as_it_is() -> None:
    model = of_constants("Div", "int64", 2)
    assert guard_integer_divisions(model) is model


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_torch_divides_towards_zero_and_the_least_integer_stays(dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    a, b = torch.tensor([least, least, -7, 7], dtype=dtype), torch.tensor([-1, 1, 2, -2], dtype=dtype)
    assert divide(a, b).tolist() == [least, least, -3, -3]


def test_torch_divides_bytes_by_255() -> None:
    bytes_ = torch.tensor([255, 254], dtype=torch.uint8)
    assert divide(bytes_, torch.full_like(bytes_, 255)).tolist() == [1, 0]


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("divisor", [-1, 0])
def test_a_file_with_such_constants_is_refused_by_the_import(operator: str, kind: str, divisor: int) -> None:
    with pytest.raises(UnsupportedModel, match=r"the (integer )?constant"):
        to_module(of_constants(operator, kind, divisor))


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_a_constant_divisor_of_0_is_refused_whatever_it_divides(operator: str) -> None:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[n, 4] x) => (float[n, 4] y)
        <int32[1] zero = {{0}}, float[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}>
        {{
            i = Cast <to = 6> (x)
            d = {operator} (i, zero)
            f = Cast <to = 1> (d)
            h = MatMul (x, w)
            y = Add (h, f)
        }}""")
    with pytest.raises(UnsupportedModel, match="it divides integers by the constant 0"):
        to_module(model)


def test_an_error_of_the_imported_graph_is_raised_and_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[n, 4] x, int64[n] b) => (float[n, 4] y)
        <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, int64[1] seven = {7}, int64[1] axis = {1}>
        {
            d = Mod (seven, b)
            f = Cast <to = 1> (d)
            g = Unsqueeze (f, axis)
            h = MatMul (x, w)
            y = Add (h, g)
        }""")
    module = to_module(model)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        module(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))
    assert capfd.readouterr() == ("", "")


def test_the_diagnosis_of_a_file_of_fixed_batch_with_such_constants_names_the_node(tmp_path: Path) -> None:
    onnx.save_model(of_constants("Div", "int32", -1), tmp_path / "model.onnx")
    found = diagnose(tmp_path / "model.onnx")
    assert [each.why for each in found.unsupported] == [
        "it divides the integer constant -2147483648 by -1, whose quotient torch.int32 does not have"
    ]


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_lengths_divided_by_0_are_refused(operator: str) -> None:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[n, 4] x) => (float[n, 4] y)
        <int64[1] zero = {{0}}, float[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}>
        {{
            s = Shape (x)
            d = {operator} (s, zero)
            h = MatMul (x, w)
            y = Reshape (h, d)
        }}""")
    with pytest.raises(UnsupportedModel, match="ZeroDivisionError"):
        to_module(model)
