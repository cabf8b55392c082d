"""The layers of a graph, and learning rates that fall with the depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.layer_scales import layer_scales, number_layers
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.optim.optimizers import build_optimizer
from onward.trainer.parallel.planning.planner import plan
from tests.support import graphs


def layer_of(layers: dict[str, int], part: str) -> set[int]:
    return {layer for name, layer in layers.items() if part in name}


def test_each_block_of_a_transformer_is_a_layer_between_embeddings_and_head() -> None:
    layers = number_layers(to_module(graphs.tiny_llama(num_layers=4)))
    assert layer_of(layers, "embed.weight") == {0}
    for block in range(4):
        assert layer_of(layers, f"layers.{block}.") == {block + 1}
    assert layer_of(layers, "lm_head") == layer_of(layers, "norm.weight") - {1, 2, 3, 4} == {5}


def test_the_factors_are_those_of_electra_and_beit() -> None:
    scales = layer_scales(to_module(graphs.tiny_transformer()), 0.5)
    assert scales["transformer.wte.weight"] == 0.5**3, "it is read by the head, too, and belongs to its first reader"
    assert scales["transformer.h.0.mlp.c_fc.weight"] == 0.5**2
    assert scales["transformer.h.1.ln_1.bias"] == 0.5
    assert scales["transformer.ln_f.weight"] == 1.0
    assert layer_scales(to_module(graphs.tiny_transformer()), 1.0) == {}


def test_without_repeated_blocks_a_layer_is_a_product_with_what_follows_it() -> None:
    layers = number_layers(to_module(graphs.tiny_resnet()))
    assert layer_of(layers, "conv1.weight") == {0, 1, 3}
    assert layers["bn1.weight"] == layers["conv1.weight"] == 0
    assert layers["layer1.0.bn2.bias"] == layers["layer1.0.conv2.weight"] == 2
    assert layers["layer2.0.downsample.0.weight"] == layers["layer2.0.conv1.weight"]
    assert layers["classifier.weight"] == layers["classifier.bias"] == max(layers.values()) == 5


def test_layers_without_trained_weights_do_not_count() -> None:
    module = to_module(graphs.tiny_llama(num_layers=4))
    select_trained(module, train=("layers.3.*", "lm_head*"), freeze=())
    layers = number_layers(module)
    assert layer_of(layers, "layers.3.") == {0}
    assert layer_of(layers, "lm_head") == {1}


def test_a_graph_of_one_layer_is_refused() -> None:
    g = GraphWriter("one")
    g.output(g.op("MatMul", g.input("x", ("batch", 3)), g.weight("w", np.ones((3, 2), np.float32))), ("batch", 2))
    with pytest.raises(ConfigError, match=r"layer_decay 0.9: all 1 trained weights are in one layer"):
        layer_scales(to_module(g.model()), 0.9)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5])
def test_a_decay_outside_of_0_to_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="layer_decay"):
        OptimizerConfig(layer_decay=decay)


def test_a_pattern_of_weights_multiplies_the_factor_of_their_layer() -> None:
    config = OptimizerConfig.model_validate(
        {"name": "sgd", "learning_rate": 1.0, "weights": [{"pattern": "head*", "learning_rate_scale": 10.0}]}
    )
    weights = {name: torch.zeros(1, requires_grad=True) for name in ("body", "head.weight", "head.bias")}
    for weight in weights.values():
        weight.grad = torch.ones(1)
    scales = {"body": 0.25, "head.weight": 0.5}
    build_optimizer(config, weights.items(), layer_scales=scales).step()
    assert {name: -float(weight.detach()) for name, weight in weights.items()} == {
        "body": 0.25,
        "head.weight": 5.0,
        "head.bias": 10.0,
    }


def test_onward_plan_has_the_layer_and_the_rate_of_each_weight(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(graphs.tiny_mlp().SerializeToString())
    rows: dict[str, Any] = {"features": np.zeros((20, 4), np.float32), "label": np.zeros((20, 1), np.float32)}
    np.savez(tmp_path / "data.npz", **rows)
    settings: dict[str, Any] = {
        "model": {"path": tmp_path / "model.onnx", "loss": "mse"},
        "data": {"source": str(tmp_path / "data.npz")},
        "train": {"num_steps": 1, "global_batch_size": 4},
        "launch": {"device": "cpu"},
    }
    assert plan(build_config(settings)).rates == ()
    weights = [{"pattern": "fc2.bias", "learning_rate_scale": 2.0}]
    decayed = {"optimizer": {"learning_rate": 0.1, "layer_decay": 0.5, "weights": weights}}
    found = {each.weight: (each.layer, each.learning_rate) for each in plan(build_config(settings | decayed)).rates}
    assert found == {
        "fc1.weight": (0, 0.05),
        "fc1.bias": (0, 0.05),
        "fc2.weight": (1, 0.1),
        "fc2.bias": (1, pytest.approx(0.2)),
    }
