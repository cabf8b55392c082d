"""Boxes of COCO, YOLO, Pascal VOC and tables are the same rows, and follow their objects through the geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from PIL import Image

from onward.tasks.shard_data import _say_boxes
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.batches.batches import Batch, Batches, one_batch
from onward.trainer.data.images.augmentation import Mixing, seeds
from onward.trainer.data.images.box_annotations import place_of, read_annotations
from onward.trainer.data.images.image_inputs import box_column
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, CROWD, DIFFICULT, boxes_of
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import cache_key, make_training_shards, recipe_of
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.parallel.planning.estimate_layouts import example_batch
from onward.trainer.rehearsal.trials.preprocessing_candidates import candidates

SIZE = 48
COLORS = {"red": (250, 10, 10), "green": (10, 250, 10)}
LOSS = """
def loss(output, labels):
    boxes = labels.reshape(len(labels), -1, 6)
    return (output.mean((1, 2, 3)) - (boxes[..., 0] >= 0).sum(1)).square().sum()
"""


def detector() -> onnx.ModelProto:
    """One convolution: `image` [batch, 3, 48, 48] -> [batch, 6, 48, 48]."""
    g = GraphWriter("detector")
    x = g.input("image", ("batch", 3, SIZE, SIZE))
    weight, bias = g.weight("weight", g.normal(0.1, 6, 3, 1, 1)), g.weight("bias", np.zeros(6, np.float32))
    g.output(g.op("Conv", x, weight, bias, kernel_shape=[1, 1], outputs="map"), ("batch", 6, SIZE, SIZE))
    return g.model()


def pictures(folder: Path, count: int = 20) -> list[tuple[str, tuple[int, int], list[tuple[str, int, int, int, int]]]]:
    """Grey images with coloured rectangles, every fourth without any; return name, size and the rectangles' corners."""
    random = np.random.default_rng(0)
    found = []
    (folder / "images").mkdir(parents=True)
    for at in range(count):
        height, width = 60 + 5 * (at % 5), 80 + 4 * (at % 7)
        pixels = np.full((height, width, 3), 128, np.uint8)
        boxes = []
        for number in range(at % 4):
            # in columns of their own, so that none covers another
            x1, y1 = 4 + 24 * number + int(random.integers(4)), int(random.integers(5, 20))
            x2, y2 = x1 + int(random.integers(10, 16)), y1 + int(random.integers(10, 30))
            name = list(COLORS)[(at + number) % 2]
            pixels[y1:y2, x1:x2] = COLORS[name]
            boxes.append((name, x1, y1, x2, y2))
        Image.fromarray(pixels).save(folder / "images" / f"{at:02d}.png")
        found.append((f"{at:02d}.png", (width, height), boxes))
    return found


def annotate(folder: Path, shown: list[Any]) -> dict[str, dict[str, str]]:
    """The same boxes in every form: name -> the settings of [data] that differ."""
    numbers = {name: number for number, name in enumerate(COLORS)}
    images, annotations, rows = [], [], []
    for place in ("labels", "xml"):
        (folder / place).mkdir()
    for at, (name, (width, height), boxes) in enumerate(shown):
        images.append({"id": 100 + at, "file_name": name, "width": width, "height": height})
        lines, objects = [], []
        for title, x1, y1, x2, y2 in boxes:
            bbox = [x1, y1, x2 - x1, y2 - y1]
            annotations.append(
                {"id": len(annotations), "image_id": 100 + at, "category_id": 7 + numbers[title], "bbox": bbox}
            )
            centre = f"{(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height}"
            lines.append(f"{numbers[title]} {centre} {(x2 - x1) / width} {(y2 - y1) / height}")
            corners = f"<xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
            objects.append(f"<object><name>{title}</name><bndbox>{corners}</bndbox></object>")
        if lines:  # an image without a file is background
            (folder / "labels" / f"{at:02d}.txt").write_text("\n".join(lines))
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        (folder / "xml" / f"{at:02d}.xml").write_text(f"<annotation>{size}{''.join(objects)}</annotation>")
        cell = [{"bbox": [x1, y1, x2 - x1, y2 - y1], "category": title} for title, x1, y1, x2, y2 in boxes]
        rows.append({"image": f"images/{name}", "objects": cell})
    (folder / "data.yaml").write_text("names:\n  0: red\n  1: green\n")
    categories = [{"id": 8, "name": "green"}, {"id": 7, "name": "red"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lists = [
        {"bbox": [each["bbox"] for each in row["objects"]], "category": [each["category"] for each in row["objects"]]}
        for row in rows
    ]
    pd.DataFrame({"image": [row["image"] for row in rows], "objects": lists}).to_parquet(folder / "rows.parquet")
    images_of = {"source": str(folder / "images"), "label": "boxes"}
    return {
        "coco": images_of | {"boxes": "../annotations.json"},
        "yolo": images_of | {"boxes": "../labels"},
        "voc": images_of | {"boxes": "../xml"},
        "jsonl": {"source": str(folder / "rows.jsonl"), "label": "objects", "boxes": "objects"},
        "parquet": {"source": str(folder / "rows.parquet"), "label": "objects", "boxes": "objects"},
    }


def configured(folder: Path, place: dict[str, str], **image: Any) -> RunConfig:
    onnx.save(detector(), folder / "model.onnx")
    (folder / "loss.py").write_text(LOSS)
    data: dict[str, Any] = {name: value for name, value in place.items() if name != "boxes"}
    if place["boxes"] in ("../xml", "objects"):  # which say no order
        data["classes"] = list(COLORS)
    settings = {
        "resize": "pad",
        "boxes": place["boxes"],
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
        "interpolation": "nearest",
    }
    return build_config(
        {
            "model": {"path": folder / "model.onnx"},
            "data": {
                **data,
                "evaluation_fraction": 0.0,
                "evaluation_source": data["source"],
                "image": settings | image,
            },
            "loss": {"file": f"{folder}/loss.py:loss"},
            "train": {"global_batch_size": 8, "num_steps": 4, "shuffle": False},
        },
        check=check_files_and_data,
    )


def batches(folder: Path, config: RunConfig, replica: int = 0, replicas: int = 1) -> Batches:
    directory, _, _ = make_training_shards(config, folder / "cache")
    signature = read_training_signature(config.model)
    rows = open_shards(directory, "train")
    return Batches(rows, config, signature, replica=replica, num_replicas=replicas, device=torch.device("cpu"))


def taken(found: Batches, steps: int = 2) -> list[Batch]:
    taken = [batch for step in range(steps) for batch in found.take(8 * step, 8)]
    found.close()
    return taken


def boxes_in(batch: Batch, at: int) -> np.ndarray[Any, Any]:
    """The boxes of a sample in pixels of the input, without padding."""
    assert batch.labels[0] is not None
    boxes = batch.labels[0][at].reshape(-1, BOX_NUMBERS).numpy()
    return boxes[boxes[:, 0] >= 0] * np.array([1, SIZE, SIZE, SIZE, SIZE, 1], np.float32)


def drawn_in(pixels: torch.Tensor, name: str, around: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The corners of what has a colour, near a box."""
    color = torch.tensor(COLORS[name]).view(3, 1, 1) / 255
    there = (pixels - color).abs().amax(0) < 0.2
    x1, y1, x2, y2 = (round(float(value)) for value in around)
    mask = torch.zeros_like(there)
    mask[max(0, y1 - 3) : y2 + 3, max(0, x1 - 3) : x2 + 3] = True
    rows, columns = torch.nonzero(there & mask, as_tuple=True)
    return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)


def test_the_same_boxes_in_every_form_give_the_same_batches(tmp_path: Path) -> None:
    shown = pictures(tmp_path)
    places = annotate(tmp_path, shown)
    found = {}
    for kind, place in places.items():
        config = configured(tmp_path, place)
        found[kind] = taken(batches(tmp_path, config))
    for kind, of_kind in found.items():
        for one, other in zip(of_kind, found["coco"], strict=True):
            assert torch.equal(one.inputs[0], other.inputs[0])
            assert one.labels[0] is not None
            assert other.labels[0] is not None
            # shares of YOLO are rounded once more
            torch.testing.assert_close(one.labels[0], other.labels[0], rtol=1e-5, atol=1e-4, msg=kind)
    first = found["coco"][0]
    assert [len(boxes_in(first, at)) for at in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3], "images without boxes are rows"
    # the order of the categories' ids, and not of their names
    assert [int(each) for each in boxes_in(first, 3)[:, 0]] == [1, 0, 1]


@pytest.mark.parametrize("cache", ["decoded", "encoded"])
@pytest.mark.parametrize("resize", ["pad", "stretch", "corner_grey"])
@pytest.mark.parametrize(
    "augment", [{}, {"flip": (0.5, 0.5)}, {"random_resized_crop": 0.5, "flip": 0.5}, {"mosaic": 0.8, "flip": 0.5}]
)
def test_boxes_lie_around_their_objects_after_every_change(
    tmp_path: Path, cache: str, resize: str, augment: dict[str, Any]
) -> None:
    if cache == "decoded" and "random_resized_crop" in augment:
        cache = "auto"
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    config = configured(tmp_path, place, cache=cache, resize=resize, augment=augment)
    compared = 0
    changed = set()
    for batch in taken(batches(tmp_path, config)):
        for at in range(batch.size):
            for box in boxes_in(batch, at):
                corners = box[1:5]
                # of a sliver at the border no pixel may be left
                if (corners[2:] - corners[:2]).min() < 4:
                    continue
                shown = drawn_in(batch.inputs[0][at], list(COLORS)[int(box[0])], corners)
                np.testing.assert_allclose(shown, corners, atol=1.01)
                compared += 1
                changed.add(tuple(np.round(corners, 2)))
    assert compared > 12
    assert len(changed) > 12


def test_two_replicas_take_the_boxes_of_one_also_augmented(tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    config = configured(tmp_path, place, augment={"flip": (0.5, 0.5), "random_resized_crop": 0.4})
    whole = taken(batches(tmp_path, config))
    halves = [taken(batches(tmp_path, config, replica, 2)) for replica in range(2)]
    for step, batch in enumerate(whole):
        parts = [halves[at // 4][step] for at in range(8)]
        for at, part in enumerate(parts):
            np.testing.assert_array_equal(boxes_in(batch, at), boxes_in(part, at % 4))


def test_boxes_beside_a_link_to_images_are_those_beside_the_link(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path))
    (tmp_path / "other" / "labels").mkdir(parents=True)
    (tmp_path / "other" / "images").symlink_to(tmp_path / "images")
    assert place_of(tmp_path / "other" / "images", "../labels") == tmp_path / "other" / "labels"
    assert place_of(tmp_path / "images", "../labels") == tmp_path / "labels"


MIXED: dict[str, Any] = {"mosaic": 0.7, "mixup": 8.0, "flip": (0.5, 0.5), "color_jitter": 0.2}


def reconstructed(plain: dict[int, tuple[torch.Tensor, np.ndarray[Any, Any]]], position: int) -> tuple[Any, Any]:
    """The mosaic at a position, cut out by torchvision: pixels uint8 [3, SIZE, SIZE] and boxes [n, 6] in pixels."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    at = np.array([position], np.uint64)
    drawn, *others = (int(keyed_hash(at, hash_key("mosaic", tile, 0))[0]) for tile in range(4))
    if drawn >= 0.7 * 2**64:
        return plain[position]
    canvas, boxes = torch.zeros(3, 2 * SIZE, 2 * SIZE, dtype=torch.uint8), []
    positions = [position, *(position // 64 * 64 + other % 64 for other in others)]
    corners = ((0, 0), (SIZE, 0), (0, SIZE), (SIZE, SIZE))
    for (left, top), tile in zip(corners, positions, strict=True):
        pixels, own = plain[tile]
        canvas[:, top : top + SIZE, left : left + SIZE] = pixels
        boxes.append(own + np.array([0, left, top, left, top, 0], np.float32))
    rows = np.concatenate(boxes)
    there = tv_tensors.BoundingBoxes(torch.from_numpy(rows[:, 1:5]), format="XYXY", canvas_size=(2 * SIZE, 2 * SIZE))
    with torch.random.fork_rng():
        torch.manual_seed(seeds(np.array([position]), seed=0, purpose="image augmentation")[0])
        pixels, moved = v2.RandomCrop(SIZE)(tv_tensors.Image(canvas), there)
    rows[:, 1:5] = moved
    return pixels, rows[((rows[:, 3:5] - rows[:, 1:3]) >= 2).all(1)]


def test_a_mosaic_and_mixed_images_are_those_of_a_plain_reconstruction(tmp_path: Path) -> None:
    import_torchvision()
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    plain: dict[int, tuple[torch.Tensor, np.ndarray[Any, Any]]] = {}
    for batch in taken(batches(tmp_path, configured(tmp_path, place)), steps=16):
        for at in range(batch.size):
            plain[len(plain)] = ((batch.inputs[0][at] * 255).round().byte(), boxes_in(batch, at))
    augment = {"mosaic": 0.7, "mixup": 8.0}
    mixing = Mixing(AugmentConfig(mixup=8.0), 2)
    numbers = []
    for step, batch in enumerate(taken(batches(tmp_path, configured(tmp_path, place, augment=augment)))):
        for first in range(0, 8, 2):
            position = 8 * step + first
            pair = [reconstructed(plain, position), reconstructed(plain, position + 1)]
            (seed,) = seeds(np.array([position // 2]), seed=0, purpose="image mixing")
            images = torch.stack([pixels for pixels, _ in pair]).float() * torch.tensor(1 / 255)
            (mixed,), _ = mixing([images], torch.arange(2), seed)
            for at in range(2):
                torch.testing.assert_close(batch.inputs[0][first + at], mixed[at], rtol=0, atol=1e-6)
                wanted = np.concatenate([pair[at][1], pair[1 - at][1]])
                np.testing.assert_allclose(boxes_in(batch, first + at), wanted, atol=1e-4)
                numbers.append(len(wanted))
    assert len(set(numbers)) > 3


@pytest.mark.parametrize("cache", ["decoded", "encoded"])
def test_mixed_images_are_the_same_on_every_layout_and_after_a_resume(cache: str, tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    config = configured(tmp_path, place, augment=MIXED, cache=cache)
    whole = taken(batches(tmp_path, config), steps=6)
    small = config.model_copy(update={"train": config.train.model_copy(update={"gradient_accumulation_steps": 4})})
    for settings, replicas in ((config, 2), (small, 1), (small, 2)):
        found = [batches(tmp_path, settings, replica, replicas) for replica in range(replicas)]
        # the first step that is taken is the fourth one, as after a resume
        for step in (3, 4, 5):
            parts = [batch for each in found for batch in each.take(8 * step, 8)]
            assert torch.equal(torch.cat([part.inputs[0] for part in parts]), whole[step].inputs[0])
            own = [boxes_in(part, at) for part in parts for at in range(part.size)]
            for at, boxes in enumerate(own):
                np.testing.assert_array_equal(boxes, boxes_in(whole[step], at))
        for each in found:
            each.close()
    # 20 rows: in the next epochs they are mixed otherwise
    assert not torch.equal(whole[0].inputs[0][:4], whole[2].inputs[0][4:])


def test_both_caches_and_other_numbers_of_threads_give_the_same_mosaics(tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    first, *others = (
        taken(batches(tmp_path, configured(tmp_path, place, augment=MIXED, cache=cache, workers=workers)))
        for cache, workers in (("decoded", 1), ("encoded", 1), ("encoded", 3))
    )
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one.inputs[0], two.inputs[0])
            assert one.labels[0] is not None
            assert two.labels[0] is not None
            assert torch.equal(one.labels[0], two.labels[0])


def test_a_random_crop_of_a_mosaic_shows_all_four_images_in_half_their_size(tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    augment = {"mosaic": 1.0, "random_resized_crop": 1.0}
    shown = [boxes_in(batch, at) for batch in taken(batches(tmp_path, configured(tmp_path, place))) for at in range(8)]
    config = configured(tmp_path, place, augment=augment)
    sides, numbers = [], []
    for batch in taken(batches(tmp_path, config)):
        for at in range(8):
            boxes = boxes_in(batch, at)
            numbers.append(len(boxes))
            sides += (boxes[:, 3] - boxes[:, 1]).tolist()
    assert max(numbers) > max(map(len, shown))
    widest = max(float((boxes[:, 3] - boxes[:, 1]).max()) for boxes in shown if len(boxes))
    # of the whole square, with another aspect ratio up to 4/3
    assert 0.5 * widest <= max(sides) <= 0.6 * widest


def test_evaluation_and_a_changed_annotation_file(tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    config = configured(tmp_path, place, augment={"flip": 1.0})
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    assert manifest.fitted["boxes"].classes == ("red", "green")
    held_out = open_shards(directory, "evaluation")
    batch = one_batch(held_out, config, read_training_signature(config.model), np.arange(4))
    plain = one_batch(held_out, configured(tmp_path, place), read_training_signature(config.model), np.arange(4))
    np.testing.assert_array_equal(boxes_in(batch, 3), boxes_in(plain, 3))
    signature = read_training_signature(config.model)
    before = cache_key(recipe_of(config, signature))
    file = tmp_path / "annotations.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["bbox"][2] += 1
    file.write_text(json.dumps(content))
    assert cache_key(recipe_of(config, signature)) != before, "other boxes are other shards"


def test_everything_that_is_wrong_is_named_by_file_and_line_at_once(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path, 3))
    names = ["00.png", "01.png", "02.png"]
    content = json.loads((tmp_path / "annotations.json").read_text())
    for number, (bbox, category, image) in enumerate(
        [
            ([0, 0, 0, 5], 7, 100),
            ([5, 5, -2, 5], 7, 100),
            ([70, 0, 50, 5], 7, 100),
            ([1, 2, 3], 7, 100),
            ([1, 1, 5, 5], 9, 100),
            ([1, 1, 5, 5], 7, 999),
        ]
    ):
        content["annotations"].append({"id": 50 + number, "image_id": image, "category_id": category, "bbox": bbox})
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        read_annotations(tmp_path / "images", names, "../annotations.json")
    assert [problem.partition(", annotation ")[2] for problem in caught.value.problems] == [
        "50: the box 0, 0, 0, 5 is empty",
        "51: the corners of the box 5, 5, 3, 10 are swapped",
        "52: the box 70, 0, 120, 5 reaches beyond the 80 x 60 pixels of its image",
        "53 has the bbox [1, 2, 3], not [x, y, width, height]",
        "54 has the category 9; there are 7, 8",
        "55 is of image 999, which the file does not list",
    ]
    (tmp_path / "labels" / "01.txt").write_text(
        "0 0.5 0.5 0.2\n5 0.5 0.5 0.2 0.2\n0 0.9 0.5 0.4 0.2\n0 .1 .1 .2 .1 .2 .3\n"
    )
    with pytest.raises(DataError) as caught:
        read_annotations(tmp_path / "images", names, "../labels")
    assert [problem.partition("01.txt, line ")[2] for problem in caught.value.problems] == [
        "1 is '0 0.5 0.5 0.2', not a class and four numbers",
        "2 has the class 5; 2 are named",
        "3: the box 0.7, 0.4, 1.1, 0.6 reaches beyond the shares of its image",
    ]
    (tmp_path / "xml" / "01.xml").write_text(
        "<annotation><object><name>red</name><bndbox><xmin>1</xmin></bndbox></object></annotation>"
    )
    (tmp_path / "xml" / "02.xml").write_text("<annotation>")
    with pytest.raises(DataError) as caught:
        read_annotations(tmp_path / "images", names, "../xml")
    first, second = caught.value.problems
    assert first.endswith("01.xml, object 1 lacks a name, or one of xmin, ymin, xmax and ymax")
    assert "02.xml is no XML: " in second


def test_boxes_of_another_image_with_the_same_name_are_not_taken(tmp_path: Path) -> None:
    for name in ("train/1.png", "val/1.png", "2.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "images" / name)
    images = [
        {"id": number, "file_name": name} for number, name in enumerate(("train/1.png", "val/1.png", "other/2.png"))
    ]
    boxes = [{"image_id": number, "category_id": 1, "bbox": [number, 0, 5, 5]} for number in range(3)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "all.json").write_text(json.dumps(content))
    found = read_annotations(tmp_path / "images" / "train", ["1.png"], "../../all.json")
    assert {name: [box.x1 for box in boxes] for name, boxes in found.boxes.items()} == {"1.png": [0]}
    found = read_annotations(tmp_path / "images", ["2.png", "train/1.png", "val/1.png"], "../all.json")
    assert {name: [box.x1 for box in boxes] for name, boxes in found.boxes.items()} == {
        "train/1.png": [0],
        "val/1.png": [1],
    }
    content["images"].append({"id": 9, "file_name": "train/1.png"})
    (tmp_path / "all.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"lists train/1\.png more than once"):
        read_annotations(tmp_path / "images" / "train", ["1.png"], "../../all.json")
    # of texts, too: directly in the folder only where a name is there once
    (tmp_path / "labels").mkdir()
    for name in ("1.txt", "2.txt"):
        (tmp_path / "labels" / name).write_text("0 0.5 0.5 0.1 0.1\n")
    found = read_annotations(tmp_path / "images", ["2.png", "train/1.png", "val/1.png"], "../labels")
    assert {name: len(boxes) for name, boxes in found.boxes.items()} == {"2.png": 1, "train/1.png": 0, "val/1.png": 0}
    with pytest.raises(DataError, match=r"none of 1 images has a \.txt file of its name"):
        read_annotations(tmp_path / "images", ["3.png"], "../labels")


@pytest.mark.parametrize("turned", [False, True])
def test_annotations_of_an_image_of_another_size_are_refused(turned: bool, tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    path = tmp_path / "images" / "03.png"
    image = Image.open(path)
    if turned:
        orientation = Image.Exif()
        orientation[0x0112] = 6
        image.save(path, exif=orientation)
        said = f"is of an image of {image.width} x {image.height} pixels, before it is turned as its EXIF data says"
    else:
        image.resize((30, 30)).save(path)
        said = f"is of an image of {image.width} x {image.height} pixels, but it has 30 x 30"
    config = configured(tmp_path, place)
    with pytest.raises(DataError, match=r"03\.png") as caught:
        make_training_shards(config, tmp_path / "cache")
    assert said in str(caught.value)


def test_class_numbers_keep_their_places_also_where_one_is_not_in_the_data(tmp_path: Path) -> None:
    places = annotate(tmp_path, pictures(tmp_path))
    (tmp_path / "data.yaml").unlink()
    for file in (tmp_path / "labels").iterdir():
        file.write_text(
            "\n".join(f"7{line[1:]}" if line.startswith("1") else line for line in file.read_text().splitlines())
        )
    _, manifest, _ = make_training_shards(configured(tmp_path, places["yolo"]), tmp_path / "cache")
    assert manifest.fitted["boxes"].classes == tuple("01234567")


def test_a_broken_yaml_and_lines_with_key_points(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path, 3))
    (tmp_path / "data.yaml").write_text("a: !Ref b\n")
    with pytest.raises(DataError, match=r"data\.yaml is no YAML: "):
        read_annotations(tmp_path / "images", ["01.png"], "../labels")
    (tmp_path / "data.yaml").write_text("names: {0: a, 2: c}\nkpt_shape: [3, 2]\n")
    (tmp_path / "labels" / "01.txt").write_text("2 0.5 0.5 0.2 0.2 0.9 0.9 0.1 0.1 0.4 0.4\n")
    found = read_annotations(tmp_path / "images", ["01.png"], "../labels")
    assert found.names == ("a", "1", "c")
    [box] = found.boxes["01.png"]
    np.testing.assert_allclose(box[1:5], (0.4, 0.4, 0.6, 0.6))


@pytest.mark.parametrize("bbox", [[-0.9, 10, 0.5, 10], [80.2, 10, 0.5, 10]])
def test_a_box_of_which_nothing_is_in_its_image_is_named(bbox: list[float], tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path, 3))
    content = json.loads((tmp_path / "annotations.json").read_text())
    content["annotations"] = [{"id": 5, "image_id": 100, "category_id": 7, "bbox": bbox}, {"id": 6, "image_id": [1]}]
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"annotation 5: the box .* is outside of its image") as caught:
        read_annotations(tmp_path / "images", ["00.png"], "../annotations.json")
    assert "annotation 6 is of image [1]" in str(caught.value)


def test_crowds_and_difficult_objects_keep_their_flags(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path, 3))
    content = json.loads((tmp_path / "annotations.json").read_text())
    content["annotations"][0]["iscrowd"] = 1
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    found = read_annotations(tmp_path / "images", ["01.png"], "../annotations.json")
    assert found.boxes["01.png"][0].flag == CROWD
    text = (tmp_path / "xml" / "01.xml").read_text()
    (tmp_path / "xml" / "01.xml").write_text(text.replace("</name>", "</name><difficult>1</difficult>"))
    assert read_annotations(tmp_path / "images", ["01.png"], "../xml").boxes["01.png"][0].flag == DIFFICULT
    assert "00.png" not in read_annotations(tmp_path / "images", ["01.png"], "../xml").boxes


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (None, "is missing"),
        ("cat", "is 'cat', not a list of boxes"),
        ([{"bbox": [1, 2, 3], "category": "a"}], "as box 0, not a bbox [x, y, width, height] and a category"),
        ([{"bbox": [1, 2, 3, 4]}], "as box 0, not a bbox"),
        ({"bbox": [[1, 2, 3, 4]], "category": []}, "is missing"),
        ([{"bbox": [1, 2, 0, 4], "category": 3}], "holds box 0: the box 1, 2, 1, 6 is empty"),
        ([{"bbox": [1, 2, float("nan"), 4], "category": 3}], "is not finite"),
        ({"bbox": [[1, 2, 0, 4]], "category": ["a"], "file": "x.png"}, "holds box 0: the box 1, 2, 1, 6 is empty"),
    ],
)
def test_cells_of_a_table_that_are_no_boxes_are_named(cell: Any, problem: str) -> None:
    found = boxes_of(cell)
    assert isinstance(found, str)
    assert problem in found


def test_preprocessings_are_tried_with_the_borders_of_the_family(tmp_path: Path) -> None:
    config = configured(tmp_path, annotate(tmp_path, pictures(tmp_path))["coco"], resize="corner_grey")
    tried = candidates(config, read_training_signature(config.model))
    assert {each.get("data.image.resize", "corner_grey") for each in tried} == {"corner_grey", "stretch"}
    assert len(tried) == 21


def test_memory_is_estimated_for_the_boxes_of_all_images_that_are_put_together(tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    for augment, images in (({}, 1), ({"mosaic": 0.1}, 4), (MIXED, 8)):
        _, (labels,) = example_batch(configured(tmp_path, place, augment=augment))
        assert labels is not None
        # an image has 3 objects at most
        assert labels.shape[1] == 3 * BOX_NUMBERS * images


def test_settings_that_would_lose_boxes_are_refused_with_the_choices(tmp_path: Path) -> None:
    places = annotate(tmp_path, pictures(tmp_path))
    for image, said in (
        ({"resize": "crop"}, "'crop' cuts off objects; set 'pad'"),
        ({"augment": {"rand_augment": 9}}, "cannot change boxes with their images"),
        ({"augment": {"cutmix": 1.0}}, "rand_augment and cutmix cannot change boxes with their images; use mosaic"),
        ({"augment": {"mosaic": 1.0}, "boxes": ""}, "augment.mosaic puts images with boxes together"),
        ({"boxes": "../nothing.json"}, "cannot be read"),
        ({"boxes": "../images"}, "no .txt and no .xml files"),
    ):
        with pytest.raises(ConfigError) as caught:
            configured(tmp_path, places["coco"], **image)
        assert said in str(caught.value)
    config = configured(tmp_path, places["coco"])
    assert config.data.image
    image = config.data.image.model_copy(update={"masks": ("mask",), "augment": AugmentConfig(mixup=8.0)})
    with pytest.raises(ConfigError, match="mosaic and mixup cannot change masks"):
        box_column(config.data.model_copy(update={"image": image}), config.losses)
    with pytest.raises(ConfigError, match="no loss reads the boxes in column 'boxes', but label"):
        configured(tmp_path, places["coco"] | {"label": "label"})


def test_it_is_said_how_many_images_have_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = pictures(tmp_path, 8)
    annotate(tmp_path, shown)
    (tmp_path / "xml" / "03.xml").unlink()
    names = [name for name, *_ in shown]
    said = {
        place: str(read_annotations(tmp_path / "images", names, f"../{place}"))
        for place in ("annotations.json", "labels", "xml")
    }
    assert said == {
        "annotations.json": "12 boxes in 6 of 8 images",
        "labels": "12 boxes in 6 of 8 images (2 without a label file)",
        "xml": "9 boxes in 5 of 8 images (1 without a label file)",
    }
    for number in (1, 2, 3):
        (tmp_path / "labels" / f"{number:02d}.txt").unlink()
    data = DataConfig(source=str(tmp_path / "images"), label="boxes", image=ImageConfig(boxes="../labels"))
    with caplog.at_level("INFO"):
        _say_boxes(data)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "6 boxes in 3 of 8 images (5 without a label file): is data.image.boxes the right place" in record.message


@pytest.mark.parametrize("limit", [{"num_epochs": 2.0, "num_steps": 0}, {"num_epochs": 0.0, "num_steps": 5}])
def test_the_last_epochs_are_without_mosaic_and_mixup_on_every_layout(limit: dict[str, Any], tmp_path: Path) -> None:
    place = annotate(tmp_path, pictures(tmp_path))["coco"]
    with_both, closed, plain = (
        configured(tmp_path, place, augment={**MIXED, **change})
        for change in ({}, {"mosaic": [MIXED["mosaic"], 0.5]}, {"mosaic": 0.0, "mixup": 0.0})
    )
    found = []
    for config in (with_both, closed, plain):
        train = config.train.model_copy(update=limit)
        found.append(config.model_copy(update={"train": train}))
    # 20 rows, 40 samples: the last 10 are plain
    both, ending, without = (taken(batches(tmp_path, each), steps=5) for each in found)
    for step in range(3):
        assert torch.equal(ending[step].inputs[0], both[step].inputs[0])
    assert torch.equal(ending[3].inputs[0][:6], both[3].inputs[0][:6])
    assert torch.equal(ending[3].inputs[0][6:], without[3].inputs[0][6:])
    assert torch.equal(ending[4].inputs[0], without[4].inputs[0])
    assert not torch.equal(both[4].inputs[0], without[4].inputs[0])
    for at in range(8):
        np.testing.assert_array_equal(boxes_in(ending[4], at), boxes_in(without[4], at))
    # two replicas with smaller micro-batches, from the fourth step on, as after a resume
    small = found[1].train.model_copy(update={"gradient_accumulation_steps": 4})
    replicas = [batches(tmp_path, found[1].model_copy(update={"train": small}), place, 2) for place in range(2)]
    for step in (3, 4):
        parts = [batch for each in replicas for batch in each.take(8 * step, 8)]
        assert torch.equal(torch.cat([part.inputs[0] for part in parts]), ending[step].inputs[0])
    for each in replicas:
        each.close()
