"""The inference form: dropout and the learning of statistics are gone from every graph of the model, however deep."""

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from onward.trainer.onnx_graph.surgery.strip_training import strip_training


def test_dropout_inside_branches_loops_and_functions_is_disabled():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        deep (float[64, 8] x, bool c) => (float[64, 8] y) {
            a = own.drop(x)
            b = If (c) <
                then_branch = t () => (float[64, 8] p) {
                    on = Constant <value = bool {1}> ()
                    r = Constant <value = float {0.5}> ()
                    d = Dropout(a, r, on)
                    p = Neg(d)
                },
                else_branch = e () => (float[64, 8] q) {
                    on2 = Constant <value = bool {1}> ()
                    r2 = Constant <value = float {0.5}> ()
                    q = Dropout(a, r2, on2)
                }
            >
            y = Identity(b)
        }
        <domain: "own", opset_import: ["" : 20]>
        drop (v) => (w) {
            yes = Constant <value = bool {1}> ()
            half = Constant <value = float {0.5}> ()
            w = Dropout(v, half, yes)
        }""")
    assert strip_training(model) == {"Dropout": 1, "Dropout training mode": 2}
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    for condition, want in ((True, -x), (False, x)):
        [y] = session.run(None, {"x": x, "c": np.array(condition)})
        assert np.array_equal(y, want)
    assert strip_training(model) == {}, "once is enough"


def test_batch_norm_inside_a_branch_uses_its_running_statistics():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        deep (float[4, 3] x, bool c) => (float[4, 3] y) {
            y = If (c) <
                then_branch = t () => (float[4, 3] p) {
                    p, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
                },
                else_branch = e () => (float[4, 3] q) { q = Identity(x) }
            >
        }""")
    for name, value in (("scale", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.full(3, value, np.float32), name))
    assert strip_training(model) == {"BatchNormalization update": 1}
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    [y] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(y, x, rtol=1e-4)


def test_every_graph_of_a_deep_model_is_read_once_for_each_graph_around_it():
    depth = 25  # read twice for each, the innermost would be read 2**25 times
    node = onnx.helper.make_node("Dropout", ["x"], ["d"])
    for level in range(depth):
        output = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, [])
        branch = onnx.helper.make_graph([node], f"inner{level}", [], [output])
        node = onnx.helper.make_node("If", ["c"], [f"y{level}"], then_branch=branch, else_branch=branch)
        del node.attribute[1:]  # both branches would double the file at each level
    result = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, [])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "deep", [], [result]))
    assert strip_training(model) == {}, "a result of an inner graph keeps its name"
