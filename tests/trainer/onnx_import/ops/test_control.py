"""Nodes that are known only at run time: runtime nodes, branches and loops, sequences, shape arithmetic."""

import copy
import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.onnx_import.train_selection import select_trained
from tests.support.trained_models import running_statistics
from tests.support.weight_roles import describe_weights

HEADER = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>\n'


def read(text: str) -> onnx.ModelProto:
    """A model in ONNX's text form, checked."""
    model = onnx.parser.parse_model(HEADER + text)
    onnx.checker.check_model(model)
    return model


def runtime_nodes(module: ImportedGraph) -> list[str]:
    """Return the operators that became runtime nodes."""
    found = (module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module")
    return [child.node.op_type for child in found if isinstance(child, RuntimeNode)]


def assert_same(module: ImportedGraph, model: onnx.ModelProto, *inputs: torch.Tensor) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    wanted = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    got = module.eval()(*inputs)
    for a, b in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b, rtol=1e-5, atol=1e-6)


# -- runtime nodes

TOP_K = """g (float[N,4] x, int64[1] k) => (float[N,K] y) <float[4,6] w = {
    1,2,3,4,5,6, 1,2,3,4,5,6, 0,1,0,2,0,3, 2,0,2,0,5,9}> {
  h = MatMul(x, w)
  best, places = TopK(h, k)
  y = Relu(best)
}"""


def test_a_runtime_node_passes_gradients():
    model = read(TOP_K)
    module = to_module(model)
    assert runtime_nodes(module) == ["TopK", "Relu"]
    for k in (1, 3):
        assert_same(module, model, torch.randn(5, 4), torch.tensor([k]))
    x = torch.ones(2, 4)
    module(x, torch.tensor([2])).sum().backward()
    values = x @ module.w.detach()
    chosen = torch.zeros_like(values).scatter(1, values.topk(2).indices, 1.0)
    torch.testing.assert_close(module.w.grad, x.t() @ chosen)


def test_a_batch_norm_in_a_branch_keeps_its_statistics_while_it_is_frozen():
    model = read("""g (float[N,2] x, bool b) => (float[N,2] y) <float[2] scale = {1,2}, float[2] bias = {1,0},
      float[2] mean = {0,1}, float[2] variance = {1,2}, float[2,2] w = {1,3,2,7}> {
      h = MatMul(x, w)
      y = If(b)<
        then_branch = t () => (float[N,2] p) { p = BatchNormalization(h, scale, bias, mean, variance) },
        else_branch = e () => (float[N,2] q) { q = Neg(h) }>
    }""")
    for freeze, moves in (((), True), (("scale", "bias"), False)):
        module = to_module(model).train()
        select_trained(module, freeze=freeze)
        before = {name: tensor.clone() for name, tensor in running_statistics(module).items()}
        module(torch.randn(5, 2), torch.tensor(True))
        after = running_statistics(module)
        assert {name: not torch.equal(after[name], before[name]) for name in before} == dict.fromkeys(before, moves)


def test_a_graph_with_runtime_nodes_can_be_copied_and_pickled():
    module = to_module(read(TOP_K)).eval()
    inputs = (torch.randn(3, 4), torch.tensor([2]))
    wanted = module(*inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*inputs), wanted)
    assert set(module.state_dict()) == {"w"}  # a runtime node stores no tensors


def test_a_runtime_node_follows_train_and_eval():
    module = to_module(
        read("""g (float[N] x, float r) => (float[N] y) { t = Constant<value = bool {1}>() y = Dropout(x, r, t) }""")
    )
    assert runtime_nodes(module) == ["Dropout"]
    ones = torch.ones(1000)
    assert torch.equal(module.eval()(ones, torch.tensor(0.5)), ones)
    assert set(module.train()(ones, torch.tensor(0.5)).tolist()) == {0.0, 2.0}


def test_nodes_after_a_runtime_node_are_computed_from_its_result():
    model = read("""g (float[N,3] x) => (float[M] y) <float[3,3] w = {1,2,3,4,5,6,7,8,9.5}> {
      zero = Constant<value = float {0}>()
      positive = Greater(x, zero)
      where = NonZero(positive)
      places = Transpose<perm = [1, 0]>(where)
      scaled = MatMul(x, w)
      picked = GatherND(scaled, places)
      y = Exp(picked)
    }""")
    module = to_module(model)
    assert_same(module, model, torch.randn(4, 3))
    module(torch.eye(3)[:2] - 0.5 * torch.eye(3)[2:]).log().sum().backward()  # the first two of the diagonal
    torch.testing.assert_close(module.w.grad, torch.tensor([[1.0, 0, 0], [0, 1, 0], [-0.5, -0.5, 0]]))


def test_a_node_after_a_runtime_node_of_known_shape_is_an_ordinary_one():
    model = read("""g (float[N,2] x, bool c) => (float[N,3] y) <float[2,3] w = {1,2,3,4,5,7}> {
      h = If(c)<then_branch = t () => (a) { a = Exp(x) }, else_branch = e () => (b) { b = Neg(x) }>
      y = MatMul(h, w)
    }""")
    module = to_module(model)
    assert runtime_nodes(module) == ["If"]
    assert_same(module, model, torch.randn(5, 2), torch.tensor(True))


def test_a_reshape_that_fits_some_sizes_only_is_computed_at_run_time():
    model = read("""g (float[N,3] x) => (float[a,b] y) <int64[2] s = {-1, 4}> { y = Reshape(x, s) }""")
    module = to_module(model)
    assert runtime_nodes(module) == ["Reshape"]
    assert_same(module, model, torch.randn(8, 3))


def test_a_dynamic_dimension_is_split_into_equal_parts_at_run_time():
    model = read("g (float[N,4] x) => (float[A,4] a, float[B,4] b) { a, b = Split<axis = 0>(x) }")
    module = to_module(model)
    for size in (2, 6):
        assert_same(module, model, torch.randn(size, 4))


def test_a_node_that_fails_at_every_size_is_refused_at_import():
    model = read("""g (float[N,4] x) => (float[N,3] y) <float[2,3] w = {1,2,3,4,5,6}> { y = MatMul(x, w) }""")
    with pytest.raises(UnsupportedModel, match="node 'y': MatMul-13: torch refuses it"):
        to_module(model)


def test_an_unknown_operator_in_a_branch_is_refused_at_import():
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[N] x, bool c) => (float[N] y) { y = If(c)<
      then_branch = t () => (float[N] a) { a = local.Nowhere(x) },
      else_branch = e () => (float[N] b) { b = Neg(x) }> }"""
    )
    with pytest.raises(UnsupportedModel, match=r"node 'a': local\.Nowhere-1: it is not implemented"):
        to_module(model)


# -- branches

BRANCH = """g (float[N,2] x%s) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> {
  %s
  y = If(c)<
    then_branch = t () => (float[N,2] a) { a = MatMul(x, w) },
    else_branch = e () => (float[N,2] b) <float[2] k = {5,6}> { two = Constant<value = float {2}>()  h = Mul(x, two)  b = Add(h, k) }>
}"""  # noqa: E501


@pytest.mark.parametrize("taken", [0, 1])
def test_an_if_on_a_constant_becomes_its_branch(taken):
    model = read(BRANCH % ("", f"c = Constant<value = bool {{{taken}}}>()"))
    module = to_module(model)
    assert runtime_nodes(module) == []
    assert_same(module, model, torch.randn(3, 2))


def test_an_if_on_data_is_a_runtime_node_with_gradients_of_captured_weights():
    model = read(BRANCH % (", bool c", ""))
    module = to_module(model)
    assert runtime_nodes(module) == ["If"]
    for taken in (False, True):
        assert_same(module, model, torch.randn(3, 2), torch.tensor(taken))
    module(torch.ones(3, 2), torch.tensor(True)).sum().backward()
    torch.testing.assert_close(module.w.grad, torch.full((2, 2), 3.0))


def test_weights_stored_inside_a_branch_are_frozen_and_described():
    rows = {name: (kind, why) for name, kind, why in describe_weights(to_module(read(BRANCH % (", bool c", ""))))}
    assert rows["w"][0] == "trained"
    assert [kind for name, (kind, _) in rows.items() if name.endswith("k")] == ["frozen"]


# -- loops

LOOP = """g (float[N,2] x%s) => (float[N,2] y, float[K,N,2] z) <float[2,2] w = {1,2,3,4}%s, bool on = {1}> {
  y, z = Loop(turns, on, x)<body = b (int64 i, bool c, float[N,2] h) => (bool c2, float[N,2] h2, float[N,2] o) {
    c2 = Identity(c)
    f = Cast<to = 1>(i)
    m = MatMul(h, w)
    h2 = Add(m, f)
    o = Tanh(h2)
  }>
}"""


def test_a_loop_of_few_iterations_is_unrolled():
    model = read(LOOP % ("", ", int64 turns = {3}"))
    module = to_module(model)
    assert runtime_nodes(module) == []
    assert_same(module, model, torch.randn(3, 2))


def test_a_loop_of_many_iterations_is_a_runtime_node():
    text = LOOP % ("", ", int64 turns = {100}")
    model = read(text.replace("w = {1,2,3,4}", "w = {0.1,0.2,0.3,0.4}"))
    module = to_module(model)
    assert runtime_nodes(module) == ["Loop"]
    assert_same(module, model, torch.randn(3, 2))


def test_a_loop_over_data_gives_captured_weights_their_gradients():
    model = read(LOOP % (", int64 turns", ""))
    module = to_module(model)
    assert runtime_nodes(module) == ["Loop"]
    for turns in (1, 4):
        assert_same(module, model, torch.randn(3, 2), torch.tensor(turns))
    module(torch.ones(3, 2), torch.tensor(2))[0].sum().backward()
    w = module.w.detach().clone().requires_grad_()
    ((torch.ones(3, 2) @ w) @ w + 1).sum().backward()
    torch.testing.assert_close(module.w.grad, w.grad)


def test_a_loop_ends_when_its_condition_fails():
    model = read("""g (float x) => (float y) {
      limit = Constant<value = int64 {100}>()  on = Constant<value = bool {1}>()  ten = Constant<value = float {10}>()
      y = Loop(limit, on, x)<body = b (int64 i, bool c, float h) => (bool c2, float h2) {
        h2 = Add(h, h)
        c2 = Less(h2, ten)
      }>
    }""")
    module = to_module(model)
    for start in (1.0, 3.0, 20.0):
        assert_same(module, model, torch.tensor(start))


SCAN = """g (float[N,%s,2] x) => (float[N,2] y, float[T,N,2] z) <float[2,2] w = {0.1,0.2,0.3,0.4}> {
  axis = Constant<value = int64[1] {1}>()
  h0 = ReduceSum<keepdims = 0>(x, axis)
  y, z = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
              body = b (float[N,2] h, float[N,2] row) => (float[N,2] h2, float[N,2] o) {
    a = MatMul(h, w)
    %s
    o = Identity(h2)
  }>(h0, x)
}"""


BRANCHED = """s = ReduceSum<keepdims = 0>(row)
    zero = Constant<value = float {0}>()
    c = Greater(s, zero)
    h2 = If(c)<
      then_branch = t () => (float[N,2] p) { p = Add(a, row) },
      else_branch = e () => (float[N,2] q) { q = Sub(a, row) }>"""


@pytest.mark.parametrize(
    ("rows", "body", "kinds"),
    [("3", "h2 = Add(a, row)", []), ("T", "h2 = Add(a, row)", ["Scan"]), ("T", BRANCHED, ["Scan"])],
)
def test_a_scan_of_known_length_is_unrolled(rows, body, kinds):
    model = read(SCAN % (rows, body))
    module = to_module(model)
    assert runtime_nodes(module) == kinds
    assert_same(module, model, torch.randn(4, 3, 2))
    module(torch.randn(4, 3, 2))[0].sum().backward()
    assert module.w.grad.abs().min() > 0


# -- functions of the model

FUNCTIONS = """g (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> {
  y = local.outer<scale = 3.0>(x, w, c)
}
<domain: "local", opset_import: ["" : 17, "local" : 1]>
outer <scale>(a, m, c) => (r) {
  s = Constant<value_float: float = @scale>()
  r = If(c)<
    then_branch = t () => (p) { h = local.inner(a, m)  p = Mul(h, s) },
    else_branch = e () => (q) { q = Mul(a, s) }>
}
<domain: "local", opset_import: ["" : %d]>
inner (a, m) => (r) { %s  r = Tanh(h) }"""


@pytest.mark.parametrize(
    ("opset", "product"),
    [(17, "h = MatMul(a, m)"), (12, "p = MatMul(a, m)  u = Unsqueeze<axes = [0]>(p)  h = Squeeze<axes = [0]>(u)")],
)
def test_functions_with_branches_and_functions_in_them_are_imported(opset, product):
    model = onnx.parser.parse_model(HEADER + FUNCTIONS % (opset, product))
    module = to_module(model)
    x = torch.randn(3, 2)
    torch.testing.assert_close(module(x, torch.tensor(True)), 3 * torch.tanh(x @ module.w))
    torch.testing.assert_close(module(x, torch.tensor(False)), 3 * x)
    module(x, torch.tensor(True)).sum().backward()
    assert module.w.grad.abs().min() > 0


# -- sequences


def test_sequences_of_known_length_need_no_runtime_node():
    model = read("""g (float[N,6] x) => (float[N,4] y) {
      sizes = Constant<value = int64[3] {1, 2, 3}>()
      parts = SplitToSequence<axis = 1>(x, sizes)
      first = Constant<value = int64 {0}>()  last = Constant<value = int64 {-1}>()
      a = SequenceAt(parts, first)
      b = SequenceAt(parts, last)
      y = Concat<axis = 1>(a, b)
    }""")
    module = to_module(model)
    assert runtime_nodes(module) == []
    assert_same(module, model, torch.randn(5, 6))


def test_a_sequence_whose_length_depends_on_data_is_in_runtime_nodes():
    model = read("""g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {2, 3, 4, 7}> {
      rows = SplitToSequence<axis = 0, keepdims = 1>(x)
      last = Constant<value = int64 {-1}>()
      z = SequenceAt(rows, last)
      more = SequenceInsert(rows, z)
      fewer = SequenceErase(more)
      all = ConcatFromSequence<axis = 0>(fewer)
      y = MatMul(all, w)
    }""")
    module = to_module(model)
    assert_same(module, model, torch.randn(3, 2))
    module(torch.ones(3, 2)).sum().backward()
    assert module.w.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]


# -- shape arithmetic


CHOSEN = """g (float[N,4] x) => (int64[1] y) <
    int64[8] table = {0,10,20,30,40,50,60,70}, int64[1] begin = {0}, int64[1] end = {1}> {
  shape = Shape(x)
  rows = Slice(shape, begin, end)
  y = Gather(table, rows)
}"""


def test_a_length_chooses_from_stored_integers():
    model = read(CHOSEN)
    module = to_module(model)
    for rows in (1, 6):
        assert_same(module, model, torch.zeros(rows, 4))


def test_lengths_computed_in_floats_need_no_runtime_node():
    model = read("""g (float[N,3,H,W] x) => (float[a,b,c,d] y)
      <int64[1] two = {2}, int64[1] four = {4}, float[1] part = {0.7}, int64[1] zero = {0}> {
      sizes = Shape(x)
      image = Slice(sizes, two, four)
      other = Slice(sizes, zero, two)
      f = Cast<to = 1>(image)
      g = Mul(f, part)
      h = Floor(g)
      i = Cast<to = 7>(h)
      shape = Concat<axis = 0>(other, i)
      y = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , , shape)
    }""")
    module = to_module(model)
    assert runtime_nodes(module) == []
    for size in (10, 13):
        assert_same(module, model, torch.randn(2, 3, size, size + 1))


def test_an_if_on_a_length_is_taken_at_run_time():
    model = read("""g (float[N,3] x) => (float[N,3] y) {
      sizes = Shape<end = 1>(x)
      four = Constant<value = int64[1] {4}>()
      small = Less(sizes, four)
      c = Squeeze(small)
      y = If(c)<
        then_branch = t () => (float[N,3] a) { a = Neg(x) },
        else_branch = e () => (float[N,3] b) { b = Exp(x) }>
    }""")
    module = to_module(model)
    for size in (2, 4, 9):
        assert_same(module, model, torch.randn(size, 3))


PAD_TO_MULTIPLE = """g (float[N,S,4] x) => (float[N,K,4] y) <
  int64[1] one = {1}, int64[1] w = {WIDTH}, int64[4] before = {0,0,0,0}, int64[1] zero = {0}> {
  sizes = Shape(x)
  length = Gather(sizes, one)
  past = Mod(length, w)
  short = Sub(w, past)
  added = Mod(short, w)
  pads = Concat<axis = 0>(before, added, zero)
  y = Pad(x, pads)
}"""


@pytest.mark.parametrize("width", ["2", "4", "7", "16"])
def test_padding_to_a_multiple_is_right_for_lengths_other_than_the_trial_sizes(width):
    model = read(PAD_TO_MULTIPLE.replace("WIDTH", width))
    module = to_module(model)
    assert runtime_nodes(module) == []
    for size in (1, 7, 8, 11, 16, 20):
        assert_same(module, model, torch.randn(2, size, 4))


def test_the_number_of_blocks_is_computed_at_run_time():
    model = read("""g (float[N,S] x) => (float[K] y) <int64 one = {1}, int64 last = {15}, int64[1] block = {16}> {
      sizes = Shape(x)
      length = Gather(sizes, one)
      more = Add(length, last)
      blocks = Div(more, block)
      y = ConstantOfShape(blocks)
    }""")
    module = to_module(model)
    for size in (1, 16, 17, 100):
        assert_same(module, model, torch.randn(2, size))


def test_a_comparison_equal_at_both_trial_sizes_is_checked_at_run_time():
    model = read("""g (float[N,4] x) => (float[M,4] y) <int64 zero = {0}, int64 one = {1}> {
      sizes = Shape(x)
      batch = Gather(sizes, zero)
      alone = Equal(batch, one)
      y = If(alone)<
        then_branch = t () => (float[M,4] a) { a = Neg(x) },
        else_branch = e () => (float[M,4] b) { b = Exp(x) }>
    }""")
    for fuse in (True, False):
        module = to_module(model, fuse=fuse)
        assert_same(module, model, torch.randn(2, 4))
        for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(RuntimeError, match=r"eq\(size\(x, 0\), 1\) is False, but now it is True"):
                same(torch.randn(1, 4))


def test_a_comparison_that_no_length_changes_is_not_checked():
    model = read("""g (float[N,4] x) => (float[N,4] y) <int64[2] none = {-1,-1}, int64[2] ones = {1,1}> {
      sizes = Shape(x)
      unknown = Equal(sizes, none)
      to = Where(unknown, ones, sizes)
      y = Expand(x, to)
    }""")
    assert all("must_be" not in node.name for node in to_module(model).graph.nodes)


def test_the_maximum_of_a_length_and_a_number_is_computed_at_run_time():
    model = read("""g (float[N,3] x) => (float[K] y) {
      sizes = Shape<end = 1>(x)
      four = Constant<value = int64[1] {4}>()
      n = Max(sizes, four)
      y = ConstantOfShape<value = float[1] {7}>(n)
    }""")
    module = to_module(model)
    assert runtime_nodes(module) == []
    for size in (2, 9):
        assert_same(module, model, torch.randn(size, 3))


def test_lengths_cast_to_int32_are_int32():
    model = read("g (float[N,3] x) => (int32[2] y) { s = Shape(x)  y = Cast<to = 6>(s) }")
    assert to_module(model)(torch.randn(5, 3)).tolist() == [5, 3]
    assert to_module(model)(torch.randn(5, 3)).dtype == torch.int32


# -- element types


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64"])
def test_wide_unsigned_integers_wrap_around_as_in_onnx(kind):
    model = read(f"g ({kind}[N] a, {kind}[N] b) => ({kind}[N] y) {{ y = Sub(a, b) }}")
    dtype = getattr(torch, kind)
    got = to_module(model)(torch.tensor([1, 5]).to(dtype), torch.tensor([2, 3]).to(dtype))
    assert got.dtype == dtype
    assert got.tolist() == [2 ** int(kind[4:]) - 1, 2]


def test_uint64_values_that_would_be_wrong_are_refused():
    module = to_module(read("g (uint64[N] a, uint64[N] b) => (uint64[N] y) { y = Max(a, b) }"))
    small, great = torch.tensor([3]).to(torch.uint64), torch.tensor([-1]).to(torch.uint64)
    assert module(small, small).tolist() == [3]
    with pytest.raises(RuntimeError, match=r"uint64 values of 2\^63 and more"):
        module(small, great)
