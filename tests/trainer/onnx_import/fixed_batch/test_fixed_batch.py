"""Files of fixed batch: widened where that is right, used at their own size where it is not; never silently wrong."""

import time

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, parser

from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.fixed_batch import fixed_batch
from onward.trainer.onnx_import.fixed_batch.fixed_batch import batch_use
from tests.support.fixed_batches import EXPORTERS, FILES, built, exported, rows

QUICK = ("vit-2", "attention-2")
"""Those that torch.export also writes in the ordinary run: it takes seconds for each."""
ANY = [name for name, file in FILES.items() if file.use == "any"]
OTHERS = [name for name in FILES if name not in ANY]


def written(names):
    """Each file by both exporters."""
    return pytest.mark.parametrize(
        ("name", "exporter"),
        [
            pytest.param(name, kind, marks=() if kind == "legacy" or name in QUICK else pytest.mark.slow)
            for name in names
            for kind in EXPORTERS
        ],
    )


@written(FILES)
def test_running_a_file_tells_how_it_is_used(name, exporter):
    use = batch_use(exported(name, exporter))
    assert (use.kind, use.declared, use.proved) == (FILES[name].use, FILES[name].batch, True), use.reason


@written(ANY)
def test_a_widened_file_gives_every_row_what_onnxruntime_gives_it_at_the_own_batch(name, exporter):
    model, size, number = exported(name, exporter), FILES[name].batch, 12
    inputs, session = rows(name, number, seed=1), onnxruntime.InferenceSession(model.SerializeToString())
    groups = [inputs[at : at + size].numpy() for at in range(0, number, size)]
    want = torch.from_numpy(np.concatenate([session.run(None, {"x": group})[0] for group in groups]))
    module = to_module(model, widen=True).eval()
    for batch in (1, 2, 5, 12):
        torch.testing.assert_close(module(inputs[:batch]).detach(), want[:batch], rtol=1e-4, atol=1e-5)


@written(ANY)
def test_a_widened_file_has_the_gradients_of_the_module_that_was_exported(name, exporter):
    module, native, inputs = to_module(exported(name, exporter), widen=True).eval(), built(name), rows(name, 5)
    for network in (module, native):
        network(inputs).square().sum().backward()
    want = dict(native.named_parameters())
    found = {name: weight for name, weight in module.named_parameters() if name in want}
    assert len(found) >= 2  # not those that the exporter has transposed or packed
    for key, weight in found.items():
        torch.testing.assert_close(weight.grad, want[key].grad, rtol=1e-3, atol=1e-4)


def test_the_rows_of_a_weight_that_an_exporter_repeated_for_the_batch_stay_equal():
    module, native, inputs = to_module(exported("vit-2", "dynamo"), widen=True), built("vit-2"), rows("vit-2", 5)
    (stored,) = [weight for weight in module.parameters() if weight.shape == (2, 1, 16)]
    native(inputs).square().sum().backward()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(inputs).square().sum().backward()
    torch.testing.assert_close(stored.grad, native.token.grad.expand(2, 1, 16), rtol=1e-4, atol=1e-4)
    optimizer.step()
    assert torch.equal(stored[0], stored[1])


@written(OTHERS)
def test_a_file_at_its_own_batch_is_exact_there_and_refuses_every_other(name, exporter):
    model, size = exported(name, exporter), FILES[name].batch
    module, inputs = to_module(model, widen=False).eval(), rows(name, size)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    want = torch.from_numpy(session.run(None, {"x": inputs.numpy()})[0])
    torch.testing.assert_close(module(inputs).detach(), want, rtol=1e-4, atol=1e-5)
    for other in (size + 1, 32):
        with pytest.raises(ValueError, match=f"fits batches of {size}, but 'x' has {other} rows"):
            module(rows(name, other))


def mean_over_rows(batch, *, mixing):
    """x [batch, 4] -> the mean of a loss over its rows, which knows of the other rows if `mixing`."""
    g = GraphWriter("loss", seed=0, opset=17)
    x = g.op("MatMul", g.input("x", (batch, 4)), g.weight("w", g.normal(1, 4, 3)))
    if mixing:
        x = g.op("Sub", x, g.op("ReduceMean", x, axes=[0], keepdims=1))
    g.op("ReduceMean", g.op("Mul", x, x), outputs="y", keepdims=0)
    g.output("y", ())
    return g.model()


def test_a_loss_over_the_rows_is_used_at_any_size_only_if_it_is_their_mean():
    assert batch_use(mean_over_rows(3, mixing=False)).kind == "any"
    assert batch_use(mean_over_rows(3, mixing=True)).kind == "joint"


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_share_a_limit_are_found_though_made_up_rows_do_not_reach_it(batch):
    g = GraphWriter("limit", seed=0, opset=17)
    x = g.op("MatMul", g.input("x", (batch, 4)), g.weight("w", g.normal(1, 4, 3)))
    largest = g.op("ReduceMax", g.op("Abs", x), axes=[0, 1], keepdims=1)
    g.op("Div", x, g.op("Max", largest, g.weight("limit", np.float32([[20]]))), outputs="y")
    g.output("y", (batch, 3))
    use = batch_use(g.model())
    assert use.kind == ("own" if batch == 1 else "joint")
    assert use.reason.startswith("for inputs 30 times as large as normal ones the results of a row")


def test_an_input_without_dimensions_is_named_as_the_reason_why_nothing_is_proved():
    g = GraphWriter("scalar", seed=0, opset=17)
    x = g.op("MatMul", g.input("x", (2, 4)), g.weight("w", g.normal(1, 4, 3)))
    g.op("Mul", x, g.input("t", ()), outputs="y")
    g.output("y", (2, 3))
    use = batch_use(g.model())
    assert (use.kind, use.proved, use.reason) == ("joint", False, "input 't' has no rows, so that nothing is proved")


def test_a_large_fixed_batch_is_proved_in_seconds():
    began = time.monotonic()
    assert batch_use(elementwise(60_000)).kind == "any"
    assert time.monotonic() - began < 20


def elementwise(batch, *operands):
    """x [batch, 4] + w, then one operator after the other, each with a stored operand."""
    g = GraphWriter("constants", seed=0, opset=17)
    x = g.op("Add", g.input("x", (batch, 4)), g.weight("w", g.normal(1, 4)))
    for number, (operator, array) in enumerate(operands):
        x = g.op(operator, x, g.op("Constant", value=helper.make_tensor(f"c{number}", 1, array.shape, array.ravel())))
    g.op("Relu", x, outputs="y")
    g.output("y", (batch, 4))
    return g.model()


def test_a_constant_of_equal_rows_fits_every_batch_and_one_of_different_rows_its_own():
    equal, different = np.ones((3, 1), np.float32), np.arange(3, dtype=np.float32)[:, None]
    assert batch_use(elementwise(3, ("Mul", equal))).kind == "any"
    use = batch_use(elementwise(3, ("Mul", different)))
    assert use.kind == "joint"
    assert "place" in use.reason


@pytest.mark.parametrize("batch", [1, 2])
def test_zeros_that_a_router_scatters_its_weights_into_fit_every_batch(batch):
    g = GraphWriter("router", seed=0, opset=17)
    scores = g.op("MatMul", g.input("x", (batch, 4)), g.weight("w", g.normal(1, 4, 6)))
    g.op("TopK", scores, g.weight("k", [2]), outputs=["best", "where"])
    zeros = helper.make_tensor("zeros", TensorProto.FLOAT, [batch, 6], [0.0] * batch * 6)
    g.op("ScatterElements", g.op("Constant", value=zeros), "where", "best", outputs="y", axis=1)
    g.output("y", (batch, 6))
    assert batch_use(g.model()).kind == "any"


def test_a_file_whose_rows_are_independent_but_hidden_from_the_importer_is_used_at_its_own_batch():
    g = GraphWriter("by number", seed=0, opset=17)
    x = g.op("MatMul", g.input("x", (2, 4)), g.weight("w", g.normal(1, 4, 3)))
    both = [g.op("Gather", x, g.weight(f"row{row}", [row]), axis=0) for row in range(2)]
    g.op("Concat", *both, outputs="y", axis=0)
    g.output("y", (2, 3))
    use = batch_use(g.model())
    assert (use.kind, use.declared) == ("own", 2)
    assert "its shapes hold for no other batch" in use.reason


def test_a_file_that_draws_random_numbers_proves_nothing():
    g = GraphWriter("noise", seed=0, opset=17)
    x = g.op("Add", g.input("x", (2, 4)), g.weight("w", g.normal(1, 4)))
    g.op("Add", x, g.op("RandomNormal", shape=[2, 4]), outputs="y")
    g.output("y", (2, 4))
    use = batch_use(g.model())
    assert (use.kind, use.proved) == ("joint", False)
    assert "differ from run to run" in use.reason


def test_large_inputs_are_computed_once_for_all_outputs_that_losses_read(monkeypatch):
    g = GraphWriter("three outputs", seed=0, opset=17)
    product = g.op("MatMul", g.input("x", (1, 4)), g.weight("w", g.normal(1, 4, 4)))
    for name, activation in (("a", "Tanh"), ("b", "Sigmoid"), ("c", "Relu")):
        g.output(g.op(activation, product, outputs=name), (1, 4))
    made = []
    begin = fixed_batch._Trial.__init__

    def counted(self, *words):
        made.append(self)
        begin(self, *words)

    monkeypatch.setattr(fixed_batch._Trial, "__init__", counted)
    assert batch_use(g.model(), outputs=("a", "b", "c")).kind == "any"
    assert len(made) == 2


def test_a_file_of_dynamic_batch_is_not_run():
    model = exported("lstm-4", "legacy")
    free = onnx.ModelProto()
    free.CopyFrom(model)
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    free.graph.node[0].op_type = "NoSuchOperator"
    assert batch_use(free).declared == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attention-2", "trained at any size"),
        ("squeezed-1", "trained at this batch alone (its shapes hold for no other batch"),
        ("over-the-batch-4", "every micro-batch must have 4 rows, and no rows may be added"),
    ],
)
def test_the_doctor_says_which_of_the_three_it_is(name, said, tmp_path):
    onnx.save(exported(name, "legacy"), tmp_path / "model.onnx")
    (warning,) = [each for each in diagnose(tmp_path / "model.onnx").warnings if each.key == "fixed_batch"]
    assert said in warning.what


def test_half_precision_is_proved_by_the_module_at_its_own_batch():
    g = GraphWriter("half", seed=0, opset=17)
    kind = TensorProto.FLOAT16
    x = g.op("Reshape", g.input("x", (2, 2, 4), kind), g.weight("flat", [2, 8]))
    g.op("MatMul", x, g.weight("w", g.normal(1, 8, 3).astype(np.float16)), outputs="y")
    g.output("y", (2, 3), kind)
    assert batch_use(g.model()).kind == "any"


def test_of_an_input_of_gigabytes_no_rows_are_made_up() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 14]>
        net (float[1, 4000000000] x) => (float[1, 4000000000] y) { y = Relu (x) }""")
    use = batch_use(model)
    assert not use.proved
    assert use.reason == "no rows can be made up for its inputs, so that nothing is proved"
