"""The fast reader of plain CSV gives what the careful one gives, bit for bit, or leaves the rows to it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.data.formats import table_readers as tables
from onward.trainer.data.formats.csv_dialect import Dialect
from onward.trainer.data.formats.plain_csv import PlainColumns
from onward.trainer.data.schema.columns import Block, ColumnType
from onward.trainer.errors import DataError
from tests.support.shards import make_shards

READ = PlainColumns.read
ODD = (
    *("", "nan", "NaN", "NA", "null", "None", "-nan", "inf", "-inf", "Infinity", "INF", "1e5", "1E-3", "1e+2", "1e300"),
    *("3e-310", "1e309", "0x10", "0b1", "1d3", "007", "-0", "-0.0", "+5", "5.", ".5", "-.5", "-", ".", "--1", "1.2.3"),
    *("1-2", "1/2", "2020-01-01", "00:01", "true", "True", "1 ", "  2", " ", "\t3", "1_000", "1,5", "1.000,5", "1 000"),
    *(
        "9007199254740993",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "1" * 25,
        "-" + "9" * 19,
    ),
    *(
        "1.23456789012345678",
        "0.1234567890123456789",
        "1e-05",
        "2.5e-08",
        "e5",
        "1e",
        "1\x00",
        "1\x0b",
        "\x0c2",
        "\u00a05",
    ),
    *("é", "\uff11\uff12", "\ufffd", "\u2028", '"', "'", "1'000"),
)


def cell(kind: str, drawn: random.Random) -> str:
    """Return a cell of a column of this kind."""
    if kind == "integer":
        return str(drawn.randint(-(10 ** drawn.randint(0, 18)), 10 ** drawn.randint(0, 20)))
    if kind == "float":
        return repr(drawn.uniform(-1, 1) * 10.0 ** drawn.randint(-12, 12))
    if kind == "short":
        return f"{drawn.uniform(-99, 99):.{drawn.randint(0, 6)}f}"
    if kind == "text":
        return "".join(drawn.choice("ab ,;\"'\né\r\tx0.-\u2028") for _ in range(drawn.randint(0, 9)))
    return drawn.choice(ODD if kind == "odd" else ("oslo", "rome", "", " x", "NA", "é", "日本"))


def draw(seed: int, path: Path) -> tuple[list[str] | None, list[str], TableConfig]:
    """Write a table; return the columns to read, those of them that are text, and the settings."""
    drawn = random.Random(seed)
    separator, end = drawn.choice(",,,;\t|"), drawn.choice(["\n", "\n", "\r\n"])
    kinds = drawn.choices(["integer", "float", "short", "word", "text", "odd"], k=drawn.randint(1, 6))
    names = [f"c{number}" for number in range(len(kinds))]
    oddity, quoting = drawn.choice([0, 0, 0, 0.02, 0.2]), drawn.choice(["none", "needed", "all", "some", "wrong"])

    def written(kind: str) -> str:
        text = cell("odd" if drawn.random() < oddity else kind, drawn)
        needs = any(mark in text for mark in (separator, '"', "\n", "\r"))
        if quoting == "none" and kind != "odd":
            return "".join(letter for letter in text if letter not in (separator, '"', "\n", "\r"))
        if (
            quoting == "all"
            or (quoting == "some" and drawn.random() < 0.2)
            or (needs and quoting in ("needed", "some"))
        ):
            return '"' + text.replace('"', '""') + '"'
        return text

    text = drawn.choice(["", "\ufeff"]) + separator.join(names) + end
    for _ in range(drawn.randint(1, 40)):
        row = [written(kind) for kind in kinds]
        row += ["9"] * (drawn.random() < oddity * 0.3)
        row = row[: len(row) - (drawn.random() < oddity * 0.3)]
        text += separator.join(row) + (end if drawn.random() > 0.01 else drawn.choice(["\n", "\r\n", "\r"]))
        text += end * (drawn.random() < oddity * 0.3)
    text = text.removesuffix(end) if drawn.random() < 0.3 else text
    encoding = drawn.choice(["utf-8"] * 6 + ["latin-1", "utf-16"])
    content = text.encode(encoding, "replace")
    if encoding == "utf-8" and drawn.random() < 0.05:
        at = drawn.randrange(len(content))
        content = content[:at] + b"\xff" + content[at:]
    path.write_bytes(content)
    settings: dict[str, Any] = {"encoding": encoding, "header": drawn.random() > 0.1}
    settings |= {"separator": separator} if drawn.random() < 0.7 else {}
    if separator != "," and drawn.random() < 0.2:
        settings |= {"decimal": ",", "thousands": drawn.choice(["", ".", " "])}
    settings |= {"quote": drawn.choice(["'", "none"])} if drawn.random() < 0.1 else {}
    texts = [name for name, kind in zip(names, kinds, strict=True) if kind in ("text", "word") and drawn.random() < 0.7]
    return drawn.choice([None, drawn.sample(names, drawn.randint(1, len(names)))]), texts, TableConfig(**settings)


def exact(block: Block) -> object:
    """Return all of a block in a form whose equality is that of bits and types."""
    cells = {
        name: (each.dtype.str, each.tobytes())
        if isinstance(each, np.ndarray)
        else [(type(value).__name__, repr(value)) for value in each]
        for name, each in block.cells.items()
    }
    return block.file, block.index.dtype.str, block.index.tolist(), list(cells.items()), block.bad, block.first


def read(path: Path, names: Sequence[str] | None, texts: Collection[str], settings: TableConfig) -> Iterator[object]:
    """Yield the blocks, and the message with which the file is refused."""
    try:
        yield from map(exact, tables.csv_blocks(path, names, texts, settings))
    except DataError as error:
        yield str(error)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the pieces that the fast reader has read, and those that it has left."""
    found = Counter[str]()

    def counted(self: PlainColumns, piece: bytes, lines: int, *, quoted: bool) -> Any:
        result = READ(self, piece, lines, quoted=quoted)
        found["left" if result is None else "quoted" if quoted else "plain"] += 1
        return result

    monkeypatch.setattr(PlainColumns, "read", counted)
    return found


@pytest.fixture
def carefully(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Reads without the fast reader."""

    def without(*given: Any) -> list[object]:
        with monkeypatch.context() as patched:
            patched.setattr(PlainColumns, "read", lambda *_, **__: None)
            return list(read(*given))

    return without


@pytest.mark.slow
def test_both_readers_give_the_same_bits_or_the_same_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: Counter[str], carefully: Callable[..., list[object]]
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 600)
    for seed in range(400):
        names, texts, settings = draw(seed, path := tmp_path / "t.csv")
        assert list(read(path, names, texts, settings)) == carefully(path, names, texts, settings), f"seed {seed}"
    # else nothing would have been compared
    assert min(outcomes["plain"], outcomes["quoted"], outcomes["left"]) > 50, outcomes


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("beside", ["1", "2.5", ""])
def test_a_single_odd_cell_is_read_as_before(
    tmp_path: Path, odd: str, beside: str, carefully: Callable[..., list[object]]
) -> None:
    for number, form in enumerate(("{0},7\n", "{0},x\n", '"{0}",x\n', '{0},"x"\n')):
        rows = "".join(form.format(each) for each in (beside, odd, beside))
        (path := tmp_path / f"{number}.csv").write_text("a,b\n" + rows, newline="")
        for texts in ((), ("b",), ("a", "b")):
            assert list(read(path, None, texts, TableConfig())) == carefully(path, None, texts, TableConfig())


@pytest.mark.parametrize(
    "content",
    [
        *("a\n1\n\n2\n", "a\n\n", "a,b\n1,2\n\n3,4\n", "a,b\n1,2\n,\n", 'a\n""\n1\n', 'a\n"1"\n\n"2"\n'),
        *('a,b\n"1"x,2\n', 'a,b\nx"1",2\n', 'a,b\n"1",2"\n', 'a,b\n"1" ,2\n', 'a,b\n "1",2\n', 'a,b\n"""",""""""\n'),
        *("a,b\n1,2\r\n3,4", "a,b\r\n1,2\n", "a,b\n1,2\r3,4\n", "a,b\n1,2,3\n4,5\n", "a,b\n1\n2,3,4\n", "a,b\n1,2,\n"),
    ],
)
@pytest.mark.parametrize("block_bytes", [7, 1000])
def test_unusual_rows_are_read_as_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    block_bytes: int,
    carefully: Callable[..., list[object]],
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", block_bytes)
    (path := tmp_path / "t.csv").write_text(content, newline="")
    for texts in ((), ("a",), ("a", "b")):
        assert list(read(path, None, texts, TableConfig())) == carefully(path, None, texts, TableConfig())


def test_a_byte_order_mark_between_rows_is_read_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carefully: Callable[..., list[object]]
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 10)
    for number, mark in enumerate(("", '"')):
        (path := tmp_path / f"{number}.csv").write_text(f"a,b\n1,234\n\ufeffx,{mark}1{mark}\n\ufeffy,{mark}2{mark}\n")
        given = (path, None, ("a",), TableConfig())
        assert list(read(*given)) == carefully(*given)


def test_common_tables_are_read_by_the_fast_reader(tmp_path: Path, outcomes: Counter[str]) -> None:
    (path := tmp_path / "t.csv").write_text("a,b\n" + "1.5,2\n,3\n1e-05,-4\n" * 20)
    (block,) = tables.csv_blocks(path, None)
    assert outcomes == {"plain": 1}
    assert [block.cells["a"].dtype, block.cells["b"].dtype] == [np.float64, np.int64]  # type: ignore[union-attr]
    np.testing.assert_array_equal(block.cells["a"][:3], [1.5, np.nan, 1e-05])
    path.write_text('a,b\r\n1.5,"say ""hi"",\nrow"\r\n2,x\r\n', newline="")
    (block,) = tables.csv_blocks(path, None, {"b"})
    assert outcomes == {"plain": 1, "quoted": 1}
    assert block.cells["b"] == ['say "hi",\nrow', "x"]
    assert [block.where(index) for index in block.index] == [f"{path}, line 2", f"{path}, line 4"]


def test_a_doubtful_column_is_left_to_the_careful_reader_and_the_others_are_not(
    tmp_path: Path, outcomes: Counter[str]
) -> None:
    (path := tmp_path / "t.csv").write_text("a,b,c\n" + "1,nan,x\n2,3,y\n" * 20)
    (block,) = tables.csv_blocks(path, None, {"c"})
    assert outcomes == {"plain": 1}
    assert list(block.cells) == ["a", "b", "c"]
    np.testing.assert_array_equal(block.cells["b"][:2], [np.nan, 3])


def test_shards_of_both_readers_have_the_same_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 500)
    drawn = random.Random(0)
    rows = "".join(f'{drawn.gauss(0, 1)},{drawn.choice("xyz")},"a {number}, b"\n' for number in range(200))
    (path := tmp_path / "t.csv").write_text("a,b,c\n" + rows)
    wants = {"a": ColumnType("float32", ()), "b": ColumnType("str"), "c": ColumnType("str")}
    data = DataConfig(source=str(path), rows_per_shard=64)
    _, fast, _ = make_shards(data, wants, tmp_path / "fast")
    monkeypatch.setattr(PlainColumns, "read", lambda *_, **__: None)
    _, careful, _ = make_shards(data, wants, tmp_path / "careful")
    assert fast == careful


def test_threads_of_pyarrow_hold_no_object_of_python() -> None:
    # a thread that drops one while the interpreter ends aborts the process; in 3,000 pieces 200 were dropped so
    class Piece(bytes):
        """Bytes that tell which thread dropped them."""

        def __del__(self) -> None:
            droppers.add(threading.get_ident())

    droppers: set[int] = set()
    columns = PlainColumns(["a", "b"], ["a", "b"], ["a"], Dialect())
    for _ in range(1000):
        columns.read(Piece(b"x,1\ny,2\n" * 20), 40, quoted=False)
    assert droppers == {threading.get_ident()}
