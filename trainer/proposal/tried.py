"""Let a trained file decide its preprocessing: the one of `onward doctor` under which it is right most often."""

from __future__ import annotations

from onward.trainer.config.loading import load_config
from onward.trainer.config.loss_rules import DENSE_LOSSES
from onward.trainer.data.completed_settings import completed
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.draft import Draft
from onward.trainer.rehearsal.trials.preprocessing_trials import MEASURED, try_preprocessings

ROWS = 100
LIMIT_S = 60.0
"""About how long all trials may take."""


def propose_tried(draft: Draft) -> bool | None:
    """Propose the settings of the best preprocessing, if one is better than chance, and the order of the classes.

    Return whether one is better than chance, None if nothing can be tried.
    """
    # one step, because a configuration is complete only with a length of training, and none is proposed yet
    settings = draft.settings()
    # objects are found whatever their class, so the file is tried with its own classes
    if draft.value("loss.name") in DENSE_LOSSES:
        settings["model"].pop("num_classes", None)
    config = completed(load_config({**settings, "train": {"num_steps": 1}}))
    if len(config.losses) != 1 or config.losses[0].name not in MEASURED or config.model.num_classes:
        return None
    try:
        tried = try_preprocessings(config, ROWS, limit_s=LIMIT_S)
    except ConfigError as error:  # such as labels that are probabilities
        draft.notes.append(f"preprocessings were not tried: {error.problems[0]}")
        return None
    best = tried.trials[0]
    number = len(tried.trials)
    value = f"{tried.measure} {best.accuracy:.3f} on {best.rows} rows before any training"
    if not tried.better_than_chance and not tried.other_order:
        named = "better than always naming the"
        least = {
            "accuracy": f"{named} most frequent class of these labels (accuracy {tried.chance:.3f})",
            "r2": f"{named} mean of these labels (r2 0.000)",
            "precision": f"find objects (precision {best.accuracy:.3f} of the best box of each image)",
        }[tried.measure]
        draft.notes.append(
            f"no preprocessing that was tried ({number}) makes the file {least}; the proposed one is a default, and "
            "may not be that of its training"
        )
        # a detector that was trained on other objects finds none of these
        return None if tried.measure == "precision" else False
    for key, setting in best.settings.items():
        draft.set(key, setting, f"best of {number} that were tried: {value}")
    if not best.settings:
        draft.notes.append(f"of {number} preprocessings that were tried the default is best: {value}")
    names = {output: tried.classes[label] for label, output in tried.other_order.items() if label < len(tried.classes)}
    # an order is proposed only if each class has an output of its own
    if tried.classes and sorted(names) == list(range(len(tried.classes))):
        order = [names[output] for output in sorted(names)]
        draft.set("data.classes", order, f"the order in which accuracy is {tried.other_order_accuracy:.3f}")
    return True
