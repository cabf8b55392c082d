"""Propose a configuration for an ONNX file and data: what the two say, in this order.

    the file    its outputs and inputs, whether it computes its own loss, whether its weights were trained
    the data    where the samples are, columns, types, ranges of values
    both        the columns of the inputs, the losses and labels, the preprocessing, batch size and learning rate

Nothing is computed with torch but the preprocessings that `onward doctor` tries, and these for trained weights only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx

from onward.trainer.config.loading import Override, load_config
from onward.trainer.config.loss_rules import DENSE_LOSSES
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.text import PACKED
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.reading.source_kinds import PAGE
from onward.trainer.data.schema.signature import Signature, TensorInfo, read_training_signature
from onward.trainer.data.text.text_columns import ROLES
from onward.trainer.errors import ConfigError
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.onnx_graph.outputs import readable_output, selected_output, with_numeric_outputs
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import WITHOUT_GRADIENT
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.proposal import targets as outputs
from onward.trainer.proposal.audio_proposal import audio_input, propose_audio_column, propose_audio_files
from onward.trainer.proposal.detectors.boxes import propose_boxes, propose_start
from onward.trainer.proposal.draft import INPUTS, Draft
from onward.trainer.proposal.image_proposal import propose_digits, propose_image_column, propose_image_settings
from onward.trainer.proposal.inputs import num_axes, propose_columns, propose_source
from onward.trainer.proposal.masks import propose_masks
from onward.trainer.proposal.readings import Reading, readings, with_fitting_head
from onward.trainer.proposal.series import propose_windows
from onward.trainer.proposal.source_summary import Facts, read_facts
from onward.trainer.proposal.table_proposal import (
    feeding,
    propose_rows,
    propose_split,
    propose_tables,
    propose_vocabularies,
)
from onward.trainer.proposal.targets import Target
from onward.trainer.proposal.text_proposal import (
    ids_input,
    propose_task,
    propose_text_column,
    propose_tokenizer,
    propose_word_labels,
)
from onward.trainer.proposal.training_proposal import family_of, propose_training, trained_before
from onward.trainer.proposal.tried import propose_tried

WITH_WEIGHTS = ("MatMul", "Gemm", "Conv", "LinearClassifier", "LinearRegressor")
"""Operators of which one at least is in every file that has something to train beside trees."""
PIXEL_MASK = "pixel_mask"


def propose(path: Path, source: str, given: Iterable[Override] = ()) -> Draft:
    """Return the configuration for a model and its data, with questions where two answers remain.

    given: settings that are decided. Raises ConfigError, DataError or UnsupportedModel where nothing can be proposed:
    files that cannot be read, a source without rows, data that no input or no output takes.
    """
    draft = Draft(given)
    model = load_model(path)
    _refuse_trees(model, path)
    draft.set("model.path", str(path), "")
    is_normalised = propose_start(draft, model)
    signature = _signature(draft, model, path)
    # a loss that the user names reads an output and labels, even in a file with a loss of its own
    loss = None if draft.is_given("model.loss") else outputs.own_loss(signature)
    candidates = [] if loss else outputs.targets(model, signature, draft.value("model.output"))
    facts, is_text = _read_data(draft, path, source, signature)
    # the columns are windows from here on, so the data is read again
    if not is_text and propose_windows(draft, facts, signature.fed, candidates):
        facts = read_facts(_data(draft))
    images: list[TensorInfo] = []
    if {"data.image", "data.image.column"} & draft.entries.keys():
        images = [info for info in signature.fed if num_axes(info) == 4]
    written = {entry.key: entry.value for entry in model.metadata_props}
    propose_image_settings(draft, facts, images, written.get("imgsz", ""))
    sound = audio_input(draft, signature.fed) if "data.audio" in draft.entries else None
    # images, sound and the tokenizer feed their inputs; columns of the table feed the others
    from_text = _text_inputs(draft) if is_text else set()
    others = [info for info in signature.fed if info.name not in from_text]
    others = [info for info in others if info not in (*images, sound)]
    task = propose_task(draft, path, signature, [target.info for target in candidates]) if is_text else ""
    if loss:
        draft.set("model.loss", "output", f"the file computes its own loss, {loss.name}")
        if loss.name != signature.outputs[0].name:
            draft.set("model.output", loss.name, "the loss")
        propose_columns(draft, facts, others, ())
    else:
        _propose_learned(draft, model, facts, others, candidates, task=task, has_images=bool(images))
    _note_choices(draft, model, signature)
    # these read the label, the loss and the columns that are proposed by now
    propose_rows(draft, facts)
    propose_split(draft, facts)
    propose_vocabularies(draft, facts, model.graph, others)
    is_without_trial = task in (*PACKED, "tokens") or is_normalised or bool(_declared_batch(signature))
    trained, why = _propose_preprocessing(draft, model, path, facts, others, can_try=not is_without_trial)
    is_dense = task in PACKED or facts.format == "text" or draft.value("data.label") == "mask"
    propose_training(
        draft,
        family_of(model.graph),
        trained=trained,
        why=why,
        num_rows=facts.num_training if facts.is_all and task != "causal" else None,
        is_dense=is_dense,
    )
    _propose_fixed_batch(draft, signature)
    return draft


def _note_choices(draft: Draft, model: onnx.ModelProto, signature: Signature) -> None:
    """Note outputs that hold what an operator has chosen, unless the losses read tensors before it."""
    if draft.is_given("model.output") or draft.value("loss.name") in DENSE_LOSSES:
        return
    for info in signature.outputs:
        what, remedy = selected_output(model, info.name)
        if what:
            draft.notes.append(f"{what}; {remedy}")


def _propose_preprocessing(
    draft: Draft, model: onnx.ModelProto, path: Path, facts: Facts, inputs: Sequence[TensorInfo], *, can_try: bool
) -> tuple[bool, str]:
    """Propose how numbers are scaled, by the weights; return whether these may be trained, and how that was found.

    inputs: those that columns feed. can_try: whether the file may be run on the data to compare preprocessings.
    """
    trained, why = trained_before(with_numeric_outputs(model), path.parent)
    # weights that may be trained expect the scales of their training, so only fresh ones get standardised columns
    propose_tables(draft, facts, model.graph, inputs, trained=trained is not False)
    if trained is not False and can_try and not draft.questions:
        is_better = propose_tried(draft)
        # weights that are known to be trained stay so, whatever they give on this data
        if trained is None and is_better is False:
            propose_tables(draft, facts, model.graph, inputs, trained=False)
            return False, "the file as it is predicts no better than a constant"
    return trained is not False, why


def _propose_learned(
    draft: Draft,
    model: onnx.ModelProto,
    facts: Facts,
    inputs: Sequence[TensorInfo],
    found: Sequence[Target],
    *,
    task: str,
    has_images: bool,
) -> None:
    """Propose the losses, the labels and the columns of `inputs`."""
    if task in PACKED or facts.format == "text":
        draft.set("model.loss", "cross_entropy", "of the tokens")
        draft.set("metrics", ["perplexity"], "")
        propose_columns(draft, facts, inputs, ("label",))
    elif task == "tokens":
        propose_word_labels(draft, facts, found[0].info)
        propose_columns(draft, facts, inputs, (draft.value("data.label", ""),))
    elif has_images and (boxes := propose_boxes(draft, model, facts, found)):
        propose_columns(draft, facts, inputs, boxes)
    elif has_images and (masks := propose_masks(draft, facts, found)):
        propose_columns(draft, facts, inputs, masks)
    else:
        _propose_labels(draft, model, facts, inputs, found)


def _signature(draft: Draft, model: onnx.ModelProto, path: Path) -> Signature:
    """Return inputs and outputs, of the part behind preprocessing where the file begins with strings, or behind
    `model.start`.

    Of a file whose first output has no gradient, such as the labels that skl2onnx writes, it is that of another one.
    """
    given = draft.value("model.output", "")
    readable = readable_output(model)
    is_first = readable == next((value.name for value in model.graph.output), "")
    output = given or ("" if is_first else readable)
    # the transformers that train DETR call it so: 1 for pixels of an image, 0 for borders
    if PIXEL_MASK in [value.name for value in model.graph.input] and not draft.is_given(f"model.bind.{PIXEL_MASK}"):
        draft.set(f"model.bind.{PIXEL_MASK}", 1, "every pixel counts; borders as well")
    settings = {key: draft.settings()["model"].get(key, empty) for key, empty in (("start", ()), ("bind", {}))}
    return read_training_signature(ModelConfig.model_validate({"path": path, "output": output, **settings}))


def _refuse_trees(model: onnx.ModelProto, path: Path) -> None:
    """Raise ConfigError for a file of decision trees or support vectors, which no gradient changes."""
    operators = {node.op_type for node in model.graph.node}
    if (trees := sorted(operators & WITHOUT_GRADIENT)) and not operators & {*WITH_WEIGHTS}:
        raise ConfigError(
            f"{path.name} is made of {', '.join(trees)}: trees and support vectors have no weights that a gradient "
            f"changes; fit them again with the library that made them, or train a network on the same table; {PAGE} "
            "says more"
        )


def _read_data(draft: Draft, path: Path, source: str, signature: Signature) -> tuple[Facts, bool]:
    """Propose the source, and what reads images and texts; return what is in it, and whether a tokenizer reads it."""
    image_inputs = [info for info in signature.fed if num_axes(info) == 4]
    propose_source(draft, source, takes_images=bool(image_inputs))
    if source == "digits":
        propose_digits(draft, signature.fed)
    is_audio = "data.image" not in draft.entries and propose_audio_files(draft, signature.fed)
    facts = read_facts(_data(draft))
    if is_audio or ("data.image" not in draft.entries and propose_audio_column(draft, facts, signature.fed)):
        return facts, False
    if "data.image" in draft.entries or facts.format == "digits":
        return facts, False
    # a column of numbers with the name of the input feeds it as it is
    numbers = [name for name, column in facts.schema.items() if column.holds_numbers]
    if any(info.name not in numbers for info in image_inputs):
        propose_image_column(draft, facts)
    is_files = facts.format == "text"
    if not is_files and not _needs_tokenizer(draft, facts, signature):
        return facts, False
    propose_tokenizer(draft, path, signature, source=source, is_text=is_files)
    if is_files and draft.value("data.format") == "text":
        # the tokens are bytes, which are columns of numbers: the data is read again as such
        return read_facts(_data(draft)), False
    if not is_files:
        propose_text_column(draft, facts)
    return facts, True


def _needs_tokenizer(draft: Draft, facts: Facts, signature: Signature) -> bool:
    """Return whether the ids of tokens come from a column of texts: no column has them, and none is named for them."""
    ids = ids_input(signature)
    if ids is None or ids.name in facts.schema:
        return False
    return bool(facts.texts) and f"{INPUTS}.{ids.name}" not in draft.entries


def _data(draft: Draft) -> DataConfig:
    settings = draft.settings()["data"]
    names = {
        "source",
        "format",
        "image",
        "audio",
        "evaluation_source",
        "test_source",
        "table",
        "sequence_length",
        "image_size",
    }
    return DataConfig.model_validate({name: value for name, value in settings.items() if name in names})


def _text_inputs(draft: Draft) -> set[str]:
    named = draft.value("data.text.inputs", {})
    return {*ROLES, *named.values()}


def _propose_labels(
    draft: Draft,
    model: onnx.ModelProto,
    facts: Facts,
    inputs: Sequence[TensorInfo],
    found: Sequence[Target],
) -> None:
    """Propose the columns of the inputs and of the labels, which exclude each other."""
    text = draft.value("data.text.columns", "text") if "data.text.tokenizer" in draft.entries else ""
    image = ""
    if {"data.image", "data.image.column"} & draft.entries.keys():
        image = draft.value("data.image.column", "image")
    sound = draft.value("data.audio.column", "audio") if "data.audio" in draft.entries else ""
    reserved = [name for name in facts.schema if name in (text, image, sound)]
    given = draft.value("data.label", ())
    labels = [given] if isinstance(given, str) else list(given)
    labels = labels or outputs.named_labels(facts, found)
    try:
        propose_columns(draft, facts, inputs, [*labels, *reserved])
    except ConfigError:
        # the vector input may take all columns of numbers but one, which is the label then
        choices = [] if labels else _label_choices(facts, inputs, found, reserved)
        if not choices:
            raise
        if len(choices) > 1:
            _ask_for_label(draft, facts, inputs[0], choices)
            return
        propose_columns(draft, facts, inputs, [choices[0].label, *reserved])  # type: ignore[list-item]
    used = {name for info in inputs for name in feeding(draft, facts, info)}.union(reserved)
    free = [name for name in facts.schema if name not in used]
    outputs.propose_targets(draft, model, facts, found, free)


def _label_choices(
    facts: Facts, inputs: Sequence[TensorInfo], found: Sequence[Target], reserved: Sequence[str]
) -> list[Reading]:
    """Return the columns of numbers without any one of which the others make the only input, as labels."""
    if len(inputs) != 1 or len(found) != 1:
        return []
    single = [name for name in facts.numbers if name not in reserved]
    sample = inputs[0].sample_shape
    if not single or sample != (len(single) - 1,):
        return []
    of_one_column = [reading for reading in readings(facts, found[0].info, single) if isinstance(reading.label, str)]
    return with_fitting_head(of_one_column) or of_one_column


def _ask_for_label(draft: Draft, facts: Facts, info: TensorInfo, choices: Sequence[Reading]) -> None:
    """Ask for the label, and for the other columns, which are the input."""
    names = [str(reading.label) for reading in choices]
    what = f"the column to predict; the others feed {info.name}"
    draft.ask("data.label", what, {name: reading.loss for name, reading in zip(names, choices, strict=True)})
    patterns = {(*_others(facts, name),): f"if the label is {name}" for name in names}
    draft.ask(f"{INPUTS}.{info.name}", "all columns of numbers but the label", patterns)
    losses = {reading.loss: "" for reading in choices}
    if len(losses) > 1:
        draft.ask("model.loss", "the loss of the label", losses)
    else:
        draft.set("model.loss", choices[0].loss, f"every column that may be the label: {choices[0].reason}")


def _others(facts: Facts, label: str) -> list[str]:
    if set(facts.schema) == set(facts.numbers):
        return ["*", f"!{label}"]
    return [name for name in facts.numbers if name != label]


def _propose_fixed_batch(draft: Draft, signature: Signature) -> None:
    """Propose the batch that a file declares, where it is right for no other."""
    declared = _declared_batch(signature)
    if not declared or draft.questions:
        return
    # the trained part is run with another batch size; where it fails, only the declared one is right
    try:
        choose_fixed_batch(completed(load_config(draft.settings())))
    except ConfigError as error:
        draft.set("train.global_batch_size", declared, f"the file declares it: {error.problems[0].split('; ')[0]}")


def _declared_batch(signature: Signature) -> int:
    """Return the fixed number of rows that all inputs declare; 0 if there is none."""
    batches = {info.shape[0] for info in signature.inputs if info.shape}
    if len(batches) != 1:
        return 0
    return batches.pop() or 0
