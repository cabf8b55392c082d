"""onward doctor: what of a file is trained and why, how it is imported, and what an exporter did to it."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from typer.testing import CliRunner

import onward
from onward.flows.cli import app
from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.diagnostics.audit_input import audit_of_run
from onward.trainer.diagnostics.config_check import _patterns, check_files_and_data
from onward.trainer.diagnostics.doctor import Diagnosis, diagnose
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings, refused_warnings
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.train_selection import select_trained
from tests.support.graphs import MODELS, tiny_conv_net, tiny_conv_net_with_batch_norm, tiny_mlp, tiny_transformer


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model in ONNX's text form, with initializers."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def examined(model: onnx.ModelProto, folder: Path) -> Diagnosis:
    onnx.save(model, folder / "m.onnx")
    return diagnose(folder / "m.onnx")


def warned(found: Diagnosis) -> str:
    return "\n".join(f"{warning.what} -> {warning.remedy}" for warning in found.warnings)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_every_stored_tensor_is_counted_and_has_a_reason(name, tmp_path):
    model = MODELS[name]()
    found = examined(model, tmp_path)
    stored = dict(stored_protos(model.graph))  # of Constant nodes, too
    assert stored.keys() >= {tensor.name for tensor in model.graph.initializer}
    kept = {name: tensor for name, tensor in stored.items() if tensor.data_type == onnx.TensorProto.FLOAT}
    floats = {name: math.prod(tensor.dims) for name, tensor in kept.items()}
    assert found.importable
    assert {weight.name for weight in found.weights} == set(floats)
    assert all(weight.reason for weight in found.weights)
    assert sum(total.values for total in found.totals.values()) == sum(floats.values())
    assert {use.imported_by for use in found.operators} == {"rule"}
    assert sum(use.nodes for use in found.operators) == len(model.graph.node)
    assert Diagnosis.model_validate_json(found.model_dump_json()) == found


def test_everything_unsupported_is_listed_with_what_would_help(tmp_path):
    model = parsed("""
        <ir_version: 10, opset_import: ["" : 20, "acme" : 3]>
        bad (float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] z) {
            y = acme.Twist(x)
            a = acme.Stretch(x)
            z = MatMul(a, w)
        }""", w=random(4, 4))  # fmt: skip
    found = examined(model, tmp_path)
    assert not found.importable
    assert [(entry.where, entry.operator, entry.version) for entry in found.unsupported] == [
        ("y", "acme.Twist", 3),
        ("a", "acme.Stretch", 3),
    ]
    assert 'add_converter("Twist", version=3, domain="acme")' in found.unsupported[0].remedy
    assert found.unsupported[1].why == "it is not implemented"
    assert [weight.kind for weight in found.weights] == ["trained"], "what could be trained is told all the same"
    assert {use.operator: use.imported_by for use in found.operators}["acme.Twist"] == "nothing"


def test_folded_batch_norm_is_suspected_where_there_is_none(tmp_path):
    assert "the exporter folded it into them" in warned(examined(tiny_conv_net(), tmp_path))
    assert "folded" not in warned(examined(tiny_conv_net_with_batch_norm(), tmp_path))


def test_stripped_dropout_is_suspected_in_a_transformer(tmp_path):
    assert "graph.dropout = 0.1" in warned(examined(tiny_transformer(), tmp_path))
    assert "graph.dropout" not in warned(examined(tiny_transformer(dropout=0.1), tmp_path))
    assert "graph.dropout" not in warned(examined(tiny_mlp(), tmp_path))


LAYERS = """
    <ir_version: 10, opset_import: ["" : 20]>
    layers (float[batch, 8] x) => (float[batch, 8] y) {{
        a = LayerNormalization(x, {0}, {1})
        b = MatMul(a, w0)
        c = LayerNormalization(b, {2}, {3})
        d = MatMul(c, w1)
        y = LayerNormalization(d, {4}, {5})
    }}"""


def test_merged_weights_are_named_with_the_setting_that_parts_them(tmp_path):
    matrices = {"w0": random(8, 8, seed=0), "w1": random(8, 8, seed=1)}
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    merged = parsed(LAYERS.format(*("scale", "bias") * 3), scale=ones, bias=zeros, **matrices)
    said = warned(examined(merged, tmp_path))
    assert 'model.untie = ["scale", "bias"]' in said
    assert "scale (by 3: a, c, y" in said
    names = [f"{kind}{i}" for i in range(3) for kind in ("scale", "bias")]
    apart = {name: ones if "scale" in name else zeros for name in names}
    assert "untie" not in warned(examined(parsed(LAYERS.format(*names), **apart, **matrices), tmp_path))


def test_merged_weights_are_refused_until_they_are_untied_frozen_or_accepted(tmp_path):
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    model = parsed(LAYERS.format(*("scale", "bias") * 3), scale=ones, bias=zeros, w0=random(8, 8), w1=random(8, 8))
    onnx.save(model, tmp_path / "m.onnx")

    def refused(**settings: object) -> list[str]:
        config = ModelConfig.model_validate({"path": tmp_path / "m.onnx", **settings})
        changed = load_model(config.path)
        apply_surgery(changed, config, seed=0)
        module = to_module(changed, base=tmp_path)
        select_trained(module, train=config.train, freeze=config.freeze)
        return refused_warnings(exporter_warnings(audit_of_run(changed, module, tmp_path)), config.accept)

    (only,) = refused()
    assert 'set model.untie = ["scale", "bias"]' in only
    assert 'set model.accept = ["merged"]' in only
    assert "2 weights are read by several layers" in only
    assert refused(untie=["scale", "bias"]) == refused(freeze=["scale", "bias"]) == refused(accept=["merged"]) == []
    assert "1 weights" in refused(untie=["scale"])[0]


def test_an_unknown_warning_is_not_accepted_and_the_known_ones_are_listed():
    with pytest.raises(ConfigError, match=r"model\.accept\.0: Input should be 'merged'.*, not 'merge'"):
        build_config({"model": {"path": "m.onnx", "accept": ["merge"]}, "data": {"source": "digits"}})


def test_a_network_that_repeats_a_layer_is_not_suspected_of_merging(tmp_path):
    model = parsed(LAYERS.replace("w1", "w0").format(*("scale", "bias") * 3), w0=random(8, 8))
    y = model.graph.node[-1]
    y.CopyFrom(helper.make_node("Relu", ["d"], ["y"]))  # scale, bias and w0 are each read twice
    for name, value in (("scale", 1.0), ("bias", 0.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.full(8, value, np.float32), name))
    assert "untie" not in warned(examined(model, tmp_path))


def test_copies_tables_and_random_nodes_are_told(tmp_path):
    table = random(16, 8)
    model = parsed("""
        <ir_version: 10, opset_import: ["" : 20]>
        tied (int64[batch] ids) => (float[batch, 16] y) {
            a = Gather(embedding, ids)
            n = RandomUniformLike <dtype: int = 1> (a)
            b = Mul(a, n)
            c = Add(b, grid)
            y = MatMul(c, val_7)
        }""", embedding=table, val_7=table.T.copy(), grid=np.arange(8, dtype=np.float32))  # fmt: skip
    found = examined(model, tmp_path)
    said = warned(found)
    assert "val_7 of embedding" in said
    assert "model.tie = false" in said
    assert "8 numbers in 1 tensors stay frozen: grid (8: a table of whole numbers" in said
    assert "1 nodes draw random numbers" in said
    assert found.totals["trained"].values == table.size, "a copy is not counted"


def test_training_mode_fixed_batches_and_halves_are_told(tmp_path):
    model = parsed("""
        <ir_version: 10, opset_import: ["" : 20]>
        bn (float[4, 3, 8, 8] x) => (float[4, 3, 8, 8] y) {
            y, rm, rv = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
        }""", scale=random(3), bias=random(3), mean=random(3), var=np.ones(3, np.float32))  # fmt: skip
    said = warned(examined(model, tmp_path))
    assert "1 BatchNormalization nodes are in training mode" in said
    assert "declares a batch of 4" in said
    half = parsed("""
        <ir_version: 10, opset_import: ["" : 20]>
        half (float16[batch, 4] x) => (float16[batch, 4] y) { y = MatMul(x, w) }""",
        w=random(4, 4).astype(np.float16),
    )  # fmt: skip
    assert "1 tensors are stored in float16" in warned(examined(half, tmp_path))


def test_a_model_without_weights_says_so(tmp_path):
    model = parsed("""
        <ir_version: 10, opset_import: ["" : 20]>
        light (float[batch, 4] x) => (float[batch, 4] y) {
            s = Constant <value_ints = [4, 4]> ()
            w = ConstantOfShape(s)
            m = MatMul(x, w)
            y = Mul(m, half)
        }""", half=np.array(0.5, np.float32))  # fmt: skip
    assert "no stored tensor is a weight; 1 nodes make tensors of their own" in warned(examined(model, tmp_path))


CONTRADICTION = """
    <ir_version: 10, opset_import: ["" : 20]>
    wrong (float[batch, 4] x, double[batch, 4] z) => (float[batch, 4] y) {
        a = MatMul(x, w)
        y = Add(a, z)
    }"""


def test_a_file_that_onnxruntime_finds_invalid_is_not_called_importable(tmp_path):
    found = examined(parsed(CONTRADICTION, w=random(4, 4)), tmp_path)
    assert not found.runtime.opens
    assert not found.runtime.valid
    assert "bound to different types (tensor(float) and tensor(double)" in found.runtime.error
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "m.onnx")])
    assert shown.exit_code == 2
    assert "yes, but onnxruntime rejects the file" in shown.output
    assert "rejects it: Type Error" in shown.output


def test_what_onnxruntime_lacks_is_said_and_does_not_make_a_file_invalid(tmp_path):
    half = """<ir_version: 10, opset_import: ["" : 20]>
        half (bfloat16[batch, 4] x) => (bfloat16[batch, 4] y) { y = Tanh(x) }"""
    found = examined(parsed(half), tmp_path)
    assert found.importable
    assert (found.runtime.opens, found.runtime.valid) == (False, True)
    assert "Could not find an implementation for Tanh" in found.runtime.error
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "m.onnx")]).exit_code == 0


@pytest.mark.parametrize(("body", "opens"), [(CONTRADICTION, False), (CONTRADICTION.replace("double", "float"), True)])
def test_a_large_file_is_opened_without_its_weights(tmp_path, monkeypatch, body, opens):
    monkeypatch.setattr("onward.trainer.diagnostics.doctor.MOST_OPENED_BYTES", 100)
    model = parsed(body.replace(", 4]", ", 64]"), w=random(64, 64))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    check = diagnose(tmp_path / "m.onnx").runtime
    assert check.opens == opens
    assert "tensors of more than 1,024 elements are inputs" in check.how


def test_with_converters_of_ones_own_their_operators_are_imported(tmp_path):
    bad = parsed(
        """<ir_version: 10, opset_import: ["" : 20, "taught" : 1]>
        taught (float[b] x) => (float[b] y) { y = taught.Same(x) }"""
    )
    onnx.save(bad, tmp_path / "m.onnx")
    (tmp_path / "same.py").write_text(
        "import torch\n"
        "from onnx2torch.node_converters.registry import add_converter\n"
        "from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node\n"
        "@add_converter('Same', 1, domain='taught')\n"
        "def same(node, graph):\n"
        "    return OperationConverterResult(torch.nn.Identity(), onnx_mapping_from_node(node))\n"
    )
    assert not diagnose(tmp_path / "m.onnx").importable
    shown = CliRunner().invoke(
        app, ["doctor", str(tmp_path / "m.onnx"), "--converters", str(tmp_path / "same.py"), "--json"]
    )
    assert shown.exit_code == 0
    assert json.loads(shown.output)["operators"][0]["imported_by"] == "your converter"


def test_the_command_prints_it_and_exits_with_2_when_the_model_cannot_be_imported(tmp_path):
    onnx.save(tiny_mlp(), tmp_path / "good.onnx")
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "good.onnx"), "--all"])
    assert shown.exit_code == 0
    assert "fc1.weight  trained  weight of Gemm" in shown.output
    bad = parsed(
        """<ir_version: 10, opset_import: ["" : 20, "acme" : 1]>
        bad (float[b] x) => (float[b] y) { y = acme.Twist(x) }"""
    )
    onnx.save(bad, tmp_path / "bad.onnx")
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "bad.onnx"), "--json"])
    assert shown.exit_code == 2
    assert json.loads(shown.output)["unsupported"][0]["operator"] == "acme.Twist"
    with pytest.raises(ConfigError, match="cannot read the model"):
        diagnose(tmp_path / "absent.onnx")


def test_a_bias_of_a_convolution_that_nothing_computes_is_told(tmp_path):
    body = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 3, 8, 8] x) => (float[n, 4, 6, 6] y) { y = Conv(x, w, b) }"""
    for shape in ((1, 4, 1, 1), (4, 1)):
        found = examined(parsed(body, w=random(4, 3, 3, 3), b=random(*shape)), tmp_path)
        assert f"such as b {list(shape)}: onnxruntime opens the file, but neither it nor torch computes" in warned(
            found
        )
        assert "store b as [4] in the file" in warned(found)
    right = examined(parsed(body, w=random(4, 3, 3, 3), b=random(4)), tmp_path)
    assert "conv_bias" not in [each.key for each in right.warnings]


INSIDE = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4] x, bool c) => (float[n, 4] y) {
        h = MatMul(x, w)
        z = Slice(h, starts, ends)
        y = If(c) <
            then_branch = t () => (float[n, 4] a) { a = Mul(z, A) },
            else_branch = e () => (float[n, 4] b) { b = Neg(z) }
        >
    }"""


def test_a_run_says_why_an_integer_or_integers_inside_a_branch_are_not_trained(tmp_path):
    model = parsed(INSIDE, w=random(4, 4), starts=np.array([0]), ends=np.array([9]))
    branch = next(each.g for each in model.graph.node[-1].attribute if each.name == "then_branch")
    integers = numpy_helper.from_array(np.arange(4, dtype=np.int8), "Q")
    branch.initializer.extend([numpy_helper.from_array(random(4), "A"), integers])
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=random(20, 4), c=np.ones(20, bool), label=random(20, 4))

    def checked(*names: str) -> None:
        settings = {
            "model": {"path": str(tmp_path / "m.onnx"), "loss": "mse", "train": names},
            "data": {"source": str(tmp_path / "d.npz")},
            "train": {"num_steps": 1},
        }
        load_config(settings, check=check_files_and_data)

    for refused in (lambda: checked("starts"), lambda: onward.to_module(tmp_path / "m.onnx", train=["starts"])):
        with pytest.raises(ConfigError, match="'starts' is int64; only tensors of floating-point numbers are trained"):
            refused()
    module = to_module(load_model(tmp_path / "m.onnx"))
    select_trained(module, train=["y/A"])
    why = "'y/Q' is frozen: stored as integers inside the body of If; move it to the main graph to train it"
    with pytest.raises(ConfigError, match=why):
        select_trained(module, train=["y/Q"])
    config = build_config(
        {
            "model": {"path": tmp_path / "m.onnx", "train": ["y/Q"]},
            "data": {"source": "digits"},
            "train": {"num_steps": 1},
        }
    )
    assert [*_patterns(config)] == [], "the import gives the reason"


def test_an_input_that_no_node_reads_is_named(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        net (float[batch, 4] x, int64[batch] ids, bool c) => (float[batch, 4] y)
        <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
            h = MatMul (x, w)
            y = If (c) <then_branch = t () => (float[batch, 4] p) { p = Relu (h) },
                        else_branch = e () => (float[batch, 4] q) { q = Neg (h) }>
        }""")
    onnx.save_model(model, tmp_path / "model.onnx")
    (found,) = [each for each in diagnose(tmp_path / "model.onnx").warnings if each.key == "unread_inputs"]
    assert found.what == "no node reads the input ids"
