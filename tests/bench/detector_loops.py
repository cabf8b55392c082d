"""Train one detector on other classes by the loop of its family and by `onward run`: how good are the files?

nudenet (only downloaded)       ->  320n.onnx, a YOLOv8 of 18 classes: the start of both
onward example boxes            ->  540 pictures to train on and 60 to measure, 4 classes, 160 x 160
ultralytics, in an environment  ->  its trainer, from the weights of the file
onward init, onward run         ->  the same pictures, epochs, batches, optimizer, learning rates and flips

python -m tests.bench.detector_loops --epochs 8            about 8 minutes on 2 cores

The whole file of each side is run under onnxruntime on the same pictures, and measured by the same lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from PIL import Image

from onward.trainer.model.losses.dense_heads.families import best_detections
from onward.trainer.model.metrics.library_measure import import_torchmetrics
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from tests.bench.packaged_detector import SIDE, onward, packaged_file
from tests.support.own_environment import run_script, with_packages

BATCH, RATE, MEASURED = 16, 1e-3, 10
"""Every tenth picture is measured."""
PACKAGES = ("ultralytics", "opencv-python-headless", "ultralytics-thop", "polars", "polars-runtime-32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory(prefix="onward-loops-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = packaged_file(folder)
        classes = write_pictures(folder)
        python = with_packages(folder / "env", *PACKAGES)
        began = time.monotonic()
        of_loop = folder / "loop.onnx"
        words = (model, folder / "data.yaml", str(epochs), str(RATE), str(BATCH), str(SIDE), of_loop)
        run_script(python, "ultralytics_loop.py", *words)
        report("ultralytics", of_loop, folder, classes, time.monotonic() - began)
        size = f"data.image.size=[{SIDE},{SIDE}]"
        onward(folder, "init", str(model), "train/images", size, "--no-try", "-o", "new.toml")
        began = time.monotonic()
        settings = (
            *(f"train.num_epochs={epochs}", f"train.global_batch_size={BATCH}", 'export.checkpoint="last"'),
            *('data.evaluation_source="test/images"', "data.evaluation_fraction=0"),
            *('optimizer.name="adamw"', f"optimizer.learning_rate={RATE}", "optimizer.weight_decay=5e-4"),
            *('schedule.mode="cosine"', "schedule.warmup_ratio=0", "data.image.augment={flip=0.5}"),
            *("metrics=[]", "monitor.report=false", 'launch.device="cpu"'),
        )
        found = json.loads(onward(folder, "run", "new.toml", *settings, "--json"))
        onward(folder, "down")
        (exported,) = (Path(found["directory"]) / "export").glob("*.onnx")
        report("onward run", exported, folder, classes, time.monotonic() - began)


def write_pictures(folder: Path) -> int:
    """Write the pictures of the example, padded to SIDE x SIDE, with boxes in the forms of COCO and of ultralytics."""
    onward(folder, "example", "boxes")
    content = json.loads((folder / "boxes" / "boxes.json").read_text())
    for split in ("train", "test"):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
        images: list[dict[str, Any]] = []
        boxes = []
        for place, image in enumerate(content["images"]):
            if (place % MEASURED == 0) != (split == "test"):
                continue
            picture = Image.open(folder / "boxes" / "images" / image["file_name"])
            scale = SIDE / max(picture.size)
            padded = Image.new("RGB", (SIDE, SIDE), (114, 114, 114))
            padded.paste(picture.resize(tuple(round(side * scale) for side in picture.size)))
            file = folder / split / "images" / f"{image['id']}.png"
            padded.save(file)
            own = [each for each in content["annotations"] if each["image_id"] == image["id"]]
            boxes += [{**each, "bbox": [scale * number for number in each["bbox"]]} for each in own]
            images.append({**image, "file_name": file.name, "width": SIDE, "height": SIDE})
            lines = [f"{each['category_id'] - 1} {centred(each['bbox'], scale / SIDE)}\n" for each in own]
            (folder / split / "labels" / f"{image['id']}.txt").write_text("".join(lines))
        written = {**content, "images": images, "annotations": boxes}
        (folder / split / "annotations.json").write_text(json.dumps(written))
    names = [each["name"] for each in content["categories"]]
    (folder / "data.yaml").write_text(
        json.dumps({"path": str(folder), "train": "train", "val": "test", "names": names})
    )
    return len(names)


def centred(box: list[float], scale: float) -> str:
    x, y, width, height = (number * scale for number in box)
    return f"{x + width / 2} {y + height / 2} {width} {height}"


def report(title: str, path: Path, folder: Path, classes: int, elapsed_s: float) -> None:
    """Print the precision of a whole file [1, 4 + classes, cells] on the pictures that nobody trained on."""
    import_torchmetrics()
    from torchmetrics.detection import MeanAveragePrecision

    session = open_session(onnx.load(path))
    content = json.loads((folder / "test" / "annotations.json").read_text())
    measured = MeanAveragePrecision(backend="pycocotools")
    for image in content["images"]:
        pixels = np.asarray(Image.open(folder / "test" / "images" / image["file_name"]), np.float32) / 255
        (table,) = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})[0]
        assert len(table) == 4 + classes
        rows = torch.from_numpy(table.T)
        corners = torch.cat([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], 1)
        found = best_detections(corners, rows[:, 4:], keeps_all=False)
        own = [each for each in content["annotations"] if each["image_id"] == image["id"]]
        boxes = torch.tensor([each["bbox"] for each in own]).reshape(-1, 4)
        wanted = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
        labels = torch.tensor([each["category_id"] - 1 for each in own], dtype=torch.long)
        predictions = {"labels": found[:, 0].long(), "scores": found[:, 1], "boxes": found[:, 2:]}
        measured.update([predictions], [{"labels": labels, "boxes": wanted}])
    values = measured.compute()
    print(f"{title}: mAP {values['map']:.4f}, mAP50 {values['map_50']:.4f}, {elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
