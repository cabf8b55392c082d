"""preprocessing.json: what training did to raw data before the graph read it, written beside every exported model.

    raw data                      preprocessing.json               input of the model
    cat.jpg                       ImageInput                       float32 [1, 3, 224, 224]
    "a good film"                 TokenInput and `text`            int64 [1, 5]
    dog.flac                      AudioInput                       float32 [1, 16000]
    age 31, city "Rome"           TableInput                       float32 [1, 2]

With this file and the raw data a program in any language computes the same inputs bit for bit; the one in Python is
trainer/export/served/, which `onward predict` runs and every registered model has a copy of.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from onward.trainer.run.records import Record

PREPROCESSING_VERSION = 3
"""Raised when a reader of the former version would compute other inputs."""


class ImageInput(Record):
    """An input that takes images. The steps in this order: decode to 8 bits a channel, rotate as the EXIF data says,
    resize and crop; multiply with `scale`, subtract `mean`, divide by `std`, all in float32; order channels and layout.
    """

    kind: Literal["image"] = "image"
    column: str
    """The column of encoded images in the training data."""
    height: int
    width: int
    resize: Literal["crop", "stretch", "pad"]
    """`crop`: resize so that the shorter side fits `crop_ratio`, then take the centre. `stretch`: resize to height and
    width. `pad`: resize the longer side and add borders."""
    border_color: tuple[int, ...] = ()
    """`pad` only: one number a channel, in the order red, green, blue; () = black."""
    is_in_corner: bool = False
    """`pad` only: whether the image begins in the left upper corner; false = it is in the middle."""
    crop_ratio: float
    """`crop` only. Where height = width = n: the shorter side becomes m = int(n / crop_ratio), the longer one
    int(m * longer / shorter). Else both sides are multiplied by f = max(height / old height, width / old width) /
    crop_ratio, rounded, but at least height and width. The crop begins at round((resized - wanted) / 2)."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box"]
    antialias: bool
    """Whether a smaller image averages over all pixels, as Pillow's `Image.resize` does; false = torchvision's `resize`
    of a tensor of uint8 without antialias."""
    pillow: str
    """The release of Pillow that has read the images. Others may decode and resize to pixels that differ by 1 of 255:
    rows are resized before columns, which is rounded in between, if any rows are lost, and more than
    twice as many as columns; before release 13 if the old height is above 100 old widths and rows are lost."""
    scale: float
    """What pixels of 0..255 are multiplied with."""
    mean: tuple[float, ...]
    """One a channel, in the order red, green, blue."""
    std: tuple[float, ...]
    channels: Literal["rgb", "bgr", "grey"]
    """The channels of the model, in their order."""
    layout: Literal["nchw", "nhwc"]
    dtype: str


class TableColumn(Record):
    """One column of numbers or texts, and what becomes of a cell. The steps in this order: fill what is missing, take
    the logarithm, (value - center) / scale, all in float64; then round to float32 and to the type of the input."""

    name: str
    """The column of the raw data."""
    indicates_missing: bool = False
    """Whether the result is 1 where the cell is missing, else 0."""
    fill: tuple[float, ...] = ()
    """What takes the place of missing numbers, one for each element of a cell; () = a row with a gap is refused."""
    log1p: bool = False
    """Whether log(1 + value) is taken."""
    center: tuple[float, ...] = ()
    """What is subtracted, one for each element of a cell; () = the column is not scaled."""
    scale: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    """Of a column of categories: the texts; a cell is replaced by its place in this list, from 0 on. Missing and
    unknown texts have the place of ""; without one they are refused. () = the column holds no categories."""
    integers: bool = False
    """Of a column of categories: whether cells are integers, whose decimal digits are looked up."""


class TableInput(Record):
    """An input that takes columns as they are, or after the steps of each column."""

    kind: Literal["columns"] = "columns"
    columns: tuple[TableColumn, ...]
    stacked: bool
    """Whether the columns are stacked behind each other, [B, ..., number of columns]; otherwise there is one column,
    whose cells are the samples."""
    shape: tuple[int | None, ...] | None
    """Of one sample as the graph declares it; a None in it is a dynamic dimension, None alone is an unknown shape."""
    dtype: str
    """numpy's name, or `string`."""
    pad_value: float | None = None
    """What pads rows of varying length to the longest of a batch; None where all rows have one length."""


class AudioInput(Record):
    """An input that takes audio. The steps in this order: decode to float32 between -1 and 1, average the channels,
    resample, take the middle or fill up with zeros at the end, compute the features."""

    kind: Literal["audio"] = "audio"
    column: str
    """The column of audio files in the training data."""
    sample_rate: int
    """Other rates are resampled by scipy.signal.resample_poly with the rates divided by their greatest divisor."""
    samples: int
    """Length of a clip; 0 = its own."""
    features: Literal["waveform", "log_mel"]
    """`log_mel`: log(max(m, floor)) of the mel power m of torchaudio's MelSpectrogram with n_fft = `window`, hop_length
    = `hop`, n_mels = `mel_bins` and its other defaults."""
    mel_bins: int
    window: int
    hop: int
    floor: float
    time_first: bool
    """Whether frames come before mel bands."""
    channel_axis: bool
    """Whether an axis of one channel is in front."""
    dtype: str
    pad_value: float = 0.0
    """What pads clips of their own lengths to the longest of a batch."""


class TokenInput(Record):
    """An input that takes what the tokenizer computes of the texts (`text`)."""

    kind: Literal["tokens"] = "tokens"
    role: Literal["input_ids", "attention_mask", "token_type_ids", "position_ids"]
    """`attention_mask` is 1 for each token and `position_ids` counts from 0; the tokenizer gives the others."""
    pad_value: float
    """What pads shorter rows: to the longest of a batch, or to `length`."""
    pad_side: Literal["left", "right"] = "right"
    """Where the padding is: in front of a row's values, or behind them. `position_ids` count tokens alone."""
    length: int | None
    """The length that the graph declares; None = any."""
    dtype: str


class ValueInput(Record):
    """An input that has the same value for all rows (`model.bind`)."""

    kind: Literal["value"] = "value"
    value: Any
    """A number or nested lists of numbers, which are broadcast to `shape`."""
    shape: tuple[int | None, ...]
    """None on the axis of the rows, if there is one."""
    dtype: str


class Tokenizer(Record):
    """How texts become tokens, with the library `tokenizers` of Hugging Face."""

    file: str
    """The tokenizer.json, in the directory of preprocessing.json."""
    sha256: str
    columns: tuple[str, ...]
    """The columns of texts in the training data; of two the texts are encoded as a pair."""
    words: bool = False
    """Whether cells are lists of words, or words with spaces between them: the `is_pretokenized` of the library."""
    lowercase: bool = False
    """Whether texts become lower-case before they are tokenized, as `str.lower` of Python does."""
    special_tokens: bool
    """The `add_special_tokens` of the library."""
    max_length: int
    """Tokens after which a sample is truncated, special tokens included, as the tokenizer's own settings say (by
    default the longest text of a pair first, on the right); 0 = none is."""
    stride: int | None = None
    """Longer texts are not truncated but divided into windows of `max_length` tokens that share so many, each a sample
    of its own: the library's `stride` and `overflowing`. None = they are truncated."""
    padding: Literal["none"] = "none"
    """The library's own padding is off: `TokenInput` says how batches are padded."""


Input = ImageInput | TableInput | TokenInput | AudioInput | ValueInput


class OutputMeaning(Record):
    """What an output of the model is, by the loss that was trained on it."""

    name: str
    loss: str
    holds: str = ""
    """`classes`: logits, one a class. `labels`: logits, each of a class of its own. `sequences`: logits, one a class,
    at each time step. `objects`: boxes (`Preprocessing.objects`). Else values. Files of former versions do not say it;
    there it follows from `loss`."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of the logits, as far as the data has names."""
    label: tuple[str, ...] = ()
    """The columns of the training data that it was trained on."""


class Objects(Record):
    """Where the boxes that a detector has found are in its outputs for one image."""

    outputs: tuple[str, ...]
    """The outputs that are read, in this order; raw outputs inside the file where `form` is None."""
    form: dict[str, Any] | None
    """Which of their columns hold boxes, scores and classes, and which boxes count: `FileDetections` of
    trainer/export/served/detections.py. None = the outputs are raw, and boxes are decoded as the loss does."""
    loss: dict[str, Any]
    """The settings of the loss: its name, outputs, strides and anchors."""


class Preprocessing(Record):
    """The content of preprocessing.json."""

    version: int = PREPROCESSING_VERSION
    model: str
    """The name of the ONNX file that the inputs belong to."""
    sha256: str
    """Its digest, as in model.json."""
    begins_at: tuple[str, ...] = ()
    """Where only a part of the file was trained (`model.start`): `inputs` are these tensors inside of it; else ()."""
    inputs: dict[str, Annotated[Input, Field(discriminator="kind")]]
    """Input of the model -> how it is computed."""
    window_length: int | None = None
    """Of windows over time series: so many successive values of a column, the oldest first, are one cell; else None."""
    text: Tokenizer | None = None
    """The tokenizer, if an input takes tokens."""
    outputs: tuple[OutputMeaning, ...]
    """The outputs that a loss was trained on; of a detector the one that holds its boxes."""
    objects: Objects | None = None
    """Of a detector: how its boxes are read."""
