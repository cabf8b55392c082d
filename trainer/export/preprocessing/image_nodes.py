"""Resize and crop images with ONNX nodes, to the very pixels that Pillow computes.

    pixels uint8 [N, H, W, C]  --Transpose, Cast-->  x double [N, C, H, W]
    columns   x @ K^T          K double [width, W]: row i has the weights of the pixels that make column i of the result
    rows      L @ x            L double [height, H]
              with Floor(x / 2^22 + 1/2) and 0..255 after each, as Pillow rounds; of high images rows before columns

    K, of a crop that begins at 1, or of borders of 1        . w w . . .        . . .
                                                             . . w w . .        w w .
                                                             . . . . w w        . w w

Pillow keeps weights as integers of 22 bits, and adds up products with integers of 8 bits. All of these numbers and
their sums are integers below 2^53, which double holds exactly, so that products of matrices give the same bits in any
order of summation. ONNX's own Resize does not: onnxruntime rounds the weights otherwise, and with antialias = 1 a few
percent of the pixels differ by 1 of 255. The steps are those of fitted_image (trainer/data/images/geometry.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.data.schema.columns import Array
from onward.trainer.onnx_graph.node_builder import GraphExtender
from onward.trainer.run.recorded.preprocessing_record import ImageInput

LEAST_OPSET = 11
"""The first with Range, CumSum and Round."""
SUPPORT = {"box": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
"""How far the weights of a filter reach, in pixels of the larger of the two images."""
PRECISION = 2.0**22


class Fitting:
    """Adds the nodes of one input. Sizes and places are scalars of type double, all values names in the graph."""

    def __init__(self, how: ImageInput, nodes: GraphExtender) -> None:
        self._how = how
        self._nodes = nodes

    def pixels(self, raw: str) -> str:
        """Return the fitted pixels of `raw`, uint8 [N, H, W, C] of any size: fp32 [N, C, height, width] of 0..255."""
        height, width = self._sides(raw)
        rows, columns = self._resized(height, width)
        x = self._double(self._op("Transpose", raw, perm=[0, 3, 1, 2]))
        down, is_row = self._weights(height, rows, self._how.height)
        across, is_column = (
            self._op("Transpose", each, perm=[1, 0]) for each in self._weights(width, columns, self._how.width)
        )
        # the order matters, because the result of the first product is rounded
        x = self._op(
            "If",
            self._rows_first((height, width), (rows, columns)),
            then_branch=self._products(x, (down, None), (None, across)),
            else_branch=self._products(x, (None, across), (down, None)),
        )
        if any(self._how.border_color):
            color = np.array(self._how.border_color, np.float64).reshape(-1, 1, 1)
            x = self._op("Where", self._op("And", is_row, is_column), x, self._stored(color))
        return self._op("Cast", x, to=TensorProto.FLOAT)

    def begin_and_factors(self, raw: str) -> tuple[str, str]:
        """Return where the fitted pixels come from, double [2] each, x first: the place of their first one in the
        resized image, and the pixels of `raw` for each of the resized image."""
        height, width = self._sides(raw)
        rows, columns = self._resized(height, width)
        one = self._nodes.constant([1])
        begins = self._begin(columns, self._how.width), self._begin(rows, self._how.height)
        factors = self._op("Div", width, columns), self._op("Div", height, rows)
        begin, factor = (
            self._op("Concat", *(self._op("Reshape", each, one) for each in pair), axis=0) for pair in (begins, factors)
        )
        return begin, factor

    def _rows_first(self, old: tuple[str, str], new: tuple[str, str]) -> str:
        """Return whether Pillow computes rows before columns: of images that lose many rows (since release 13), or
        that are very high."""
        rows, columns = (self._op("Sub", before, after) for before, after in zip(old, new, strict=True))
        steep = rows, self._times(columns, 2.0)
        if int(self._how.pillow.partition(".")[0]) < 13:
            steep = old[0], self._op("Mul", old[1], self._number(100.0))
        return self._op("And", self._op("Greater", rows, self._number(0.0)), self._op("Greater", *steep))

    def _products(self, x: str, *factors: tuple[str | None, str | None]) -> onnx.GraphProto:
        """Return a graph that multiplies x with matrices, from the left or from the right, and rounds each product."""
        inner = Fitting(self._how, self._nodes.inner("resize"))
        for left, right in factors:
            x = inner._op("MatMul", left or x, right or x)
            x = inner._op("Floor", inner._add(inner._times(x, 1 / PRECISION), 0.5))
            x = inner._op("Max", inner._op("Min", x, inner._number(255.0)), inner._number(0.0))
        inner._nodes.graph.output.append(helper.make_tensor_value_info(x, TensorProto.DOUBLE, None))
        return inner._nodes.graph

    # -- sizes

    def _sides(self, raw: str) -> tuple[str, str]:
        """Return height and width of pixels [N, H, W, C]."""
        shape = self._op("Shape", raw)
        height, width = (self._double(self._op("Gather", shape, self._integer(axis))) for axis in (1, 2))
        return height, width

    def _begin(self, new: str, wanted: int) -> str:
        """Return where the centre `wanted` begins in `new`, or the corner; below 0 with a border."""
        if self._how.is_in_corner:
            return self._number(0.0)
        return self._op("Round", self._times(self._add(new, -float(wanted)), 0.5))

    def _resized(self, height: str, width: str) -> tuple[str, str]:
        """Return the height and width to which the whole image is resized."""
        how = self._how
        number = self._number
        rows = number(float(how.height))
        columns = number(float(how.width))
        if how.resize == "stretch":
            return rows, columns
        # how much each side is scaled
        factors = self._op("Div", rows, height), self._op("Div", columns, width)
        if how.resize == "pad":
            factor = self._op("Min", *factors)
            sizes = [self._op("Round", self._op("Mul", old, factor)) for old in (height, width)]
            fitting = [self._op("Min", new, most) for new, most in zip(sizes, (rows, columns), strict=True)]
            return self._op("Max", fitting[0], number(1.0)), self._op("Max", fitting[1], number(1.0))
        if how.height == how.width:
            short = number(float(int(how.height / how.crop_ratio)))
            # as fitted_image: the longer side is cut to an integer
            longer = [
                self._op("Floor", self._op("Div", self._op("Mul", short, side), other))
                for side, other in ((height, width), (width, height))
            ]
            # of the shorter side the quotient is at most `short`
            return self._op("Max", longer[0], short), self._op("Max", longer[1], short)
        factor = self._op("Div", self._op("Max", *factors), number(how.crop_ratio))
        sizes = [self._op("Round", self._op("Mul", old, factor)) for old in (height, width)]
        return self._op("Max", sizes[0], rows), self._op("Max", sizes[1], columns)

    # -- weights

    def _weights(self, old: str, new: str, wanted: int) -> tuple[str, str]:
        """Return the weights [wanted, old], integers of 22 bits, of `wanted` of `new` resized from `old`: of the
        centre, or from 0 on; and which rows are inside of `new` [wanted, 1].

        Rows outside of it are 0: black borders.
        """
        at = self._op("Add", self._begin(new, wanted), self._stored(np.arange(wanted, dtype=np.float64)[:, None]))
        inside = self._op(
            "And", self._op("Greater", at, self._number(-0.5)), self._op("Less", at, self._add(new, -0.5))
        )
        pixel = self._range(old)
        scale = self._op("Div", old, new)
        if self._how.interpolation == "nearest":
            chosen = self._op("Equal", self._integers(pixel), self._integers(self._nearest(at, new, scale)))
            return self._times(self._double(self._op("And", chosen, inside)), PRECISION), inside
        # of a smaller result a pixel averages over `stretched` times as many pixels
        stretched = self._op("Max", scale, self._number(1.0))
        reach = self._times(stretched, SUPPORT[self._how.interpolation])
        centre = self._op("Mul", self._add(at, 0.5), scale)
        first = self._op("Floor", self._add(self._op("Sub", centre, reach), 0.5))
        last = self._op("Floor", self._add(self._op("Add", centre, reach), 0.5))
        in_reach = self._op("And", self._op("Greater", pixel, self._add(first, -0.5)), self._op("Less", pixel, last))
        share = self._op("Div", self._number(1.0), stretched)
        distance = self._op("Mul", self._add(self._op("Sub", pixel, centre), 0.5), share)
        weights = self._op("Mul", self._filter(distance), self._double(self._op("And", in_reach, inside)))
        ones = self._op("Add", self._times(pixel, 0.0), self._number(1.0))
        sums = self._op("MatMul", weights, self._op("Reshape", ones, self._nodes.constant([-1, 1])))
        # rows of borders have the sum 0; 0 / 1 is 0
        shares = self._op("Div", weights, self._op("Where", inside, sums, self._number(1.0)))
        # to the nearest integer, halves away from 0
        size = self._op("Floor", self._add(self._times(self._op("Abs", shares), PRECISION), 0.5))
        return self._op("Mul", self._op("Sign", shares), size), inside

    def _nearest(self, at: str, new: str, scale: str) -> str:
        """Return the pixels that columns or rows `at` take: the integer part of scale / 2 + scale + scale + ..."""
        first = self._op("Less", self._range(new), self._number(0.5))
        steps = self._op("Where", first, self._times(scale, 0.5), scale)
        # a running sum, because the product has other roundings
        places = self._op("Floor", self._op("CumSum", steps, self._integer(0)))
        last = self._add(new, -1.0)
        valid = self._op("Min", self._op("Max", at, self._number(0.0)), last)
        return self._op("Gather", places, self._integers(valid))

    def _filter(self, distance: str) -> str:
        """Return the weight of a pixel at a distance, in the operations of Pillow and in their order."""
        x = self._op("Abs", distance)
        number = self._number
        if self._how.interpolation == "bilinear":
            return self._op("Max", self._op("Sub", number(1.0), x), number(0.0))
        if self._how.interpolation == "box":
            inside = self._op("Greater", distance, number(-0.5)), self._op("Greater", distance, number(0.5))
            return self._double(self._op("And", inside[0], self._op("Not", inside[1])))
        if self._how.interpolation == "lanczos":
            product = self._op("Mul", self._sinc(x), self._sinc(self._op("Div", x, number(3.0))))
            return self._op("Where", self._op("Less", x, number(3.0)), product, number(0.0))
        near = self._add(self._times(x, 1.5), -2.5)
        near = self._add(self._op("Mul", self._op("Mul", near, x), x), 1.0)
        far = self._add(self._op("Mul", self._add(x, -5.0), x), 8.0)
        far = self._times(self._add(self._op("Mul", far, x), -4.0), -0.5)
        far = self._op("Where", self._op("Less", x, number(2.0)), far, number(0.0))
        return self._op("Where", self._op("Less", x, number(1.0)), near, far)

    def _sinc(self, x: str) -> str:
        angle = self._op("Mul", x, self._number(float(np.pi)))
        is_zero = self._op("Less", angle, self._number(1e-300))
        quotient = self._op("Div", self._op("Sin", angle), self._op("Where", is_zero, self._number(1.0), angle))
        return self._op("Where", is_zero, self._number(1.0), quotient)

    # -- nodes

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self._nodes.op(kind, *inputs, **attributes)

    def _number(self, value: float) -> str:
        return self._nodes.constant(value, np.float64)

    def _integer(self, value: int) -> str:
        return self._nodes.constant(value, np.int64)

    def _stored(self, value: Array) -> str:
        return self._op("Constant", value=numpy_helper.from_array(value))

    def _add(self, value: str, number: float) -> str:
        return self._op("Add", value, self._number(number))

    def _times(self, value: str, number: float) -> str:
        return self._op("Mul", value, self._number(number))

    def _double(self, value: str) -> str:
        return self._op("Cast", value, to=TensorProto.DOUBLE)

    def _integers(self, value: str) -> str:
        return self._op("Cast", value, to=TensorProto.INT64)

    def _range(self, stop: str) -> str:
        """Return 0, 1, ... stop - 1."""
        return self._double(self._op("Range", self._integer(0), self._integers(stop), self._integer(1)))
