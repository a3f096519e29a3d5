"""Parts of matrices that go from GPU to GPU among ranks: which, and when."""

import itertools
from types import SimpleNamespace

import numpy as np

from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.ranks import peer_memory
from hybrid_gemm.ranks.redistribution import NOTHING, Part, moves


def test_what_ranks_let_others_read_is_all_that_they_want(monkeypatch):
    """In turns, of which none has more than the limit or a row."""
    monkeypatch.setattr(peer_memory, "STAGED_BYTES", 100)
    rng = np.random.default_rng(3)
    for _ in range(200):
        ranks, rows, cols = (int(x) for x in rng.integers(1, (5, 40, 12)))
        whole = np.arange(rows * cols).reshape(rows, cols)
        edges = [0, *sorted(int(x) for x in rng.integers(0, rows + 1, ranks - 1)), rows]
        have = [Part(Span(*x), Span(0, cols)) for x in itertools.pairwise(edges)]

        def some(size):
            return Span(*sorted(int(x) for x in rng.integers(0, size + 1, 2)))

        want = [Part(some(rows), some(cols)) for _ in range(ranks)]
        turns = peer_memory.staged(have, want, 4)
        for rank, mine in enumerate(want):
            found = np.full(mine.shape, -1)
            if own := have[rank] & mine:
                mine.of(found, own)[...] = whole[own.rows.slice, own.cols.slice]
            for parts in turns:
                for other, part in enumerate(parts):
                    assert part is None or 4 * np.prod(part.shape) <= max(100, 4 * cols)
                    if other != rank and part and (common := part & mine):
                        mine.of(found, common)[...] = whole[common.rows.slice, common.cols.slice]
            np.testing.assert_array_equal(found, whole[mine.rows.slice, mine.cols.slice])
        if all(x == y for x, y in zip(have, want, strict=True)):
            assert not turns


def test_ranks_move_what_one_wants_and_has_not():
    whole, half = (Part(Span(0, rows), Span(0, 3)) for rows in (4, 2))
    assert moves([whole, NOTHING], [whole, half])
    assert not moves([whole, NOTHING], [half, NOTHING])
    assert not moves([whole, half], [whole, half])


def test_what_nobody_wants_is_not_put_on_a_gpu(monkeypatch):
    """As of A and B where alpha is 0."""
    device, copied = EmulatorDevice(), []
    monkeypatch.setattr(device, "copy", lambda dst, src, stream: copied.append(src.shape))
    peers = peer_memory.PeerMemory(SimpleNamespace(rank=0, size=1), 0, device, "auto")
    monkeypatch.setattr(peers, "empty", lambda part, dtype: np.empty(part.shape, dtype))
    have, want = ([Part(Span(0, 4), Span(0, k))] for k in (3, 0))
    assert peers.move(np.ones((4, 3)), have, want, np.dtype("f4")).shape == (4, 0)
    assert not copied
