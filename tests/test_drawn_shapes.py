"""Shapes that are drawn at random, to fit models of times to and to report on."""

import math

from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing


def test_drawn_shapes_are_of_their_class_and_of_the_seed():
    drawn = drawing.draw(7, 60, drawing.FITTED)
    assert drawn == drawing.draw(7, 60, drawing.FITTED) != drawing.draw(8, 60, drawing.FITTED)
    for each in drawn:
        m, n, k = each.shape
        assert drawing.LEAST <= m * n * k <= drawing.MOST and each.layout in catalog.LAYOUTS
        holds = {
            "any": min(m, n, k) >= 16, "thin m or n": min(m, n) <= 64, "short k": 8 <= k <= 360,
            "long k": k >= 8192 and max(m, n) <= 1024,
            "multiples of 16": not (m % 16 or n % 16 or k % 16),
            drawing.FEW: min(m, n) <= 8,
        }  # fmt: skip
        assert holds[each.kind], each
    assert len({each.kind for each in drawn}) == 6


def test_long_sides_are_drawn_as_m_as_n_and_as_k():
    longest = set()
    for each in drawing.draw(9, 60, (drawing.LONG,)):
        m, n, k = each.shape
        assert 2**14 <= max(each.shape) <= 2**23 and sorted(each.shape)[1] <= 1024
        assert m * k + k * n + m * n <= drawing.MOST_ELEMENTS[drawing.LONG]
        least, most = drawing.KEPT[drawing.LONG]
        assert least <= m * n * k <= most
        longest.add(each.shape.index(max(each.shape)))
    assert longest == {0, 1, 2}


def test_large_sides_are_drawn_together():
    least, most = drawing.KEPT[drawing.LARGE]
    for each in drawing.draw(9, 60, (drawing.LARGE,)):
        m, n, k = each.shape
        assert 4096 <= min(each.shape) <= max(each.shape) <= 49152
        assert least <= m * n * k <= most
        assert m * k + k * n + m * n <= drawing.MOST_ELEMENTS[drawing.LARGE]


def is_power(x):
    """Whether it is one of 2."""
    return math.log2(x).is_integer()


def test_round_numbers_are_drawn_for_all_sides_and_lines():
    drawn = drawing.draw(9, 240, (drawing.ROUND,))
    lines = 0
    for each in drawn:
        m, n, k = each.shape
        assert all(x % 1000 == 0 or is_power(x) or is_power(x / 3) for x in each.shape)
        assert 16 <= k <= 24576 and max(each.shape) <= 24576
        assert m * k + k * n + m * n <= drawing.MOST_ELEMENTS[drawing.ROUND]
        lines += min(m, n) == 1
    assert 20 <= lines <= 60


def test_a_k_of_a_few_is_drawn_with_large_c():
    drawn = drawing.draw(9, 60, (drawing.TINY,))
    assert {each.kind for each in drawn} == {drawing.TINY}
    for each in drawn:
        m, n, k = each.shape
        assert 1 <= k <= 16 and min(m, n) >= 32 and max(m, n) <= 2**15
        assert m * k + k * n + m * n <= drawing.MOST_ELEMENTS[drawing.TINY]
        least, most = drawing.KEPT[drawing.TINY]
        assert least <= m * n * k <= most
