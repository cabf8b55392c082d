"""Propose how columns of tables are prepared: missing cells, scales that differ, and the numbers of categories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.text import PACKED
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.data.tables.column_patterns import matching
from onward.trainer.data.text.graph_limits import embedding_rows
from onward.trainer.onnx_graph.files.index import Index
from onward.trainer.proposal.draft import INPUTS, Draft
from onward.trainer.proposal.source_summary import Facts

MOST_NAMED = 4
"""Columns that a reason names."""
FAR = 10.0
"""Standard deviations or means of columns that differ by more than this factor from 1 are scaled."""


def feeding(draft: Draft, facts: Facts, info: TensorInfo) -> list[str]:
    """Return the columns that feed an input; [] where it is not decided."""
    given = draft.value(f"{INPUTS}.{info.name}", info.name)
    names = matching([given] if isinstance(given, str) else given, list(facts.schema))
    return [name for name in names if name in facts.schema]


def propose_tables(
    draft: Draft, facts: Facts, graph: onnx.GraphProto, inputs: Sequence[TensorInfo], *, trained: bool
) -> None:
    """Propose [data.table] for the columns of numbers that feed inputs of floats."""
    _propose_missing(draft, facts, inputs)
    unscaled = [info for info in inputs if not scales_itself(graph, info.name)]
    if trained or not (names := _columns_of_floats(draft, facts, unscaled)):
        return
    spreads = np.concatenate([_per_element(facts, name).std(axis=0) for name in names])
    middles = np.concatenate([np.abs(_per_element(facts, name).mean(axis=0)) for name in names])
    # a constant column has no scale
    used = spreads[spreads > 0]
    if not used.size:
        return
    if used.max() > FAR or used.min() < 1 / FAR or (middles > FAR).any():
        reason = f"standard deviations are {used.min():.3g} to {used.max():.3g}, means up to {middles.max():.3g}"
        draft.set("data.table.standardise", "standard", reason)


def _columns_of_floats(draft: Draft, facts: Facts, inputs: Iterable[TensorInfo]) -> list[str]:
    """Return the columns of numbers that feed single numbers, or vectors of them."""
    columns: list[str] = []
    for info in inputs:
        # the rows of a window are vectors, one for each time
        takes_rows = len(info.sample_shape or (1,)) <= 1 or facts.data.table.window
        if "float" in info.dtype and takes_rows:
            numbers = [name for name in feeding(draft, facts, info) if facts.column(name).holds_numbers]
            columns += [name for name in numbers if name in facts.values]
    return columns


def _propose_missing(draft: Draft, facts: Facts, inputs: Iterable[TensorInfo]) -> None:
    names = _columns_of_floats(draft, facts, inputs)
    # a missing text is a bad row as well, unless the setting says what becomes of missing cells
    categories = draft.value("data.table.categories", ())
    gaps = [name for name in names if facts.missing[name]]
    unknown = [name for name in categories if facts.missing.get(name)]
    if missing := [*gaps, *unknown]:
        cells = sum(facts.missing[name] for name in missing)
        named = ", ".join(missing[:MOST_NAMED])
        if len(missing) > MOST_NAMED:
            named += ", ..."
        reason = f"{cells} cells of {len(missing)} columns ({named}) are missing in {facts.rows}"
        if unknown:
            reason += "; texts get the id of unknown ones"
        draft.set("data.table.missing", "mean", reason)


def propose_vocabularies(draft: Draft, facts: Facts, graph: onnx.GraphProto, inputs: Iterable[TensorInfo]) -> None:
    """Propose the order of the categories whose embedding has a row for each text and none for unknown ones."""
    categories = draft.value("data.table.categories", ())
    vocabularies: dict[str, list[str]] = {}
    tables: dict[str, None] = {}
    for info in inputs:
        table = embedding_rows(graph, info.name)
        for name in set(categories).intersection(feeding(draft, facts, info)):
            # by default the id 0 is that of unknown texts, and needs a row more than there are texts
            if table and table[0] == len(facts.distinct(name)) and not facts.missing[name]:
                vocabularies[name] = facts.distinct(name)
                tables[table[1]] = None
    if vocabularies:
        reason = f"{', '.join(tables)} has a row for each of these texts, and none for unknown ones"
        orders = {name: vocabularies.get(name, "sorted") for name in categories}
        draft.set("data.table.categories", orders, f"{reason}; sorted, which is right for fresh weights alone")


RESCALES = ("Sub", "Div", "Mul", "Add")
PASSES = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "FeatureVectorizer", "Imputer")
"""Operators behind which an input has its own scale still."""


def scales_itself(graph: onnx.GraphProto, name: str) -> bool:
    """Return whether a file rescales each column of an input before a layer reads it, as a pipeline of scikit-learn."""
    stored = Index(graph).stored
    reached = {name}
    for node in graph.node:  # in topological order
        if not reached.intersection(node.input):
            continue
        constants = [stored[operand] for operand in node.input if operand in stored]
        if node.op_type in ("Scaler", "Normalizer", "BatchNormalization"):
            return True
        # a scalar changes all columns alike, so their scales differ still
        if node.op_type in RESCALES and any(max(tensor.dims, default=1) > 1 for tensor in constants):
            return True
        if node.op_type in PASSES:
            reached.update(node.output)
    return False


def propose_rows(draft: Draft, facts: Facts) -> None:
    """Propose to leave out the rows whose label is missing, of which nothing can be learned."""
    of_losses = [key for key in draft.entries if key.startswith("loss.")]
    keys = ["data.label", *(key for key in of_losses if key.endswith(".label"))]
    names: list[str] = []
    for key in keys:
        labels = draft.value(key, "label" if key == "data.label" else ())
        names += [labels] if isinstance(labels, str) else labels
    missing = {name: facts.missing[name] for name in names if facts.missing.get(name)}
    if missing:
        shown = ", ".join(f"{count} of {name}" for name, count in missing.items())
        reason = f"labels are missing or cannot be read in {facts.rows} ({shown}): their rows are left out and counted"
        draft.set("data.bad_rows", "skip", reason)


def propose_split(draft: Draft, facts: Facts) -> None:
    """Propose which rows are held out for evaluation: a tenth, of classes the same share of each."""
    if draft.value("data.evaluation_source"):
        return
    fraction = draft.value("data.evaluation_fraction", DataConfig.model_fields["evaluation_fraction"].default)
    count = f"about {max(1, round(fraction * facts.num_rows)):,} of {facts.num_rows:,} rows"
    reason = count if facts.is_all and facts.format != "text" else "the share of rows, or of files of text"
    draft.set("data.evaluation_fraction", fraction, f"{reason}: not trained on, but measured")
    label = draft.value("data.label", "label")
    if not _holds_classes(draft, facts, label):
        return
    values, counts = np.unique(np.asarray(facts.values[label]), return_counts=True)
    if len(values) > 1 and counts.min() * fraction >= 1:  # of a smaller class there may be no row to evaluate on
        draft.set("data.split", "stratified", f"each of {len(values)} classes has the same share held out")


def _holds_classes(draft: Draft, facts: Facts, label: object) -> bool:
    """Return whether the label is one column with a class in each row, by which rows can be divided."""
    if draft.value("model.loss") != "cross_entropy" or not isinstance(label, str) or "data.label" in draft.questions:
        return False
    if facts.data.table.window or facts.format == "text" or draft.value("data.text.task") in ("tokens", *PACKED):
        return False
    return label in facts.values and not facts.column(label).shape


def _per_element(facts: Facts, name: str) -> Array:
    """Return the values of a column of numbers as [rows, elements]."""
    values = facts.values[name]
    # rows of varying length have no element in common but as numbers of one distribution
    if isinstance(values, list):
        return facts.joined(name).reshape(-1, 1).astype(np.float64)
    return values.reshape(len(values), -1).astype(np.float64)
