"""Rewrites of the imported graph: each finds its pattern in every spelling, computes the same, and leaves the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.gather import strided
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.ops.reduce import reduce_mean
from onward.trainer.onnx_import.ops.shape import arange, expand, full
from onward.trainer.onnx_import.passes.fuse import fuse_graph
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import Traced

Build = Callable[..., Any]
TYPES = [(torch.float32, 5e-7), (torch.float64, 1e-12)]
B, T = -1, -2  # the dimensions that are dynamic
SIZES = {B: (3, 5), T: (7, 11)}


class Recorder:
    """`c(torch.add, x, y)` records a call; `c.weight(shape)` makes a trained tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tracer, self.dtype = Tracer(), dtype

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.call(function, *args, **kwargs)

    def weight(self, *shape: int) -> Traced:
        torch.manual_seed(sum(shape))
        return self.tracer.tensor(
            f"w{len(list(self.tracer.root.parameters()))}", nn.Parameter(torch.randn(shape, dtype=self.dtype))
        )

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Traced:
        probes = [
            torch.empty([SIZES[n][i] if n in SIZES else n for n in shape], dtype=dtype or self.dtype, device="meta")
            for i in (0, 1)
        ]
        return self.tracer.placeholder(name, (probes[0], probes[1]))


def rewritten(
    build: Build, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, int]]:
    """(as it was, as it is, how often each rewrite applied)"""
    c = Recorder(dtype)
    result = build(c, *(c.input(f"x{i}", shape) for i, shape in enumerate(shapes)))
    results = result if isinstance(result, tuple) else (result,)
    c.tracer.graph.output(tuple(part.node for part in results))
    plain = fx.GraphModule(copy.deepcopy(c.tracer.root), copy.deepcopy(c.tracer.graph))
    counts = fuse_graph(c.tracer.graph, c.tracer.root)
    c.tracer.graph.lint()
    return plain, fx.GraphModule(c.tracer.root, c.tracer.graph), counts


def results_of(module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of inputs and weights."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = module(*inputs)
    torch.manual_seed(5)
    loss = sum((y * torch.randn_like(y)).sum() for y in outputs)
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    return [*outputs, *(torch.zeros(()) if g is None else g for g in found)]


def assert_same(
    plain: fx.GraphModule, fused: fx.GraphModule, shapes: list[tuple[int, ...]], dtype: torch.dtype, tolerance: float
) -> None:
    for batch, length in ((2, 6), (3, 5)):
        torch.manual_seed(batch)
        sizes = {B: batch, T: length}
        inputs = [torch.randn([sizes.get(n, n) for n in shape], dtype=dtype) for shape in shapes]
        for mine, theirs in zip(results_of(fused, inputs), results_of(plain, inputs), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            error = ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)).detach()
            assert float(error) <= tolerance


def check(
    build: Build, shapes: list[tuple[int, ...]], expected: dict[str, int], only: torch.dtype | None = None
) -> fx.GraphModule:
    """Every rewrite applied as often as expected, and as if nothing had."""
    for dtype, tolerance in TYPES:
        if only in (None, dtype):
            plain, fused, counts = rewritten(build, shapes, dtype)
            assert {name: count for name, count in counts.items() if count and name != "cse"} == expected
            assert_same(plain, fused, shapes, dtype, tolerance)
    return fused


# -- norms


def squares(c: Recorder, x: Any, how: str) -> Any:
    return {
        "pow": lambda: c(torch.pow, x, 2.0),
        "mul": lambda: c(torch.mul, x, x),
        "square": lambda: c(torch.square, x),
    }[how]()


def over_root(c: Recorder, x: Any, variance: Any, how: str) -> Any:
    root = lambda: c(torch.sqrt, variance)  # noqa: E731
    return {
        "div": lambda: c(torch.div, x, root()),
        "reciprocal": lambda: c(torch.mul, x, c(torch.reciprocal, root())),
        "one over": lambda: c(torch.mul, c(torch.div, torch.ones((), dtype=c.dtype), root()), x),
        "rsqrt": lambda: c(torch.mul, c(torch.rsqrt, variance), x),
        "power": lambda: c(torch.mul, x, c(torch.pow, variance, -0.5)),
    }[how]()


@pytest.mark.parametrize(
    ("square", "root", "affine"),
    [
        ("pow", "div", "wb"),
        ("mul", "reciprocal", "wb"),
        ("square", "rsqrt", "w"),
        ("pow", "one over", ""),
        ("mul", "power", "b"),
    ],
)
def test_a_layer_norm_is_found_in_every_spelling(square: str, root: str, affine: str) -> None:
    def build(c: Recorder, x: Any) -> Any:
        d = c(torch.sub, x, c(reduce_mean, x, [2], True))
        y = over_root(c, d, c(torch.add, c(reduce_mean, squares(c, d, square), [-1], True), 1e-5), root)
        y = c(torch.mul, c.weight(8), y) if "w" in affine else y
        return c(torch.add, y, c.weight(8)) if "b" in affine else y

    fused = check(build, [(B, T, 8)], {"layer_norm": 1})
    assert len([n for n in fused.graph.nodes if n.op == "call_function"]) == 1


@pytest.mark.parametrize(
    ("square", "root"), [("pow", "reciprocal"), ("mul", "div"), ("square", "rsqrt"), ("pow", "one over")]
)
def test_an_rms_norm_is_found_in_every_spelling(square: str, root: str) -> None:
    def build(c: Recorder, x: Any) -> Any:
        y = over_root(c, x, c(torch.add, c(reduce_mean, squares(c, x, square), [-1], True), 1e-6), root)
        return c(torch.mul, y, c(torch.add, c.weight(8), 1.0))

    check(build, [(B, T, 8)], {"rms_norm": 1})


def layer_norm(
    c: Recorder,
    x: Any,
    *,
    axes: tuple[int, ...] = (-1,),
    inside: bool = True,
    weight: tuple[int, ...] = (8,),
    keep: bool = False,
) -> Any:
    d = c(torch.sub, x, c(reduce_mean, x, list(axes), True))
    variance = c(reduce_mean, c(torch.mul, d, d), list(axes), True)
    root = c(torch.sqrt, c(torch.add, variance, 1e-3)) if inside else c(torch.add, c(torch.sqrt, variance), 1e-3)
    y = c(torch.mul, c(torch.div, d, root), c.weight(*weight))
    return (y, variance, d) if keep else y


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"axes": (1,)}, {}),  # of no last dimension
        ({"inside": False}, {}),  # epsilon outside of the root
        ({"axes": (-2, -1)}, {}),  # over a dynamic dimension
        ({"weight": (1, 1, 8)}, {"layer_norm": 1}),  # a weight of another rank stays a multiplication
        ({"weight": (8, 1, 8)}, None),
        ({"keep": True}, {}),  # others read what is inside
    ],
)  # fmt: skip
def test_other_normalisations_are_not_fused(options: dict[str, Any], expected: dict[str, int] | None) -> None:
    shapes = [(B, 8, 8)] if options.get("weight") == (8, 1, 8) else [(B, T, 8)]
    if expected is None:
        expected, shapes = {"layer_norm": 1}, [(1, 8, 8)]
    check(lambda c, x: layer_norm(c, x, **options), shapes, expected)


# -- activations


def erf_gelu(c: Recorder, x: Any, how: str) -> Any:
    inner = c(torch.div, x, math.sqrt(2)) if how != "times" else c(torch.mul, x, 1 / math.sqrt(2))
    sum_ = c(torch.add, c(torch.erf, inner), 1.0)
    return {
        "x (1 + erf) 0.5": lambda: c(torch.mul, c(torch.mul, x, sum_), 0.5),
        "0.5 x (1 + erf)": lambda: c(torch.mul, c(torch.mul, x, 0.5), sum_),
        "x (0.5 (1 + erf))": lambda: c(torch.mul, x, c(torch.mul, sum_, 0.5)),
        "times": lambda: c(torch.div, c(torch.mul, sum_, x), 2.0),
    }[how]()


def tanh_gelu(c: Recorder, x: Any, how: str) -> Any:
    cube = c(torch.pow, x, 3.0) if how != "products" else c(torch.mul, x, c(torch.mul, x, x))
    if how == "taken out":
        square = c(torch.mul, c(torch.pow, x, 2.0), 0.044715)
        inner = c(torch.mul, c(torch.mul, x, math.sqrt(2 / math.pi)), c(torch.add, square, 1.0))
    else:
        inner = c(torch.mul, c(torch.add, x, c(torch.mul, cube, 0.044715)), math.sqrt(2 / math.pi))
    return c(torch.mul, c(torch.mul, x, 0.5), c(torch.add, c(torch.tanh, inner), 1.0))


@pytest.mark.parametrize("how", ["x (1 + erf) 0.5", "0.5 x (1 + erf)", "x (0.5 (1 + erf))", "times"])
def test_gelu_is_found_in_every_spelling(how: str) -> None:
    check(lambda c, x: erf_gelu(c, x, how), [(B, T, 8)], {"gelu": 1})


@pytest.mark.parametrize("how", ["power", "products", "taken out"])
def test_gelu_by_tanh_is_found_in_every_spelling(how: str) -> None:
    check(lambda c, x: tanh_gelu(c, x, how), [(B, T, 8)], {"gelu": 1})


def test_a_formula_with_other_numbers_than_gelu_is_not_fused() -> None:
    def build(c: Recorder, x: Any) -> Any:
        half = c(torch.mul, c(torch.mul, x, c(torch.add, c(torch.erf, c(torch.div, x, 1.4142)), 1.0)), 0.5)
        other = c(torch.mul, c(torch.mul, x, c(torch.add, c(torch.erf, c(torch.div, half, math.sqrt(2))), 1.0)), 0.5)
        return c(torch.add, half, other)

    check(build, [(B, 8)], {})


def test_fp32_constants_in_an_fp64_graph_are_not_fused() -> None:
    rounded = float(torch.tensor(math.sqrt(2)))

    def build(c: Recorder, x: Any) -> Any:
        return c(torch.mul, c(torch.mul, x, c(torch.add, c(torch.erf, c(torch.div, x, rounded)), 1.0)), 0.5)

    check(build, [(B, 8)], {"gelu": 1}, only=torch.float32)
    check(build, [(B, 8)], {}, only=torch.float64)


def test_silu_is_fused_in_both_orders_but_not_with_two_different_values() -> None:
    check(lambda c, x: c(torch.mul, c(torch.sigmoid, x), x), [(B, 8)], {"silu": 1})
    check(lambda c, x, y: c(torch.mul, c(torch.sigmoid, x), y), [(B, 8), (B, 8)], {})


# -- attention

HEADS = (B, 2, T, 4)


def attend(
    c: Recorder,
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Callable[[Recorder, Any, Any], Any] | None = None,
    scale: str = "scores",
    guard: bool = False,
) -> Any:
    turned = c("permute", k, [0, 1, 3, 2]) if q.ndim == 4 else c("transpose", k, 1, 2)
    if scale == "shared":
        q, turned = c(torch.mul, q, 0.5), c(torch.mul, turned, 0.5)
    elif scale == "query":
        q = c(torch.div, q, 3.0)
    scores = c(torch.matmul, q, turned)
    scores = c(torch.mul, scores, 0.25) if scale == "scores" else scores
    scores = scores if mask is None else mask(c, scores, q)
    scores = c(torch.mul, scores, 0.25) if scale == "after the mask" else scores
    weights = c(F.softmax, scores, dim=-1)
    if guard:
        weights = c(torch.where, c(torch.isnan, weights), 0.0, weights)
    return c(torch.matmul, weights, v)


def stored_triangle(c: Recorder, scores: Any, query: Any) -> Any:
    table = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    length = c("size", query, 2)
    seen = c(strided, c(strided, c.tracer.tensor("table", table, persistent=False), 2, 0, length, 1), 3, 0, length, 1)
    return c(torch.where, c(torch.logical_not, seen), torch.finfo(c.dtype).min, scores)


def made_triangle(c: Recorder, scores: Any, query: Any) -> Any:
    length = c("size", query, 2)
    ones = c(full, c.tracer.anchor, [length, length], 1.0, c.dtype)
    hidden = c(torch.eq, c(torch.tril, ones, 0), 0.0)
    return c(
        torch.add, scores, c(torch.where, hidden, -math.inf, c(full, c.tracer.anchor, [length, length], 0.0, c.dtype))
    )


def compared_positions(c: Recorder, scores: Any, query: Any) -> Any:
    places = c(arange, c.tracer.anchor, 0, c("size", query, 2), 1, torch.int64)
    seen = c(torch.le, c(torch.unsqueeze, places, 0), c(torch.unsqueeze, places, 1))
    return c(torch.where, c(torch.unsqueeze, seen, 0), scores, -math.inf)


def strictly_before(c: Recorder, scores: Any, query: Any) -> Any:
    places = c(arange, c.tracer.anchor, 0, c("size", query, 2), 1, torch.int64)
    hidden = c(torch.gt, c(torch.unsqueeze, places, 0), c(torch.add, c(torch.unsqueeze, places, 1), 1))
    return c(torch.where, hidden, -math.inf, scores)


def window(c: Recorder, scores: Any, query: Any) -> Any:
    table = torch.ones(16, 16, dtype=torch.bool).tril().triu(-2)
    length = c("size", query, 2)
    seen = c(strided, c(strided, c.tracer.tensor("table", table, persistent=False), 0, 0, length, 1), 1, 0, length, 1)
    return c(torch.where, seen, scores, -1e9)


def bias(c: Recorder, scores: Any, query: Any) -> Any:
    return c(
        torch.add,
        c(strided, c(strided, c.weight(2, 16, 16), 1, 0, c("size", query, 2), 1), 2, 0, c("size", query, 2), 1),
        scores,
    )


@pytest.mark.parametrize("mask", [stored_triangle, made_triangle, compared_positions])
def test_a_causal_mask_is_recognised_in_every_spelling(mask: Any) -> None:
    fused = check(lambda c, q, k, v: attend(c, q, k, v, mask=mask), [HEADS] * 3, {"attention": 1})
    assert fused.get_submodule("attention_0").causal


@pytest.mark.parametrize("mask", [strictly_before, window, bias])
def test_another_mask_is_kept(mask: Any) -> None:
    fused = check(lambda c, q, k, v: attend(c, q, k, v, mask=mask), [HEADS] * 3, {"attention": 1})
    assert not fused.get_submodule("attention_0").causal


@pytest.mark.parametrize(("scale", "guard"), [("scores", True), ("shared", False), ("query", False)])
def test_the_scale_is_found_on_scores_query_or_key(scale: str, guard: bool) -> None:
    check(lambda c, q, k, v: attend(c, q, k, v, scale=scale, guard=guard), [HEADS] * 3, {"attention": 1})


def test_batch_and_heads_may_be_one_dimension() -> None:
    check(lambda c, q, k, v: attend(c, q, k, v), [(B, T, 4)] * 3, {"attention": 1})


def test_repeated_key_heads_are_read_once() -> None:
    def build(c: Recorder, q: Any, k: Any, v: Any) -> Any:
        wide = [c(expand, c(torch.unsqueeze, x, 2), [1, 1, 2, 1, 1]) for x in (k, v)]
        k, v = (c("reshape", x, [c("size", q, 0), 4, c("size", q, 2), 4]) for x in wide)
        return attend(c, q, k, v)

    fused = check(build, [(B, 4, T, 4), HEADS, HEADS], {"attention": 1})
    assert fused.get_submodule("attention_0").grouped


def over_queries(c: Recorder, q: Any, k: Any, v: Any) -> Any:
    return c(torch.matmul, c(F.softmax, c(torch.matmul, q, c("permute", k, [0, 1, 3, 2])), dim=2), v)


def weights_too(c: Recorder, q: Any, k: Any, v: Any) -> Any:
    weights = c(F.softmax, c(torch.matmul, q, c("permute", k, [0, 1, 3, 2])), dim=-1)
    return c(torch.matmul, weights, v), weights


def masked_then_scaled(c: Recorder, q: Any, k: Any, v: Any) -> Any:
    return attend(c, q, k, v, mask=bias, scale="after the mask")


@pytest.mark.parametrize("build", [over_queries, weights_too, masked_then_scaled])
def test_other_products_around_softmax_are_not_fused(build: Build) -> None:
    check(build, [HEADS] * 3, {})


@pytest.mark.parametrize(("hidden", "guard"), [(-math.inf, True), (-math.inf, False), (-1e9, False)])
@pytest.mark.parametrize("added", [True, False])
def test_a_row_with_all_scores_masked_keeps_its_result(hidden: float, guard: bool, added: bool) -> None:
    def build(c: Recorder, q: Any, k: Any, v: Any, visible: Any) -> Any:
        seen = c(torch.gt, visible, 0.0)

        def mask(c: Recorder, scores: Any, _: Any) -> Any:
            if not added:
                return c(torch.where, seen, scores, hidden)
            return c(torch.add, scores, c(torch.where, seen, torch.zeros((), dtype=c.dtype), hidden))

        return attend(c, q, k, v, mask=mask, guard=guard)

    shapes = [HEADS] * 3 + [(B, 1, 1, T)]
    plain, fused, counts = rewritten(build, shapes, torch.float32)
    assert counts["attention"] == 1
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 5, 4) for _ in range(3)] + [torch.tensor([[1.0] * 5, [-1.0] * 5]).reshape(2, 1, 1, 5)]
    found, wanted = results_of(fused, inputs), results_of(plain, inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    if guard:  # NaN, spelled out
        assert all(bool(gradient.isfinite().all()) for gradient in found)
    elif math.isinf(hidden):  # NaN reaches the weights that make the values, either way
        assert bool(found[3].isnan().any()) == bool(wanted[3].isnan().any()) is True
    elif not added:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_dropout_between_softmax_and_values_is_fused_too() -> None:
    def build(c: Recorder, q: Any, k: Any, v: Any) -> Any:
        weights = c(F.softmax, c(torch.matmul, q, c("permute", k, [0, 1, 3, 2])), dim=-1)
        return c(torch.matmul, c.tracer.call_module("drop", Dropout(0.3), weights), v)

    _, fused, counts = rewritten(build, [HEADS] * 3, torch.float32)
    assert (counts["attention"], fused.get_submodule("attention_0").dropout) == (1, 0.3)


# -- sharing


def test_a_product_and_its_bias_become_linear_in_both_orders() -> None:
    check(lambda c, x: c(torch.add, c.weight(6), c(torch.matmul, x, c.weight(8, 6))), [(B, T, 8)], {"linear": 1})
    check(lambda c, x: c(torch.add, c(torch.matmul, x, c.weight(8, 6)), c.weight(6)), [(B, 8)], {"linear": 1})


@pytest.mark.parametrize("shape", [(1,), (T, 6), (1, 6)])
def test_a_bias_of_another_shape_is_not_fused(shape: tuple[int, ...]) -> None:
    if T in shape:
        check(lambda c, x, b: c(torch.add, c(torch.matmul, x, c.weight(8, 6)), b), [(B, T, 8), shape], {})
    else:
        check(lambda c, x: c(torch.add, c(torch.matmul, x, c.weight(8, 6)), c.weight(*shape)), [(B, T, 8)], {})


def test_rows_are_not_merged_for_a_linear_layer() -> None:
    def build(c: Recorder, x: Any) -> Any:
        flat = c(F.linear, c("reshape", x, [-1, 8]), c.weight(6, 8), c.weight(6))
        return c("reshape", flat, [c("size", x, 0), c("size", x, 1), 6])

    fused = check(build, [(B, T, 8)], {})
    assert [n.target for n in fused.graph.nodes if n.op.startswith("call")] == [F.linear]


def test_equal_calls_are_made_once_unless_they_are_random_or_their_operands_change() -> None:
    def build(c: Recorder, x: Any) -> Any:
        statistic = c.tracer.tensor("running", torch.zeros(8))
        sines = [c(torch.sin, x) for _ in range(3)]
        noise = [c(torch.rand_like, x) for _ in range(2)]
        reads = [c(torch.exp, statistic) for _ in range(2)]
        ones = [c(torch.mul, x, n) for n in (1.0, 0.0, -0.0)]
        return (*sines, *noise, *reads, *ones)

    _, fused, counts = rewritten(build, [(B, 8)], torch.float32)
    called = [n.target for n in fused.graph.nodes if n.op == "call_function"]
    assert counts["cse"] == 2
    assert [called.count(f) for f in (torch.sin, torch.rand_like, torch.exp, torch.mul)] == [1, 2, 2, 3]


def test_a_users_function_is_called_as_often_as_the_file_says() -> None:
    def drawn(x: Tensor) -> Tensor:
        return x + 1

    _, fused, _ = rewritten(lambda c, x: (c(drawn, x), c(drawn, x)), [(B, 8)], torch.float32)
    assert [n.target for n in fused.graph.nodes].count(drawn) == 2


def test_slices_that_cover_a_dimension_become_one_split() -> None:
    def build(c: Recorder, x: Any) -> Any:
        a, b, d = (c(strided, x, 2, i, i + 3, 1) for i in (0, 3, 6))
        return c(torch.add, a, c(torch.mul, b, d))

    fused = check(build, [(B, T, 9)], {"cut": 1})
    assert [n.target for n in fused.graph.nodes].count(torch.split) == 1
    check(lambda c, x: c(torch.mul, c(torch.select, x, 0, 1), c(torch.select, x, 0, 0)), [(2, B, 8)], {"cut": 1})


def test_slices_that_overlap_or_do_not_cover_the_dimension_stay() -> None:
    for spans in (((0, 3), (2, 6)), ((0, 3), (4, 6)), ((0, 3), (3, 5))):
        check(lambda c, x, spans=spans: c(torch.cat, [c(strided, x, 1, a, b, 1) for a, b in spans], 1), [(B, 6)], {})


def test_fuse_false_changes_no_node() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 14]> g (float[b, 4] x) => (float[b, 4] y) { s = Sigmoid(x) y = Mul(x, s) }'
    )
    assert [n.target for n in to_module(model, fuse=False).graph.nodes if n.op.startswith("call")] == [
        torch.sigmoid,
        torch.mul,
    ]
    assert [n.target for n in to_module(model).graph.nodes if n.op.startswith("call")] == [F.silu]
