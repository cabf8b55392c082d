"""Every kind of model that PyTorch users bring, written by every exporter they use: `ARCHITECTURES`, `export`, `feed`.

    native = build("gpt2")                       # the torch module, small, with random weights
    model = export("gpt2", "legacy-17", folded=False)
    inputs = feed("gpt2", batch=3)               # by name, in the order of the module's and the file's inputs

The modules are in zoo_text.py, zoo_vision.py and zoo_other.py (zoo_*.py). `folded` is the exporter's default: it
folds BatchNormalization, transposes and renames weights and unties them. Unfolded is the recipe for training: dynamo
with optimize=False, the older exporter in training mode without constant folding.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from tests.support import zoo_buffers, zoo_other, zoo_parameters, zoo_text, zoo_vision
from tests.support.shared_files import made_once

EXPORTERS = ("dynamo-18", "dynamo-20", "dynamo-23", "legacy-14", "legacy-17")
LEGACY = EXPORTERS[3:]
DYNAMO = EXPORTERS[:3]  # the older exporter does not know nn.RMSNorm, and adds wrongly what meets in one place

IGNORED = (
    ("You are using the legacy TorchScript-based ONNX export", DeprecationWarning),
    ("The feature will be removed", DeprecationWarning),
    ("Setting `training` to something other than default", DeprecationWarning),
    ("`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning),
    ("_check_is_size will be removed", FutureWarning),
    ("Exporting a model while it is in training mode", UserWarning),
    ("# The axis name: .* will not be used, since it shares", UserWarning),
    ("The tensor attributes self.rnn._flat_weights", UserWarning),
    ("The tensor attribute self.fc.weight was assigned during export", UserWarning),  # older_spectral_norm
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
    ("Warning: ONNX export of embedding with padding_idx", UserWarning),
    ("Warning: ONNX export does not support duplicated values in 'index'", UserWarning),
    ("ONNX Preprocess - Removing mutation from node aten::add_", UserWarning),  # num_batches_tracked
    ("ONNX export mode is set to TrainingMode.EVAL, but operator 'instance_norm'", UserWarning),
    ("Constant folding - Only steps=1 can be constant folded", UserWarning),
    ("Exporting aten::index operator of advanced indexing", UserWarning),
    ("Exporting a model to ONNX with a batch_size other than 1", UserWarning),
    ("Converting a tensor to a Python", torch.jit.TracerWarning),
)
"""(how it opens, category) of what the exporters warn of and these tests do not mind."""


@dataclass(frozen=True)
class Architecture:
    """A module and what it reads: for each input how to make it, and which of its dimensions have names."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Callable[[int], Tensor]]
    dims: dict[str, dict[int, str]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("output",)
    after: Callable[[onnx.ModelProto], None] | None = None
    """What a user adds to the file behind the network."""
    exporters: tuple[str, ...] = EXPORTERS
    """Those that can write it."""
    as_initialised: bool = False
    """Whether its weights stay as the module initialises them."""


def entry_of(name: str) -> Architecture:
    """Return an architecture of the zoo, or a module of zoo_parameters.py or zoo_buffers.py."""
    return ARCHITECTURES.get(name) or ROLE_MODULES[name]


def build(name: str, *, shifted: bool = False) -> nn.Module:
    """The module, in evaluation mode: no two weights equal, no statistic at its start.

    shifted: every parameter differs from that of the same module without it; equal ones stay equal.
    """
    torch.manual_seed(0)
    entry = entry_of(name)
    module = entry.build()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim < 2 and not entry.as_initialised:
                weight += 0.1 * torch.randn_like(weight)
            if shifted:
                weight.mul_(1.0625).add_(0.0625)
        for key, buffer in module.named_buffers():
            if key.endswith("running_mean"):
                buffer += 0.1 * torch.randn_like(buffer)
            elif key.endswith("running_var"):
                buffer += 0.2 * torch.rand_like(buffer)
    return module.eval()


def feed(name: str, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs by name, in order."""
    torch.manual_seed(100 * seed + batch)
    return {key: make(batch) for key, make in entry_of(name).inputs.items()}


def export(name: str, exporter: str, *, folded: bool, shifted: bool = False) -> onnx.ModelProto:
    """What this exporter writes for this architecture; made once in a session."""
    return onnx.load(exported_file(name, exporter, folded=folded, shifted=shifted))


def exported_file(name: str, exporter: str, *, folded: bool, shifted: bool = False) -> Path:
    """Return the file of `export`."""

    def write(path: Path) -> None:
        kind, opset = exporter.split("-")
        with warnings.catch_warnings():
            for opening, category in IGNORED:
                warnings.filterwarnings("ignore", opening, category)
            export_with = _dynamo if kind == "dynamo" else _legacy
            export_with(name, build(name, shifted=shifted), path, int(opset), folded)
        if after := entry_of(name).after:
            model = onnx.load(path)
            after(model)
            onnx.save(model, path)

    return made_once(f"{name}-{exporter}-{folded}{'-shifted' * shifted}.onnx", write)


def _dynamo(name: str, module: nn.Module, path: Path, opset: int, folded: bool) -> None:
    inputs, entry = feed(name, 2), entry_of(name)
    dims = {label: torch.export.Dim(label) for names in entry.dims.values() for label in names.values()}
    shapes = tuple({axis: dims[label] for axis, label in entry.dims[key].items()} for key in inputs)
    program = torch.onnx.export(
        module.train(not folded),
        tuple(inputs.values()),
        dynamo=True,
        optimize=folded,
        opset_version=opset,
        input_names=list(inputs),
        output_names=list(entry.outputs),
        dynamic_shapes=shapes,
        verbose=False,
    )
    assert program is not None
    program.save(str(path), external_data=False)


def _legacy(name: str, module: nn.Module, path: Path, opset: int, folded: bool) -> None:
    inputs, entry = feed(name, 2), entry_of(name)
    training = {} if folded else {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        str(path),
        dynamo=False,
        opset_version=opset,
        input_names=list(inputs),
        output_names=list(entry.outputs),
        dynamic_axes=entry.dims,
        **training,
    )


def _suppression(model: onnx.ModelProto) -> None:
    """Behind a detector: the 5 best scores of each image, and non-maximum suppression; neither has a gradient."""
    tensors = (("best", [5]), ("limit", [3]))
    model.graph.initializer.extend(helper.make_tensor(f"post.{key}", TensorProto.INT64, [1], v) for key, v in tensors)
    for key, value in (("overlap", 0.5), ("least", 0.3)):
        model.graph.initializer.append(helper.make_tensor(f"post.{key}", TensorProto.FLOAT, [1], [value]))
    limits = ["post.limit", "post.overlap", "post.least"]
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["scores"], ["post.top"], axes=[1], keepdims=0)
            if model.opset_import[0].version < 18
            else helper.make_node("ReduceMax", ["scores", "post.axis"], ["post.top"], keepdims=0),
            helper.make_node("TopK", ["post.top", "post.best"], ["post.values", "best_places"]),
            helper.make_node("NonMaxSuppression", ["boxes", "scores", *limits], ["selected"]),
        ]
    )
    model.graph.initializer.append(helper.make_tensor("post.axis", TensorProto.INT64, [1], [1]))
    if model.opset_import[0].version < 18:
        del model.graph.initializer[-1]
    for output, shape in (("best_places", ["batch", 5]), ("selected", ["selected_boxes", 3])):
        model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.INT64, shape))


# -- inputs


def _tokens(*shape: int, below: int = zoo_text.VOCABULARY) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, below, (batch, *shape))


def _text(below: int = zoo_text.VOCABULARY) -> Callable[[int], Tensor]:
    """Tokens; a batch of another size has another length."""
    return lambda batch: torch.randint(0, below, (batch, 5 + batch))


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def _mask(batch: int, length: int = 0) -> Tensor:
    """Of `_text`, or of a fixed length: ones, then zeros where a row is padded: row i lacks i of its tokens."""
    length = length or 5 + batch
    return (torch.arange(length)[None] < length - torch.arange(batch)[:, None]).long()


def _edges(batch: int) -> Tensor:
    """Three for each of the nodes, of which there are four for each of the batch."""
    return torch.randint(0, 4 * batch, (2, 12 * batch))


TOKENS, BATCH, IMAGE = {0: "batch", 1: "sequence"}, {0: "batch"}, {"image": {0: "batch"}}


def _language(module: Callable[[], nn.Module], **more: Any) -> Architecture:
    return Architecture(module, {"input_ids": _text()}, {"input_ids": TOKENS}, **more)


def _image(module: Callable[[], nn.Module], **more: Any) -> Architecture:
    return Architecture(module, {"image": _floats(3, 16, 16)}, IMAGE, **more)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _language(zoo_text.GPT2),
    "bert": Architecture(
        zoo_text.BERT,
        {"input_ids": _text(), "attention_mask": _mask, "token_type_ids": _text(below=2)},
        {"input_ids": TOKENS, "attention_mask": TOKENS, "token_type_ids": TOKENS},
        ("logits", "tags"),
    ),
    "llama": _language(zoo_text.Llama),
    "t5": Architecture(
        zoo_text.T5,
        {"input_ids": _text(), "attention_mask": _mask, "decoder_input_ids": _tokens(5)},
        {"input_ids": TOKENS, "attention_mask": TOKENS, "decoder_input_ids": {0: "batch", 1: "target"}},
    ),
    "transformer_classifier": Architecture(  # the older exporter bakes the length into nn.MultiheadAttention
        zoo_text.TransformerClassifier,
        {"input_ids": _tokens(7), "attention_mask": lambda batch: _mask(batch, 7)},
        {"input_ids": BATCH, "attention_mask": BATCH},
    ),
    "dense_experts": _language(lambda: zoo_text.Llama(zoo_text.DenseExperts)),
    "gathered_experts": _language(lambda: zoo_text.Llama(zoo_text.GatheredExperts), exporters=DYNAMO),
    "mamba": Architecture(zoo_text.SelectiveScan, {"input_ids": _tokens(6)}, {"input_ids": BATCH}, exporters=DYNAMO),
    "lstm_tagger": _language(lambda: zoo_text.RecurrentTagger(nn.LSTM), exporters=LEGACY),
    "gru_tagger": _language(lambda: zoo_text.RecurrentTagger(nn.GRU), exporters=LEGACY),
    **{  # the newer exporter bakes the length into them
        f"{kind.__name__.lower()}_tagger_of_7": Architecture(
            functools.partial(zoo_text.RecurrentTagger, kind),
            {"input_ids": _tokens(7)},
            {"input_ids": BATCH},
            exporters=DYNAMO,
        )
        for kind in (nn.LSTM, nn.GRU)
    },
    "lstm_language_model": Architecture(
        zoo_text.LSTMLanguageModel,
        {
            "input_ids": _tokens(7),
            "h": lambda batch: torch.randn(1, batch, 8),
            "c": lambda batch: torch.randn(1, batch, 8),
        },
        {"input_ids": BATCH, "h": {1: "batch"}, "c": {1: "batch"}},
        ("logits", "h_after", "c_after"),
    ),
    "vit": _image(zoo_vision.ViT),
    "swin": _image(zoo_vision.Swin),
    "resnet": _image(zoo_vision.ResNet),
    "mobilenet": _image(zoo_vision.MobileNet),
    "convnext": _image(zoo_vision.ConvNeXt),
    "unet": _image(zoo_vision.UNet),
    "densenet": _image(zoo_vision.DenseNet),
    "autoencoder": _image(zoo_vision.Autoencoder, outputs=("pixels", "code")),
    "detector": _image(zoo_vision.Detector, outputs=("boxes", "scores"), after=_suppression),
    "detr": _image(zoo_vision.DETR, outputs=("classes", "boxes")),
    "siamese": Architecture(
        zoo_vision.Siamese, {"left": _floats(3, 16, 16), "right": _floats(3, 16, 16)}, {"left": BATCH, "right": BATCH}
    ),
    "crnn": Architecture(zoo_vision.CRNN, {"image": _floats(3, 16, 20)}, IMAGE),
    "tabular": Architecture(
        zoo_other.TabularMLP,
        {"numbers": _floats(5), "categories": _tokens(3, below=8)},
        {"numbers": BATCH, "categories": BATCH},
    ),
    "recommender": Architecture(
        zoo_other.Recommender,
        {"user": _tokens(below=9), "items": _tokens(4, below=11), "numbers": _floats(5)},
        {"user": BATCH, "items": BATCH, "numbers": BATCH},
    ),
    "audio": Architecture(zoo_other.AudioNet, {"sound": _floats(48)}, {"sound": {0: "batch", 1: "time"}}),
    "speech_encoder": Architecture(zoo_other.SpeechEncoder, {"mel": _floats(6, 16)}, {"mel": BATCH}),
    "graph_net": Architecture(
        zoo_other.GraphNet,
        {"nodes": lambda batch: torch.randn(4 * batch, 4), "edges": _edges},
        {"nodes": {0: "nodes"}, "edges": {1: "edges"}},
        exporters=DYNAMO,
    ),
}


ROLE_MODULES = {
    name: Architecture(
        module,
        {"x": _floats(*shape)},
        {"x": BATCH},
        # the older exporter does not know the newer of torch's two ways to write spectral normalisation
        exporters=DYNAMO if name == "spectral_norm" else EXPORTERS,
        as_initialised=True,
    )
    for name, (module, shape) in (zoo_parameters.PARAMETERS | zoo_buffers.BUFFERS).items()
}
"""Modules whose weights or buffers are easily mistaken; not in ARCHITECTURES, whose tests train every parameter."""
