"""Which pictures a result file has."""

from __future__ import annotations

from collections.abc import Mapping

from ..bench.pictures import _accuracy, _bench, _peers
from ..errors import UsageError
from ..reporting.chrome_trace import Gantt, gantt
from ..reporting.pictures import Picture


def pictures(data: Mapping) -> dict[str, Picture | Gantt]:
    """The pictures of a result file by name: of `reproduce`'s, or one of `bench`'s rows, of
    `bench --peers`'s or of a trace.

    Raises `UsageError` for other data.
    """
    if "traceEvents" in data:
        return {"trace": gantt(data)}
    if "experiments" in data:
        from ..experiments.base import Rows
        from ..experiments.engine import experiments

        known = experiments()
        return {
            e["name"]: known[e["name"]].picture(Rows(e["rows"]))
            for e in data["experiments"]
            if e["name"] in known
        }
    if data.get("rows") and "way" in data["rows"][0] and "memory" in data["rows"][0]:
        return {"peers": _peers(data)}
    if data.get("rows") and "frobenius" in data["rows"][0]:
        return _accuracy(data)
    if data.get("rows") and "gflops" in data["rows"][0]:
        return {"bench": _bench(data)}
    raise UsageError("this file has neither experiments nor rows of bench nor a trace in it")
