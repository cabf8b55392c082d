"""The length of a sample is one that the positions of the file allow; where it hides them, the rehearsal says it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.proof import prove
from tests.support.texts import gpt2_tokenizer, sentences
from tests.trainer.data.text.test_graph_limits import decoder


def books(folder: Path) -> Path:
    (folder / "books").mkdir()
    for at in range(6):
        (folder / "books" / f"{at}.txt").write_text(". ".join(sentences(30, seed=at)))
    return folder / "books"


def test_init_trains_windows_that_the_positions_of_gpt2_allow(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json", size=300)
    onnx.save(decoder(0), tmp_path / "model.onnx")
    found = onward.init(tmp_path / "model.onnx", books(tmp_path), output=tmp_path / "config.toml", steps=2)
    assert not found.refused
    assert found.proof is not None
    assert "max_length" not in (tmp_path / "config.toml").read_text(), "the length is that of the positions"
    with pytest.raises(ConfigError, match="max_length 65 is above the 64 position embeddings of the model"):
        load_config(tmp_path / "config.toml", ["data.text.max_length=65"], check=check_files_and_data)


def test_where_positions_are_hidden_the_rehearsal_says_how_long_texts_may_be(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json", size=300)
    proto = decoder(0)
    # 1 * Range is a product that the search for positions does not follow
    place = next(at for at, node in enumerate(proto.graph.node) if node.op_type == "Range")
    (name,) = proto.graph.node[place].output
    proto.graph.node[place].output[0] = "hidden"
    proto.graph.node.insert(place + 1, onnx.helper.make_node("Mul", ["hidden", "one"], [name]))
    onnx.save(proto, tmp_path / "model.onnx")
    found = onward.init(tmp_path / "model.onnx", books(tmp_path), output=tmp_path / "config.toml", steps=2)
    assert "max_length = 128" in (tmp_path / "config.toml").read_text()
    (refused,) = found.refused
    assert (
        "rows of up to 64 run, and rows of 65 are beyond a table of the model: set data.text.max_length = 64" in refused
    )
    assert prove(load_config(tmp_path / "config.toml", ["data.text.max_length=64"]), 1).steps == 1
