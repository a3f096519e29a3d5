"""Ranks that open memory to each other, where one of them cannot: a stand-in for CuPy refuses."""

import contextlib
from types import SimpleNamespace

import pytest

from hybrid_gemm.ranks.open_memory import OpenMemory

pytestmark = pytest.mark.mpi


class Driver:
    """What OpenMemory asks of CuPy, and what it has not given back."""

    def __init__(self, refuses: str) -> None:
        self.refuses, self.opened = refuses, []
        self.cuda = SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            Memory=self.allocate,
            runtime=SimpleNamespace(
                ipcGetMemHandle=lambda address: self.may("handle", b"%d" % address),
                ipcOpenMemHandle=self.open,
                ipcCloseMemHandle=self.opened.remove,
            ),
        )

    def may(self, call, answer):
        if call == self.refuses:
            raise (MemoryError if call == "allocate" else RuntimeError)(f"no {call} here")
        return answer

    def allocate(self, size):
        return self.may("allocate", SimpleNamespace(ptr=4096, size=size))

    def open(self, handle):
        self.opened.append(self.may("open", int(handle)))
        return self.opened[-1]


@pytest.mark.parametrize("call", ["allocate", "handle", "open"])
def test_a_rank_that_cannot_is_told_by_all(comm, call):
    if call == "open" and comm.size == 1:
        pytest.skip("one rank opens nothing")
    driver = Driver(call if comm.rank == comm.size - 1 else "")
    device = SimpleNamespace(unwrapped=SimpleNamespace(cp=driver), ordinal=0)
    with pytest.raises(RuntimeError, match=f"no {call} here"):
        OpenMemory(comm, device, 100)
    assert not driver.opened


def test_all_is_closed(comm):
    driver = Driver("")
    memory = OpenMemory(comm, SimpleNamespace(unwrapped=SimpleNamespace(cp=driver), ordinal=0), 100)
    assert len(memory.bases) == comm.size and len(driver.opened) == comm.size - 1
    memory.close()
    assert not driver.opened and memory.memory is None
