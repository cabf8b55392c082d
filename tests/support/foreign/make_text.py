"""Write text-*.onnx: files that begin with strings, built by hand. Run in the project's own environment.

.venv/bin/python tests/support/foreign/make_text.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

FOLDER = Path(__file__).resolve().parent
HEAD = '<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 4]>'
WORDS = ["good", "great", "fine", "bad", "poor", "awful", "film", "plot", "actor", "music", "the", "a"]

SENTENCES = f"""{HEAD}
sentences (string[N] text) => (float[N, 2] logits)
<float[{len(WORDS) + 2}, 8] embedding = {{0}}, float[8, 2] weight = {{0}}, float[2] bias = {{0}}, int64 zero = {{0}},
 int64[1] tokens = {{1}}, int64[1] width = {{2}}>
{{
    lower = StringNormalizer <case_change_action = "LOWER", locale = "C"> (text)
    words, number = StringSplit <delimiter = " "> (lower)
    ids = ai.onnx.ml.LabelEncoder <
        keys_strings = ["", {", ".join(f'"{word}"' for word in WORDS)}],
        values_int64s = [0, {", ".join(map(str, range(2, len(WORDS) + 2)))}],
        default_int64 = 1> (words)
    vectors = Gather (embedding, ids)
    is_padding = Equal (ids, zero)
    is_word = Not (is_padding)
    mask = Cast <to = 1> (is_word)
    column = Unsqueeze (mask, width)
    masked = Mul (vectors, column)
    sum = ReduceSum <keepdims = 0> (masked, tokens)
    count = ReduceSum <keepdims = 1> (mask, tokens)
    mean = Div (sum, count)
    logits = Gemm (mean, weight, bias)
}}"""
"""The mean of the embeddings of a sentence's words; 0 pads, 1 is an unknown word."""

COLUMNS = f"""{HEAD}
columns (string[N, 1] color, float[N, 2] size, string[N] code) => (float[N, 3] logits)
<float[6, 16] fc1 = {{0}}, float[16] fc1_bias = {{0}}, float[16, 3] fc2 = {{0}}, float[3] fc2_bias = {{0}},
 int64[2] flat = {{-1, 3}}, int64[1] one = {{1}}>
{{
    encoded = ai.onnx.ml.OneHotEncoder <cats_strings = ["red", "green", "blue"], zeros = 1> (color)
    colors = Reshape (encoded, flat)
    is_new = RegexFullMatch <pattern = "N-[0-9]+"> (code)
    new = Cast <to = 1> (is_new)
    column = Unsqueeze (new, one)
    features = Concat <axis = 1> (colors, size, column)
    hidden = Gemm (features, fc1, fc1_bias)
    active = Relu (hidden)
    logits = Gemm (active, fc2, fc2_bias)
}}"""
"""A column of categories, one of codes and two of numbers, in front of a network."""


def write(name: str, text: str) -> None:
    """Write one model with random weights."""
    random = np.random.default_rng(0)
    model = parser.parse_model(text)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = random.normal(0, 0.3, tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.checker.check_model(model, full_check=True)
    (FOLDER / f"text-{name}.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    write("sentences", SENTENCES)
    write("columns", COLUMNS)
