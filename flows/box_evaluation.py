"""Measure a detector on images with boxes: the loss, and `map` of its raw outputs and of what its file itself returns.

a run                       its own settings, on other images
preprocessing.json          the settings that it records
neither                     the settings that `onward init` proposes
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.images import GREY
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import write_record

PLACE = "data.image.boxes"


def measure_boxes(
    path: Path, source: str, recipe: Mapping[str, Any] | None, known: Mapping[str, Any] | None, changes: Sequence[Any]
) -> tuple[int, dict[str, float], tuple[str, ...]]:
    """Return the number of images, the metrics of a file, and what was guessed, in words.

    recipe: the content of its preprocessing.json. known: the settings of the run that has trained it. changes: given
    settings. Raises ConfigError and DataError with what is wrong with the settings, the images and their boxes.
    """
    from onward.trainer.data.storage.sharding import make_training_shards
    from onward.trainer.export.export_commands import evaluation_data
    from onward.trainer.export.exported_model import metrics_of_file
    from onward.trainer.export.measuring.evaluating import metrics_that_fit
    from onward.trainer.export.model_file import ModelFile

    guessed: tuple[str, ...] = ()
    if known:
        settings = dict(known)
    elif recipe:
        settings = _recorded(path, recipe)
    else:
        settings, guessed = _proposed(path, source, changes)
    # all images are evaluated, and none is augmented
    rows = {"data.source": source, "data.evaluation_source": source, "data.test_source": "", "train.num_steps": 1}
    if classes := (recipe or {}).get("outputs", [{}])[0].get("classes"):
        rows["data.classes"] = list(classes)
    try:
        changed = load_config(settings, [*rows.items(), *changes])
        if Path(source).is_dir() and not (changed.data.image and changed.data.image.boxes):
            raise DataError(f"nothing says where the boxes of {source} are ({PLACE})")
        metrics = tuple(metrics_that_fit(changed.losses, changed.metrics))
        with tempfile.TemporaryDirectory(prefix="onward-evaluate-") as folder:
            run = RunDir(Path(folder) / "run")
            write_record(run.config, changed.model_copy(update={"metrics": metrics}))
            shards, manifest, _ = make_training_shards(changed, Path(folder) / "shards")
            run.shards.symlink_to(shards, target_is_directory=True)
            data = evaluation_data(run)
            part = Path(folder) / "part"
            found = metrics_of_file(ModelFile.read(path), data, part, changed.model, metrics)
    except DataError as error:
        if any(PLACE in problem for problem in error.problems):
            error.add_note(f"`onward evaluate {path} {source} --boxes PLACE`: a .json of COCO, or a folder of labels")
        raise
    return (
        manifest.rows("evaluation"),
        {name.removeprefix("evaluation/"): value for name, value in found.items()},
        guessed,
    )


def _recorded(path: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a preprocessing.json records. Raises ConfigError for one of an earlier version."""
    (how,) = (each for each in recipe["inputs"].values() if each["kind"] == "image")
    if not recipe["objects"]:
        raise ConfigError(
            f"the preprocessing.json beside {path}, of an earlier version, does not say where its boxes are: "
            "`onward export RUN -o FILE.onnx` writes both anew"
        )
    image = {key: how[key] for key in ("column", "crop_ratio", "scale", "mean", "std")}
    image |= {"color": how["channels"], "size": [how["height"], how["width"]]}
    image["interpolation"] = how["interpolation"] + ("" if how["antialias"] else "_aliased")
    image["resize"] = how["resize"]
    if how["resize"] == "pad":
        # the colour of borders, and whether they are beside and below the image
        other = "corner_mean" if how["is_in_corner"] else "pad"
        grey = "corner_grey" if how["is_in_corner"] else "pad_grey"
        image["resize"] = grey if set(how["border_color"]) == {GREY} else other
    bound = {name: how["value"] for name, how in recipe["inputs"].items() if how["kind"] == "value"}
    return {
        "model": {"path": str(path), "start": recipe["begins_at"], "bind": bound},
        "data": {"label": recipe["outputs"][0]["label"][0], "image": image},
        "loss": recipe["objects"]["loss"],
    }


def _proposed(path: Path, source: str, changes: Sequence[Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    from onward.trainer.proposal.propose import propose
    from onward.trainer.proposal.toml_text import reasons

    draft = propose(path, source, changes)
    if draft.questions:
        open_settings = ", ".join(draft.questions)
        raise ConfigError(
            f"{path} has no preprocessing.json, and {open_settings} cannot be guessed; give SECTION.KEY=VALUE"
        )
    proposed = draft.settings()
    # new layers would have no trained weights
    proposed["model"].pop("num_classes", None)
    kept = {key: proposed[key] for key in ("model", "data", "loss")}
    said = [f"{key} = {value}" + (f": {why}" if why else "") for key, value, why in reasons(draft)]
    # how rows are divided and trained is not measured
    own = [line for line in said if line.startswith(("data.image", "data.label", "model.", "loss"))]
    return kept, (f"{path.name} has no preprocessing.json, so that its settings are those of `onward init`:", *own)
