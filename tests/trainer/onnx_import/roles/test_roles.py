"""What of a file is trained: weights, never masks, tables, scales or states; and copies of a weight as that weight."""

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.inner_tensors import lift_inner_tensors
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights, stored_weights
from onward.trainer.onnx_import.roles.roles import find_roles
from onward.trainer.onnx_import.train_selection import select_trained
from tests.support.trained_models import model_with_weights
from tests.support.weight_roles import describe_weights

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model in ONNX's text form, with initializers."""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def reasons(model: onnx.ModelProto) -> dict[str, str]:
    """Name -> why it is frozen, or "trained" or "statistic"."""
    found = find_roles(model.graph, stored_tensors(model.graph, None))
    return {name: role.reason if role.kind == "frozen" else role.kind for name, role in found.items()}


def test_frequencies_of_rotary_embeddings_are_frozen_also_with_folded_positions():
    """Exporters without dynamic axes write the positions as a constant: no integer input is left to tell by."""
    model = parsed(
        """rope (float[batch, 6, 8] x) => (float[batch, 6, 8] y) {
            angles = MatMul(positions, inv_freq)
            c = Cos(angles)
            s = Sin(angles)
            waves = Concat <axis = -1> (c, s)
            y = Mul(x, waves)
        }""",
        positions=np.arange(6, dtype=np.float32)[:, None],
        inv_freq=1e-2 ** np.arange(4, dtype=np.float32)[None],
    )
    assert reasons(model)["inv_freq"] == "frequencies of sines and cosines"


def waves(rows: int, width: int, phase: float) -> np.ndarray:
    angles = np.arange(rows)[:, None] * 100.0 ** -np.linspace(0, 1, width)[None] + phase
    return np.cos(angles).astype(np.float32)


def test_sinusoidal_tables_and_grids_are_frozen_and_learned_embeddings_are_trained():
    model = parsed(
        """tables (int64[batch, 4] ids, float[batch, 12, 8] x) => (float[batch, 12, 8] y, float[batch, 4, 8] z) {
            a = Gather(cosines, ids)
            b = Gather(learned, ids)
            z = Mul(a, b)
            c = Add(x, sines)
            y = Add(c, grid)
        }""",
        cosines=waves(32, 8, 0.0),
        sines=waves(12, 8, np.pi / 2),
        learned=random(32, 8),
        grid=np.stack([np.arange(12.0)] * 8, axis=1).astype(np.float32),
    )
    found = reasons(model)
    assert found.pop("learned") == "trained"
    assert set(found.values()) == {"a table of sines, cosines or positions"}


def test_a_bias_to_which_a_mask_is_added_is_trained():
    """As in T5: a learned bias of relative positions, plus the padding mask, plus the scores."""
    model = parsed(
        """t5 (float[batch, 2, 4, 4] scores, int64[batch, 4] mask) => (float[batch, 2, 4, 4] y) {
            m = Cast <to = 1> (mask)
            far = Mul(m, large)
            axes = Constant <value_ints = [1, 2]> ()
            wide = Unsqueeze(far, axes)
            rows = Gather(bias, buckets)
            heads = Transpose <perm = [2, 0, 1]> (rows)
            both = Add(heads, wide)
            y = Add(scores, both)
        }""",
        bias=random(8, 2),
        buckets=np.abs(np.arange(4)[:, None] - np.arange(4)[None]),
        large=np.array(-1e9, np.float32),
    )
    assert reasons(model)["bias"] == "trained"
    module = to_module(model)
    module(torch.randn(2, 2, 4, 4), torch.ones(2, 4, dtype=torch.int64)).square().sum().backward()
    assert module.bias.grad.abs().sum() > 0


def test_recurrent_weights_are_trained_and_a_zero_initial_state_is_frozen():
    model = parsed(
        """rnn (float[6, batch, 4] x) => (float[6, 1, batch, 5] y) {
            y, h, c = LSTM <hidden_size = 5> (x, W, R, B, , h0, c0)
        }""",
        W=random(1, 20, 4),
        R=random(1, 20, 5),
        B=np.zeros((1, 40), np.float32),
        h0=np.zeros((1, 3, 5), np.float32),
        c0=random(1, 3, 5),
    )
    found = reasons(model)
    assert found.pop("h0") == "the zero state a recurrent layer begins in"
    assert set(found.values()) == {"trained"}, "a state that is not zero was learned"


def test_weights_of_contrib_operators_are_trained_and_their_tables_are_frozen():
    model = parsed(
        """contrib (float[batch, 4, 8] x, int64[batch, 4] ids, int64[batch, 4] at) => (float[batch, 4, 8] y) {
            e, m = com.microsoft.EmbedLayerNormalization (ids, , words, places, , gamma, beta)
            s = com.microsoft.SkipLayerNormalization (x, e, gamma2)
            g = com.microsoft.BiasGelu (s, bias)
            q = com.microsoft.MatMulNBits <K = 8, N = 8, block_size = 16> (g, packed, scales)
            y = com.microsoft.RotaryEmbedding (q, at, cos, sin)
        }""",
        words=random(16, 8), places=random(8, 8), gamma=random(8), beta=random(8), gamma2=random(8), bias=random(8),
        packed=np.ones((8, 1, 8), np.uint8), scales=random(8, 1), cos=random(8, 4), sin=random(8, 4),
    )  # fmt: skip
    found = reasons(model)
    trained = {name for name, why in found.items() if why == "trained"}
    assert trained == {"words", "places", "gamma", "beta", "gamma2", "bias"}
    assert found["packed"].startswith("stored as integers")
    assert found["scales"] == "a scale of quantized weights"
    assert found["cos"] == found["sin"] == "a table of rotation angles"


def test_integers_without_a_stored_scale_are_frozen():
    """Those with one are trained: test_quantized_weights.py."""
    model = parsed(
        """dynamic (float[batch, 4] x) => (float[batch, 4] y) {
            q, s, z = DynamicQuantizeLinear(x)
            p = MatMulInteger(q, packed, z)
            f = Cast<to = 1>(p)
            y = Mul(f, s)
        }""",
        packed=np.arange(16, dtype=np.int8).reshape(4, 4),
    )
    found = {name: role.reason for name, role in to_module(model).roles.items()}
    assert found["packed"] == "stored as integers; train the model it was quantized from"


def test_weights_that_are_quantized_when_the_graph_runs_are_trained():
    """Quantization-aware files keep the weight in fp32 and round it in the graph; gradients pass."""
    model = parsed(
        """qat (float[batch, 4] x) => (float[batch, 3] y) {
            q = QuantizeLinear(w, scale, zero)
            r = DequantizeLinear(q, scale, zero)
            y = MatMul(x, r)
        }""",
        w=random(4, 3),
        scale=np.array(0.05, np.float32),
        zero=np.array(0, np.int8),
    )
    module = to_module(model)
    assert set(named_weights(module)) == {"w"}
    module(torch.randn(2, 4)).square().sum().backward()
    assert module.w.grad.abs().min() > 0
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()


def test_values_are_followed_through_branches_and_loops():
    model = parsed(
        """flow (float[batch, 4] x, bool c) => (float[batch, 4] y) {
            a = If (c) <
                then_branch = t () => (float[batch, 4] p) { p = MatMul(x, inside_then) },
                else_branch = e () => (float[4, 4] q) { q = Identity(given) }
            >
            n = Constant <value_int = 3> ()
            k = Constant <value = bool {1}> ()
            y = Loop (n, k, x) <
                body = b (int64 i, bool g, float[batch, 4] s) => (bool h, float[batch, 4] r) {
                    h = Identity(g)
                    held = Constant <value = float[4] {1.5, 2.5, 3.5, 4.5}> ()
                    m = Mul(s, held)
                    r = MatMul(m, inside_loop)
                }
            >
        }""",
        inside_then=random(4, 4),
        given=random(4, 4, seed=1),
        inside_loop=random(4, 4, seed=2),
    )
    found = reasons(lift_inner_tensors(model))
    assert {name for name, why in found.items() if why == "trained"} == {
        "inside_then",
        "given",
        "inside_loop",
        "y/held",
    }


def test_mean_and_deviation_that_normalise_the_input_are_frozen():
    model = parsed(
        """image (float[batch, 3, 8, 8] x) => (float[batch, 3, 8, 8] y) {
            a = Sub(x, mean)
            b = Div(a, deviation)
            y = Mul(b, learned)
        }""",
        mean=random(1, 3, 1, 1), deviation=random(1, 3, 1, 1), learned=random(1, 3, 1, 1),
    )  # fmt: skip
    assert reasons(model) == {"mean": "normalises the input", "deviation": "normalises the input", "learned": "trained"}


def test_a_frozen_tensor_is_trained_if_model_train_names_it():
    model = parsed(
        "clip (float[batch, 4] x) => (float[batch, 4] y) { a = Mul(x, scale)\n y = Mul(a, temperature) }",
        scale=random(4),
        temperature=np.array(2.5, np.float32),
    )
    module = to_module(model)
    assert set(named_weights(module)) == {"scale"}
    with pytest.raises(ConfigError, match="'temperature' is frozen: a single number"):
        select_trained(module, train=["temperature"])
    module = to_module(model, train=["temperature"])
    select_trained(module, train=["temperature"])
    assert [name for name, parameter in module.named_parameters() if parameter.requires_grad] == ["temperature"]


# -- copies of one weight

TIED = """tied (int64[batch, 5] ids) => (float[batch, 5, 16] y) {
    x = Gather(embedding, ids)
    h = MatMul(x, w)
    y = MatMul(h, val_9)
}"""


def tied(**more: np.ndarray) -> onnx.ModelProto:
    table = random(16, 8)
    return parsed(TIED, **{"val_9": table.T.copy(), "w": random(8, 8, seed=1), "embedding": table, **more})


def test_a_transposed_copy_is_one_parameter_with_its_original_and_both_are_written():
    model = tied()
    module = to_module(model)
    assert module.copies == {"val_9": ("embedding", True)}
    assert set(named_weights(module)) == {"embedding", "w"}
    assert ("val_9", "trained", "a transposed copy of embedding, trained as one with it") in describe_weights(module)
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    module(ids).square().sum().backward()
    assert module.embedding.grad[10].abs().sum() > 0, "rows that were not looked up learn from the output layer"
    with torch.no_grad():
        module.embedding -= 0.1 * module.embedding.grad
    written = model_with_weights(module, model)
    after = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    assert np.array_equal(after["val_9"], after["embedding"].T)
    assert set(stored_weights(copy.deepcopy(module))) == {"embedding", "w", "val_9"}
    [want] = onnxruntime.InferenceSession(written.SerializeToString()).run(None, {"ids": ids.numpy()})
    np.testing.assert_allclose(module(ids).detach().numpy(), want, rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_frozen_by_either_name_and_untied_on_request():
    assert set(named_weights(to_module(tied(), tie=False))) == {"embedding", "w", "val_9"}
    module = to_module(tied())
    select_trained(module, freeze=["val_*"])
    assert not module.embedding.requires_grad
    assert {name: kind for name, kind, _ in describe_weights(module)}["val_9"] == "frozen"


def test_an_equal_copy_of_an_embedding_is_tied_whatever_the_order():
    table = random(16, 8)
    model = parsed(
        """tied (int64[batch, 5] ids) => (float[batch, 16] y) {
            x = Gather(embedding, ids)
            m = ReduceMean <keepdims = 0> (x, axis)
            y = Gemm <transB = 1> (m, head)
        }""",
        head=table, embedding=table, axis=np.array([1]),
    )  # fmt: skip
    module = to_module(model)
    assert module.copies == {"head": ("embedding", False)}
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()


def test_weights_untied_by_the_user_are_not_tied_again():
    model = tied()
    for tensor in model.graph.initializer:
        if tensor.name == "val_9":
            tensor.name = model.graph.node[-1].input[1] = "embedding.untied.1"
    assert to_module(model).copies == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros((16, 8), np.float32), np.zeros((8, 16), np.float32)),
        (np.ones((16, 8), np.float32), np.ones((8, 16), np.float32)),
        (np.eye(16, dtype=np.float32), np.eye(16, dtype=np.float32)),
        (random(16, 8), random(16, 8).T + np.float32(1e-7)),
    ],
)
def test_similar_weights_are_not_tied(first, second):
    model = tied(embedding=first, val_9=second, w=random(first.shape[1], second.shape[0]))
    assert to_module(model).copies == {}


def test_layers_with_equal_initial_weights_are_not_tied():
    """torch.nn.TransformerEncoder copies its layer: equal at first, but not one weight."""
    model = parsed(
        """deep (float[batch, 8] x) => (float[batch, 8] y) {
            a = MatMul(x, w0)
            y = MatMul(a, w1)
        }""",
        w0=random(8, 8), w1=random(8, 8),
    )  # fmt: skip
    assert to_module(model).copies == {}
