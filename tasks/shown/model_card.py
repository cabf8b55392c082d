"""Write the model card of an exported file: README.md beside it, in the form that Hugging Face reads.

    model.json, config.json, identity.json, train.json, the manifest of the shards, preprocessing.json --> README.md

Every number is read from these records. What only the publisher of a model knows (its purpose, its licence) is left to
be filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from onward.tasks.shown.markdown import code, table
from onward.tasks.shown.mlflow_tags import data_digests, parameters, trained_from
from onward.tasks.shown.prefect_results import metric_rows
from onward.tasks.shown.raw_prediction import raw_prediction_of
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.schema.signature import TensorInfo, read_signature
from onward.trainer.data.storage.shards import ShardManifest, Split
from onward.trainer.errors import few
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.recorded.preprocessing_record import (
    AudioInput,
    ImageInput,
    OutputMeaning,
    Preprocessing,
    TableInput,
    TokenInput,
)
from onward.trainer.run.records import ExportedModel, RunIdentity, TrainResult, read_record, record_if_written

CARD = "README.md"
MOST_NAMED = 50
"""Classes, columns or tensors that the card names."""
NOT_SHOWN = (
    *("model.path", "data.source", "data.inputs", "data.classes"),
    *("launch.", "monitor.", "export.", "checkpoint."),
)
"""Beginnings of settings that are elsewhere on the card, or say nothing about the weights."""
SPLITS: tuple[tuple[Split, str], ...] = (
    ("train", "training"),
    ("evaluation", "evaluation, held out from training"),
    ("test", "test, by which nothing was chosen"),
)


def write_card(run: RunDir, exported: ExportedModel, folder: Path) -> Path:
    """Write the card of a file that was exported into `folder`; return its path."""
    write_durably(folder / CARD, model_card(run, exported).encode())
    return folder / CARD


def model_card(run: RunDir, exported: ExportedModel) -> str:
    """Return the card in Markdown, with the header that Hugging Face reads."""
    # as it was given: the paths of local copies mean nothing to a reader elsewhere
    config = read_config(run, "given")
    identity = record_if_written(run.identity, RunIdentity)
    shards = run.shards / "manifest.json"
    # the card is also written where shards or records are gone, with the rows that are known
    manifest = record_if_written(shards, ShardManifest)
    record = next((file for file in exported.preprocessing if file.name == "preprocessing.json"), None)
    recipe = read_record(record, Preprocessing) if record else None
    # the parameters of the run's page in MLflow, without those that say nothing about the weights
    settings = {key: value for key, value in parameters(config).items() if not key.startswith(NOT_SHOWN)}
    sections: dict[str, Iterable[str]] = {
        "Model": _model(run, config.model, config.exports_average, exported, identity),
        "Data": _data(run, config.data, manifest, recipe),
        "Results": _results(config.promote_metric, exported, manifest),
        "Training": table(("setting", "value"), [(f"`{key}`", _place(value)) for key, value in settings.items()]),
        "Preprocessing": _preprocessing(recipe, exported),
        "Predict": _predict(exported),
        "Limits": _limits(config.export, exported, manifest),
        "Intended use": ["*To be filled in: what the model is for, what it must not be used for, whom it may harm.*"],
        "Licence": ["*To be filled in, here and as `license` in the header: that of the file, and of its data.*"],
    }
    # the header is YAML; the licence is a comment, because only the publisher can choose it
    lines = ["---", "library_name: onnx", "tags:", "- onnx", "- onward", "# license: apache-2.0", "---", ""]
    origin = _place(trained_from(run, config.model))
    lines += [
        f"# {code(identity.name if identity else config.name)}",
        "",
        f"An ONNX file trained by Onward from {origin} on {_place(config.data.source)}, exported at step "
        f"{exported.step}.",
    ]
    for heading, content in sections.items():
        lines += ["", f"## {heading}", "", *content]
    return "\n".join(lines) + "\n"


def _place(path: str) -> str:
    """Return a name without the directories of this machine."""
    return code(Path(path).name if path.startswith("/") else path)


def _model(
    run: RunDir, model: ModelConfig, exports_average: bool, exported: ExportedModel, identity: RunIdentity | None
) -> list[str]:
    trained = record_if_written(run.train, TrainResult)
    facts = {"SHA-256": f"`{exported.sha256}`", "trained from": _place(trained_from(run, model))}
    if identity and identity.model_sha256:
        facts["SHA-256 of that file"] = f"`{identity.model_sha256}`"
    facts["step of the weights"] = f"{exported.step}"
    if trained:
        facts["step of the weights"] += f"; the training ended at {trained.step}"
    facts["weights"] = "moving average" if exports_average else "as trained"
    facts["changed tensors"] = str(exported.changed)
    if identity:
        facts["run"] = code(identity.run_id)
        facts["began"] = identity.created_at
    signature = read_signature(exported.path)
    rows = [("input", *_tensor(info)) for info in signature.inputs]
    rows += [("output", *_tensor(info)) for info in signature.outputs]
    return [
        *table(("what", "value"), ((what, value) for what, value in facts.items() if value)),
        "",
        # a graph may have hundreds of inputs, such as the cache of a decoder
        *table(("", "name", "type", "shape"), rows[:MOST_NAMED]),
    ]


def _tensor(info: TensorInfo) -> tuple[str, str, str]:
    shape = "any"
    if info.shape is not None:
        dims = ", ".join("N" if dim is None else str(dim) for dim in info.shape)
        shape = f"[{dims}]"
    return code(info.name), info.dtype, shape


def _data(run: RunDir, data: DataConfig, manifest: ShardManifest | None, recipe: Preprocessing | None) -> Iterator[str]:
    yield f"Source: {_place(data.source)}"
    if manifest:
        digests = data_digests(run)
        # a split without rows has no digest
        rows = [(what, f"{manifest.rows(split)}", f"`{digests[split]}`") for split, what in SPLITS if split in digests]
        yield from ("", *table(("split", "rows", "SHA-256"), rows))
        left_out = {"bad": manifest.skipped, "without a value": manifest.left_out}
        if said := [f"{number} {what}" for what, number in left_out.items() if number]:
            yield from ("", f"Rows that were left out: {', '.join(said)}.")
    if recipe:
        for meaning in recipe.outputs:
            yield from ("", _labels(meaning))


def _labels(meaning: OutputMeaning) -> str:
    trained_on = f" on {_named(meaning.label)}" if meaning.label else ""
    text = f"Output {code(meaning.name)} was trained{trained_on} with the loss `{meaning.loss}`"
    return f"{text}; {len(meaning.classes)} classes: {_named(meaning.classes)}." if meaning.classes else f"{text}."


def _results(promote_metric: str, exported: ExportedModel, manifest: ShardManifest | None) -> Iterator[str]:
    rows = f"all {manifest.rows('evaluation')} evaluation rows" if manifest else "all evaluation rows"
    yield f"On {rows}, by {exported.judged_by}, before and after the training:"
    found = [(code(row["what"]), row["before"], row["after"]) for row in metric_rows(exported, promote_metric)]
    yield from ("", *table(("metric", "before", "after"), found))
    if exported.baselines:
        without = [(code(name), _metrics(each)) for name, each in exported.baselines.items()]
        yield from ("", "Without a model:", "", *table(("prediction", "metrics"), without))
    if written := [variant for variant in exported.variants if variant.path]:
        variants = [(variant.kind, f"{variant.size_ratio:.2f}", _metrics(variant.metrics)) for variant in written]
        yield from ("", "Variants:", "", *table(("variant", "size / the file's", "metrics"), variants))


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{code(name.removeprefix('evaluation/'))} {value:.4g}" for name, value in metrics.items())


def _preprocessing(recipe: Preprocessing | None, exported: ExportedModel) -> list[str]:
    if recipe is None:
        why = f": {code(exported.preprocessing_refused)}" if exported.preprocessing_refused else ""
        return [f"Not recorded{why}. The file reads its inputs as they are."]
    rows = []
    for name, how in recipe.inputs.items():
        if isinstance(how, ImageInput):
            said = f"image of {code(how.column)}: {how.resize} to {how.height} x {how.width}, {how.channels}"
        elif isinstance(how, AudioInput):
            said = f"audio of {code(how.column)}: {how.sample_rate} Hz, {how.features}"
        elif isinstance(how, TableInput):
            said = f"columns {_named(dict.fromkeys(column.name for column in how.columns))}"
        elif isinstance(how, TokenInput):
            limit = f", at most {recipe.text.max_length} tokens" if recipe.text and recipe.text.max_length else ""
            said = f"{how.role} of {_named(recipe.text.columns) if recipe.text else 'the text'}{limit}"
        else:
            said = "the same value for all rows"
        rows.append((code(name), said))
    return [
        *table(("input", "computed from"), rows[:MOST_NAMED]),
        "",
        "`preprocessing.json`, written with the file, has every step and number.",
    ]


def _predict(exported: ExportedModel) -> Iterator[str]:
    yield from ("```sh", "onward predict FILE.onnx DATA -o predictions.csv", "```")
    # None where what is beside the file does not say how raw rows become inputs
    if raw := raw_prediction_of(exported):
        yield from ("", f"`DATA` has {_named(column.name for column in raw.columns)}, computed as in training.")
        if raw.predicted:
            yield from ("", f"Each row gets {_named(column.name for column in raw.predicted)}.")


def _limits(export: ExportConfig, exported: ExportedModel, manifest: ShardManifest | None) -> Iterator[str]:
    chosen = "; the checkpoint was chosen by them" if export.checkpoint == "best" else ""
    yield f"- The results are those of the evaluation rows{chosen}. Rows of another origin were not measured."
    if manifest and not manifest.test:
        yield "- No rows were set aside by which nothing was chosen (`data.test_source`)."
    differ = f"differ from those of the training by at most {exported.parity:.2g} of the largest value"
    yield f"- Outputs under {exported.judged_by} {differ}."
    for variant in exported.variants:
        if variant.refused:
            yield f"- Variant {variant.kind} was refused: {code(variant.refused)}"


def _named(names: Iterable[str]) -> str:
    """Return names, the first MOST_NAMED of many."""
    return few(map(code, names), MOST_NAMED)
