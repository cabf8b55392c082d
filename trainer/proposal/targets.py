"""Propose what is learned: which outputs the losses read, the losses, the columns of labels, and a new head.

For each output the possible readings are listed (readings.py). One is taken where names or values leave one; else the
question is asked in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onward.trainer.config.loss_rules import LOSS_RULES, LossName
from onward.trainer.config.section import as_tuple
from onward.trainer.data.reading.series_windows import AHEAD
from onward.trainer.data.schema.signature import FLOAT_NAMES, Signature, TensorInfo
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.outputs import class_labels, score_tensors
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import bare_name, shown
from onward.trainer.proposal.readings import Reading, names_in_cells, readings, with_fitting_head
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.rehearsal.trials.data_of_model import LABELS


@dataclass(frozen=True)
class Target:
    """An output that a loss may read."""

    info: TensorInfo
    scores: str
    """The tensor of scores behind it, for losses of classes; its own name if it holds scores."""
    scores_reason: str = ""


def own_loss(signature: Signature) -> TensorInfo | None:
    """Return the output that is the graph's own loss: a single number for all rows; None if there is none."""
    floats = [info for info in signature.outputs if info.dtype in FLOAT_NAMES]
    scalars = [info for info in floats if info.shape == ()]
    # an exporter may leave the shape of a loss unknown, or write it as one element
    single_numbers = [info for info in floats if info.shape in (None, (), (1,))]
    named = [info for info in single_numbers if "loss" in info.name.lower()]
    # the name decides where several outputs are scalars, such as a loss and an accuracy
    return next((candidates[0] for candidates in (named, scalars) if len(candidates) == 1), None)


def targets(model: onnx.ModelProto, signature: Signature, given: object = None) -> list[Target]:
    """Return the outputs of floats with the scores behind them; given: `model.output`, which then decides."""
    if given:
        named = [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]
        return [Target(info, info.name) for info in signature.outputs if info.name in named]
    floats = []
    descriptions = dict(score_tensors(model.graph))
    # the scores behind an output are for losses of classes; other losses read the output itself
    for info in signature.outputs:
        scores = next(score_tensors(model.graph, [info.name]), None)
        # a scalar has no row to be compared with a label
        if info.dtype in FLOAT_NAMES and info.shape != ():
            name, description = scores or (info.name, descriptions.get(info.name, ""))
            is_own_scores = scores is not None and name == info.name
            floats.append(Target(info, name, "" if is_own_scores else description))
    if floats:
        return floats
    # the file returns class labels only, which have no gradient: a loss reads the scores behind them
    return [
        Target(TensorInfo(name, "float32", (None, None)), name, description)
        for name, description in list(score_tensors(model.graph))[:1]
    ]


def named_labels(facts: Facts, found: Iterable[Target]) -> list[str]:
    """Return the columns that are labels by their names: those of outputs, else one of the usual names."""
    ending = AHEAD if facts.data.table.window else ""  # what is predicted is the future
    outputs = [target.info.name + ending for target in found]
    # a column that is called like an output is meant for it, whatever else is there
    by_output = [name for name in facts.schema if name in outputs]
    usual = [name for name in facts.schema if name.lower() in LABELS]
    return [*by_output, *(name for name in usual[:1] if name not in by_output)]


def propose_targets(
    draft: Draft, model: onnx.ModelProto, facts: Facts, found: Sequence[Target], free: Sequence[str]
) -> None:
    """Propose the losses; free: columns that feed no input. Raises ConfigError if no column can be a label."""
    given = draft.value("data.label")
    columns = [given] if isinstance(given, str) else list(given or free)
    if facts.data.table.window and not given:  # what is predicted is the future
        columns = [name for name in columns if name.endswith(AHEAD)]
    possible = {target.info.name: readings(facts, target.info, columns) for target in found}
    # model.num_classes is the number of one output: of several none gets a new head
    if len(found) > 1:
        possible = {name: with_fitting_head(ways) for name, ways in possible.items()}
    chosen = _chosen(possible, given=bool(given))
    read = [target for target in found if chosen[target.info.name]]
    if not read:
        raise ConfigError(_no_label(facts, found, columns))
    # outputs without labels stay in the file, and are not trained
    unread = [target.info.name for target in found if target not in read]
    if unread:
        draft.notes.append(f"not trained, for want of labels: output {', '.join(unread)}")
    if len(read) == 1:
        _propose_one(draft, model, facts, read[0], chosen[read[0].info.name], first=_is_first(model, read[0]))
    else:
        for position, target in enumerate(read):
            _propose_entry(draft, position, target, chosen[target.info.name])


def _no_label(facts: Facts, found: Iterable[Target], columns: Sequence[str]) -> str:
    shown_outputs = ", ".join(f"{target.info.name} {shown(target.info)}" for target in found) or "none of floats"
    shown_columns = ", ".join(f"{name} ({facts.column(name).kind})" for name in columns) or "none that is free"
    problem = (
        f"no column of {facts.data.source} can be the labels of an output: the outputs are {shown_outputs}, the "
        f"columns {shown_columns}; name the column (data.label=...) and the loss (model.loss=...)"
    )
    lists = names_in_cells(facts, columns)
    return f"{problem}; {lists}" if lists else problem


def _is_first(model: onnx.ModelProto, target: Target) -> bool:
    """Return whether an output is the first of the file, which a loss reads where no setting names another."""
    return target.info.name == next((value.name for value in model.graph.output), "")


def _chosen(possible: dict[str, list[Reading]], *, given: bool) -> dict[str, list[Reading]]:
    """Return output -> the readings that remain: one if it is decided."""
    left = {name: _preferred(name, ways, several=len(possible) > 1) for name, ways in possible.items()}
    # a decided output takes its columns from the others, which may decide one of these; until nothing changes
    while not given and len(left) > 1:
        # columns of outputs that are decided by now
        taken = {as_tuple(ways[0].label): name for name, ways in left.items() if len(ways) == 1}
        fewer = {name: _not_taken(name, ways, taken) for name, ways in left.items()}
        if fewer == left:
            break
        left = fewer
    return left


def _not_taken(output: str, ways: list[Reading], taken: Mapping[tuple[str, ...], str]) -> list[Reading]:
    """Return the readings of columns that no other output has taken; all if none would be left."""
    if len(ways) < 2:
        return ways
    free = [reading for reading in ways if taken.get(as_tuple(reading.label), output) == output]
    return free or ways


def _preferred(output: str, ways: list[Reading], *, several: bool) -> list[Reading]:
    """Return the readings that names and values leave of an output."""
    by_name = [reading for reading in ways if reading.label == output]
    if not by_name:
        # such as columns age_1, age_2 for an output age
        by_name = [reading for reading in ways if _begins_like(reading, output)]
    # a usual name such as "label" does not say of which of several outputs it is
    if not by_name and not several:
        by_name = [reading for reading in ways if _has_usual_name(reading)][:1]
    return by_name or with_fitting_head(ways) or ways


def _begins_like(reading: Reading, output: str) -> bool:
    stem = bare_name(output)
    return all(bare_name(name).startswith(stem) for name in as_tuple(reading.label))


def _has_usual_name(reading: Reading) -> bool:
    return isinstance(reading.label, str) and reading.label.lower() in LABELS


def _propose_one(
    draft: Draft, model: onnx.ModelProto, facts: Facts, target: Target, ways: Sequence[Reading], *, first: bool
) -> None:
    """Propose the loss of the only output that is read, in the short form."""
    if len(ways) > 1:
        choices = {reading.label: reading.loss for reading in ways}
        draft.ask("data.label", f"the column that {target.info.name} predicts", choices)
    elif ways[0].label != "label":
        draft.set("data.label", _plain(ways[0].label), ways[0].reason)
    losses = _labels_of_losses(ways)
    if len(losses) > 1:
        draft.ask("model.loss", "the loss, which depends on data.label", losses)
    else:
        # the default of data.label has no line of its own, so the loss has the reason
        draft.set("model.loss", ways[0].loss, ways[0].reason if ways[0].label == "label" else "")
    tensor = target.scores if LOSS_RULES[ways[0].loss].applies else target.info.name
    if tensor != target.info.name or tensor not in {value.name for value in model.graph.output}:
        draft.set("model.output", tensor, target.scores_reason)
    elif not first:
        draft.set("model.output", tensor, "the output that has labels")
    if len(ways) > 1:
        return
    (way,) = ways
    for key, value in way.settings.items():
        draft.set(f"loss.{key}", value, way.reason)
    if way.axes:
        draft.ask(
            "loss.class_axis",
            f"the axis of {target.info.name} {shown(target.info)} with the classes",
            dict.fromkeys(way.axes, ""),
        )
    if way.classes:
        draft.set("model.num_classes", way.classes, f"a new head: {way.reason}")
    if way.sorted_ids:
        draft.set("data.classes", "sorted", way.reason)
    _propose_class_order(draft, model, facts, way)
    if way.loss == "cross_entropy" and isinstance(way.label, str):
        different = facts.distinct(way.label)
        if len(different) == 1:
            only = repr(different[0])
            draft.notes.append(f"every label is {only} in {facts.rows}: nothing can be learned from one class")


def _labels_of_losses(ways: Iterable[Reading]) -> dict[LossName, str]:
    """Return loss -> the labels for which it is right."""
    # two columns may need the same loss, which is then asked once
    labels: dict[LossName, list[str]] = {}
    for reading in ways:
        labels.setdefault(reading.loss, []).append(str(reading.label))
    return {loss: f"for {' or '.join(names)}" for loss, names in labels.items()}


def _propose_class_order(draft: Draft, model: onnx.ModelProto, facts: Facts, way: Reading) -> None:
    """Propose the order of classes that operators of the file hold, where the labels have their names."""
    # of a new head the file's order says nothing
    if not isinstance(way.label, str) or way.classes:
        return
    order = class_labels(model.graph)
    # numbers 0, 1, ... are their own order, and without operators of classes there is none
    if order == [str(at) for at in range(len(order))]:
        return
    # all labels of the data are names of the file, so that its order is the one that it was made with
    if set(map(str, facts.distinct(way.label))) <= set(order):
        draft.set("data.classes", order, "the file's own order of classes")


def _propose_entry(draft: Draft, position: int, target: Target, ways: Sequence[Reading]) -> None:
    """Propose one of several [[loss]]."""
    # an entry of the list has no short form, so that each is written out
    table = f"loss.{position}"
    tensor = target.scores if LOSS_RULES[ways[0].loss].applies else target.info.name
    draft.set(f"{table}.output", tensor, target.scores_reason if tensor != target.info.name else "")
    if len(ways) > 1:
        choices = {reading.label: reading.loss for reading in ways}
        draft.ask(f"{table}.label", f"the column that {target.info.name} predicts", choices)
    else:
        draft.set(f"{table}.label", _plain(ways[0].label), ways[0].reason)
    losses = _labels_of_losses(ways)
    if len(losses) > 1:
        draft.ask(f"{table}.name", "the loss, which depends on the label", losses)
    else:
        draft.set(f"{table}.name", ways[0].loss, "")
    if len(ways) == 1:
        for key, value in ways[0].settings.items():
            draft.set(f"{table}.{key}", value, ways[0].reason)
        if ways[0].axes:
            axes = dict.fromkeys(ways[0].axes, "")
            draft.ask(f"{table}.class_axis", f"the axis of {target.info.name} with the classes", axes)


def _plain(label: str | tuple[str, ...]) -> str | list[str]:
    return label if isinstance(label, str) else list(label)
