"""Weights stored as integers behind Cast and Mul: trained like those of DequantizeLinear, else counted."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onward.tasks.export import export_file
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.export.file_verification import weight_problems
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights, stored_weights
from tests.support import runs
from tests.support.trained_models import model_with_weights

RANDOM = np.random.default_rng(0)
ROWS, WIDTH, CLASSES = 40, 8, 4


def codes(*shape, kind=np.int8, least=-100, greatest=100):
    return RANDOM.integers(least, greatest, shape).astype(kind)


def floats(*shape, least=0.01, greatest=0.03):
    return RANDOM.uniform(least, greatest, shape).astype(np.float32)


def made(body: str, **stored: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (int64[n, t] ids, float[n, t, 8] x) => (float[n, t, 4] y) {'
        + body
        + "}"
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items())
    onnx.checker.check_model(model, full_check=True)
    return model


TABLE = "c = Gather(E, ids) e = Cast<to = 1>(c) "
HEAD = "h = Add(w, x) y = MatMul(h, V)"
V = floats(WIDTH, CLASSES, least=-1, greatest=1)
E = codes(ROWS, WIDTH)
MATRIX = "c = Cast<to = 1>(W) "
PRODUCT = "y = MatMul(x, w)"
W = codes(WIDTH, CLASSES)

FORMS = {
    "a table, one scale": (TABLE + "w = Mul(e, s)" + HEAD, {"E": E, "s": floats(1), "V": V}),
    "a table, a scale for each column": (TABLE + "w = Mul(s, e)" + HEAD, {"E": E, "s": floats(1, WIDTH), "V": V}),
    "a table, a scale for each row, gathered alike": (
        TABLE + "r = Gather(s, ids) w = Mul(e, r)" + HEAD,
        {"E": E, "s": floats(ROWS, 1), "V": V},
    ),
    "a table, a scale for each row, gathered afterwards": (
        "e = Cast<to = 1>(E) t = Mul(e, s) w = Gather(t, ids)" + HEAD,
        {"E": E, "s": floats(ROWS, 1), "V": V},
    ),
    "a table and a zero point for each row, gathered alike": (
        TABLE + "zc = Gather(z, ids) zf = Cast<to = 1>(zc) d = Sub(e, zf) r = Gather(s, ids) w = Mul(d, r)" + HEAD,
        {
            "E": codes(ROWS, WIDTH, kind=np.uint8, least=0, greatest=255),
            "z": codes(ROWS, 1, kind=np.uint8, least=100, greatest=140),
            "s": floats(ROWS, 1),
            "V": V,
        },
    ),
    "a matrix, a scale for each column": (MATRIX + "w = Mul(c, s)" + PRODUCT, {"W": W, "s": floats(1, CLASSES)}),
    "a matrix, a scale for each row": (MATRIX + "w = Mul(c, s)" + PRODUCT, {"W": W, "s": floats(WIDTH, 1)}),
    "a transposed matrix": (
        "c = Cast<to = 1>(W) t = Transpose<perm = [1, 0]>(c) w = Mul(t, s)" + PRODUCT,
        {"W": codes(CLASSES, WIDTH), "s": floats(CLASSES)},
    ),
    "a zero point in floats": (
        MATRIX + "d = Sub(c, z) w = Mul(d, s)" + PRODUCT,
        {
            "W": codes(WIDTH, CLASSES, kind=np.uint8, least=0, greatest=255),
            "z": np.float32([128, 127, 120, 3]),
            "s": floats(CLASSES),
        },
    ),
    "a zero point in integers, cast": (
        MATRIX + "f = Cast<to = 1>(z) d = Sub(c, f) w = Mul(d, s)" + PRODUCT,
        {
            "W": codes(WIDTH, CLASSES, kind=np.uint16, least=0, greatest=60000),
            "z": np.array(30000, np.uint16),
            "s": np.array(1e-4, np.float32),
        },
    ),
    "blocks of a row": (
        MATRIX + "b = Mul(c, s) w = Reshape(b, shape)" + PRODUCT,
        {"W": codes(WIDTH, 2, 2, kind=np.int16), "s": floats(WIDTH, 2, 1), "shape": np.int64([WIDTH, CLASSES])},
    ),
}  # fmt: skip
"""Form -> (nodes, stored tensors); the integers are E or W."""


def feed(seed=0, rows=3):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, 5, WIDTH)).astype(np.float32)
    return {"ids": random.integers(0, ROWS, (rows, 5)), "x": x}


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {value.name: inputs[value.name] for value in session.get_inputs()})[0]


def ours(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    return module(torch.from_numpy(inputs["ids"]), torch.from_numpy(inputs["x"]))


def dequantized(stored: dict[str, np.ndarray]) -> np.ndarray:
    """Return scale (q - zero) in fp64, for the scales as the file has them."""
    q = next(stored[name] for name in ("E", "W") if name in stored).astype(np.float64)
    scale, zero = stored["s"].astype(np.float64), np.asarray(stored.get("z", 0.0)).astype(np.float64)
    return (q.T * scale).T if q.shape == (CLASSES, WIDTH) else (q - zero) * scale


def of_a_float_file(stored: dict[str, np.ndarray], inputs: dict[str, np.ndarray], weight: torch.Tensor) -> torch.Tensor:
    """Return in fp64 what the same network computes with a float weight."""
    x = torch.from_numpy(inputs["x"]).double()
    if "E" in stored:
        return (weight[torch.from_numpy(inputs["ids"])] + x) @ torch.from_numpy(stored["V"]).double()
    matrix = weight.t() if weight.shape == (CLASSES, WIDTH) else weight.reshape(WIDTH, CLASSES)
    return x @ matrix


@pytest.mark.parametrize("form", FORMS)
def test_integers_behind_cast_and_mul_are_weights_with_the_gradients_of_the_float_network(form):
    body, stored = FORMS[form]
    model, inputs, name = made(body, **stored), feed(), "E" if "E" in stored else "W"
    module = to_module(model)
    assert set(named_weights(module)) == {name} | ({"V"} if "V" in stored else set())
    assert module.roles["s"].reason == f"a scale or zero point of {name}, stored as integers"
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    y = ours(module, inputs)
    np.testing.assert_allclose(y.detach(), by_onnxruntime(model, inputs), atol=2e-6, rtol=1e-5)
    y.square().mean().backward()
    weight = torch.from_numpy(dequantized(stored)).requires_grad_()
    of_a_float_file(stored, inputs, weight).square().mean().backward()
    np.testing.assert_allclose(named_weights(module)[name].detach(), weight.detach(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(named_weights(module)[name].grad, weight.grad, atol=1e-5, rtol=1e-4)


def learn(module, count=20):
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.05)
    for seed in range(count):
        optimizer.zero_grad()
        (ours(module.train(), feed(seed)) - 1.0).square().mean().backward()
        optimizer.step()
    return module.eval()


@pytest.mark.parametrize("mode", ["frozen", "recalibrate", "train"])
@pytest.mark.parametrize("form", FORMS)
def test_the_written_file_holds_integers_of_its_type_and_computes_what_the_module_computes(form, mode, tmp_path):
    body, stored = FORMS[form]
    model, name = made(body, **stored), "E" if "E" in stored else "W"
    module = learn(to_module(model, scales=mode))
    written = model_with_weights(module, model)
    np.testing.assert_allclose(ours(module, feed(9)).detach(), by_onnxruntime(written, feed(9)), atol=1e-5, rtol=1e-4)
    before, after = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, written))
    changed = {each for each in before if not np.array_equal(before[each], after[each])}
    follows = mode != "frozen" and form != "blocks of a row"
    assert changed - {"V"} == {name} | ({"s"} if follows else set())
    assert all(before[each].dtype == after[each].dtype for each in before)
    assert list(written.graph.node) == list(model.graph.node)
    path = tmp_path / "model.onnx"
    onnx.save(written, path)
    weights = {each: weight.detach() for each, weight in stored_weights(module).items()}
    assert weight_problems(ModelFile(path, written), weights) == []
    again = to_module(written, scales=mode).eval()
    np.testing.assert_allclose(ours(again, feed(9)).detach(), ours(module, feed(9)).detach(), atol=1e-6)


def test_a_scale_that_is_named_is_trained_in_place_of_its_integers():
    body, stored = FORMS["a matrix, a scale for each column"]
    module = to_module(made(body, **stored), train=["s"])
    assert set(named_weights(module)) == {"s"}
    assert module.roles["W"].reason == "stored as integers, whose scale s is trained"


NOT_SCALED = {
    "scaled after the product": ("c = Cast<to = 1>(W) p = MatMul(x, c) y = Mul(p, s)", {"W": W, "s": floats(CLASSES)}),
    "without a scale": ("w = Cast<to = 1>(W) p = MatMul(x, w) y = Mul(p, V)", {"W": W, "V": floats(CLASSES)}),
    "a computed scale": (
        "c = Cast<to = 1>(W) m = ReduceMax<keepdims = 0>(x) w = Mul(c, m) p = MatMul(x, w) y = Mul(p, V)",
        {"W": W, "V": floats(CLASSES)},
    ),
    "a scale for each element": (
        "c = Cast<to = 1>(W) w = Mul(c, s) y = MatMul(x, w)",
        {"W": W, "s": floats(WIDTH, CLASSES)},
    ),
    "a fraction as zero point": (
        "c = Cast<to = 1>(W) d = Sub(c, z) w = Mul(d, s) p = MatMul(x, w) y = Mul(p, V)",
        {"W": W, "z": np.array(0.5, np.float32), "s": np.array(0.1, np.float32), "V": floats(CLASSES)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_SCALED)
def test_other_integers_that_become_floats_are_frozen_and_counted_by_their_numbers(form, tmp_path):
    body, stored = NOT_SCALED[form]
    model = made(body, **stored)
    onnx.save(model, tmp_path / "model.onnx")
    found = diagnose(tmp_path / "model.onnx")
    row = next(weight for weight in found.weights if weight.name == "W")
    assert (row.kind, row.shape) == ("frozen", (WIDTH, CLASSES))
    assert row.reason.startswith("stored as integers")
    assert found.totals["frozen"].values >= WIDTH * CLASSES
    module = to_module(model)
    np.testing.assert_allclose(ours(module, feed()).detach(), by_onnxruntime(model, feed()), atol=1e-4, rtol=1e-5)


def test_four_bits_behind_cast_and_mul_are_frozen_and_counted(tmp_path):
    model = made(
        "c = Cast<to = 1>(W) w = Mul(c, s) p = MatMul(x, w) y = Mul(p, V)", s=floats(1, CLASSES), V=floats(4), W=W
    )
    model.opset_import[0].version, model.ir_version = 21, 10
    few = helper.make_tensor("W", TensorProto.INT4, W.shape, RANDOM.integers(-8, 8, W.shape))
    model.graph.initializer[2].CopyFrom(few)
    onnx.save(model, tmp_path / "model.onnx")
    row = next(weight for weight in diagnose(tmp_path / "model.onnx").weights if weight.name == "W")
    assert (row.kind, row.shape, row.stored_as) == ("frozen", (WIDTH, CLASSES), "int4")


@pytest.mark.parametrize(
    ("kind", "values"), [(np.uint8, [[0, 1, 1, 0]]), (np.int32, [[0, 1, 2, 3]]), (np.int64, [[0, 1, 2, 3]])]
)
def test_masks_and_positions_that_become_floats_are_no_weights(kind, values):
    body = "c = Cast<to = 1>(m) f = Mul(c, k) p = MatMul(x, V) y = Add(p, f)"
    module = to_module(made(body, m=np.array(values, kind), k=np.array(-100, np.float32), V=V))
    assert set(named_weights(module)) == {"V"}
    assert "m" not in module.roles


def small_encoder() -> onnx.ModelProto:
    """A sentence encoder whose table and matrices are int8: attention, and the mean over the words."""
    scaled = "{0}c = Cast<to = 1>({0}) {0}w = Mul({0}c, {0}s) "
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (int64[n, 6] ids) => (float[n, 4] y) {'
        "e8 = Gather(E, ids) e = Cast<to = 1>(e8) t = Mul(e, Es) h = LayerNormalization(t, norm, shift)"
        + "".join(scaled.format(name) for name in "QKVO")
        + "q = MatMul(h, Qw) k = MatMul(h, Kw) v = MatMul(h, Vw) kt = Transpose<perm = [0, 2, 1]>(k) a = MatMul(q, kt) "
        "p = Softmax(a) c = MatMul(p, v) o = MatMul(c, Ow) r = Add(o, h) y3 = ReduceMean<axes = [1], keepdims = 0>(r) "
        "y = MatMul(y3, head) }"
    )
    stored = {"E": E, "Es": floats(1), "norm": np.ones(WIDTH, np.float32), "shift": np.zeros(WIDTH, np.float32)}
    for name in "QKVO":
        stored |= {name: codes(WIDTH, WIDTH), f"{name}s": floats(1, WIDTH, greatest=0.02)}
    stored["head"] = floats(WIDTH, CLASSES, least=-1, greatest=1)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.mpi
@pytest.mark.slow
def test_a_run_trains_a_sentence_encoder_of_integers_whole(tmp_path):
    model = small_encoder()
    ids = RANDOM.integers(0, ROWS, (60, 6))
    run = runs.make_run(
        tmp_path,
        model,
        {"ids": ids, "label": ids[:, 0] % CLASSES},
        train={"global_batch_size": 8, "num_steps": 40},
        optimizer={"learning_rate": 0.02},
    )
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    losses = runs.losses(run)
    assert losses[40] < 0.6 * losses[1]
    assert exported.parity < 1e-4
    after = onnx.load(exported.path)
    assert list(after.graph.node) == list(model.graph.node)
    kept = zip(model.graph.initializer, after.graph.initializer, strict=True)
    assert {a.name for a, b in kept if a != b} == {tensor.name for tensor in model.graph.initializer}
    assert all(
        a.data_type == b.data_type for a, b in zip(model.graph.initializer, after.graph.initializer, strict=True)
    )
