"""Propose [data.text]: the tokenizer, the column of texts, and what is learned of them.

output [B, C]                        the class (or the number) in the column of labels
output [B, L, C]                     the class of each word
output [B, L, V], V = the tokens     each next token, or tokens that are masked: the graph is run to find out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onward.trainer.config.sections.text import MASKED
from onward.trainer.data.schema.columns import TEXT
from onward.trainer.data.schema.signature import Signature, TensorInfo
from onward.trainer.data.text.graph_limits import embedding_rows, position_rows
from onward.trainer.data.text.special_tokens import END, MASK
from onward.trainer.data.text.text_columns import ROLES
from onward.trainer.data.text.tokenizer import open_tokenizer
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import num_axes
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.rehearsal.trials.data_of_model import LABELS

ID_INPUTS = ("input_ids", "ids", "tokens", "token_ids")
TEXT_COLUMNS = ("text", "sentence", "review", "content", "document", "question", "prompt", "body")
WORD_LABELS = ("tags", "ner_tags", "pos_tags", "ner", "pos")
LENGTH = 128
"""Tokens in a sample where the model does not say it."""
BYTES = 256
"""Rows of an embedding of bytes."""


def ids_input(signature: Signature) -> TensorInfo | None:
    """Return the input that takes the ids of tokens, [B, L] integers; None if there is none of a usual name."""
    integers = {info.name: info for info in signature.fed if info.dtype in ("int32", "int64")}
    for name in ID_INPUTS:
        info = integers.get(name)
        if info is not None and len(info.shape or (0, 0)) == 2:
            return info
    return None


def find_tokenizer(model: Path, data: str) -> str:
    """Return the tokenizer.json beside the model or the data; "" if there is none."""
    folders = [model.parent, Path(data), Path(data).parent]
    return next((str(folder / "tokenizer.json") for folder in folders if (folder / "tokenizer.json").is_file()), "")


def propose_tokenizer(draft: Draft, model: Path, signature: Signature, *, source: str, is_text: bool) -> None:
    """Propose the tokenizer, or bytes as tokens. source: where the data is; is_text: of files of plain text."""
    ids = ids_input(signature)
    if ids is None:
        raise ConfigError(
            "the data is text, but no input of the model takes the ids of tokens ([batch, length] integers, named "
            f"{' or '.join(ID_INPUTS)}): {', '.join(info.name for info in signature.fed)}; name it: "
            "data.text.inputs.input_ids=NAME"
        )
    if tokenizer := find_tokenizer(model, source):
        draft.set("data.text.tokenizer", tokenizer, "found beside the model or the data")
    elif is_text and (embedding_rows(_graph(model), ids.name) or (0, ""))[0] == BYTES:
        positions = position_rows(_graph(model))
        longest = positions[0] if positions else LENGTH
        length = _declared_length(ids) or min(longest, LENGTH)
        draft.set("data.format", "text", f"{ids.name} indexes an embedding of {BYTES} rows: the tokens are bytes")
        draft.set("data.sequence_length", length, "bytes in a sample")
        return
    else:
        draft.ask(
            "data.text.tokenizer", "the path of the model's own tokenizer.json, which was not found beside it", {}
        )
    if ids.name != "input_ids":
        draft.set("data.text.inputs", {"input_ids": ids.name}, f"{ids.name} takes integers [batch, length]")


def propose_text_column(draft: Draft, facts: Facts) -> None:
    """Propose the column of texts."""
    texts = [name for name in facts.texts if name not in LABELS]
    named = [name for name in texts if name.lower() in TEXT_COLUMNS]
    # a class name occurs many times, a text once or so
    free = [name for name in texts if len(facts.distinct(name)) > facts.num_rows / 2]
    only = next((names for names in (named, free, texts) if len(names) == 1), [])
    if only and only[0] != "text":  # the default has no line
        draft.set("data.text.columns", only[0], "the column of texts")
    elif not only and len(texts) > 1:
        draft.ask("data.text.columns", "the column of texts", dict.fromkeys(named or free or texts, ""))


def propose_task(draft: Draft, model: Path, signature: Signature, outputs: Sequence[TensorInfo]) -> str:
    """Propose what is learned of the texts, and return it; "" if an output says nothing of it."""
    ids = ids_input(signature)
    output = next((info for info in outputs if num_axes(info) == 3), None)
    has_labels = any(info.name == "labels" for info in signature.fed)
    if ids is None or (output is None and not has_labels):
        return str(draft.value("data.text.task", "classification"))
    rows = embedding_rows(_graph(model), ids.name)
    classes = output.shape[2] if output and output.shape else None
    # another number of scores than of tokens is that of labels
    if output and rows and classes not in (None, rows[0]):
        draft.set("data.text.task", "tokens", f"output {output.name} has {classes} scores for each token")
        return "tokens"
    # a score for each token of the vocabulary: which tokens a score depends on tells the two tasks apart
    is_bidirectional = _reads_later_tokens(model, ids, output) if output else None
    vocabulary = f"{output.name if output else 'the loss'} has a score for each of {rows[0] if rows else 'the'} tokens"
    has_end, has_mask = (_has_token(draft, usual) for usual in (END, MASK))
    if is_bidirectional is None and has_end != has_mask:
        how = f"by its tokens: it has {'one that masks' if has_mask else 'none that masks'}"
        draft.set("data.text.task", "masked" if has_mask else "causal", f"{vocabulary}; {how}")
    elif is_bidirectional is None:
        tasks = {"causal": "each next token is predicted", "masked": "masked tokens are predicted, as in BERT"}
        draft.ask("data.text.task", vocabulary, tasks)
    elif is_bidirectional:
        draft.set("data.text.task", "masked", f"{vocabulary}, which depend on later tokens, too: tried on the file")
    else:
        draft.set("data.text.task", "causal", f"{vocabulary}, which depend on earlier ones only: tried on the file")
    _propose_windows(draft, model, signature, ids)
    task = draft.value("data.text.task")
    if task == "causal" and not has_end:
        _ask_for_token(draft, "end", "the token that ends a text")
    if task in MASKED and not has_mask:
        _ask_for_token(draft, "mask", "the token that replaces masked ones")
    return str(draft.value("data.text.task", "causal"))


def propose_word_labels(draft: Draft, facts: Facts, output: TensorInfo) -> None:
    """Propose the columns of words and of their labels, which have as many words in each row.

    Raises ConfigError if there are no two such columns.
    """
    words: dict[str, list[list[str]]] = {}
    for name, cells in facts.cells.items():
        if facts.column(name).dtype == TEXT:
            words[name] = [_words_in(cell) for cell in cells]
    # words and their labels are two columns that agree in the number of words of every row
    lengths = {name: tuple(map(len, rows)) for name, rows in words.items()}
    num_columns = Counter(lengths.values())
    alike = [name for name in words if num_columns[lengths[name]] > 1]
    if len(alike) < 2:
        raise ConfigError(
            f"output {output.name} has scores for each word, but no two columns of {facts.data.source} have as many "
            f"words in each row: {', '.join(facts.schema)}; name them: data.text.columns=... and data.label=..."
        )
    num_different = {name: len(set(chain.from_iterable(words[name]))) for name in alike}
    named = [name for name in alike if name.lower() in (*LABELS, *WORD_LABELS)]
    # labels recur more often than words
    label = named[0] if len(named) == 1 else min(num_different, key=num_different.__getitem__)
    label = draft.value("data.label", label)
    num_labels = num_different.get(label, 0)
    draft.set("data.label", label, f"{num_labels} different labels; as many in each row as it has words")
    draft.set("model.loss", "cross_entropy", "of each word")
    others = [name for name in alike if name != label]
    if len(others) > 1:
        draft.ask("data.text.columns", "the column of the words", dict.fromkeys(others, ""))
    elif draft.value("data.text.columns") != others[0]:
        draft.set("data.text.columns", others[0], "the column of the words")
    classes = output.shape[2] if output.shape else None
    if classes is not None and num_labels > classes:
        draft.set("model.num_classes", num_labels, f"a new head: the output has {classes} scores")


def _words_in(cell: Any) -> list[str]:
    """Return the words of a text, or of a list that has them one by one; [] of a missing cell."""
    if isinstance(cell, str):
        return cell.split()
    return [str(word) for word in cell or ()]


def _has_token(draft: Draft, usual: Sequence[str]) -> bool:
    """Return whether the tokenizer has one of these tokens; false without a tokenizer."""
    path = draft.value("data.text.tokenizer")
    if path is None:
        return False
    try:
        return open_tokenizer(Path(path)).find("", "", usual) is not None
    except ConfigError:  # several, of which the user has to name one
        return False


def _ask_for_token(draft: Draft, name: str, what: str) -> None:
    if (path := draft.value("data.text.tokenizer")) is not None:
        special = open_tokenizer(Path(path)).special_ids
        draft.ask(f"data.text.tokens.{name}", what, dict.fromkeys(special, ""))


def _propose_windows(draft: Draft, model: Path, signature: Signature, ids: TensorInfo) -> None:
    """Propose the length of a sample where the model has none, and samples of one text where it has other inputs."""
    names = {*ROLES, ids.name}
    # two texts in one sample would have two values for such an input
    if others := [info.name for info in signature.fed if info.name not in names]:
        draft.set("data.text.packing", "none", f"{', '.join(others)} has a value for each text")
    elif not _declared_length(ids) and position_rows(_graph(model)) is None:
        draft.set("data.text.max_length", LENGTH, "the model takes any length; tokens in a sample")


def _reads_later_tokens(model: Path, ids: TensorInfo, output: TensorInfo) -> bool | None:
    """Return whether the scores of a token depend on the tokens behind it, found by running the file; None if it does
    not run on ids and masks of ones alone.

    The file is run twice, with another last token: ids [B, L], scores [B, L, V].
    """
    rows = (embedding_rows(_graph(model), ids.name) or (2, ""))[0]
    try:
        session = open_session(model)
        feed = {}
        for value in session.get_inputs():
            declared = [dim if isinstance(dim, int) else None for dim in value.shape]
            if value.name not in (*ROLES, ids.name) or len(declared) != 2:
                return None
            # an open length is 8: any would do that has tokens before the last one
            length = _declared_length(ids) or declared[1] or 8
            shape = declared[0] or 1, length
            dtype = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}[value.type]
            feed[value.name] = (np.ones if value.name == "attention_mask" else np.zeros)(shape, dtype)
        tokens = feed[ids.name]
        feed[ids.name] = (np.arange(tokens.size).reshape(tokens.shape) % rows).astype(tokens.dtype)
        before = session.run([output.name], feed)[0]
        feed[ids.name][:, -1] = (feed[ids.name][:, -1] + 1) % rows
        after = session.run([output.name], feed)[0]
    except Exception:  # onnxruntime's own errors have no common base class
        return None
    # the scores of the last token change in both cases
    return not np.allclose(before[:, :-1], after[:, :-1], rtol=1e-4, atol=1e-5)


def _declared_length(ids: TensorInfo) -> int | None:
    """Return the tokens in a sample that an input [B, L] declares; None or 0 if it declares none."""
    return (ids.shape or (0, 0))[1]


def _graph(model: Path) -> onnx.GraphProto:
    return read_model(model).graph
