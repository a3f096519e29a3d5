"""Times of calls that follow one another on GPUs, for the scripts that measure, and how far apart
what two calls give is."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

SAMPLE_S, SAMPLES, MOST = 0.06, 3, 300
Calls = tuple[str, Callable[[], object], Callable[[], object]]  # what it is, ours, a library's


def ms_of(work: Callable[[], object], count: int) -> float:
    """The time of one of so many calls in a row on the current GPU, by its own clock."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(count):
        work()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / count


def turns_ms(works: Sequence[Callable[[], object]], turns: int, turn_ms: float) -> list:
    """Turn by turn, the time of one call of each of these, which is called so often that it takes
    about `turn_ms`."""
    for work in works:
        ms_of(work, 2)
    counts = [max(2, round(turn_ms / ms_of(work, 2))) for work in works]
    return [[ms_of(w, n) for w, n in zip(works, counts, strict=True)] for _ in range(turns)]


def graph_of(works: Sequence[Callable[[], object]], stream: Any) -> Callable[[], Any]:
    """All works one after the other, as a graph that is launched on the stream."""
    for work in works[:1] * 3:
        work()
    stream.synchronize()
    stream.begin_capture()
    for work in works:
        work()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def calls_us(wait: Callable[[], object], *calls: Callable[[], object]) -> list[float]:
    """The time of one of many calls in a row, `wait` for the GPUs included, for each of these:
    medians of samples in turns."""
    counts, samples = [], []
    for call in calls:
        for _ in range(4):
            call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        counts.append(int(min(MOST, max(3, SAMPLE_S / (time.perf_counter() - start)))))
    for _ in range(SAMPLES):
        for call, count in zip(calls, counts, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                call()
            wait()
            samples.append((time.perf_counter() - start) / count)
    return [statistics.median(samples[i :: len(calls)]) * 1e6 for i in range(len(calls))]


def rows_beside(
    library: str, sizes: Sequence[int], kinds: Sequence[Callable[[int], Iterable[Calls]]],
    times_us: Callable[..., list[float]],
) -> list[dict]:  # fmt: skip
    """A row for each pair of calls that `kinds` give at each size, printed as it is made: the times
    of both by `times_us`, and the difference of what they give, but where that is "added to" C,
    which grows from call to call. A pair of which one fails is a row with its error."""
    rows: list[dict] = []
    cases = ((side, *calls) for side in sizes for kind in kinds for calls in kind(side))
    for n, name, ours, theirs in cases:
        rows.append({"what": name, "n": n})
        try:
            if not name.startswith("added to"):
                rows[-1]["difference"] = difference(ours, theirs)
            mine, its = times_us(ours, theirs)
            rows[-1] |= {"ours_us": mine, f"{library}_us": its, "ratio": its / mine}
        except Exception as error:
            rows[-1]["error"] = f"{type(error).__name__}: {error}"
        print(rows[-1], flush=True)
    return rows


def difference(ours: Callable[[], Any], theirs: Callable[[], Any]) -> float | None:
    """The largest difference of the arrays that two calls give, or of lists of these, over the
    largest element of theirs; None of calls that give nothing. Both may write to one place."""
    found = []
    for call in (ours, theirs):
        made = call()
        if made is None:
            return None
        found.append([_on_host(x) for x in (made if isinstance(made, list) else [made])])
    apart, largest = (  # NaN, if there is any
        float(np.max([abs(x).max(initial=0) for x in of], initial=0))
        for of in ([x - y for x, y in zip(*found, strict=True)], found[1])
    )
    return apart / largest if largest else apart


def _on_host(x: Any) -> np.ndarray:
    """A copy as complex128, which holds all that is compared."""
    if hasattr(x, "detach"):
        return x.detach().to("cpu", sys.modules["torch"].complex128).clone().numpy()
    return np.array(x.get() if hasattr(x, "get") else x, "c16")
