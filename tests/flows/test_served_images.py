"""JPEG files of different sizes go through a whole run; the file with preprocessing takes their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.run.directory import RunDir
from tests.support.exported_runs import serve
from tests.support.graphs import tiny_conv_net
from tests.support.images import encoded, picture
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def write_photos(folder: Path, each: int, first: int) -> list[Path]:
    """Dark and bright pictures, from 20 to 200 pixels high and wide."""
    rng, files = np.random.default_rng(first), []
    for name, factor in (("bright", 1.0), ("dark", 0.5)):
        (folder / name).mkdir(parents=True)
        for at in range(each):
            height, width = rng.integers(20, 200, 2)
            image = picture(first + at, int(height), int(width)).point(
                [int(value * factor) for value in range(256)] * 3
            )
            files.append(folder / name / f"{at:02d}.jpg")
            files[-1].write_bytes(encoded(image))
    return files


def test_the_predictions_of_raw_pixels_are_those_of_the_run(workshop: Workshop) -> None:
    write_photos(workshop.root / "train", 40, 0)
    held_out = write_photos(workshop.root / "held", 20, 1000)
    onnx.save(tiny_conv_net(image_size=32, num_classes=2), workshop.root / "model.onnx")
    settings = [
        '[model]\npath = "model.onnx"',
        '[data]\nsource = "train"\nevaluation_source = "held"\n[data.image]',
        "[train]\nnum_epochs = 2\nglobal_batch_size = 16",
        '[export]\nvariants = ["with_preprocessing"]',
    ]
    (workshop.root / "run.toml").write_text("\n".join(settings))
    facts = workshop.onward("run", str(workshop.root / "run.toml"), limit_s=800)
    run, exported = RunDir(Path(facts["directory"])), Path(facts["model"])
    variant = next(run.root.rglob("*.with_preprocessing.onnx"))
    whole, plain = (onnxruntime.InferenceSession(path) for path in (variant, exported))
    (raw,) = whole.get_inputs()
    assert (raw.type, raw.shape[1:]) == ("tensor(uint8)", [None, None, 3])
    program, folder = serve(), run.root / "export"
    recipe, right = program.read_recipe(folder), 0
    for file in held_out:
        content = file.read_bytes()
        (logits,) = whole.run(None, {raw.name: pixels_of(decode_image(content, grey=False))[None]})
        (wanted,) = plain.run(None, program.model_inputs(recipe, {"image": [content]}, folder))
        np.testing.assert_array_equal(logits, wanted)
        right += recipe["outputs"][0]["classes"][logits.argmax()] == file.parent.name
    assert right / len(held_out) == pytest.approx(facts["after"]["evaluation/accuracy"], abs=1e-9)
