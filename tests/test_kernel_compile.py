"""Every kernel compiles for the GPUs of today, without a card, and fits on them. What each one
that is compiled as devices do uses is listed at the end of the run, of all in campaigns."""

import itertools
import math

import pytest
from support.command import run
from support.kernels import with_anything_new

from hybrid_gemm import catalog
from hybrid_gemm.cli import kernel_listing
from hybrid_gemm.devices.cuda import nvrtc
from hybrid_gemm.errors import KernelError, UnavailableError, UsageError

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")  # NVRTC 13 knows none before
REGISTERS = 65536  # of a multiprocessor; a block's must fit
STATIC_SHARED_BYTES = 48 * 1024
# Their sums must stay in registers. They are shaped for sm_90; elsewhere a few bytes may spill.
TILED = ("block_tile", "conflict_free", "double_buffered")


def archs(kernel):
    if kernel.arch.startswith("=="):
        return (f"sm_{kernel.arch[2:]}",)
    return tuple(arch for arch in ARCHS if int(arch[3:]) >= kernel.min_arch())


def first_arch(kernel):
    """On which it is compiled in all its variants: sm_90 where it runs there."""
    return "sm_90" if "sm_90" in archs(kernel) else archs(kernel)[0]


def possible(variant, dtype):
    try:
        variant.check(dtype)
    except UsageError:
        return False
    return True


def tile(variant):
    return tuple(variant.params.get(x) for x in ("BM", "BN", "TERMS"))


def one_of_each_tile(variants):
    """The first. Others of a tile differ in how k is shared, in clusters, and in what C is stored
    as, which takes few registers beside the sums."""
    return {tile(v): v for v in reversed(variants)}.values()


def listed(kernel):
    """Variants that have every tile and every value of a parameter; the first and the last also
    without shares of k."""
    variants = kernel.variants()
    uncut = variants[0].uncut, variants[-1].uncut
    tiles = one_of_each_tile(variants)
    return dict.fromkeys((*with_anything_new(variants), *tiles, *uncut))


TILES = set().union(
    *(one_of_each_tile(k.variants()) for k in catalog.kernels().values() if not k.library)
)


def asked_of_spills(variant, dtype, layout, arch):
    """Whether the test below asks how many bytes spill."""
    kernel = variant.kernel
    if dtype != kernel.dtypes[0]:
        return False
    tile_of_wgmma = arch == "sm_90a" and variant in TILES and layout == kernel.layouts[0]
    return tile_of_wgmma or (variant.name in TILED and arch in ("sm_80", "sm_90"))


def cases():
    """Every kernel on every architecture, and on one in many variants. Default variants in every
    dtype, and every layout, each on another architecture. Outside campaigns only the first of each
    of these: a kernel's default variant on its first architecture, and on another in its second
    layout. With each, whether it is compiled quickly, and whether always."""
    for kernel in catalog.kernels().values():
        if kernel.library:
            continue
        dtype, layout = kernel.dtypes[0], kernel.layouts[0]
        default, arch = kernel.variant(), first_arch(kernel)
        for variant in listed(kernel):
            quick = not asked_of_spills(variant, dtype, layout, arch)
            yield variant, dtype, layout, arch, quick, variant == default
            if quick and variant == default:  # what it uses is of interest
                yield variant, dtype, layout, arch, False, False
        yield from ((default, other, layout, arch, True, False) for other in kernel.dtypes[1:])
        layouts = kernel.layouts[1:] if kernel.role in ("gemm", "tensor") else ()
        elsewhere = [other for other in archs(kernel) if other != arch]
        for i, (way, other) in enumerate(itertools.zip_longest(layouts, elsewhere)):
            case = default, dtype, way or layout, other or arch
            yield *case, not asked_of_spills(*case), i == 0


CASES = [
    pytest.param(
        variant, *rest, quick,
        id=" ".join(map(str, (variant, *rest, "quick" if quick else "whole"))),
        marks=[] if always else [pytest.mark.campaign],
    )
    for variant, *rest, quick, always in cases()
    if possible(variant, rest[0])
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("variant", "dtype", "layout", "arch", "quick"), CASES)
def test_compiles_and_fits(variant, dtype, layout, arch, quick, record_property):
    """As the device compiles them where something is asked of spills, and in campaigns the default
    variants on their first architecture; otherwise quickly, and registers fit since each kernel
    names its block's threads."""
    source = variant.source(dtype, layout)
    cubin, usage = nvrtc.compile(source, arch, f"{variant.name}.cu", quick=quick)
    spilled = usage.spill_store_bytes + usage.spill_load_bytes
    used = [usage.registers, usage.shared_bytes, usage.stack_bytes, spilled]
    if not quick:
        record_property("usage", [str(variant), dtype, layout, arch, *used])  # see conftest.py
    assert cubin.startswith(b"\x7fELF")
    sides = (32, 32, 32) if variant.takes(32, 32, 32, dtype) else (1, 1, 1)
    threads = math.prod(variant.launch(*sides, dtype).block)
    assert -(-usage.registers // 8) * 8 * threads <= REGISTERS
    assert usage.shared_bytes <= STATIC_SHARED_BYTES
    if variant.name in TILED and not quick:
        assert spilled <= (0 if arch == "sm_90" else 128)
    if arch == "sm_90a" and not quick:
        assert spilled == 0


@pytest.mark.parametrize(
    "tiles", [(8, 16), pytest.param((1, 2, 4, 32, 64), marks=pytest.mark.campaign)]
)
def test_register_tiles_leave_the_registers_as_the_source_says(tiles):
    """Tiles of 8 x 8 fit; from 16 x 16 on the sums are in local memory, all or in part."""
    kernel = catalog.get("register_tile")
    assert {variant.params["TILE"] for variant in kernel.variants()} == {1, 2, 4, 8, 16, 32, 64}
    for variant in kernel.variants():
        if (tile := variant.params["TILE"]) in tiles:
            text = variant.source("float32")
            stack = nvrtc.compile(text, "sm_90", f"{variant.name}.cu")[1].stack_bytes
            assert (stack == 0) == (tile <= 8)
            assert stack >= (tile * tile * 4 if tile >= 32 else 0)


def test_rules_of_the_header_hold_in_the_compiler_too():
    """A variant that the host would refuse does not compile either."""
    kernel = catalog.get("double_buffered")
    bad = catalog.Variant(kernel, {**kernel.params[0], "BM": 100})
    with pytest.raises(UsageError, match="BM"):
        bad.check()
    with pytest.raises(KernelError, match="double_buffered needs BM"):
        nvrtc.compile(bad.source("float32"), "sm_90", kernel.path.name)


def test_an_error_names_the_kernels_own_line():
    variant = catalog.get("naive").variant()
    source = variant.source("float32").replace("T sum = 0;", "T sum = nonsense;")
    line = 1 + variant.kernel.text.split("T sum = 0;")[0].count("\n")
    with pytest.raises(KernelError, match=rf'gemm_naive.cu\({line}\): error: .*"nonsense"'):
        nvrtc.compile(source, "sm_90", "gemm_naive.cu")


def test_a_compiled_kernel_is_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    source = catalog.get("naive").variant().source("float32")
    first = nvrtc.compile(source, "sm_90", "gemm_naive.cu")
    quick = nvrtc.compile(source, "sm_90", "gemm_naive.cu", quick=True)
    monkeypatch.setattr(nvrtc, "compiled_by_nvrtc", None)
    assert nvrtc.compile(source, "sm_90", "gemm_naive.cu") == first
    assert nvrtc.compile(source, "sm_90", "gemm_naive.cu", quick=True) == quick != first


def test_nothing_is_included_from_the_working_directory(tmp_path, monkeypatch):
    """Which may be another user's, with files of the names that kernels include."""
    for path in catalog.directory().glob("*.cuh"):
        (tmp_path / path.name).write_text("#error planted\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    variant = catalog.get("naive").variant()
    nvrtc.compile(variant.source("float32"), "sm_90", "gemm_naive.cu", quick=True)


@pytest.mark.parametrize("arch", ["sm_30", "90", "SM_90", "", "sm_90;x", "sm_-1"])
def test_an_architecture_that_nvrtc_does_not_know_is_refused(arch):
    with pytest.raises(UsageError, match=r"NVRTC \S+ compiles for sm_.*, sm_90,"):
        kernel_listing.kernels(["naive"], arch, "float32")


def test_what_is_not_compiled_is_said(capsys):
    with pytest.raises(UsageError, match="blas, cublas is a library's"):
        kernel_listing.kernels(["blas", "cublas"], "sm_90", "float32")
    kernel_listing.print_kernels(kernel_listing.kernels(["naive"], "sm_90", "float16"), True)
    table = capsys.readouterr().out.partition("compiled for sm_90, float16")[2]
    assert table.count("no float16 form") == len(catalog.get("naive").variants())
    run("kernels", "naive", "--dtype", "float16", check=2)
