"""Classes are counted once, while the data is sharded; all that need "balanced" weights read the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest, Shards
from onward.trainer.run.records import read_record, write_record
from tests.support import graphs

LABELS = np.tile([0, 0, 2, 255, 2, 0, -100, 1], 12)


def config_of(folder: Path, **loss: Any) -> RunConfig:
    (folder / "model.onnx").write_bytes(graphs.tiny_mlp(outputs=4).SerializeToString())
    np.savez(folder / "data.npz", features=np.ones((96, 4), np.float32), label=LABELS)
    np.savez(folder / "held-out.npz", features=np.ones((2, 4), np.float32), label=[0, 1])
    data = {"source": str(folder / "data.npz"), "evaluation_source": str(folder / "held-out.npz")}
    loss = {"class_weights": "balanced", "ignore_index": 255, **loss}
    return build_config(
        {"model": {"path": folder / "model.onnx"}, "data": data, "loss": loss, "train": {"num_steps": 1}}
    )


def weights(config: RunConfig, directory: Path) -> Any:
    rows = open_shards(directory, "train")
    return resolve(config, rows, read_training_signature(config.model)).losses[0].class_weights


def by_hand(*counts: int) -> list[float]:
    present = [count for count in counts if count]
    return [sum(counts) / (len(present) * count) if count else 0.0 for count in counts]


def test_sharding_counts_the_classes_and_nothing_reads_the_labels_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    directory, manifest, cached = make_training_shards(config, tmp_path / "cache")
    assert not cached
    assert manifest == read_record(directory / "manifest.json", ShardManifest)
    counts = manifest.fitted["label"].class_counts
    assert (len(counts), counts[:3], counts[255], sum(counts)) == (256, (36, 12, 24), 12, 84)
    monkeypatch.setattr(Shards, "read", lambda *_: pytest.fail("the labels were counted before"))
    # four classes, of which one never occurs; class 255 is ignored
    assert list(weights(config, directory)) == by_hand(36, 12, 24, 0)


def test_shards_without_counts_are_counted_and_give_the_same_weights(tmp_path: Path) -> None:
    config, cache = config_of(tmp_path), tmp_path / "cache"
    plain = config_of(tmp_path, class_weights=())
    directory, manifest, _ = make_training_shards(plain, cache)
    assert manifest.fitted == {}
    assert list(weights(config, directory)) == by_hand(36, 12, 24, 0)
    again, counted, cached = make_training_shards(config, cache)
    assert cached
    assert again == directory
    assert list(counted.fitted) == ["label"]
    assert list(weights(config, directory)) == by_hand(36, 12, 24, 0)
    # as an earlier version wrote it, beside what is known of the column
    write_record(
        directory / "manifest.json",
        manifest.model_copy(update={"fitted": {"label": Fitted(classes=("a",))}}).with_digest(),
    )
    _, counted, _ = make_training_shards(config, cache)
    assert counted.fitted["label"].classes == ("a",)
    assert list(weights(config, directory)) == by_hand(36, 12, 24, 0)


def test_class_names_are_counted_by_their_ids(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(graphs.tiny_mlp(outputs=3).SerializeToString())
    kinds = ["cat", "dog", "cat", "ape", "cat", "dog", "cat", "cat"] * 4
    rows = "\n".join(f"1,2,3,4,{kind}" for kind in kinds)
    (tmp_path / "data.csv").write_text(f"a,b,c,d,label\n{rows}\n")
    config = build_config(
        {
            "model": {"path": tmp_path / "model.onnx"},
            "data": {
                "source": str(tmp_path / "data.csv"),
                "evaluation_source": str(tmp_path / "data.csv"),
                "inputs": {"features": ["a", "b", "c", "d"]},
            },
            "loss": {"class_weights": "balanced"},
            "train": {"num_steps": 1},
        }
    )
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    found = manifest.fitted["label"]
    assert (found.classes, found.class_counts) == (("ape", "cat", "dog"), (4, 20, 8))
    assert list(weights(config, directory)) == by_hand(4, 20, 8)
