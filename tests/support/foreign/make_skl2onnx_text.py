"""Write text-skl2onnx-*.onnx: scikit-learn pipelines that begin with strings, converted by skl2onnx.

python -m venv env && env/bin/pip install scikit-learn==1.9.1 skl2onnx==1.20.0
env/bin/python tests/support/foreign/make_skl2onnx_text.py
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

FOLDER = Path(__file__).resolve().parent
OPSET = 18
WORDS = ["good", "great", "fine", "bad", "poor", "awful", "film", "plot", "actor", "music", "the", "a"]
COLORS, SIZES = ["red", "green", "blue"], ["small", "medium", "large"]


def sentences(rows: int) -> tuple[list[str], Any]:
    """Return sentences, and whether good words outnumber bad ones."""
    random = np.random.default_rng(0)
    words = [random.choice(WORDS, random.integers(3, 9)) for _ in range(rows)]
    good = [sum(w in WORDS[:3] for w in row) > sum(w in WORDS[3:6] for w in row) for row in words]
    return [" ".join(row) for row in words], np.array(good, np.int64)


def table(rows: int) -> tuple[Any, Any]:
    """Return two columns of text and two of numbers, with a class from 0 to 2."""
    random = np.random.default_rng(0)
    rowwise = (
        random.choice(COLORS, rows),
        random.choice(SIZES, rows),
        random.normal(3, 2, rows).round(3),
        random.normal(30, 9, rows).round(3),
    )
    frame = np.empty((rows, 4), object)
    for column, values in enumerate(rowwise):
        frame[:, column] = values
    return frame, random.integers(0, 3, rows)


def write_words() -> None:
    """TF-IDF of words in front of a logistic regression."""
    texts, labels = sentences(300)
    model = make_pipeline(TfidfVectorizer(token_pattern="[a-z]+", lowercase=False), LogisticRegression(max_iter=2))
    onx = to_onnx(
        model.fit(texts, labels),
        initial_types=[("text", StringTensorType([None]))],
        options={"zipmap": False},
        target_opset=OPSET,
    )
    (FOLDER / "text-skl2onnx-words.onnx").write_bytes(onx.SerializeToString())


def write_columns() -> None:
    """Encoded columns of text and scaled columns of numbers in front of an MLP."""
    frame, labels = table(300)
    encoded = ColumnTransformer(
        [
            ("color", OneHotEncoder(handle_unknown="ignore", sparse_output=False), [0]),
            ("size", OrdinalEncoder(categories=[SIZES]), [1]),
            ("numbers", StandardScaler(), [2, 3]),
        ]
    )
    model = make_pipeline(encoded, MLPClassifier((16,), max_iter=1, random_state=0)).fit(frame, labels)
    types = [(name, StringTensorType([None, 1])) for name in ("color", "size")]
    types += [(name, FloatTensorType([None, 1])) for name in ("weight", "age")]
    onx = to_onnx(model, initial_types=types, options={"zipmap": False}, target_opset=OPSET)
    (FOLDER / "text-skl2onnx-columns.onnx").write_bytes(onx.SerializeToString())


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):  # the training was short, as it says
        write_words()
        write_columns()
