"""What kernels say of themselves in their headers, and what is made of it: tiles, persistent and
early launches, boxes of tensor maps, architectures. Needs neither a compiler nor a card."""

import math
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from support.command import PACKAGE_FOLDER, python

import hybrid_gemm
from hybrid_gemm import Runner, catalog
from hybrid_gemm.catalog import ITEM_SIZE, Variant, files
from hybrid_gemm.errors import KernelError, UsageError
from hybrid_gemm.options import DEVICES

KERNELS = list(catalog.kernels().values())
MULTIPLY = [k for k in KERNELS if k.role in ("gemm", "tensor", "across") and not k.library]
TILED = [k for k in MULTIPLY if k.name != "one_block"]  # of which the grid is one block
TMA = [k for k in KERNELS if k.tma]
READ_BY_THE_HOST = ("TERMS", "MODULI")  # parameters that say what a kernel multiplies
CUBLAS = catalog.get("cublas").path
TEXTS = [
    path
    for folder in (catalog.directory(), Path(hybrid_gemm.__file__).parent)
    for path in sorted(folder.rglob("*"))
    if path.suffix in (".cu", ".cuh", ".h", ".cpp")
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of one's own kernels, searched by the catalog."""
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path))
    catalog.kernels.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    catalog.kernels.cache_clear()


def write(folder, *lines, name="mine"):
    header = ['summary = "mine"', 'source = "mine"', 'entry = "gemm_mine"', *lines]
    text = 'extern "C" __global__ void gemm_mine() {}'
    (folder / f"gemm_{name}.cu").write_text("\n".join(["/*---", *header, "---*/", text, ""]))


def test_a_kernel_is_read_without_the_others(monkeypatch):
    """As for a product on the CPU: all headers take longer than all else of a small one."""
    monkeypatch.setattr(files, "_kernels_in", lambda _folder: pytest.fail("all are read"))
    catalog.kernels.cache_clear()
    try:
        assert [catalog.get(kernel.name) for kernel in KERNELS] == KERNELS
        with Runner(device="cpu") as runner:
            assert runner.gemm([[2.0]], [[3.0]]) == 6
    finally:
        monkeypatch.undo()
    assert dict.fromkeys(k.name for k in KERNELS) == dict.fromkeys(catalog.kernels())


def test_a_kernel_that_has_the_name_of_another_is_not_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "directory", lambda: tmp_path)
    catalog.kernels.cache_clear()
    try:
        write(tmp_path, 'tile = ["1", "1"]', 'block = ["1", "1", "1"]', 'grid = ["1", "1", "1"]')
        assert catalog.get("mine").entry == "gemm_mine"
        (tmp_path / "gemm_mine.cu").write_text("no kernel")
        with pytest.raises(UsageError, match=r"gemm_mine.cu holds no kernel: .* begins with"):
            catalog.get("mine")
        catalog.kernels.cache_clear()
        write(tmp_path, 'tile = ["1", "1"]', 'block = ["1", "1", "1"]', 'grid = ["1", "1", "1"]')
        with pytest.raises(UsageError, match="no kernel is called 'gemm_mine'"):
            catalog.get("gemm_mine")  # as where all were read
        catalog.kernels.cache_clear()
        (tmp_path / "mine.toml").write_text(CUBLAS.read_text())
        with pytest.raises(UsageError, match="two kernels are called mine"):
            catalog.get("mine")
    finally:
        monkeypatch.undo()
        catalog.kernels.cache_clear()


# --- the headers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.text], ids=lambda k: k.name)
def test_a_comment_says_what_each_parameter_means(kernel):
    """In the header, or in the shared file that the header names: "# BM, BN: see tile.cuh"."""
    header = kernel.text.split("---*/")[0]
    explained = re.findall(r"^# ([A-Z]+)  +\S.*$", header, re.MULTILINE)
    for names, shared in re.findall(r"^# ([A-Z, ]+): see (\w+\.cuh)$", header, re.MULTILINE):
        text = (catalog.directory() / shared).read_text()
        there = re.findall(r"^//   ([A-Z]+)  +\S.*$", text, re.MULTILINE)
        assert set(names.split(", ")) <= set(there), shared
        explained += names.split(", ")
    assert sorted(explained) == sorted(kernel.params[0])


def whole_text(path):
    """A kernel's text with the shared files that it includes."""
    text = path.read_text()
    included = re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE)
    return text + "".join(whole_text(catalog.directory() / name) for name in included)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_comments_have_lines_of_100_characters_at_most(path):
    """clang-format, which is not to turn drawings into text, leaves them as they are."""
    comments = [line for line in path.read_text().splitlines() if line.lstrip()[:2] in ("//", "# ")]
    assert max(map(len, comments), default=0) <= 100


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.text], ids=lambda k: k.name)
def test_the_header_says_what_the_text_does(kernel):
    """Whether it waits for the launch before by itself, takes tensor maps, and by what parameters
    it or its launch differs."""
    text = whole_text(kernel.path).partition("---*/")[2]
    assert kernel.early == ("wait_for_launch_before();" in text)
    assert bool(kernel.tma) == ("__grid_constant__" in kernel.text)
    used = re.findall(r"\w+", " ".join([re.sub("//.*", "", text), *kernel.of_launch]))
    assert {*kernel.params[0]} <= {*used, *READ_BY_THE_HOST}


@pytest.mark.parametrize("kernel", TILED, ids=lambda k: k.name)
def test_the_grid_covers_c_in_tiles_of_the_size_that_the_header_says(kernel):
    """With k = 1, which no blocks share. A cluster's blocks lie one above the other, or share a
    tile: the rows of a whole cluster serve both."""

    def blocks(variant, m, n):
        return math.prod(variant.launch(m, n, 1, kernel.dtypes[0]).grid)

    for variant in kernel.variants():
        rows, columns = variant.tile
        if kernel.turns:
            assert blocks(variant, 2 * rows, columns) == blocks(variant, columns, 2 * rows) == 2
            assert blocks(variant, 1, rows + 1) == 2
            continue
        rows *= variant.cluster
        few = blocks(variant, rows, columns)
        assert blocks(variant, 2 * rows, 3 * columns) == 6 * few, str(variant)
        assert blocks(variant, rows + 1, columns) > few, str(variant)
        assert blocks(variant, rows, columns + 1) > few, str(variant)


def note_of_what_is_left_out(capsys):
    """Of a user's own kernel with a bad header: it is left out, and a line says why."""
    assert "mine" not in catalog.kernels()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "suffix, key",
    [(".cu", "summary"), (".cu", "source"), (".cu", "entry"), (".toml", "library")],
)
def test_a_header_without_a_required_key_is_left_out(folder, capsys, suffix, key):
    given = {"summary": "mine", "source": "mine", "role": "copy"}
    given |= {"entry": "gemm_mine"} if suffix == ".cu" else {"library": "numpy"}
    del given[key]
    header = "\n".join(f'{name} = "{value}"' for name, value in given.items())
    if suffix == ".cu":
        header = f'/*---\n{header}\n---*/\nextern "C" __global__ void gemm_mine() {{}}\n'
    (folder / f"gemm_mine{suffix}").write_text(header)
    assert f"left out: the header has no {key}, which a {suffix} file needs" in (
        note_of_what_is_left_out(capsys)
    )


def test_a_kernel_that_multiplies_needs_a_tile(folder, capsys):
    write(folder)
    note = note_of_what_is_left_out(capsys)
    assert "gemm_mine.cu" in note and 'tile = ["BM", "BN"]' in note


def test_a_pass_over_matrices_needs_no_tile(folder):
    write(folder, 'role = "mine"')
    assert catalog.get("mine").tile == ()


@pytest.mark.parametrize(
    "entry",
    ['operand = "D", along_k = ["1", "1"]', 'operand = "A"',
     'operand = "A", along_k = ["1", "1"], boxes = 1'],
)  # fmt: skip
def test_an_entry_of_tma_is_checked(folder, entry, capsys):
    write(folder, 'tile = ["1", "1"]', f"tma = [{{{entry}}}]")
    assert "an entry of tma names an operand" in note_of_what_is_left_out(capsys)


def test_entries_of_tma_are_tables(folder, capsys):
    write(folder, 'tile = ["1", "1"]', 'tma = [{operand = "A", box = ["1", "1"]}, 1]')
    assert "the header's tma cannot be" in note_of_what_is_left_out(capsys)


def test_a_kernel_may_have_an_empty_list_of_parameters(folder):
    write(folder, 'tile = ["1", "1"]', "params = []")
    assert catalog.get("mine").variant().params == {}


def test_a_header_names_devices_that_there_are(folder, capsys, monkeypatch):
    write(folder, 'tile = ["1", "1"]', 'runs_on = ["cuda", "toy"]')
    assert "the header's runs_on cannot be ('cuda', 'toy')" in note_of_what_is_left_out(capsys)
    catalog.kernels.cache_clear()
    monkeypatch.setattr(files, "DEVICES", (*DEVICES, "toy"))
    assert catalog.get("mine").runs_on == ("cuda", "toy")


def test_parameters_are_a_list(folder, capsys):
    write(folder, 'tile = ["1", "1"]', "params = 0")
    assert "the header's params cannot be 0" in note_of_what_is_left_out(capsys)


def test_scales_names_parameters(folder, capsys):
    write(folder, 'tile = ["1", "1"]', "params = [{BLOCKS = 4}]", 'scales = ["BLOCKS", "SPLIT"]')
    assert "scales names 'SPLIT', which is no parameter" in note_of_what_is_left_out(capsys)


# --- launches -------------------------------------------------------------------------------


def test_blocks_of_a_persistent_kernel_fill_the_gpu_once_in_whole_clusters():
    for variant in catalog.get("wgmma").variants():
        launch = variant.launch(8192, 8192, 64, "float16")
        assert launch.early and launch.persistent and launch.cluster == variant.cluster
        assert launch.grid[0] > 133
        here = launch.resident(133)
        assert here.grid == (133 // variant.cluster * variant.cluster, 1, 1)
        assert here.block == launch.block and here.shared_bytes == launch.shared_bytes
        few = variant.launch(100, 100, 64, "float16")
        assert few.resident(133) == few


@pytest.mark.parametrize("name, sides", [
    ("tuned", {"BM": 64, "BN": 96, "TM": 8, "TN": 12}),
    ("deep", {"BM": 64, "BN": 96, "TM": 8, "TN": 12}),
    ("short_k", {"BM": 96, "BN": 64, "TM": 8, "TN": 8}),
])  # fmt: skip
def test_a_tile_whose_lines_threads_cannot_share_out_evenly_is_refused(name, sides):
    """With 96 rows some threads' copies would lie beyond the tile and the matrix."""
    (side,) = (x for x in sides if sides[x] == 96)
    kernel = catalog.get(name)
    params = next(p for p in kernel.params if p["BM"] == p["BN"] == 64)
    with pytest.raises(UsageError, match=f"needs 256 % {side} == 0$"):
        kernel.variant({**params, **sides})


@pytest.mark.parametrize("name", ["wgmma", "mma"])
def test_shares_of_k_have_as_many_blocks_as_all_of_it(name):
    whole = catalog.get(name).variant().launch(300, 500, 4096, "float16")
    cut = whole.cut(3)
    assert math.prod(cut.grid) == 3 * math.prod(whole.grid) and cut.block == whole.block


def test_other_launches_stay_as_they_are():
    for kernel in TILED:
        if not kernel.persistent:
            launch = kernel.variant().launch(1, 1, 1, kernel.dtypes[0])
            assert launch.resident(4) == launch


def test_only_parameters_that_count_blocks_of_a_gpu_scale_with_it():
    params = {"BLOCKS": 132, "SPLIT": 4, "BM": 256}
    variant = Variant(catalog.get("tuned"), catalog.get("tuned").params[0] | params)
    scaled = variant.for_multiprocessors(78).params
    assert scaled == variant.params | {"BLOCKS": 78}
    wide = Variant(variant.kernel, {**variant.params, "SPLIT": 264})
    assert wide.for_multiprocessors(66).params["SPLIT"] == 132
    plain = catalog.get("double_buffered").variant()
    assert plain.for_multiprocessors(1) == plain


# --- boxes of tensor maps -------------------------------------------------------------------


@pytest.mark.parametrize("kernel", TMA, ids=lambda k: k.name)
def test_boxes_are_what_tma_can_copy_and_fill_a_stage(kernel):
    """Rows of 64 or 128 bytes, which is how far a swizzle reaches, and 256 lines at most; whole
    boxes make the bytes of an operand in a stage."""
    for variant in kernel.variants():
        for dtype in kernel.dtypes:
            size, p = ITEM_SIZE[dtype], variant.params
            for layout in kernel.layouts:
                if size == 4 and kernel.role == "tensor" and layout != "nt":
                    continue  # 32 bits lie along k there
                if kernel.role == "across":
                    ways = (False, True)  # A across k, which the host sees to
                else:
                    ways = (layout[0] == "n", layout[1] == "t")
                for operand, along_k, sides in zip(
                    "AB", ways, (p["BM"], p["BN"] // variant.cluster), strict=True
                ):
                    along, across = variant.box(operand, dtype, along_k=along_k)
                    assert along * size in (64, 128) and across <= 256
                    assert sides * p["SPAN"] % (along * across * size) == 0


def test_c_is_stored_by_tma_where_it_has_16_bits():
    for variant in catalog.get("wgmma").variants():
        wanted = (64, 64) if variant.params["OUT"] == 2 and variant.most_shares == 1 else None
        assert variant.box_of_c("float16") == wanted


def test_an_operand_that_tma_does_not_read_is_named():
    variant = catalog.helper("across")
    with pytest.raises(UsageError, match="wgmma_across has no box for an operand B across_k"):
        variant.box("B", "tfloat32", along_k=False)
    assert variant.box_of_c("tfloat32") is None


# --- architectures --------------------------------------------------------------------------


def test_parts_of_products_are_no_products_of_their_own():
    for kernel in catalog.kernels().values():
        if kernel.role in ("gemm", "tensor", "residues"):
            assert catalog.product(kernel.name) is kernel
        else:
            with pytest.raises(UsageError, match="multiplies nothing by itself"):
                catalog.product(kernel.name)
            with pytest.raises(UsageError, match="multiplies nothing by itself"):
                Runner(device="cpu", kernel=kernel.name)


def test_a_kernel_runs_at_later_capabilities_or_at_its_own_alone():
    tuned, wgmma = catalog.get("tuned"), catalog.get("wgmma")
    assert [tuned.runs_at(arch) for arch in (75, 80, 90, 120)] == [False, True, True, True]
    assert [wgmma.runs_at(arch) for arch in (80, 90, 100)] == [False, True, False]
    assert tuned.target("sm_90") == "sm_90" and wgmma.target("sm_90") == "sm_90a"


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.text], ids=lambda k: k.name)
def test_a_dtype_without_a_form_is_named_before_a_compiler_sees_the_text(kernel):
    for dtype in ITEM_SIZE:
        if dtype in kernel.dtypes:
            assert kernel.variant().source(dtype)
            continue
        with pytest.raises(KernelError) as refused:
            kernel.variant().source(dtype)
        assert str(refused.value) == (
            f"kernel {kernel.name} has no {dtype} form; it has {', '.join(kernel.dtypes)}"
        )


def test_rules_are_held_against_the_size_of_the_dtype_that_is_asked_for():
    variants = catalog.get("outer").variants()
    large = next(v for v in variants if v.params["DEPTH"] * v.params["COLS"] == 64)
    large.check()  # some dtype suits
    large.check("float32")
    with pytest.raises(UsageError, match=r"not possible: it needs DEPTH \* COLS \* SIZE <= 256"):
        large.check("float64")


def test_a_misspelt_key_names_the_one_that_was_meant(tmp_path, monkeypatch, capsys):
    text = catalog.get("naive").path.read_text().replace("summary", "sumary", 1)
    (tmp_path / "gemm_mine.cu").write_text(text)
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path))
    catalog.kernels.cache_clear()
    try:
        assert "mine" not in catalog.kernels()
    finally:
        monkeypatch.undo()
        catalog.kernels.cache_clear()
    assert "the header has no key 'sumary' (did you mean summary?)" in capsys.readouterr().err


def test_a_kernel_file_may_begin_with_a_byte_order_mark(tmp_path):
    text = catalog.get("naive").text
    (tmp_path / "gemm_mine.cu").write_text(text, encoding="utf-8-sig")
    assert catalog.files.read_kernel(tmp_path / "gemm_mine.cu").text == text


def test_modules_without_the_package_s_data_multiply_on_the_cpu(tmp_path):
    """As a frozen program has them."""
    left_out = shutil.ignore_patterns("*.[!p]*", "*.pyc", "__pycache__")
    shutil.copytree(PACKAGE_FOLDER / "hybrid_gemm", tmp_path / "hybrid_gemm", ignore=left_out)
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import numpy as np, hybrid_gemm as hg
        a = np.ones((300, 300))
        for options in {{}}, {{"split": "cols", "threads": 2}}, {{"checked": True}}:
            assert (hg.gemm(a, a, **options) == 300).all()
        try:
            hg.gemm(a, a, kernel="block_tile")
        except hg.errors.UsageError as error:
            assert "--collect-data hybrid_gemm" in str(error)
            print("both")
    """
    done = python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.stdout == "both\n", done.stderr


def test_a_package_without_its_kernels_is_not_blamed_on_the_user(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog.files, "directory", lambda: tmp_path / "a.zip/kernels")
    with pytest.raises(UsageError, match=r"in .*not from a zip; .* --collect-data hybrid_gemm"):
        catalog.kernels()
    monkeypatch.undo()
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match=rf"{catalog.VARIABLE} names .*none, which is no folder"):
        catalog.kernels()


def test_the_digest_of_what_kernels_include_changes_with_each_name_and_text(monkeypatch):
    """Else code that was compiled from the text of before would be taken."""
    found = set()
    for texts in ({"tile.cuh": b"one"}, {"tile.cuh": b"two"}, {"wide.cuh": b"one"}):
        monkeypatch.setattr(catalog.files, "included", lambda texts=texts: texts)
        found.add(catalog.include_digest.__wrapped__())
    assert len(found) == 3
