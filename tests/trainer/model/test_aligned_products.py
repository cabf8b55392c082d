"""Products in half precision with aligned rows compute what they computed before, with the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.model import aligned_products
from onward.trainer.model.aligned_products import align_products, aligned_linear, aligned_matmul
from onward.trainer.model.losses import chunked_loss
from onward.trainer.model.weight_casts import insert_casts
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph

GPU = torch.device("cuda")


def gpt2_graph(vocabulary: int) -> ImportedGraph:
    model = build_gpt2(vocab_size=vocabulary, sequence_length=8, num_layers=1, num_heads=2, width=16, dropout=0.0)
    graph = to_module(model)
    insert_casts(graph, PrecisionConfig(compute="bf16"))
    return graph


def loss_and_gradients(graph: torch.fx.GraphModule, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = graph(tokens)
    logits = logits[0] if isinstance(logits, tuple) else logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    parameters = list(graph.parameters())
    return loss, list(torch.autograd.grad(loss, parameters))


def num_aligned(graph: ImportedGraph, device: torch.device) -> int:
    align_products(graph, device)
    return sum(node.target in (aligned_linear, aligned_matmul) for node in graph.graph.nodes)


def test_an_output_layer_with_aligned_rows_has_the_same_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aligned_products, "LEAST_FEATURES", 33)
    graph, tokens = gpt2_graph(61), torch.arange(16).reshape(2, 8)
    loss, gradients = loss_and_gradients(graph, tokens)
    assert num_aligned(graph, torch.device("cpu")) == 0
    assert num_aligned(graph, GPU) == 1  # the vocabulary; 48 and 64 features are aligned
    aligned_loss, aligned_gradients = loss_and_gradients(graph, tokens)
    torch.testing.assert_close(aligned_loss, loss, rtol=1e-5, atol=0)
    for found, expected in zip(aligned_gradients, gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


def test_small_layers_stay_as_they_are() -> None:
    assert num_aligned(gpt2_graph(61), GPU) == 0


def test_the_result_is_a_view_with_aligned_rows() -> None:
    x, weight, bias = torch.rand(3, 4), torch.rand(13, 4), torch.rand(13)
    found = aligned_linear(x, weight, bias)
    assert found.stride(0) == 16
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    torch.testing.assert_close(aligned_matmul(x, weight.t()), x @ weight.t())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the compiler itself
def test_the_compiled_cross_entropy_equals_the_one_by_chunks_for_any_number_of_rows() -> None:
    for rows in (6, 5):
        logits = torch.randn(rows, 24, dtype=torch.bfloat16)[:, :19].requires_grad_()
        labels = torch.arange(rows) % 19
        labels[0] = -100
        found = []
        for function in (chunked_loss.cross_entropy, chunked_loss.compiled_cross_entropy):
            loss = function(logits, labels, -100)
            found.append((loss, *torch.autograd.grad(loss, logits)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-4)
