"""Before the launch it is said which weights Muon takes and that a rate is unusual; wrong patterns are refused."""

from __future__ import annotations

from typing import Any

import pytest

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.rehearsal.guards.batch_checks import update_problems, update_warnings
from tests.support import graphs


def config(**values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate(values)


def test_muon_takes_the_matrices_of_hidden_layers_and_says_which() -> None:
    module = to_module(graphs.tiny_llama())
    matrices = find_matrices(module)
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate", "mlp.up", "mlp.down")
    assert matrices == {f"layers.{number}.{layer}.weight": 0 for number in range(2) for layer in layers}
    (said,) = update_warnings(config(name="muon", learning_rate=0.02), module)
    assert said.what.startswith("Muon updates 14 of 21 weights (layers.0.q_proj.weight, ")
    assert "AdamW the others (embed.weight, " in said.what
    assert "with 0.0003" in said.what
    by_pattern = [{"pattern": "*_proj*", "rule": "adamw"}, {"pattern": "lm_head.weight", "rule": "muon"}]
    (said,) = update_warnings(config(name="muon", learning_rate=0.02, weights=by_pattern), module)
    assert said.what.startswith("Muon updates 7 of 21 weights")


def test_tied_embeddings_and_kernels_are_left_to_adamw() -> None:
    tied = find_matrices(to_module(graphs.tiny_transformer()))
    assert len(tied) == 8
    assert all(outputs == 1 and ".h." in name for name, outputs in tied.items()), "MatMul stores [in, out]"
    kernels = to_module(graphs.tiny_resnet())
    assert find_matrices(kernels) == {}
    (problem,) = update_problems(config(name="muon"), kernels)
    assert "no trained weight is a matrix of a hidden layer; use adamw" in problem
    assert update_problems(config(name="muon", weights=[{"pattern": "*conv*", "rule": "muon"}]), kernels) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "lion"}, "0.001 is unusual for lion, which is used with rates from 0 to 0.0004"),
        ({"name": "adafactor"}, "0.001 is unusual for adafactor, which is used with rates from 0.0025"),
        ({"name": "muon"}, "0.001 is unusual for muon, which is used with rates from 0.002 to 0.2"),
    ],
)
def test_the_default_rate_is_said_to_be_unusual_where_the_rule_needs_another(
    settings: dict[str, Any], said: str
) -> None:
    module = to_module(graphs.tiny_llama())
    assert said in next(iter(update_warnings(config(**settings), module))).what
    assert "learning_rate" not in [warning.key for warning in update_warnings(config(name="adamw"), module)]
    (large,) = update_warnings(config(name="adamw", learning_rate=1e3), module)
    assert "learning_rate 1000 is unusual for adamw, which is used with rates from 0 to 1" in large.what
    assert not list(update_warnings(config(name="sgd", learning_rate=16.0), module))


def test_wrong_patterns_are_refused_together_before_the_launch() -> None:
    module = to_module(graphs.tiny_llama())
    wrong = [{"pattern": "layer.*", "alpha": 0.5}, {"pattern": "norm.weight", "rule": "muon"}]
    problems = update_problems(config(name="muon", weights=wrong), module)
    assert [problem.split(": ")[1].split(" needs")[0] for problem in problems] == [
        "pattern 'layer.*' matches no weight that is trained",
        "rule 'muon' of 'norm.weight' [32]",
    ]
