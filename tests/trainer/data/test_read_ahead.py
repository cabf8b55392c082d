"""Reading ahead changes neither the order nor the errors, and reads one item ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from onward.trainer.data.reading.read_ahead import read_ahead


def test_items_come_in_their_order_and_an_error_in_the_place_of_its_item() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("the sixth")

    ahead = read_ahead(items())
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the sixth"):
        next(ahead)
    assert list(read_ahead(iter(()))) == []


def test_the_next_item_is_made_in_a_thread_while_one_is_used_and_no_other() -> None:
    made, asked = [], threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(6):
            made.append((number, threading.current_thread() is threading.main_thread()))
            asked.release()
            yield number

    for item in read_ahead(items()):
        # waits until the next one is made; the last one has none
        for _ in range(2 if item == 0 else item < 5):
            asked.acquire()
        assert [number for number, _ in made] == list(range(min(item + 2, 6)))
    assert not any(is_main for _, is_main in made)


def test_an_iterator_that_is_left_early_is_closed() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.set()

    ahead = read_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert closed.is_set()
