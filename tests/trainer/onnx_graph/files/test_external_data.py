"""Weights in other files are mapped, not read, and only the bytes of changed weights are written."""

import copy
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.files import external_data as external
from onward.trainer.onnx_graph.files import stored_protos
from onward.trainer.onnx_graph.files.external_ranges import BYTEWISE_SIZES, byte_range, external_problems, is_external
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support.graphs import feed, tiny_bert, tiny_conv_net_with_batch_norm, tiny_mlp


def saved(model: onnx.ModelProto, folder: Path, *, smallest: int = 0) -> Path:
    """The model as m.onnx, its tensors in m.bin beside it."""
    path = folder / "m.onnx"
    onnx.save(copy.deepcopy(model), path, save_as_external_data=True, location="m.bin", size_threshold=smallest)
    return path


def imported(path: Path) -> tuple[onnx.ModelProto, ImportedGraph]:
    model = load_model(path)
    return model, to_module(model, base=path.parent)


def differing(a: Path, b: Path) -> set[int]:
    """Offsets at which two files differ; b may be longer."""
    first, second = (np.frombuffer(path.read_bytes(), np.uint8) for path in (a, b))
    return set(np.flatnonzero(first != second[: len(first)]).tolist())


def ranges(model: onnx.ModelProto, names: set[str]) -> set[int]:
    places = [byte_range(tensor) for tensor in model.graph.initializer if tensor.name in names and is_external(tensor)]
    return {byte for where in places for byte in range(where.offset, where.end)}


@pytest.mark.parametrize("rows", [80, 200])
def test_a_large_tensor_of_the_main_graph_stays_in_its_file_and_a_small_one_is_loaded(tmp_path, rows):
    weight = np.zeros((rows, 200), np.float32)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[n, {rows}] x) => (float[n, 200] y) {{ y = MatMul(x, w) }}""")
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = saved(model, tmp_path)
    copied = stored_protos.load_small_tensors(onnx.load(path, load_external_data=False), tmp_path)
    assert is_external(copied.graph.initializer[0]) == (weight.nbytes > stored_protos.SMALL_BYTES) == (rows == 200)


def moved(module: ImportedGraph, *names: str) -> None:
    with torch.no_grad():
        for name in names:
            named_weights(module)[name].add_(0.5)


@pytest.mark.parametrize("smallest", [0, 200])
@pytest.mark.parametrize("build", [tiny_mlp, tiny_bert, tiny_conv_net_with_batch_norm])
def test_an_untrained_model_is_written_as_the_same_bytes_in_all_its_files(build, smallest, tmp_path):
    path = saved(build(), tmp_path, smallest=smallest)
    model, module = imported(path)
    written = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    assert written == [tmp_path / "out" / "m.onnx", tmp_path / "out" / "m.bin"]
    for file in written:
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"m.bin", "m.onnx"}


def test_only_the_bytes_of_changed_weights_change_in_the_model_and_in_external_data(tmp_path):
    path = saved(tiny_conv_net_with_batch_norm(), tmp_path, smallest=200)
    model, module = imported(path)
    inside = {tensor.name for tensor in model.graph.initializer if not is_external(tensor)}
    changed = {"features.0.weight", "features.1.running_mean", "classifier.weight"}
    assert changed & inside
    assert changed - inside
    before = path.with_suffix(".bin").read_bytes()
    moved(module, *changed)
    target, side = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    assert path.with_suffix(".bin").read_bytes() == before, "the source is mapped copy-on-write"
    assert differing(path.with_suffix(".bin"), side) <= ranges(model, changed)
    after = onnx.load(target)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    for name, tensor in named_weights(module).items():
        assert np.array_equal(tensors[name], tensor.detach().numpy()), name
    feeds = feed(after, 3)
    [want] = onnxruntime.InferenceSession(target).run(None, feeds)
    got = module.eval()(*(torch.from_numpy(feeds[name]) for name in module.input_names))
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-4, atol=1e-5)


def test_weights_are_mapped_not_read(tmp_path):
    _, module = imported(saved(tiny_mlp(), tmp_path))
    assert len(named_weights(module)) == 4
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/m.bin") >= 1


def test_external_half_precision_weights_are_rounded_once(tmp_path):
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float16)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["batch", d]) for n, d in (("x", 4), ("y", 3))]
    protos = [numpy_helper.from_array(weight, "w")]
    path = saved(helper.make_model(helper.make_graph([node], "half", ends[:1], ends[1:], protos)), tmp_path)
    model, module = imported(path)
    _, side = write_model(module, model, path, tmp_path / "same" / "m.onnx")
    assert side.read_bytes() == path.with_suffix(".bin").read_bytes()
    moved(module, "w")
    target, _ = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    [stored] = onnx.load(target).graph.initializer
    assert np.array_equal(numpy_helper.to_array(stored), (weight.astype(np.float32) + 0.5).astype(np.float16))


def shared_range(folder: Path) -> Path:
    """Two weights, a and b, in the same bytes of m.bin, and one, c, in bytes of its own."""
    values = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)
    (folder / "m.bin").write_bytes(values.tobytes())
    protos = []
    for name, offset in (("a", 0), ("b", 0), ("c", 64)):
        proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "m.bin"), ("offset", str(offset)), ("length", "64")):
            proto.external_data.add(key=key, value=value)
        protos.append(proto)
    nodes = [helper.make_node("MatMul", [x, w], [y]) for x, w, y in (("x", "a", "p"), ("p", "b", "q"), ("q", "c", "y"))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "shared", ends[:1], ends[1:], protos))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def test_weights_that_shared_bytes_get_separate_bytes_when_they_differ(tmp_path):
    path = shared_range(tmp_path)
    model, module = imported(path)
    _, side = write_model(module, model, path, tmp_path / "same" / "m.onnx")
    assert side.read_bytes() == path.with_suffix(".bin").read_bytes()
    moved(module, "b", "c")
    target, _ = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    after = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(target).graph.initializer}
    for name, tensor in named_weights(module).items():
        assert np.array_equal(after[name], tensor.detach().numpy()), name
    onnx.checker.check_model(str(target))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"location": "../m.bin"}, "outside the model's directory"),
        ({"location": "/etc/hostname"}, "outside the model's directory"),
        ({"location": "link.bin"}, "is a symbolic link"),
        ({"location": "absent.bin"}, "absent.bin"),
        ({"location": "m.bin", "offset": "100"}, r"bytes 100 to 164 are outside .*m\.bin, which has 128"),
        ({"location": "m.bin", "length": "60"}, r"60 bytes in .*m\.bin, but its shape takes 64"),
        ({"location": "m.bin", "offset": "here"}, "cannot be read"),
    ],
)
def test_an_impossible_byte_range_is_refused(entries, why, tmp_path):
    path = shared_range(tmp_path)
    (tmp_path / "link.bin").symlink_to(tmp_path / "m.bin")
    model = onnx.load(path, load_external_data=False)
    del model.graph.initializer[0].external_data[:]
    for key, value in entries.items():
        model.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModel):
        load_model(path)
    [problem] = external_problems(model, tmp_path)  # load_model asks onnx first, which says it in its own words
    assert re.search(f"tensor 'a': .*{why}", problem)


def test_files_of_other_models_are_never_overwritten(tmp_path):
    path = saved(tiny_mlp(), tmp_path)
    model, module = imported(path)
    moved(module, "fc1.weight")
    with pytest.raises(ConfigError, match="is the model that was trained"):
        write_model(module, model, path, path)
    with pytest.raises(ConfigError, match=r"m\.bin holds the weights of .*m\.onnx; write to another directory"):
        write_model(module, model, path, tmp_path / "trained.onnx")
    out = tmp_path / "out"
    out.mkdir()
    (out / "m.bin").write_bytes(b"somebody else's")
    with pytest.raises(ConfigError, match=r"exists and is not a file of trained\.onnx"):
        write_model(module, model, path, out / "trained.onnx")
    assert (out / "m.bin").read_bytes() == b"somebody else's"
    (out / "m.bin").unlink()
    write_model(module, model, path, out / "trained.onnx")
    moved(module, "fc2.weight")
    write_model(module, model, path, out / "trained.onnx")  # our own, again
    assert {file.name for file in out.iterdir()} == {"m.bin", "trained.onnx"}


def test_a_tensor_is_written_and_compared_in_chunks(tmp_path, monkeypatch):
    for module in (external, stored_protos):
        monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    path = saved(tiny_mlp(), tmp_path)
    model, module = imported(path)
    with torch.no_grad():
        named_weights(module)["fc1.weight"][3, 1] += 1
    _, side = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    [start] = [byte_range(tensor).offset for tensor in model.graph.initializer if tensor.name == "fc1.weight"]
    assert differing(path.with_suffix(".bin"), side) <= set(range(start + 52, start + 56))
    [proto] = [tensor for tensor in tiny_mlp().graph.initializer if tensor.name == "fc1.weight"]
    for kept in (proto, helper.make_tensor("t", 1, proto.dims, numpy_helper.to_array(proto).reshape(-1))):
        assert [len(piece) for piece in stored_protos.read_chunks(kept, tmp_path)] == [4] * 16


def test_types_that_are_compared_in_chunks_are_those_that_are_mapped():
    assert external.BYTEWISE_DTYPES.keys() == BYTEWISE_SIZES.keys()


WIDE = 8192
NUM_LAYERS = 9


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_than_two_gigabytes_are_trained_and_written(tmp_path):
    import psutil

    with (tmp_path / "m.bin").open("wb") as file:
        block = np.random.default_rng(0).standard_normal((WIDE, WIDE), np.float32) / 90
        for layer in range(NUM_LAYERS):
            file.write(np.roll(block, layer).tobytes())
    size = WIDE * WIDE * 4
    protos, nodes = [], []
    for layer in range(NUM_LAYERS):
        proto = TensorProto(name=f"w{layer}", data_type=1, dims=[WIDE, WIDE], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "m.bin"), ("offset", str(layer * size)), ("length", str(size))):
            proto.external_data.add(key=key, value=value)
        protos.append(proto)
        nodes.append(helper.make_node("Gemm", [f"x{layer}", f"w{layer}"], [f"x{layer + 1}"]))
    ends = [helper.make_tensor_value_info(f"x{i}", 1, ["batch", WIDE]) for i in (0, NUM_LAYERS)]
    path = tmp_path / "m.onnx"
    graph_proto = helper.make_graph(nodes, "wide", ends[:1], ends[1:], protos)
    onnx.save(helper.make_model(graph_proto, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)
    full = NUM_LAYERS * size
    assert full > 2**31

    def own_bytes() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared  # without pages of mapped files, which the system takes back at will

    del block
    before = own_bytes()
    model, module = imported(path)
    with torch.no_grad():
        named_weights(module)["w3"][5] += 1
    trained = write_model(module, model, path, tmp_path / "out" / "m.onnx")
    assert own_bytes() - before < full / 20
    with (tmp_path / "m.bin").open("rb") as a, trained[1].open("rb") as b:
        for layer in range(NUM_LAYERS):
            differ = a.read(size) != b.read(size)
            assert differ == (layer == 3)
    x = np.random.default_rng(1).standard_normal((2, WIDE)).astype(np.float32)
    with torch.no_grad():
        ours = module(torch.from_numpy(x)).numpy()
    [theirs] = onnxruntime.InferenceSession(trained[0]).run(None, {"x0": x})
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
