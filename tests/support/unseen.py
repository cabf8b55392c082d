"""Models and data of eleven kinds, made in a folder, for `onward init`: model.onnx and what it is to be trained on."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto
from PIL import Image

from onward.trainer.onnx_graph.examples.small_models import build_unet
from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support import graphs
from tests.support.images import encoded, write_classes
from tests.support.runs import tiny_images
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, reviews, sentences, write_csv


def _image_folder(folder: Path) -> Path:
    onnx.save(graphs.tiny_conv_net_with_batch_norm(num_classes=3), folder / "model.onnx")
    return write_classes(folder / "animals", ("cat", "cow", "dog"), each=30)


def _npz(folder: Path) -> Path:
    onnx.save(graphs.tiny_resnet(), folder / "model.onnx")
    columns = tiny_images(120)
    np.savez(folder / "pixels.npz", image=columns["image"], quadrant=columns["label"])
    return folder / "pixels.npz"


def _csv_text(folder: Path) -> Path:
    size = bert_tokenizer(folder / "tokenizer.json").get_vocab_size()
    onnx.save(graphs.tiny_bert(vocab_size=size, num_classes=2), folder / "model.onnx")
    rows = [(at, text, ("bad", "good")[label]) for at, (text, label) in enumerate(reviews(160))]
    return write_csv(folder / "reviews.csv", ("id", "sentence", "verdict"), rows)


def _causal_text(folder: Path) -> Path:
    size = gpt2_tokenizer(folder / "tokenizer.json", size=300).get_vocab_size()
    onnx.save(graphs.tiny_transformer(vocab_size=size), folder / "model.onnx")
    (folder / "books").mkdir()
    for at in range(6):
        (folder / "books" / f"{at}.txt").write_text(". ".join(sentences(30, seed=at)))
    return folder / "books"


def _masks(folder: Path) -> Path:
    onnx.save(build_unet(num_classes=2, image_size=16, width=4), folder / "model.onnx")
    for name in ("images", "masks"):
        (folder / "scans" / name).mkdir(parents=True)
    random = np.random.default_rng(0)
    for at in range(60):
        spot = np.zeros((16, 16), np.uint8)
        y, x = random.integers(0, 10, 2)
        spot[y : y + 6, x : x + 6] = 255
        pixels = (random.integers(0, 90, (16, 16, 3)) + spot[:, :, None] // 2).clip(0, 255).astype(np.uint8)
        (folder / "scans" / "images" / f"{at}.png").write_bytes(encoded(Image.fromarray(pixels), "PNG"))
        (folder / "scans" / "masks" / f"{at}.png").write_bytes(encoded(Image.fromarray(spot), "PNG"))
    return folder / "scans"


def _parquet_regression(folder: Path) -> Path:
    onnx.save(graphs.tiny_mlp(inputs=5), folder / "model.onnx")
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5))
    cells = {f"m{at}": pa.array(x[:, at] * 10.0**at + 100 * at) for at in range(5)}
    cells["m2"] = pa.array([None if at % 20 == 0 else value for at, value in enumerate(cells["m2"].to_pylist())])
    pq.write_table(pa.table({**cells, "yield": x[:, 0] - 2 * x[:, 4]}), folder / "crops.parquet")
    return folder / "crops.parquet"


def _two_outputs(folder: Path) -> Path:
    g = GraphWriter("two_outputs")
    x = g.input("sensors", ("batch", 6))
    x = g.op("Relu", g.op("Gemm", x, g.weight("trunk.weight", g.normal(0.4, 6, 16))))
    for name, size in (("state", 3), ("load", 2)):
        g.op("Gemm", x, g.weight(f"{name}.weight", g.normal(0.3, 16, size)), outputs=name)
        g.output(name, ("batch", size))
    onnx.save(g.model(), folder / "model.onnx")
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 6)).astype(np.float32)
    states = np.array(["idle", "run", "stop"])[x[:, :3].argmax(axis=1)]
    rows = [[*cells, state, cells[3] + cells[4], cells[5]] for cells, state in zip(x.tolist(), states, strict=True)]
    header = [*(f"s{at}" for at in range(6)), "mode", "load_left", "load_right"]
    return write_csv(folder / "machine.csv", header, rows)


def _labels_are_an_input(folder: Path) -> Path:
    onnx.save(graphs.tiny_loss_model(), folder / "model.onnx")
    x = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", features=x, target=x[:, :3].argmax(axis=1))
    return folder / "rows.npz"


def _audio_folder(folder: Path) -> Path:
    g = GraphWriter("audio")
    x = g.op("ReduceMean", g.input("mel", ("batch", 1, 40, 101)), g.weight("time", [-1]), keepdims=0)
    x = g.op("MatMul", g.op("Flatten", x), g.weight("weight", g.normal(0.01, 40, 2)))
    g.op("Add", x, g.weight("bias", np.zeros(2, np.float32)), outputs="logits")
    g.output("logits", ("batch", 2))
    onnx.save(g.model(), folder / "model.onnx")
    for at in range(60):
        path = folder / "tones" / ("high", "low")[at % 2] / f"{at}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = 0.4 * np.sin(2 * np.pi * (2000 + at, 300 + at)[at % 2] * np.arange(16000) / 16000)
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes((samples * 32767).astype("<i2").tobytes())
    return folder / "tones"


def _categories(folder: Path) -> Path:
    g = GraphWriter("categories")
    place = g.op("Gather", g.weight("places", g.normal(0.5, 4, 2)), g.input("island", ("batch",), TensorProto.INT64))
    x = g.op("Concat", g.input("measures", ("batch", 3)), place, axis=1)
    x = g.op("Relu", g.op("MatMul", x, g.weight("w1", g.normal(0.5, 5, 16))))
    g.op("MatMul", x, g.weight("w2", g.normal(0.3, 16, 3)), outputs="scores")
    g.output("scores", ("batch", 3))
    onnx.save(g.model(), folder / "model.onnx")
    random, islands, species = np.random.default_rng(0), ("Biscoe", "Dream", "Torgersen"), ("a", "c", "g")
    rows = []
    for at in range(180):
        kind = int(random.integers(0, 3))
        cells = (random.normal(0, 0.5, 3) + kind).round(3).tolist()
        cells[at % 3] = "" if at % 20 == 7 else cells[at % 3]
        rows.append([islands[random.integers(0, 3)], *cells, species[kind]])
    return write_csv(folder / "birds.csv", ("island", "bill", "depth", "tail", "species"), rows)


def _series(folder: Path) -> Path:
    g = GraphWriter("series")
    x = g.op("MatMul", g.input("past", ("batch", 24)), g.weight("w", g.normal(0.1, 24, 3)))
    g.op("Add", x, g.weight("b", np.zeros(3, np.float32)), outputs="future")
    g.output("future", ("batch", 3))
    onnx.save(g.model(), folder / "model.onnx")
    days, noise = np.arange(300), np.random.default_rng(0).normal(0, 0.1, 300)
    rows = [(np.datetime64("2025-01-01") + day, np.sin(day / 5) + noise[day]) for day in days]
    return write_csv(folder / "days.csv", ("date", "load"), rows)


UNSEEN: dict[str, Callable[[Path], Path]] = {
    "image folder": _image_folder,
    "npz": _npz,
    "csv text": _csv_text,
    "causal text": _causal_text,
    "masks": _masks,
    "parquet regression": _parquet_regression,
    "two outputs": _two_outputs,
    "labels are an input": _labels_are_an_input,
    "audio folder": _audio_folder,
    "categories": _categories,
    "series": _series,
}
"""Kind -> writes model.onnx and the data into a folder, and returns the path of the data."""
