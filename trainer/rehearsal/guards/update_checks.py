"""Check the optimizer's settings against the weights: patterns, learning rate, which weights Muon takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.errors import few
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.optim.optimizers import settings_problems
from onward.trainer.optim.weight_settings import settings_of
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.run.records import ExporterWarning


def update_problems(optimizer: OptimizerConfig, module: ImportedGraph) -> list[str]:
    """Return what is wrong with the settings by pattern, for the weights that are trained."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(module).items() if tensor.requires_grad}
    # patterns are checked against the trained weights alone
    problems = list(settings_problems(optimizer, shapes, shapes))
    if optimizer.name == "muon" and not _by_muon(optimizer, module):
        problems.append(
            "optimizer.name 'muon': no trained weight is a matrix of a hidden layer; use adamw, or choose weights "
            "or kernels with [[optimizer.weights]] rule = 'muon'"
        )
    return problems


def update_warnings(optimizer: OptimizerConfig, module: ImportedGraph) -> Iterator[ExporterWarning]:
    """Yield what may not be intended: an unusual learning rate, and Muon's choice of weights."""
    # with Muon's `match_rms_adamw` the rate is on the scale of AdamW
    low, high = UPDATE_RULES[optimizer.name].rates
    if not low <= optimizer.learning_rate <= high and (optimizer.name, optimizer.muon.scale) != (
        "muon",
        "match_rms_adamw",
    ):
        yield ExporterWarning(
            key="learning_rate",
            what=f"optimizer.learning_rate {optimizer.learning_rate:g} is unusual for {optimizer.name}, which is used "
            f"with rates from {low:g}" + (f" to {high:g}" if high < math.inf else ""),
            remedy="set optimizer.learning_rate, or find it with a short run at each of several rates",
        )
    if optimizer.name == "muon":
        trained = [name for name, tensor in named_weights(module).items() if tensor.requires_grad]
        chosen = _by_muon(optimizer, module)
        others = [name for name in trained if name not in chosen]
        yield ExporterWarning(
            key="muon",
            what=f"Muon updates {len(chosen)} of {len(trained)} weights ({few(chosen)}), AdamW the others "
            f"({few(others)}) with {optimizer.muon.adamw_learning_rate:g}",
            remedy="to change it: [[optimizer.weights]] pattern = '...', rule = 'muon' or 'adamw'",
        )


def _by_muon(optimizer: OptimizerConfig, module: ImportedGraph) -> list[str]:
    outputs = find_matrices(module)
    trained = [name for name, tensor in named_weights(module).items() if tensor.requires_grad]
    return [name for name in trained if settings_of(optimizer, name, outputs=outputs.get(name)).rule == "muon"]
