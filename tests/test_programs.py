"""Played = written = reference: a call gives the same the first time, when its program is written,
and ever after, with arrays that moved, shrank or changed dtype in between. Whole numbers, so that
every order of sums is exact."""

import gc
import weakref

import numpy as np
import pytest
from support import late_gpus, played_runs
from support.arrays import LIES, copied
from support.devices import HERE
from support.emulation import needs_emulator

import hybrid_gemm as hg
from hybrid_gemm.programs.planned import Plans
from hybrid_gemm.programs.program import Program, Unfit

DTYPES = "float16", "bfloat16", "float32", "float64", "int8", "int32", "complex64", "complex128"
# Of the options of a runner: one worker, several, and a program of each kind of device.
OPTIONS = [{}, {"threads": 2, "split": "cols"}, {"checked": True}, {"threads": 3, "split": "rows"}]
gpus = played_runs.gpus
PLACES = {"cpu": ["numpy"], "emulator": ["numpy"], "cuda": ["numpy", "cupy", "torch", "mixed"]}


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 20))]


def dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


class Drawn:
    """A call that was drawn: how its arrays lie and what it computes. `arrays` gives new ones."""

    def __init__(self, rng, place):
        self.rng, self.place = rng, place
        pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
        self.names = [pick(*DTYPES)] * 2
        if rng.random() < 0.15 and self.names[0] != "bfloat16":
            self.names[1] = pick(*[x for x in DTYPES if x != "bfloat16"])
        self.m, self.n, self.k = (int(x) for x in rng.integers(1, 24, 3))
        if rng.random() < 0.05:
            self.k = 0
        self.lies = [pick("rows", "rows", "columns", "part", "steps", "backwards") for _ in "abco"]
        self.trans = [bool(rng.integers(2)) for _ in "ab"]
        self.alpha, self.beta = pick(1.0, 1.0, 2, -1.0, 0.0), pick(0.0, 0.0, 1.0, -2)
        self.c = pick("whole", "row", "out") if self.beta else pick("none", "out")
        self.out = self.c == "out" or bool(rng.integers(2))
        self.where = [pick("numpy", "cupy") if place == "mixed" else place for _ in "abco"]

    def __repr__(self):
        shown = {x: y for x, y in vars(self).items() if x != "rng"}
        return ", ".join(f"{x}={y}" for x, y in shown.items())

    @property
    def dtype(self):
        return np.result_type(*map(dtype, self.names))

    def numbers(self, shape, name):
        made = self.rng.integers(-2, 3, shape)
        if dtype(name).kind == "c":
            made = made + 1j * self.rng.integers(-2, 3, shape)
        return made.astype(dtype(name))

    def there(self, x, i):
        """An array in its place, as it lies."""
        lying = LIES[self.lies[i]](x) if x.ndim == 2 else x
        if self.where[i] == "numpy":
            return lying
        cupy = pytest.importorskip("cupy")
        backwards = self.where[i] == "torch" and self.lies[i] == "backwards"  # which it has not
        view = copied(cupy, x if backwards else lying)
        if self.where[i] == "cupy":
            return view
        torch = pytest.importorskip("torch")
        bits = torch.from_dlpack(view.view("int16") if x.dtype == dtype("bfloat16") else view)
        return bits.view(torch.bfloat16) if x.dtype == dtype("bfloat16") else bits

    def arrays(self):
        """The arguments and keywords of a call, and what it should give."""
        (m, n, k), done = (self.m, self.n, self.k), self.dtype
        a = self.numbers((k, m) if self.trans[0] else (m, k), self.names[0])
        b = self.numbers((n, k) if self.trans[1] else (k, n), self.names[1])
        c = None if self.c == "none" else self.numbers((n,) if self.c == "row" else (m, n), done)
        exact = complex if done.kind == "c" else np.int64
        op_a, op_b = (x.T if t else x for x, t in zip((a, b), self.trans, strict=True))
        expected = self.alpha * (op_a.astype(exact) @ op_b.astype(exact))
        if c is not None and self.beta:
            expected = expected + self.beta * c.astype(exact)
        args = [self.there(a, 0), self.there(b, 1)]
        out = self.there(np.full((m, n), 3, done), 3) if self.out else None
        if self.c == "out":
            out = self.there(c, 3)
            args.append(out)
        elif c is not None:
            args.append(self.there(c, 2))
        keywords = {"alpha": self.alpha, "beta": self.beta}
        keywords |= {"trans_a": self.trans[0], "trans_b": self.trans[1], "out": out}
        return args, keywords, expected.astype(done)


def on_host(x):
    if type(x).__module__ == "torch":
        return x.float().cpu().numpy() if str(x.dtype) == "torch.bfloat16" else x.cpu().numpy()
    return x.get() if hasattr(x, "get") else x


def check(gemm, drawn):
    args, keywords, expected = drawn.arrays()
    made = gemm(*args, **keywords)
    assert keywords["out"] is None or made is keywords["out"], drawn
    made = on_host(made)
    np.testing.assert_array_equal(made.astype(expected.dtype), expected, err_msg=repr(drawn))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kind", "place"), [(x, y) for x in HERE for y in PLACES[x]])
@pytest.mark.parametrize("seed", SEEDS)
def test_played_is_written_is_reference(kind, place, options, seed):
    """Calls of several kinds, in any order and more than once each, by one runner and by `gemm`."""
    if options and place in ("torch", "mixed"):
        pytest.skip("the first options' ways alone")
    rng = np.random.default_rng(seed)
    options = {"device": kind, **options}
    with hg.Runner(**options) as runner, np.errstate(all="ignore"):
        for _ in range(6 if kind == "emulator" else 25):
            several = [Drawn(rng, place) for _ in range(3)]
            for i in [0, 0, 1, 0, 2, 1, 0, 2]:
                check(runner.gemm, several[i])
            again = several[int(rng.integers(3))]
            for _ in range(3):
                check(lambda *a, **k: hg.gemm(*a, **k, **options), again)


@needs_emulator
@pytest.mark.parametrize("options", [{}, {"checked": True}], ids=str)
@pytest.mark.parametrize("place", ["cupy", "numpy", "mixed"])
def test_played_is_written_is_reference_on_played_gpus(place, options, gpus, rng, monkeypatch):
    """Whose streams work late. What lies in one place takes no plan but to warn."""
    planned = late_gpus.counted(monkeypatch, Plans, "multiply")
    with hg.Runner(device="cuda", gpus=[0], kernel="own", **options) as runner:
        for _ in range(12):
            drawn = Drawn(rng, place)
            if drawn.dtype.kind == "c":  # which the played CuPy has no kernels for
                continue
            planned.clear()
            for _ in range(3):
                check(runner.gemm, drawn)
            unread = not (drawn.k and drawn.alpha)
            assert not planned or unread or place == "mixed" or options, drawn


@pytest.mark.parametrize("kind", HERE)
def test_programs_go_with_their_runner(kind):
    runner = hg.Runner(device=kind)
    a = np.ones((8, 8), "float32")
    for _ in range(2):
        runner.gemm(a, a)
    devices = [weakref.ref(x) for x in runner.devices]
    gc.disable()
    try:
        del runner
        assert not any(x() for x in devices)
    finally:
        gc.enable()


def test_a_call_is_written_once(monkeypatch):
    written = []
    with hg.Runner(device="cpu") as runner:
        write = runner._writers.write
        monkeypatch.setattr(
            runner._writers, "write", lambda call: written.append(call) or write(call)
        )
        a = np.ones((5, 5))
        for keywords in ({}, {"alpha": 2.0}, {"alpha": 2}, {"out": np.empty((5, 5))}):
            for _ in range(3):
                runner.gemm(a.copy(), a.copy(), **keywords)
        assert len(written) == 4
        for x in ([[1.0]], np.ones((1, 1))):
            runner.gemm(x, x, alpha=np.array([2.0])[0])
        before = len(written)
        for _ in range(2):  # whose factor may change
            with pytest.raises(TypeError):
                runner.gemm(a, a, alpha=np.ones(2))
        assert len(written) == before + 2


def test_what_is_unfit_plays_another_program():
    def unfit(_slots):
        raise Unfit

    def put(slots):
        slots[3] = slots[0]

    assert Program([unfit], otherwise=Program([put])).play(7, None) == 7
