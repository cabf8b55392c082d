"""Masks go through the geometry of their images, as torchvision's Mask does, and become class numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from PIL import Image

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, Batches, one_batch
from onward.trainer.data.images.augmentation import Augmentation, seeds
from onward.trainer.data.images.image_decoding import decode_image, decode_mask
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support.images import encoded, picture

AUGMENT = {"crop_padding": 3, "flip": (0.5, 0.5), "color_jitter": 0.3, "erasing": 0.3}


def segmenter(size: int = 16, classes: int = 3) -> onnx.ModelProto:
    """One convolution, with the classes on the last axis: `image` [batch, 3, size, size] -> [batch, size, size, C]."""
    g = GraphWriter("segmenter")
    x = g.input("image", ("batch", 3, size, size))
    weight, bias = g.weight("weight", g.normal(0.1, classes, 3, 1, 1)), g.weight("bias", np.zeros(classes, np.float32))
    x = g.op("Transpose", g.op("Conv", x, weight, bias, kernel_shape=[1, 1]), perm=[0, 2, 3, 1])
    g.output(g.op("Identity", x, outputs="scores"), ("batch", size, size, classes))
    return g.model()


def mask_of(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Rectangles of three classes."""
    mask = np.zeros((height, width), np.uint8)
    mask[seed % 5 + 2 :, seed % 3 + 4 :] = 1
    mask[-6:, : 5 + seed % 4] = 2
    return mask


def write_pairs(folder: Path, count: int = 30, factor: int = 1) -> Path:
    """Images in `images/`, masks in `masks/`, and a table of both; return the folder of images."""
    rows = []
    for at in range(count):
        height, width = 18 + at % 5, 20 + at % 7
        for kind in ("images", "masks"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / "images" / f"{at:02d}.jpg").write_bytes(encoded(picture(at, height, width)))
        Image.fromarray(mask_of(at, height, width) * factor).save(folder / "masks" / f"{at:02d}.png")
        rows.append((f"images/{at:02d}.jpg", f"masks/{at:02d}.png"))
    pd.DataFrame(rows, columns=["image", "mask"]).to_csv(folder / "table.csv", index=False)
    return folder / "images"


def configured(folder: Path, source: Path, model: dict[str, Any] | None = None, **image: Any) -> RunConfig:
    onnx.save(segmenter(), folder / "model.onnx")
    return build_config(
        {
            "model": {"path": folder / "model.onnx", **(model or {})},
            "data": {"source": str(source), "label": "mask", "image": image, "evaluation_fraction": 0.2},
            "train": {"global_batch_size": 8, "num_steps": 4},
        },
        check=check_files_and_data,
    )


def batches(folder: Path, source: Path, model: dict[str, Any] | None = None, **image: Any) -> Batches:
    config = configured(folder, source, model, **image)
    directory, _, _ = make_training_shards(config, folder / "cache")
    signature = read_training_signature(config.model)
    return Batches(
        open_shards(directory, "train"), config, signature, replica=0, num_replicas=1, device=torch.device("cpu")
    )


def taken(found: Batches, steps: int = 3) -> list[Batch]:
    taken = [found.take(8 * step, 8)[0] for step in range(steps)]
    found.close()
    return taken


def test_tables_and_folders_and_both_caches_give_the_same_masks(tmp_path: Path) -> None:
    images = write_pairs(tmp_path)
    settings = {"masks": ["mask"], "augment": AUGMENT}
    table = taken(batches(tmp_path, tmp_path / "table.csv", **settings))
    encoded_table = taken(batches(tmp_path, tmp_path / "table.csv", cache="encoded", **settings))
    for one, other in zip(table, encoded_table, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.labels[0], other.labels[0])
    labels = table[0].labels[0]
    assert labels is not None
    assert (labels.dtype, labels.shape) == (torch.int64, (8, 16, 16))
    assert set(labels.unique().tolist()) == {-100, 0, 1, 2}  # borders of crops are ignored
    folder = taken(batches(tmp_path, images, masks="../masks"))
    assert {0, 1, 2} == set(torch.cat([each.labels[0] for each in folder]).unique().tolist())
    # folders of splits inside of those of images and masks
    for name in ("images", "masks"):
        (tmp_path / "split" / name).mkdir(parents=True)
        (tmp_path / name).rename(tmp_path / "split" / name / "train")
    inside = taken(batches(tmp_path, tmp_path / "split/images/train", masks="../../masks/{source}"))
    for one, other in zip(folder, inside, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.labels[0], other.labels[0])


@pytest.mark.parametrize("augment", [AUGMENT, {"random_resized_crop": 0.3, "flip": 0.5}])
def test_masks_are_those_of_torchvision_for_the_same_seed(augment: dict[str, Any], tmp_path: Path) -> None:
    import_torchvision()
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    write_pairs(tmp_path)
    table = tmp_path / "table.csv"
    config = configured(tmp_path, table, masks=["mask"], augment=augment)
    assert config.data.image is not None
    resize = [] if "random_resized_crop" in augment else [v2.Resize(18), v2.CenterCrop(16)]
    expected = v2.Compose([*resize, *Augmentation(config.data.image, (16, 16)).before])
    plain = configured(tmp_path, table, masks=["mask"], cache="encoded")
    files = open_shards(make_training_shards(plain, tmp_path / "cache")[0], "train")
    found = batches(tmp_path, table, masks=["mask"], augment=augment)
    with torch.random.fork_rng():
        for step, batch in enumerate(taken(found)):
            values = files.read(batch.rows)
            for at in range(8):
                torch.manual_seed(seeds(np.array([8 * step + at]), seed=0, purpose="image augmentation")[0])
                image = decode_image(values["image"][at], grey=False)
                mask = tv_tensors.Mask(torch.from_numpy(decode_mask(values["mask"][at])))
                assert batch.labels[0] is not None
                assert torch.equal(expected(image, mask)[1].to(torch.int64), batch.labels[0][at])


def test_values_of_masks_are_numbered_in_the_order_that_is_given(tmp_path: Path) -> None:
    write_pairs(tmp_path, factor=100)
    settings = {"masks": ["mask"], "mask_values": [200, 0, 100]}
    found = taken(batches(tmp_path, tmp_path / "table.csv", **settings))
    plain_folder = tmp_path / "plain"
    write_pairs(plain_folder)
    plain = taken(batches(plain_folder, plain_folder / "table.csv", masks=["mask"]))
    assert found[0].labels[0] is not None
    assert torch.equal(found[0].labels[0], torch.tensor([1, 2, 0])[plain[0].labels[0]])
    with pytest.raises(ConfigError, match=r"holds the value 200, which is not in data.image.mask_values \[0, 100\]"):
        batches(tmp_path, tmp_path / "table.csv", masks=["mask"], mask_values=[0, 100])


@pytest.mark.parametrize("cache", ["decoded", "encoded"])
def test_masks_of_another_size_than_their_image_are_bad_rows(cache: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "masks" / "04.png")
    with pytest.raises(DataError, match="line 6: mask is a mask of 9 x 8 pixels, but its image is 22 x 24"):
        batches(tmp_path, tmp_path / "table.csv", masks=["mask"], cache=cache)


@pytest.mark.parametrize("cache", ["decoded", "encoded"])
def test_masks_with_a_value_that_is_no_class_are_bad_rows_unless_the_loss_ignores_it(
    cache: str, tmp_path: Path
) -> None:
    source = write_pairs(tmp_path)
    mask = mask_of(4, 22, 24)
    mask[0] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "04.png")
    with pytest.raises(DataError) as refused:
        batches(tmp_path, source, masks="../masks", cache=cache)
    assert f"{source}/04.jpg: mask holds class 255, but the output has 3 of them, 0..2" in str(refused.value)
    assert "1 bad row: correct it" in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []
    ignoring = batches(tmp_path, source, {"ignore_index": 255}, masks="../masks", cache=cache)
    assert ignoring.num_rows
    ignoring.close()


def test_images_without_a_mask_are_left_out_on_request_and_none_of_all_is_refused(tmp_path: Path) -> None:
    source = write_pairs(tmp_path)
    config = configured(tmp_path, source, masks="../masks")
    for name in ("04", "07"):
        (tmp_path / "masks" / f"{name}.png").unlink()
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"bad_rows": "skip"})})
    _, manifest, _ = make_training_shards(skipping, tmp_path / "cache")
    assert manifest.rows("train") + manifest.rows("evaluation") == 28
    assert [row.partition("images/")[2] for row in manifest.skipped_rows] == [
        f"{name}.jpg: has no mask in ../masks" for name in ("04", "07")
    ]
    for mask in (tmp_path / "masks").iterdir():
        mask.unlink()
    with pytest.raises(DataError, match="30 of 30 images have no mask in"):
        make_training_shards(skipping, tmp_path / "cache")


def test_missing_masks_and_folders_and_masks_that_no_loss_reads_are_refused(tmp_path: Path) -> None:
    images = write_pairs(tmp_path)
    (tmp_path / "masks" / "04.png").unlink()
    (tmp_path / "masks" / "07.png").rename(tmp_path / "masks" / "77.png")
    with pytest.raises(ConfigError, match=r"2 of 30 images have no mask in .*masks: 04.jpg, 07.jpg"):
        batches(tmp_path, images, masks="../masks")
    with pytest.raises(ConfigError, match=r"set data.label, or name a folder of masks with a slash, such as ./masks"):
        batches(tmp_path, images, masks="masks")
    with pytest.raises(ConfigError, match=r"data.image.masks: there is no folder .*absent"):
        batches(tmp_path, images, masks="../absent")
    with pytest.raises(ConfigError, match=r"no loss reads the masks in column other, but mask; set data.label"):
        batches(tmp_path, tmp_path / "table.csv", masks=["other"])
    with pytest.raises(ConfigError, match="rand_augment 9 cannot change masks with their images"):
        batches(tmp_path, tmp_path / "table.csv", masks=["mask"], augment={"rand_augment": 9})


def test_borders_need_a_loss_that_ignores_targets(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    with pytest.raises(ConfigError, match=r"loss mse ignores no targets, but data.image.resize 'pad'"):
        batches(tmp_path, tmp_path / "table.csv", {"loss": "mse"}, masks=["mask"], resize="pad")


def test_balanced_weights_are_those_of_the_masks_as_evaluation_reads_them_in_either_cache(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    found = []
    for cache in ("decoded", "encoded"):
        plain = configured(tmp_path, tmp_path / "table.csv", masks=["mask"], cache=cache)
        weighted = plain.losses[0].model_copy(update={"class_weights": "balanced"})
        config = plain.model_copy(update={"loss": (weighted,)})
        directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
        rows, signature = open_shards(directory, "train"), read_training_signature(config.model)
        batch = one_batch(rows, plain, signature, np.arange(rows.num_rows))
        assert batch.labels[0] is not None
        expected = torch.bincount(batch.labels[0].flatten()).tolist()
        assert list(manifest.fitted["mask"].class_counts) == expected
        found.append(resolve(config, rows, signature).losses[0].class_weights)
    assert found[0] == found[1]
