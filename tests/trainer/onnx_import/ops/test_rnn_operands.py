"""Recurrent layers whose stored states or operands do not fit the input: expanded or refused, never read beyond.

torch's kernels do not check all operands, so the models run in a process of their own: a segmentation fault or a
corrupted heap fails the test, and not pytest.
"""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, FEATURES, HIDDEN = 5, 4, 6
BATCHES = range(1, 65)


def fixed_batch(kind, size, *, spelling, directions=1, state=None):
    """A layer as an exporter writes it that is given a batch of `size` rows, x [size, 5, 4] -> y [size, 5, hidden].

    The newer exporter stores the initial states; the legacy one expands zeros [directions, size, hidden] to a computed
    shape. state: the stored initial states, instead of zeros.
    """
    g = GraphWriter("fixed", seed=1, opset=17)
    width = HIDDEN * directions
    x = g.op("Transpose", g.input("x", (size, STEPS, FEATURES)), perm=[1, 0, 2])
    zeros = g.weight("state", np.zeros((directions, size, HIDDEN), np.float32) if state is None else state)
    if spelling == "legacy":
        rows = g.op("Gather", g.op("Shape", x), g.weight("one", np.array([1])))
        dims = g.op("Concat", g.weight("directions", [directions]), rows, g.weight("hidden", [HIDDEN]), axis=0)
        zeros = g.op("Expand", zeros, dims)
    rows = GATES[kind] * HIDDEN
    shapes = {"W": (rows, FEATURES), "R": (rows, HIDDEN), "B": (2 * rows,)}
    weights = [g.weight(name, g.normal(0.6, directions, *shape)) for name, shape in shapes.items()]
    states = [zeros] * (2 if kind == "LSTM" else 1)
    direction = "forward" if directions == 1 else "bidirectional"
    y = g.op(kind, x, *weights, "", *states, outputs=["Y"], direction=direction, hidden_size=HIDDEN)
    y = g.op("Transpose", y, perm=[0, 2, 1, 3])
    y = g.op("Reshape", y, g.weight("shape", [STEPS, size if spelling == "dynamo" else -1, width]))
    g.output(g.op("Transpose", y, perm=[1, 0, 2]), (size, STEPS, width))
    return g.model()


def row_by_row(model, rows):
    """What onnxruntime computes, with as many rows at a time as the file declares."""
    size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    session = onnxruntime.InferenceSession(model.SerializeToString())
    padded = np.concatenate([rows, rows[: -len(rows) % size]]) if len(rows) % size else rows
    parts = [session.run(None, {"x": padded[at : at + size]})[0] for at in range(0, len(padded), size)]
    return np.concatenate(parts)[: len(rows)]


RUNS = """
import sys
import numpy as np, onnx, torch
from onward.trainer.onnx_import.driver import to_module

rows = np.load(sys.argv[1] + "/rows.npy")
number = 0
for name in sys.argv[3:]:
    module = to_module(onnx.load(f"{sys.argv[1]}/{name}.onnx"))
    for batch in map(int, sys.argv[2].split(",")):
        x = torch.from_numpy(rows[:batch]).requires_grad_()
        y = module(x)
        y.sum().backward()
        want = torch.from_numpy(np.load(f"{sys.argv[1]}/{name}.npy")[:batch])
        torch.testing.assert_close(y.detach(), want, rtol=1e-5, atol=1e-5)
        number += 1
print(number)
"""


@pytest.mark.slow
def test_zero_states_of_a_fixed_batch_expand_to_every_batch(tmp_path):
    rows = np.random.default_rng(0).standard_normal((max(BATCHES), STEPS, FEATURES), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    names = []
    for kind in GATES:
        for spelling, size, directions in (("dynamo", 2, 1), ("legacy", 2, 2), ("dynamo", 3, 2), ("legacy", 1, 1)):
            model = fixed_batch(kind, size, spelling=spelling, directions=directions)
            names.append(f"{kind}-{spelling}-{size}")
            onnx.save(model, tmp_path / f"{names[-1]}.onnx")
            np.save(tmp_path / f"{names[-1]}.npy", row_by_row(model, rows))
    command = [sys.executable, "-X", "faulthandler", "-c", RUNS, str(tmp_path), ",".join(map(str, BATCHES)), *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == len(names) * len(BATCHES) > 100


def different_rows(size):
    return np.random.default_rng(0).standard_normal((1, size, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("spelling", ["dynamo", "legacy"])
@pytest.mark.parametrize("kind", GATES)
def test_states_that_differ_by_row_hold_for_their_own_batch_and_are_refused_for_others(kind, spelling):
    model = fixed_batch(kind, 2, spelling=spelling, state=different_rows(2))
    module = to_module(model)
    rows = np.random.default_rng(0).standard_normal((2, STEPS, FEATURES), np.float32)
    torch.testing.assert_close(
        module(torch.from_numpy(rows)).detach(), torch.from_numpy(row_by_row(model, rows)), rtol=1e-5, atol=1e-5
    )
    with pytest.raises((ValueError, RuntimeError), match=r"fits batches of 2|must match the existing size \(2\)"):
        module(torch.randn(17, STEPS, FEATURES))


def test_the_doctor_says_whether_a_file_of_fixed_batch_takes_other_batches(tmp_path):
    def said(model):
        onnx.save(model, tmp_path / "model.onnx")
        return " ".join(warning.what for warning in diagnose(tmp_path / "model.onnx").warnings)

    assert "trained at any size" in said(fixed_batch("LSTM", 2, spelling="dynamo"))
    fixed = said(fixed_batch("LSTM", 2, spelling="dynamo", state=different_rows(2)))
    assert "every micro-batch must have 2 rows" in fixed
    assert "any size" not in fixed


def layer(kind, operands, **attributes):
    """A layer whose operands, W and R too, are graph inputs, with the shapes given and any batch."""
    g = GraphWriter("free", opset=17)
    dims = {"X": (0, "batch", 2), "sequence_lens": ("batch",), "initial_h": (0, "batch", 2)}
    names = []
    for name, operand in operands.items():
        shape = [operand.shape[dim] if isinstance(dim, int) else dim for dim in dims.get(name, range(operand.ndim))]
        integers = name == "sequence_lens"
        names.append(g.input(name, shape, onnx.TensorProto.INT32 if integers else onnx.TensorProto.FLOAT))
    y = g.op(kind, *names, outputs=["Y"], hidden_size=HIDDEN, **attributes)
    g.output(y, [None] * 4)
    return to_module(g.model())


def operands_of(kind, batch=3):
    rows = GATES[kind] * HIDDEN
    return {
        "X": torch.randn(STEPS, batch, FEATURES),
        "W": torch.randn(1, rows, FEATURES),
        "R": torch.randn(1, rows, HIDDEN),
        "B": torch.randn(1, 2 * rows),
        "sequence_lens": torch.full((batch,), STEPS, dtype=torch.int32),
        "initial_h": torch.randn(1, batch, HIDDEN),
    }


WRONG = {
    "W": lambda w: w[:, :, :-1],
    "R": lambda r: r[:, :-1],
    "B": lambda b: b[:, :-1],
    "sequence_lens": lambda lengths: lengths[:-1],
    "initial_h": lambda h: h[:, :-1],
}


@pytest.mark.parametrize("clip", [{}, {"clip": 50.0}], ids=["fused", "step by step"])
@pytest.mark.parametrize("kind", GATES)
def test_an_operand_of_the_wrong_shape_is_refused_by_name(kind, clip):
    right = operands_of(kind)
    module = layer(kind, right, **clip)
    module(*right.values())
    for name, change in WRONG.items():
        with pytest.raises(ValueError, match=f"{name} of the {kind} has shape .* needs"):
            module(*{**right, name: change(right[name])}.values())


@pytest.mark.parametrize("clip", [{}, {"clip": 50.0}], ids=["fused", "step by step"])
@pytest.mark.parametrize("kind", GATES)
def test_lengths_outside_the_steps_are_refused(kind, clip):
    right = operands_of(kind)
    module = layer(kind, right, direction="reverse", **clip)
    for wrong in ([STEPS + 1, 1, 2], [-1, 1, 2]):
        with pytest.raises((ValueError, RuntimeError), match="sequence_lens"):
            module(*{**right, "sequence_lens": torch.tensor(wrong, dtype=torch.int32)}.values())


def test_a_type_other_than_the_inputs_is_refused_but_under_autocast():
    right = operands_of("LSTM")
    module = layer("LSTM", right)
    with pytest.raises(ValueError, match=r"W of the LSTM is torch.float32, but its input is torch.bfloat16"):
        module(*{**right, "X": right["X"].bfloat16()}.values())
    with torch.autocast("cpu", torch.bfloat16):
        module(*{**right, "X": right["X"].bfloat16()}.values())
