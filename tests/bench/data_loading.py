"""What reading data costs: the wait of a training loop for JPEG images, and readers beside those of other libraries.

    python -m tests.bench.data_loading [--images 512] [--steps 20] [--rows 100000]      3 min on 2 cores

The data wait is the share of a step in which a rank has no samples, from the event log of a real run of a ResNet-18 on
images of 128 x 128, one rank with all cores, its median over the steps. Each other figure is a ratio of times that are
measured in turn, the median over the rounds:

    images   decoding, random crop and flip in Onward's threads, over torchvision's ImageFolder and a DataLoader with as
             many processes
    texts    reading, tokenizing and sharding a CSV file, over encode_batch of the tokenizers library
    tables   reading and sharding a Parquet file of 20 columns, over pandas.read_parquet into one array
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support import graphs
from tests.support.images import encoded, picture
from tests.support.runs import events, make_run, train_run
from tests.support.texts import bert_tokenizer, reviews, write_csv

SIZE, BATCH = 128, 16
AUGMENT = {"random_resized_crop": 0.3, "flip": 0.5}


def jpegs(folder: Path, count: int) -> Path:
    """Write JPEG files of about 300 x 260 pixels in folders of two classes; return the folder."""
    for at in range(count):
        place = folder / ("cat", "dog")[at % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{at}.jpg").write_bytes(encoded(picture(at, 260 + at % 9, 300 + at % 7), quality=90))
    return folder


def resnet18() -> onnx.ModelProto:
    """Return torchvision's ResNet-18 with two classes, exported with a dynamic batch."""
    import_torchvision()
    import torchvision

    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of the exporter
        module = torchvision.models.resnet18(num_classes=2)
        axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
        names: dict[str, Any] = {"input_names": ["image"], "output_names": ["logits"], "dynamic_axes": axes}
        torch.onnx.export(module, (torch.randn(2, 3, SIZE, SIZE),), content, dynamo=False, **names)
    return onnx.load_model_from_string(content.getvalue())


def ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> float:
    """Return the median of the times of `ours` over those of `theirs`, measured in turn."""
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        times.append((middle - began) / (time.perf_counter() - middle))
    return statistics.median(times)


def data_wait(folder: Path, source: Path, steps: int, image: dict[str, Any]) -> tuple[float, float]:
    """Train, and return the medians of the data wait and of the samples per second, without the first two steps."""
    run = make_run(
        folder,
        resnet18(),
        {},
        data={"source": str(source), "image": image},
        train={"global_batch_size": BATCH, "num_steps": steps},
        launch={"threads_per_rank": os.cpu_count() or 1},
    )
    train_run(run, timeout_s=900)
    lines = [event.values for event in events(run, "scalars")][2:]
    wait, speed = (statistics.median(line[f"train/{key}"] for line in lines) for key in ("data_wait", "samples_per_s"))
    return wait, speed


def image_ratio(folder: Path, source: Path, rounds: int) -> float:
    """Return the time of Onward's loader for an epoch over that of torchvision's."""
    import_torchvision()
    import torchvision
    from torch.utils.data import DataLoader
    from torchvision.transforms import v2

    workers = os.cpu_count() or 1
    torch.set_num_threads(workers)
    image = {"size": SIZE, "augment": AUGMENT, "workers": workers}
    config = _config(folder, graphs.tiny_conv_net(image_size=SIZE), {"source": str(source), "image": image})
    directory, _, _ = make_training_shards(config, folder / "cache")
    shards = open_shards(directory, "train")
    signature = read_training_signature(config.model)

    def ours() -> None:
        batches = Batches(shards, config, signature, replica=0, num_replicas=1, device=torch.device("cpu"))
        for position in range(0, shards.num_rows // BATCH * BATCH, BATCH):
            batches.take(position, BATCH)
        batches.close()

    steps: list[Any] = [v2.RandomResizedCrop(SIZE, scale=(0.3, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    files = torchvision.datasets.ImageFolder(str(source), v2.Compose(steps))
    loader: DataLoader[Any] = DataLoader(
        files, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
    )
    for _ in loader:  # starts its processes
        pass

    def theirs() -> None:
        for _ in loader:
            pass

    # by image: a part of the files is held out for evaluation, and a last batch with fewer is left out
    return ratio(ours, theirs, rounds) * (len(files) // BATCH) / (shards.num_rows // BATCH)


def text_ratio(folder: Path, rows: int, rounds: int) -> float:
    """Return the time to shard raw text over that of the tokenizers library for the same texts."""
    library = bert_tokenizer(folder / "tokenizer.json")
    texts = [(" ".join([text] * 4), label) for text, label in reviews(rows)]
    source = write_csv(folder / "texts.csv", ("text", "label"), texts)
    model = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=2)
    config = _config(folder, model, {"source": str(source), "text": {"tokenizer": folder / "tokenizer.json"}})
    return ratio(_sharding(config, folder), lambda: library.encode_batch([text for text, _ in texts]), rounds)


def table_ratio(folder: Path, rows: int, rounds: int) -> float:
    """Return the time to shard a Parquet file over that of pandas to read it into one array."""
    import pandas as pd

    names = [f"f{number}" for number in range(20)]
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(rows, 20)), columns=names)
    frame["label"] = np.arange(rows) % 2
    frame.to_parquet(folder / "table.parquet")
    model = graphs.tiny_mlp(inputs=20, outputs=2)
    data = {"source": str(folder / "table.parquet"), "inputs": {"features": names}}
    config = _config(folder, model, data)

    def theirs() -> None:
        read = pd.read_parquet(folder / "table.parquet")
        read[names].to_numpy(np.float32)

    return ratio(_sharding(config, folder), theirs, rounds)


def _config(folder: Path, model: onnx.ModelProto, data: dict[str, Any]) -> RunConfig:
    onnx.save(model, folder / "model.onnx")
    train = {"global_batch_size": BATCH, "num_epochs": 1}
    return build_config({"model": {"path": folder / "model.onnx"}, "data": data, "train": train})


def _sharding(config: RunConfig, folder: Path) -> Callable[[], object]:
    numbers = iter(range(1000))
    return lambda: make_training_shards(config, folder / f"cache-{next(numbers)}")  # into a new cache each time


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = jpegs(folder / "jpegs", given.images)
        for what, image in (("decoded once", {}), ("decoded and augmented in each epoch", {"augment": AUGMENT})):
            place = folder / what.split()[-1]
            wait, speed = data_wait(place, source, given.steps, image)
            print(f"data wait, {what}: {wait:.2%} of a step, {speed:.1f} samples/s", flush=True)
        for what, found in (
            ("images, over ImageFolder and DataLoader", image_ratio(folder, source, given.rounds)),
            ("texts, over tokenizers alone", text_ratio(folder, given.rows // 10, given.rounds)),
            ("tables, over pandas", table_ratio(folder, given.rows, given.rounds)),
        ):
            print(f"time for {what}: {found:.2f}", flush=True)


if __name__ == "__main__":
    main()
