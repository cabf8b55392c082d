"""Guess what a stored tensor is about which the file says nothing: by its use, its contents and its name.

    use        subtracted from the input, an exponent, only combined with positions, zeros beside -inf in a Where
    contents   masks, sinusoids, distances, filters that are symmetric or made of whole numbers, filter banks
    name       running_mean, anchors, weight_u, stft; a single number is a weight if it has the name of a parameter

A guess may be wrong. `onward doctor` says which roles are guessed, `model.train` and `model.freeze` decide otherwise.
What neither use, contents nor name identifies is taken for a weight: a random projection, a codebook, a wavelet.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from onward.trainer.onnx_graph.exporter_names import is_exporter_name
from onward.trainer.onnx_graph.surgery.output_units import CENTER, SCALE
from onward.trainer.onnx_import.roles.graph_flow import GraphFlow
from onward.trainer.onnx_import.roles.role_tables import ELEMENTWISE
from onward.trainer.onnx_import.roles.tensor_contents import (
    is_distance_table,
    is_filter_bank,
    is_fixed_filter,
    is_fourier_matrix,
    is_identity,
    is_integer_table,
    is_large_and_empty,
    is_mask,
    is_sinusoidal_table,
)

NORMALISES = "normalises the input"
ZERO_STATE = "the zero state a recurrent layer begins in"

PARAMETER_NAMES = re.compile(
    r"weight|bias|alpha|beta|gamma|scale|shift|temperature|tau|p|logit_(scale|bias)|log_(var|variance|std|sigma)|slope"
)
"""Last parts of the names of parameters that may hold a single number."""
CONSTANT_NAMES = re.compile(r"eps|epsilon|embed_scale|normalizer|factor|min(imum)?|max(imum)?|steps?|zero|one|count")
"""Last parts of the names of buffers that hold a single number."""
BUFFER_NAMES = re.compile(
    r"running_(mean|var)|moving_(mean|variance)|weight_[uv]|_[uv]|(\w+_)?anchors?|(\w+_)?alibi|inv_freq|freqs_(cis|cos|sin)"
    r"|mel_(basis|filters?|fb)|mel_?filter_?bank|dft_\w+|sobel\w*|blur_(kernel|filter)"
)
"""Last parts of names that modules give to buffers and hardly ever to parameters."""
TRANSFORMS = r"(cq_?t|vqt|i?dct|i?stft|hann(ing)?|hamming|blackman|gammatone|(log_?)?mel_?(scale|spec(trogram)?))"
TRANSFORM_WORD = re.compile(rf"(?<![a-z]){TRANSFORMS}(?![a-z])", re.IGNORECASE)
TRANSFORM_MODULE = re.compile(
    rf"(\w+_)?{TRANSFORMS}[\dv_]*(_?(real|imag|sin|cos|kernels?|filters?|bas[ie]s|mat(rix)?|window|layer))*",
    re.IGNORECASE,
)
"""Fixed transforms of a signal, windows and spectrograms: a word in the name of a constant of the module's code, or the
whole name of a module (`stft.conv_real.weight`), and not a part of one (`stft_encoder.conv.weight`)."""
KERNEL_WORD = re.compile(
    r"(?<![a-z])((log_?)?mel(_?(bank|filter|basis|fb|matrix)s?|w)?|(mel_?)?filter_?banks?|f_?banks?|window|gabor)(?![a-z])",
    re.IGNORECASE,
)
"""Words that networks also give to what is learned (`mel_linear.weight`, `window_attention`, `encoder.filterbank`):
they are believed as the last part of a name, and anywhere in that of a constant in the module's code."""
SCALER_NAMES = re.compile(r"(?!log_)(\w+_)?(mean|std|stdev|var|variance|min|minimum|max|maximum|range|factor|offset)_?")
"""Last parts of the names of statistics of the data."""


def frozen_because(name: str, tensor: torch.Tensor, flow: GraphFlow, *, of_module: bool, names: Collection[str]) -> str:
    """Return why a tensor is taken for a constant or a buffer; "" if it is taken for a weight.

    of_module: whether the name says that the tensor is a parameter or a buffer of the module, and no constant of its
    code. names: those of all stored tensors.
    """
    if name.endswith((SCALE, CENTER)):
        return "the units of a label (loss.standardise_label)"
    if why := _by_use(name, tensor, flow, of_module=of_module, names=names):
        return why
    if tensor.numel() == 1:
        return _number_because(name, tensor, flow, of_module=of_module)
    return _by_contents(name, tensor, flow, of_module=of_module)


def _by_use(name: str, tensor: torch.Tensor, flow: GraphFlow, *, of_module: bool, names: Collection[str]) -> str:
    last = name.rpartition(".")[2]
    if name not in flow.first_operator:
        return flow.frozen_reason.get(name, "is not combined with data in float arithmetic")
    if BUFFER_NAMES.fullmatch(last):
        return "has the name of a buffer"
    if word := _fixed_kernel(name, of_module=of_module):
        return f"has {word!r} in its name, as fixed kernels of signals have"
    if last in ("weight", "bias") and _has_frozen_norm(name.rpartition(".")[0], flow, names):
        return "beside running statistics in a formula: a BatchNormalization that is not trained"
    scaler = any(SCALER_NAMES.fullmatch(other.rpartition(".")[2]) for other in (name, flow.rescales.get(name, "")))
    if name in flow.normalises and not (of_module and PARAMETER_NAMES.fullmatch(last)):
        return NORMALISES
    # a learned factor of the input looks the same: the name of a module's tensor decides. Without such names, a factor
    # and a shift together are a scaler, unless all factors are equal, as they are when they were initialised
    pair = bool(flow.rescales.get(name)) and bool((tensor != tensor.reshape(-1)[:1]).any())
    if name in flow.rescales and (scaler if of_module else pair):
        return NORMALISES
    if flow.waves.get(name) == {"Sin", "Cos"}:
        return "frequencies of sines and cosines of the input"
    if name in flow.exponents and not of_module:
        return "an exponent"
    # frozen, it takes nothing from what can be learned: the shift can make up for any centre
    if name in flow.centres and not of_module and tensor.numel() > 1:
        return "subtracted in front of a factor and a shift of its shape: the mean of a normalisation written out"
    return ""


def _fixed_kernel(name: str, *, of_module: bool) -> str:
    """Return the part of a name that says that the tensor is a fixed kernel; "" if there is none."""
    parts = re.split(r"[./]", name)
    if of_module:
        if modules := [part for part in parts if TRANSFORM_MODULE.fullmatch(part)]:
            return modules[-1]
        return parts[-1] if KERNEL_WORD.fullmatch(parts[-1]) else ""
    if word := TRANSFORM_WORD.search(name):
        return word[0]
    # without the numbers that exporters append to equal names, as in weight_3 and weight:0
    is_parameter = PARAMETER_NAMES.fullmatch(re.sub(r"(_\d+)?(:\d+)?$", "", parts[-1]))
    word = None if is_parameter else KERNEL_WORD.search(name)
    return word[0] if word else ""


def _has_frozen_norm(module: str, flow: GraphFlow, names: Collection[str]) -> bool:
    """Return whether a module stores running statistics that no BatchNormalization reads."""
    statistics = [f"{module}.{name}" for name in ("running_mean", "running_var")]
    return all(name in names and name not in flow.statistics for name in statistics)


def _number_because(name: str, tensor: torch.Tensor, flow: GraphFlow, *, of_module: bool) -> str:
    """Return why a single number is taken for a constant; "" if it is taken for a weight."""
    last = name.rpartition(".")[2]
    if name in flow.masks or is_mask(tensor):
        return "a mask"
    if name in flow.states and not of_module and not tensor.any():
        return ZERO_STATE
    if of_module:
        constant = CONSTANT_NAMES.fullmatch(last) or SCALER_NAMES.fullmatch(last)
        return "a single number with the name of a constant" if constant else ""
    if name in flow.layer_operands:
        # the bias of one output; exporters also add the 0 of a mask that is computed in the graph to a product, and
        # jax2onnx any number of the code
        made_up = is_exporter_name(name) or re.fullmatch(r"const_\d+", name)
        if made_up and (tensor.ndim == 0 or not tensor.any()):
            return "a single number"
        return ""
    # without knowing that names come from a module, only what looks like a parameter of one
    path = "." in name and PARAMETER_NAMES.fullmatch(last)
    return "" if path or last in ("logit_scale", "logit_bias") else "a single number"


def _by_contents(name: str, tensor: torch.Tensor, flow: GraphFlow, *, of_module: bool) -> str:
    operator = flow.first_operator[name]
    product = operator in ("MatMul", "Gemm") and tensor.ndim == 2
    conv = operator in ("Conv", "ConvTranspose") and tensor.ndim >= 3
    layer = product or conv
    looked_up = operator.startswith("Gather")
    if name in flow.masks:
        return "a mask"
    # a file that is made of shapes alone stores zeros where its weights would be
    if (layer or looked_up) and is_large_and_empty(tensor):
        return ""
    # layers may begin as the identity; beside data in other operators it is a mask
    if is_mask(tensor) and not (layer and is_identity(tensor)):
        return "a mask"
    if name in flow.states and not of_module and not tensor.any():
        return ZERO_STATE
    # exporters write GroupNorm as an InstanceNormalization with scale 1 and bias 0, followed by Mul and Add with the
    # real ones
    if operator == "InstanceNormalization" and is_exporter_name(name) and bool(((tensor == 0) | (tensor == 1)).all()):
        return "the neutral scale or bias of a normalisation whose own ones come after it"
    # a real bias of zeros has the name of its layer; training these would add parameters that the torch model did not
    # have
    if name in flow.conv_biases and re.fullmatch(r"val_\d+", name) and not tensor.any():
        return "zeros an exporter gave convolutions that have no bias"
    # an operand of a layer, the bias after a MatMul included, is a weight whatever numbers it holds
    elementwise = operator in ELEMENTWISE
    if name not in flow.layer_operands:
        if (elementwise or looked_up) and is_sinusoidal_table(tensor):
            return "a table of sines, cosines or positions"
        if elementwise and is_integer_table(tensor):
            return "a table of whole numbers: a grid, strides or distances"
        if elementwise and is_distance_table(tensor):
            return "a table of distances or of evenly spaced numbers"
    # the learned filters of a ConvTranspose often begin as those of bilinear interpolation
    if operator == "Conv" and conv and is_fixed_filter(tensor):
        return "a filter that is symmetric or made of whole numbers: blur, edges, a Fourier transform"
    if product and is_fourier_matrix(tensor):
        return "the sines and cosines of a Fourier transform"
    if product and (is_filter_bank(tensor) or is_filter_bank(tensor.t())):
        return "a filter bank: overlapping bands of frequencies"
    return ""
