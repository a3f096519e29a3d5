"""Which pictures a result file has, whatever command wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bench import pictures as bench
from ..experiments import output as experiments
from ..reporting import chrome_trace
from ..reporting.chrome_trace import Gantt
from ..reporting.pictures import Picture


def pictures(data: Mapping[str, Any]) -> dict[str, Picture | Gantt]:
    """The pictures of a result file by name: of `run --trace`, `reproduce` or `bench`; none of
    other data."""
    trace = {"trace": chrome_trace.gantt(data)} if "traceEvents" in data else {}
    return {**trace, **experiments.pictures_of(data), **bench.pictures(data)}
