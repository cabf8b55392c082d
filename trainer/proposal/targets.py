"""Propose what is learned: which outputs the losses read, the losses, the columns of labels, and a new head.

For each output the possible readings are listed (readings.py). One is taken where names or values leave one; else the
question is asked in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.data.reading.series_windows import AHEAD
from onward.trainer.data.schema.signature import FLOAT_NAMES, Signature, TensorInfo
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.outputs import class_labels, score_tensors
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import shown
from onward.trainer.proposal.readings import Reading, names_in_cells, readings
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
    named = [info for info in floats if "loss" in info.name.lower() and info.shape in (None, (), (1,))]
    return next((found[0] for found in (named, scalars) if len(found) == 1), None)


def targets(model: onnx.ModelProto, signature: Signature, given: object = None) -> list[Target]:
    """Return the outputs of floats with the scores behind them; given: `model.output`, which then decides."""
    if given:
        named = [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]
        return [Target(info, info.name) for info in signature.outputs if info.name in named]
    found = []
    known = dict(score_tensors(model.graph))
    for info in signature.outputs:
        scores = next(score_tensors(model.graph, [info.name]), None)
        if info.dtype in FLOAT_NAMES and info.shape != ():
            name, what = scores or (info.name, known.get(info.name, ""))
            found.append(Target(info, name, what if name != info.name or scores is None else ""))
    if not found:  # labels only: the scores behind them
        found = [
            Target(TensorInfo(name, "float32", (None, None)), name, what)
            for name, what in list(score_tensors(model.graph))[:1]
        ]
    return found


def named_labels(facts: Facts, found: Iterable[Target]) -> list[str]:
    """Return the columns that are labels by their names: those of outputs, else one of the usual names."""
    ending = AHEAD if facts.data.table.window else ""  # what is predicted is the future
    outputs = [each.info.name + ending for each in found]
    by_output = [name for name in facts.schema if name in outputs]
    usual = [name for name in facts.schema if name.lower() in LABELS]
    return [*by_output, *(name for name in usual[:1] if name not in by_output)]


def propose_targets(
    draft: Draft, model: onnx.ModelProto, facts: Facts, found: Sequence[Target], free: Sequence[str]
) -> None:
    """Propose the losses; free: columns that feed no input. Raises ConfigError if no column can be a label."""
    given = draft.value("data.label")
    columns = [given] if isinstance(given, str) else list(given) if given else list(free)
    if facts.data.table.window and not given:  # what is predicted is the future
        columns = [name for name in columns if name.endswith(AHEAD)]
    possible = {each.info.name: readings(facts, each.info, columns) for each in found}
    if len(found) > 1:
        possible = {name: [each for each in ways if not each.classes] for name, ways in possible.items()}
    chosen = _chosen(possible, given=bool(given))
    read = [each for each in found if chosen[each.info.name]]
    if not read:
        shown_outputs = ", ".join(f"{each.info.name} {shown(each.info)}" for each in found) or "none of floats"
        shown_columns = ", ".join(f"{name} ({facts.column(name).kind})" for name in columns) or "none that is free"
        raise ConfigError(
            f"no column of {facts.data.source} can be the labels of an output: the outputs are {shown_outputs}, the "
            f"columns {shown_columns}; name the column (data.label=...) and the loss (model.loss=...)"
            + (f"; {lists}" if (lists := names_in_cells(facts, columns)) else "")
        )
    unread = [each.info.name for each in found if each not in read]
    if unread:
        draft.notes.append(f"not trained, for want of labels: output {', '.join(unread)}")
    if len(read) == 1:
        _propose_one(draft, model, facts, read[0], chosen[read[0].info.name], first=_is_first(model, read[0]))
    else:
        for place, each in enumerate(read):
            _propose_entry(draft, place, each, chosen[each.info.name])


def _is_first(model: onnx.ModelProto, target: Target) -> bool:
    """Return whether an output is the first of the file, which a loss reads where no setting names another."""
    return target.info.name == next((value.name for value in model.graph.output), "")


def _chosen(possible: dict[str, list[Reading]], *, given: bool) -> dict[str, list[Reading]]:
    """Return output -> the readings that remain: one if it is decided."""
    left = {name: _preferred(name, ways, several=len(possible) > 1) for name, ways in possible.items()}
    while not given and len(left) > 1:
        taken = {_key(ways[0]): name for name, ways in left.items() if len(ways) == 1}
        fewer = {
            name: [each for each in ways if taken.get(_key(each), name) == name] or ways if len(ways) > 1 else ways
            for name, ways in left.items()
        }
        if fewer == left:
            break
        left = fewer
    return left


def _preferred(output: str, ways: list[Reading], *, several: bool) -> list[Reading]:
    """Return the readings that names and values leave of an output."""
    stem = re.sub(r"[\W_]", "", output).lower()
    by_name = [each for each in ways if each.label == output] or [
        each for each in ways if all(re.sub(r"[\W_]", "", name).lower().startswith(stem) for name in _names(each))
    ]
    if not by_name and not several:
        by_name = [each for each in ways if isinstance(each.label, str) and each.label.lower() in LABELS][:1]
    fitting = [each for each in ways if not each.classes]
    return by_name or fitting or ways


def _names(reading: Reading) -> tuple[str, ...]:
    return (reading.label,) if isinstance(reading.label, str) else reading.label


def _key(reading: Reading) -> tuple[str, ...]:
    return _names(reading)


def _propose_one(
    draft: Draft, model: onnx.ModelProto, facts: Facts, target: Target, ways: Sequence[Reading], *, first: bool
) -> None:
    """Propose the loss of the only output that is read, in the short form."""
    if len(ways) > 1:
        draft.ask(
            "data.label", f"the column that {target.info.name} predicts", {each.label: each.loss for each in ways}
        )
    elif ways[0].label != "label":
        draft.set("data.label", _plain(ways[0].label), ways[0].reason)
    losses = dict.fromkeys(each.loss for each in ways)
    if len(losses) > 1:
        meaning = {loss: f"for {' or '.join(str(e.label) for e in ways if e.loss == loss)}" for loss in losses}
        draft.ask("model.loss", "the loss, which depends on data.label", meaning)
    else:
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
    if way.loss == "cross_entropy" and isinstance(way.label, str) and len(different := facts.distinct(way.label)) == 1:
        draft.notes.append(f"every label is {different[0]!r} in {facts.rows}: nothing can be learned from one class")


def _propose_class_order(draft: Draft, model: onnx.ModelProto, facts: Facts, way: Reading) -> None:
    """Propose the order of classes that operators of the file hold, where the labels have their names."""
    order = class_labels(model.graph)
    if not order or not isinstance(way.label, str) or way.classes or order == [str(at) for at in range(len(order))]:
        return
    if set(map(str, facts.distinct(way.label))) <= set(order):
        draft.set("data.classes", order, "the file's own order of classes")


def _propose_entry(draft: Draft, place: int, target: Target, ways: Sequence[Reading]) -> None:
    """Propose one of several [[loss]]."""
    tensor = target.scores if LOSS_RULES[ways[0].loss].applies else target.info.name
    draft.set(f"loss.{place}.output", tensor, target.scores_reason if tensor != target.info.name else "")
    losses = dict.fromkeys(each.loss for each in ways)
    if len(ways) > 1:
        choices = {each.label: each.loss for each in ways}
        draft.ask(f"loss.{place}.label", f"the column that {target.info.name} predicts", choices)
    else:
        draft.set(f"loss.{place}.label", _plain(ways[0].label), ways[0].reason)
    if len(losses) > 1:
        meaning = {loss: f"for {' or '.join(str(e.label) for e in ways if e.loss == loss)}" for loss in losses}
        draft.ask(f"loss.{place}.name", "the loss, which depends on the label", meaning)
    else:
        draft.set(f"loss.{place}.name", ways[0].loss, "")
    if len(ways) == 1:
        for key, value in ways[0].settings.items():
            draft.set(f"loss.{place}.{key}", value, ways[0].reason)
        if ways[0].axes:
            draft.ask(
                f"loss.{place}.class_axis",
                f"the axis of {target.info.name} with the classes",
                dict.fromkeys(ways[0].axes, ""),
            )


def _plain(label: str | tuple[str, ...]) -> str | list[str]:
    return label if isinstance(label, str) else list(label)
