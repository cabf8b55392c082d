"""What a run trains, and what of it comes back: the one way from a configuration to a module, and the way back.

the file -> surgery (untie, head) -> the part from model.start to model.output -> module -> regulariser -> adapters
the file with what surgery changed <- all weights, adapters merged                      <- trained
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import fx

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.adapters import Adapter, add_adapters, merged
from onward.trainer.onnx_graph.surgery import apply_surgery, extract_subgraph
from onward.trainer.onnx_import.converters import load_converters
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.passes.dropout import add_dropout
from onward.trainer.onnx_import.train_selection import select_trained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainee:
    """A module to train, and where its weights belong."""

    module: ImportedGraph
    """On the CPU; its weights, frozen ones and adapters included: `named_weights`."""
    model: onnx.ModelProto
    """The whole graph as the user gets it back, with weights not trained yet: the file's own, a new head's."""
    base: Path
    """The directory of what the model keeps in other files."""
    adapters: tuple[Adapter, ...]
    plain: fx.Graph
    """The module's graph without its adapters."""
    dropout: tuple[str, ...]
    """Where `graph.dropout` went."""


@dataclass(frozen=True)
class Finished:
    """What is written: `write_model(finished.module, finished.model, source, target)`."""

    module: ImportedGraph
    """Computes what the trainee computes, adapters merged; its weights are those of the file, by name. It shares
    them with the trainee, but for the merged ones."""
    model: onnx.ModelProto
    """The whole graph, as in Trainee."""


def open_trainee(config: RunConfig) -> Trainee:
    """Load the model and make of it what the configuration trains. Every rank by itself, each the same bits.

    Raises ConfigError when file and configuration contradict each other, UnsupportedModel when the file cannot
    be trained.
    """
    load_converters(config.model.converters)
    model, base = load_model(config.model.path), config.model.path.parent
    apply_surgery(model, config.model, seed=config.train.seed)
    chosen = (*config.model.train, *config.lora.also_train)
    module = to_module(
        judged(model, config.model), base=base, fuse=config.graph.fuse, tie=config.model.tie, train=chosen
    )
    dropout = _regularise(module, config.graph.dropout)
    plain = copy.deepcopy(module.graph)
    if not config.lora.weights:
        select_trained(module, train=config.model.train, freeze=config.model.freeze)
        return Trainee(module, model, base, (), plain, dropout)
    adapters = add_adapters(module, config.lora, seed=config.train.seed)
    own = tuple(name for adapter in adapters for name in (adapter.a, adapter.b))
    select_trained(module, train=(*own, *config.lora.also_train), freeze=config.model.freeze)
    return Trainee(module, model, base, adapters, plain, dropout)


def _regularise(module: ImportedGraph, ratio: float) -> tuple[str, ...]:
    if not ratio:
        return ()
    places = tuple(add_dropout(module, ratio))
    if not places:
        raise ConfigError(
            f"graph.dropout {ratio:g}: the graph has no embedding, residual branch or attention to put it on; remove it"
        )
    log.info("dropout of %g went to: %s", ratio, ", ".join(places))
    return places


def finished(trainee: Trainee) -> Finished:
    """What the user gets back of a trainee: its weights as they are now, adapters merged, in the whole graph."""
    module = merged(trainee.module, trainee.plain, trainee.adapters) if trainee.adapters else trainee.module
    return Finished(module, trainee.model)


def judged(model: onnx.ModelProto, config: ModelConfig) -> onnx.ModelProto:
    """The part of a whole graph that computes what the module computes; the graph itself if nothing is cut off.

    Takes the whole graph as it came in (after surgery) or as it is written. What it keeps in other files is
    still referred to there.
    """
    return extract_subgraph(model, config)
