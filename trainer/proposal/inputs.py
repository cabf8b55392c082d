"""Propose how the inputs of a model read the data: where the samples are, and which column feeds which input.

DATA is                                                     proposed
a folder with train/ and val/                               source, evaluation_source; images/ and masks/ in each
image files in a folder for each class                      [data.image]
image files beside a folder of masks                        [data.image] masks
texts, or a table with a column of texts, and a tokenizer   [data.text]
audio files, or a table with a column of their names        [data.audio]
a table of numbers                                          columns by name, by type and shape, or stacked
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.config.setting_paths import BUNDLED_SOURCES
from onward.trainer.data.feed_problems import type_problems
from onward.trainer.data.formats.format_table import holds_images
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES
from onward.trainer.data.input_columns import Feed
from onward.trainer.data.misfits import remedy
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.series_windows import AHEAD
from onward.trainer.data.reading.source_kinds import TEXT_SUFFIXES
from onward.trainer.data.schema.columns import TEXT
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.proposal.detectors.box_places import IMAGE_FOLDERS, MASK_FOLDERS, box_place, boxes_of_source
from onward.trainer.proposal.draft import INPUTS, Draft
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.quantities import shown_shape
from onward.trainer.rehearsal.trials.data_of_model import LABELS

TRAINING, EVALUATION, TEST = (
    ("train", "training"),
    ("val", "valid", "validation", "eval", "evaluation", "dev"),
    ("test",),
)
"""Names of folders and files that are taken for the splits of a data set."""
LABEL_INPUTS = (*LABELS, "targets")
ROW_NUMBERS = ("", "id", "index", "row", "row_id", "Unnamed: 0", "__index_level_0__")
"""Names of columns that only number the rows."""


# -- the source


def propose_source(draft: Draft, given: str, *, takes_images: bool) -> None:
    """Propose data.source and what belongs to it, of the path (or name, or URL) that the user gave."""
    path = Path(given)
    source = given
    training = evaluation = test = None
    if given not in BUNDLED_SOURCES and not path.exists() and not set(given) & set("*?["):
        raise DataError(f"there is no file or directory {given}")
    if takes_images and not _has_boxes(draft, path) and (boxes := boxes_of_source(path)):
        raise DataError(f"{given}: {boxes}; data.label=... leaves the boxes aside")
    if path.is_dir():
        training, evaluation, test = _splits(path)
        if takes_images and not training:  # images/train and images/val, beside masks/train and masks/val
            training, evaluation, test = _splits(_images_in(path))
        # a folder train/ alone is no sign of a split
        if training and (evaluation or test):
            if takes_images:
                training, evaluation, test = (part and _images_in(part) for part in (training, evaluation, test))
            source = str(training)
        else:
            evaluation = test = None
            source = str(_images_in(path)) if takes_images else source
    draft.set("data.source", source, "")
    # of texts of several kinds the most frequent ones, in every split
    is_open = Path(source).is_dir() and not set("*?[") & set(given)
    texts = _glob_of_texts(Path(source)) if is_open and not takes_images else ""
    if texts:
        draft.set("data.source", f"{source}{texts}", "the files of text")
    if evaluation:
        where = f"{evaluation.relative_to(path)} is beside the training data"
        draft.set("data.evaluation_source", f"{evaluation}{texts if evaluation.is_dir() else ''}", where)
    if test:
        draft.set("data.test_source", f"{test}{texts if test.is_dir() else ''}", "measured once, at the end")
    if takes_images:
        _propose_images(draft, source)


def _has_boxes(draft: Draft, path: Path) -> bool:
    """Return whether the boxes of a folder of images are known, or its label is another one."""
    if draft.is_given("data.label") or draft.is_given("data.image.boxes"):
        return True
    return path.is_dir() and bool(box_place(_images_in(path)))


def _splits(folder: Path) -> list[Path | None]:
    """Return what a folder has for training, for evaluation and for a test."""
    entries = {entry.stem.lower(): entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")}
    return [_first_of(entries, names) for names in (TRAINING, EVALUATION, TEST)]


def _first_of(paths: Mapping[str, Path], names: Iterable[str]) -> Path | None:
    """Return the path of the first name that there is; None if there is none."""
    return next((paths[name] for name in names if name in paths), None)


def _images_in(folder: Path) -> Path:
    """Return the folder inside of a folder that is named after its images, as beside masks; else the folder itself."""
    if folder.is_dir():
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and inner.name.lower() in IMAGE_FOLDERS:
                return inner
    return folder


def _format(source: str, **tables: ImageConfig) -> str:
    try:
        return sources.locate(source, DataConfig.model_validate({"source": source, **tables})).format
    except DataError:
        return ""


def _glob_of_texts(folder: Path) -> str:
    """Return a glob of the most frequent text files below a folder; "" if it is read as it is, or has none."""
    if _format(str(folder)):
        return ""
    counts = Counter(path.suffix for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES)
    return f"/**/*{counts.most_common(1)[0][0]}" if counts else ""


def _propose_images(draft: Draft, source: str) -> None:
    """Propose [data.image] for image files that are the source themselves."""
    mask_folder = _mask_folder(Path(source))
    boxes = str(draft.value("data.image.boxes", "" if draft.is_given("data.label") else box_place(Path(source))))
    image = ImageConfig(masks=mask_folder, boxes=boxes)
    if not holds_images(_format(source, image=image)):
        return
    draft.set("data.image", {}, "the model takes images, and these are image files")
    if boxes:
        draft.set("data.image.boxes", boxes, "the boxes of these images")
        draft.set("data.image.resize", "stretch", "a crop would cut off objects")
        return
    if mask_folder:
        draft.set("data.image.masks", mask_folder, "its files have the names of the images")


def _mask_folder(folder: Path) -> str:
    """Return the folder that has a mask for each image of `folder`, relative to it; "" if there is none.

    It is beside `folder`, or in a folder that is beside that of all splits: masks/train for images/train.
    """
    folder = folder.absolute()  # of a relative one the folder of all splits would be the folder itself
    names = _image_stems(folder) if folder.is_dir() else set()
    if not names:
        return ""
    for other in _mask_folders(folder.parent):
        if names <= _image_stems(other):
            return f"../{other.name}"
    for other in _mask_folders(folder.parent.parent):
        if (other / folder.name).is_dir() and names <= _image_stems(other / folder.name):
            return f"../../{other.name}/{{source}}"
    return ""


def _mask_folders(folder: Path) -> list[Path]:
    try:
        named = [inner for inner in sorted(folder.iterdir()) if inner.name.lower() in MASK_FOLDERS]
    except OSError:  # a folder that may not be listed, such as that of all users
        return []
    return [inner for inner in named if inner.is_dir()]


def _image_stems(folder: Path) -> set[str]:
    """Return the names of the image files in a folder, without suffixes: a mask may be PNG where its image is JPEG."""
    return {file.stem for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES}


# -- columns


def propose_columns(draft: Draft, facts: Facts, inputs: Sequence[TensorInfo], kept: Iterable[str]) -> None:
    """Propose the columns of `inputs`, none of which an image or a tokenizer feeds.

    kept: columns that are labels for sure, and feed no input. Raises ConfigError with every input that no column fits.
    """
    used = set[str]()
    for key, entry in draft.entries.items():
        if key.startswith(f"{INPUTS}."):
            used.update(_names(entry.value))
    waiting = [info for info in inputs if f"{INPUTS}.{info.name}" not in draft.entries]
    # the surest comparison of names goes first over all inputs, so that a similar name takes no exact one's column
    for by_name in (_exactly, _alike, _labels):
        for info in list(waiting):
            free = [name for name in facts.schema if name not in used]
            namesakes = [name for name in free if by_name(info.name, name)]
            if len(namesakes) == 1 and (by_name is _exactly or _takes(facts, info, namesakes[0])):
                if by_name is not _exactly:
                    draft.set(f"{INPUTS}.{info.name}", namesakes[0], "their names are alike")
                _propose_category(draft, facts, info, namesakes[0])
                used.add(namesakes[0])
                waiting.remove(info)
    used.update(kept)
    free = [name for name in facts.schema if name not in used]
    free = [name for name in free if not _numbers_rows(facts, name)]
    free = [name for name in free if not _is_future(facts, name)]
    # each input that is fed takes a column away, which may leave a single one for another input
    while waiting:
        fitting = {info.name: _fitting(facts, info, free) for info in waiting}
        takers = Counter(name for names in fitting.values() for name in names)
        single = [info for info in waiting if len(fitting[info.name]) == 1]
        sure = [info for info in single if takers[fitting[info.name][0]] == 1]
        if not sure:
            break
        (column,) = fitting[sure[0].name]
        draft.set(f"{INPUTS}.{sure[0].name}", column, "the only column of its type and shape")
        _propose_category(draft, facts, sure[0], column)
        free.remove(column)
        waiting.remove(sure[0])
    # what is left takes several columns together, or one that the user has to name
    problems: list[str] = []
    for info in waiting:
        if stacked := _stacked(facts, info, free):
            draft.set(f"{INPUTS}.{info.name}", stacked, f"as many columns of numbers as {info.name} takes")
            used = set(_expanded(stacked, facts))
            free = [name for name in free if name not in used]
        elif categories := _categories(facts, info, free):
            draft.set(f"{INPUTS}.{info.name}", categories, f"{info.name} takes integers: ids of these texts")
            for name in categories:
                _propose_category(draft, facts, info, name)
            free = [name for name in free if name not in categories]
        elif choices := _fitting(facts, info, free):
            for name in choices:
                _propose_category(draft, facts, info, name)
            draft.ask(f"{INPUTS}.{info.name}", f"the column for {info.name}", dict.fromkeys(choices, ""))
        else:
            problems.append(_no_column(facts, info, free))
    if problems:
        raise ConfigError(problems)


def fits(facts: Facts, info: TensorInfo, column: str) -> bool:
    """Return whether a column has the type and the shape that an input takes."""
    feed = Feed(f"input {info.name}", (column,), False, info.dtype, info.sample_shape)
    if info.dtype == "string":
        return facts.column(column).dtype == TEXT
    return not list(type_problems(feed, [facts.column(column)]))


def _stacked(facts: Facts, info: TensorInfo, free: Sequence[str]) -> list[str] | str:
    """Return the columns of single numbers (or texts) that make the vector of an input, or a pattern of them."""
    shape = info.sample_shape
    if shape is not None and len(shape) == 2 and facts.data.table.window:
        series = [name for name in free if facts.column(name).shape == shape[:1]]
        return series if len(series) == shape[1] else []
    if shape is None or len(shape) != 1 or shape[0] is None:
        return []
    if info.dtype == "string":
        taken = [name for name in free if facts.column(name).dtype == TEXT]
    else:
        element = replace(info, shape=(None, 1))
        numbers = set(facts.numbers)
        single = [name for name in free if name in numbers]
        taken = [name for name in single if fits(facts, element, name)]
    if len(taken) == shape[0]:
        return _pattern(taken, facts) or taken
    # of more columns those are meant whose names differ by a number alone, such as x0, x1, x2 beside y
    groups: dict[str, list[str]] = {}
    for name in taken:
        groups.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    numbered = [names for names in groups.values() if len(names) == shape[0] > 1]
    if len(numbered) != 1:
        return []
    return _pattern(numbered[0], facts) or numbered[0]


def _fitting(facts: Facts, info: TensorInfo, columns: Iterable[str]) -> list[str]:
    return [name for name in columns if _takes(facts, info, name)]


def _takes(facts: Facts, info: TensorInfo, column: str) -> bool:
    """Return whether a column fits an input, as it is or as categories: texts that occur several times."""
    is_id = info.dtype in ("int32", "int64") and info.sample_shape in ((), (1,))
    if is_id and facts.column(column).dtype == TEXT:
        # free texts differ in nearly every row
        return len(facts.distinct(column)) <= max(facts.num_rows // 2, 2)
    return fits(facts, info, column)


def _propose_category(draft: Draft, facts: Facts, info: TensorInfo, column: str) -> None:
    """Add a column of texts to the categories, if it feeds an input of integers."""
    is_text = column in facts.schema and facts.column(column).dtype == TEXT
    takes_ids = info.dtype in ("int32", "int64") and None not in (info.sample_shape or ())
    if is_text and takes_ids and not draft.is_given("data.table.categories"):
        names = [*draft.value("data.table.categories", ()), column]
        reason = f"texts that feed inputs of integers, as {info.name}: ids, 0 = unknown, then the texts, sorted"
        draft.set("data.table.categories", names, reason)


def _categories(facts: Facts, info: TensorInfo, free: Sequence[str]) -> list[str]:
    """Return the columns of texts whose ids an input of integers may take; [] if they are not as many."""
    texts = [name for name in free if facts.column(name).dtype == TEXT]
    if not texts or info.dtype not in ("int32", "int64"):
        return []
    # an input that declares no shape may take any number of columns
    takes_any = info.sample_shape is None and len(texts) > 1
    return texts if takes_any or info.sample_shape == (len(texts),) else []


def _pattern(names: Sequence[str], facts: Facts) -> str:
    """Return a glob pattern that matches these columns and no others; "" if their names have no common beginning."""
    stems = {re.sub(r"\d+$", "", name) for name in names}
    if len(names) < 3 or len(stems) != 1:
        return ""
    (stem,) = stems
    # a stem with a glob's own characters would be read as a pattern
    if not stem or set(stem) & set("*?[!"):
        return ""
    pattern = f"{stem}*"
    return pattern if _expanded(pattern, facts) == list(names) else ""


def _expanded(stacked: list[str] | str, facts: Facts) -> list[str]:
    if isinstance(stacked, str):
        return [name for name in facts.schema if name.startswith(stacked[:-1])]
    return stacked


def _names(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, list | tuple) else []


def _exactly(info: str, column: str) -> bool:
    return info == column


def _alike(info: str, column: str) -> bool:
    return bare_name(info) == bare_name(column)


def bare_name(name: str) -> str:
    """Return the letters and digits of a name in lower case: `House_Price` and `house-price` are alike."""
    return re.sub(r"[\W_]", "", name).lower()


def _labels(info: str, column: str) -> bool:
    return info.lower() in LABEL_INPUTS and column.lower() in LABEL_INPUTS


def _numbers_rows(facts: Facts, name: str) -> bool:
    return name in ROW_NUMBERS and facts.num_rows > 1 and len(facts.distinct(name)) == facts.num_rows


def _is_future(facts: Facts, name: str) -> bool:
    """Return whether a column holds what comes after a window, which a model that predicts must not see."""
    return facts.data.table.window is not None and name.endswith(AHEAD)


def _no_column(facts: Facts, info: TensorInfo, free: Sequence[str]) -> str:
    columns = ", ".join(f"{name} ({facts.column(name).kind})" for name in free) or "none that is free"
    feed = Feed(f"input {info.name}", (), False, info.dtype, info.sample_shape)
    advice = next(filter(None, (remedy(feed, facts.column(name)) for name in free)), "")
    problem = (
        f"input {info.name} takes {shown(info)}, which no column of {facts.data.source} fits: {columns}; name columns: "
        f"data.inputs.{info.name}=..."
    )
    # such as the pixel_mask of DETR, which is 1 for all pixels of an image without borders
    one_value = f"or, if it is the same for all samples: model.bind.{info.name}=1"
    return f"{problem}; {f'or: {advice}; ' if advice else ''}{one_value}"


def num_axes(info: TensorInfo) -> int:
    """Return the number of axes of an input or output with that of the batch, 4 of images; 0 if it is not declared."""
    return len(info.shape or ())


def shown(info: TensorInfo) -> str:
    """Return type and shape of an input or output, such as float32 [?, 3, 32, 32]."""
    return f"{info.dtype} {shown_shape(info.shape)}"
