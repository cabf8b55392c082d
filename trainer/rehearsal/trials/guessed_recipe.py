"""Guess how a file without preprocessing.json reads labelled data, as `onward doctor` and `onward init` do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onward.trainer.config.loading import Override
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.export.preprocessing.preprocessing_file import TOKENIZER, describe
from onward.trainer.rehearsal.trials.data_of_model import settings_for
from onward.trainer.run.records import ExportedModel, read_record


def guess_recipe(
    model: Path, source: str, overrides: Sequence[Override]
) -> tuple[dict[str, Any], Path, RunConfig, tuple[str, ...]]:
    """Return a preprocessing.json for a file that has none, the folder of its tokenizer, the settings that it was made
    of, and what was guessed, in words.

    Names of classes are those in the data, sorted. Raises ConfigError with everything in which the data does not fit
    the model.
    """
    config = settings_for(model, source, overrides)
    with tempfile.TemporaryDirectory(prefix="onward-evaluate-") as folder:
        # classes, scales and categories are known only when the data was read
        shards, _, _ = make_training_shards(config, Path(folder))
        manifest = read_record(shards / "manifest.json", ShardManifest)
    exported = ExportedModel(path=model, sha256="", step=0, parity=0, before={}, after={}, changed=0)
    signature = read_training_signature(config.model)
    described = describe(config.data, config.losses, config.model, manifest, signature, exported)
    recipe = described.model_dump(mode="json")
    place = model.parent
    if recipe["text"] and config.data.text:
        tokenizer = Path(config.data.text.tokenizer)
        place, recipe["text"]["file"] = tokenizer.parent, tokenizer.name or TOKENIZER
    return recipe, place, config, tuple(_words(model, recipe, manifest))


def _words(model: Path, recipe: dict[str, Any], manifest: ShardManifest) -> Iterator[str]:
    """Yield sentences about what was guessed."""
    yield f"{model.name} has no preprocessing.json, so that its inputs, labels and loss are guessed:"
    for name, how in recipe["inputs"].items():
        if how["kind"] == "image":
            mean, std = (", ".join(f"{each:.3g}" for each in how[key]) for key in ("mean", "std"))
            yield (
                f"input {name}: images of {how['height']} x {how['width']}, {how['resize']}, {how['channels']}, "
                f"mean {mean}, std {std}; `onward doctor {model.name} DATA` tries others"
            )
        elif how["kind"] == "columns":
            yield f"input {name}: columns {', '.join(column['name'] for column in how['columns'])}"
        else:
            yield f"input {name}: {how['kind']}"
    for output in recipe["outputs"]:
        labels = ", ".join(output["label"])
        fitted = manifest.fitted.get(output["label"][0], Fitted()) if output["label"] else Fitted()
        classes = f"; classes sorted by name: {', '.join(fitted.classes[:10])}" if fitted.classes else ""
        yield f"output {output['name']}: {output['loss']} against {labels or 'no label'}{classes}"
