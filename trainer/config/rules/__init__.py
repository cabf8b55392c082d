"""Cross-section rules: which settings contradict each other.

A rule is a function of the sections it reads. It yields one sentence for each contradiction: the settings, their
values, and what to change. Each file holds the rules of one subject.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onward.trainer.config.rules import metric_rules as measures
from onward.trainer.config.rules import model_and_data, updates
from onward.trainer.config.rules import rank_rules as ranks
from onward.trainer.config.rules import result_rules as results

Sections = Mapping[str, Any]

CROSS_SECTION_RULES: tuple[Callable[..., Iterable[str]], ...] = (
    ranks.world_size,
    updates.accumulation,
    ranks.pipeline,
    ranks.replicas,
    ranks.device,
    ranks.launcher,
    ranks.split_backward,
    ranks.sequence,
    ranks.recomputation,
    updates.length,
    updates.loss_scale,
    updates.optimizer,
    updates.training_files,
    updates.schedule,
    updates.average,
    model_and_data.weights,
    measures.metrics,
    results.promotion,
    model_and_data.text,
    measures.bytes_of_a_token,
    model_and_data.surgery,
    measures.losses,
    model_and_data.adapters,
    model_and_data.dropout,
    ranks.compilation,
    results.export,
    results.profile,
    model_and_data.aware,
)
"""Each rule names the sections it reads as its parameters."""


def check_cross_section_rules(sections: Sections) -> list[str]:
    """Return one sentence for each contradiction; a rule is skipped if a section that it reads is absent."""
    problems: list[str] = []
    for rule in CROSS_SECTION_RULES:
        # the parameters of a rule name the sections that it reads
        reads = inspect.signature(rule).parameters
        if reads.keys() <= sections.keys():
            problems += rule(**{name: sections[name] for name in reads})
    return problems
