"""The examples with files of their own: `onward example NAME` writes a folder with model, data and configuration."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    import onnx

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def _images(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.pictures import write_digits
    from onward.trainer.onnx_graph.examples.small_models import build_resnet18

    write_digits(folder)
    return build_resnet18(num_classes=10, image_size=32, width=16)


def _masks(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.pictures import SHAPES, write_masks
    from onward.trainer.onnx_graph.examples.small_models import build_unet

    write_masks(folder)
    return build_unet(num_classes=1 + len(SHAPES), image_size=32, width=8)


def _boxes(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.pictures import OBJECTS, write_boxes
    from onward.trainer.onnx_graph.examples.small_models import build_detector

    write_boxes(folder)
    return build_detector(num_classes=len(OBJECTS), image_size=96)


def _two_heads(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.pictures import SHAPES, write_places
    from onward.trainer.onnx_graph.examples.small_models import build_two_heads

    write_places(folder)
    return build_two_heads(num_classes=len(SHAPES), image_size=32)


def _reviews(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.text_example import write_reviews
    from onward.trainer.onnx_graph.examples.small_models import build_bert

    return build_bert(vocab_size=write_reviews(folder).get_vocab_size(), num_classes=3)


def _language(folder: Path) -> onnx.ModelProto:
    from onward.flows.examples.text_example import write_documentation
    from onward.trainer.onnx_graph.examples.reference_models import build_gpt2

    size = write_documentation(folder).get_vocab_size()
    return build_gpt2(vocab_size=size, sequence_length=128, num_layers=2, num_heads=4, width=128, dropout=0.0)


def _table(folder: Path) -> onnx.ModelProto:
    from onward.trainer.onnx_graph.examples.small_models import build_mlp

    write_table(folder)
    return build_mlp(inputs=NUM_FEATURES, outputs=1)


FOLDERS: Mapping[str, tuple[Callable[[Path], onnx.ModelProto], str]] = {
    "images": (_images, "ResNet-18 on folders of JPEG files, a class each"),
    "reviews": (_reviews, "a BERT classifier on a CSV file of texts, with its tokenizer"),
    "language": (_language, "GPT-2 on raw text, with its tokenizer"),
    "masks": (_masks, "a U-Net on images with masks"),
    "boxes": (_boxes, "a detector in the form of YOLOv8 on photographs with boxes of COCO"),
    "table": (_table, "a regressor on a Parquet table with missing values"),
    "two-heads": (_two_heads, "a network with two outputs, and a loss for each"),
}
"""Name of an example -> writes its data into a folder and returns its model, and what it is."""


def write_example(name: str, folder: Path) -> Path:
    """Write the example into a new folder; return its configuration. Raises ConfigError when there is one already."""
    if name not in FOLDERS:
        raise ConfigError(f"no example {name!r} has files to write; these have: {', '.join(FOLDERS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; name a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # written elsewhere and then renamed, so that an interrupted command leaves no half of an example
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".onward-example-") as temporary:
        made = Path(temporary) / "example"
        made.mkdir()
        model = FOLDERS[name][0](made)
        (made / "model.onnx").write_bytes(model.SerializeToString())
        shutil.copyfile(CONFIGS / f"{name}.toml", made / f"{name}.toml")
        made.replace(folder)
    return folder / f"{name}.toml"


# -- write a table for the examples: 20 columns of numbers, some missing, and what depends on them

TABLE_ROWS = 4000
NUM_FEATURES = 20
MISSING = 0.03
"""The share of cells that are empty."""


def write_table(folder: Path) -> None:
    """Write `table.parquet`: `f0` to `f19` of different means and scales, and `price`, which depends on eight of them.

    price = f0 + 0.5 f1 - f2 + |f3| + f4 f5 + sin(2 f6) - 0.5 max(f7, 0) + noise      (of the standardised columns)
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    random = np.random.default_rng(0)
    x = random.standard_normal((TABLE_ROWS, NUM_FEATURES))
    # linear terms, a product, a sine and a kink: a linear model explains a part only
    price = x[:, 0] + 0.5 * x[:, 1] - x[:, 2] + np.abs(x[:, 3]) + x[:, 4] * x[:, 5] + np.sin(2 * x[:, 6])
    price += -0.5 * x[:, 7].clip(0) + random.normal(0, 0.1, TABLE_ROWS)
    # six orders of magnitude, so that a run without standardised columns fails visibly
    scales = 10.0 ** random.uniform(-2, 4, NUM_FEATURES)
    means = random.uniform(-3, 3, NUM_FEATURES)
    cells = (x + means) * scales
    # after the price was computed: what is missing had an influence
    cells[random.random(cells.shape) < MISSING] = np.nan
    columns = {f"f{place}": pa.array(column, from_pandas=True) for place, column in enumerate(cells.T)}
    parquet.write_table(pa.table({**columns, "price": price}), folder / "table.parquet")
