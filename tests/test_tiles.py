"""Which parts of which tiles a cluster of blocks makes: `kernels/tiles.cuh`, compiled here."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.catalog.files import directory
from hybrid_gemm.kernel_choice.tensor_cores import Cut, busiest

CXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="g++ compiles the program")
# Prints for each cluster what it makes, from lines with m, n, steps, each, cut, runs, clusters.
PROGRAM = """
#include <algorithm>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::min;
static unsigned atomicAdd(unsigned*, unsigned) { return 0; }
#define HYBRID_GEMM_EMULATOR
#include "tiles.cuh"
int main() {
    int m, n, steps, each, cut, runs, clusters;
    while (scanf("%d %d %d %d %d %d %d", &m, &n, &steps, &each, &cut, &runs, &clusters) == 7) {
        const Tiles tiles = {m, n, steps, each, cut, runs};
        printf("%d", tiles.tiles());
        for (int c = 0; c < clusters; ++c) {
            for_each_part(tiles, c, clusters, [&](const Part& part) {
                int row, col;
                tiles.at(part.t, row, col);
                const int step = (part.t - tiles.whole()) * steps + part.first;
                printf(" %d,%d,%d,%d,%d,%d,%d,%d,%d", c, part.t, part.share, part.first,
                       part.length, row, col, cut ? tiles.cluster_of(step) : 0,
                       tiles.is_cut(part) ? (int)tiles.part_of(c, part.t - tiles.whole()) : -1);
            });
        }
        printf("\\n");
        fflush(stdout);
    }
}
"""


class Parts:
    def __init__(self, folder, **params):
        self.params = {"BM": 128, "BN": 256, "CLUSTER": 2, "SHARES": 1} | params
        self.program, source = folder / "tiles", folder / "tiles.cpp"
        source.write_text(PROGRAM)
        defines = [f"-D{name}={value}" for name, value in self.params.items()]
        subprocess.run(
            [CXX, "-std=c++17", "-O1", f"-I{directory()}", *defines, source, "-o", self.program],
            check=True,
        )

    def of(self, *numbers):
        """The tiles, and all parts: cluster, tile, share, first, length, row, column, whose step
        the first one is, and the part's number."""
        line = " ".join(map(str, numbers))
        said = subprocess.run([self.program], input=line, text=True, stdout=-1, check=True).stdout
        tiles, *parts = said.split()
        return int(tiles), [tuple(map(int, part.split(","))) for part in parts]


@pytest.fixture(scope="module", params=[
    {}, {"BN": 64, "CLUSTER": 1}, {"BM": 64, "BN": 128, "SHARES": 256},
])  # fmt: skip
def parts(request, tmp_path_factory):
    return Parts(tmp_path_factory.mktemp("tiles"), **request.param)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40), st.integers(1, 70),
       st.integers(1, 70), st.integers(0, 70), st.integers(1, 40))  # fmt: skip
def test_clusters_make_each_step_of_each_tile_once(parts, m, n, steps, clusters, cut, runs, each):
    p = parts.params
    rows, cols = -(-m // (p["CLUSTER"] * p["BM"])), -(-n // p["BN"])
    if p["SHARES"] > 1:
        cut, runs, each = 0, 1, min(each, steps)
    else:
        cut = min(cut, rows * cols, clusters)
        runs = min(clusters, cut + runs)
    tiles, made = parts.of(m, n, steps, each, cut, max(1, runs), clusters)
    assert tiles == rows * cols
    done, numbers = {}, {}
    for cluster, t, share, first, length, row, col, whose, number in made:
        assert length > 0 and first + length <= steps
        done.setdefault(t, []).append((first, length, share))
        assert row % (p["CLUSTER"] * p["BM"]) == 0 == col % p["BN"]
        assert 0 <= row < m and 0 <= col < n
        assert (number >= 0) == (t >= tiles - cut)
        if number >= 0:
            assert whose == cluster
            numbers[t, first] = number
    along = [numbers[x] for x in sorted(numbers)]
    assert along == sorted(set(along)) and all(x < cut + runs for x in along)
    for t in range(tiles - cut, tiles):
        of_tile = [numbers[x] for x in sorted(numbers) if x[0] == t]
        assert of_tile == [*range(of_tile[0], of_tile[0] + len(of_tile))]
    assert sorted(done) == list(range(tiles))
    for t, of_tile in done.items():
        ends = [0]
        for first, length, share in sorted(of_tile):
            assert first == ends[-1] and share == (first // each if p["SHARES"] > 1 else 0)
            ends.append(first + length)
        assert ends[-1] == steps
        assert len(of_tile) == 1 or p["SHARES"] > 1 or t >= tiles - cut
    places = {x[5:7] for x in made}
    assert len(places) == tiles
    for cluster in range(clusters):
        own = [x[1] for x in made if x[0] == cluster and x[1] >= tiles - cut]
        assert len(own) <= 2
    if not cut or ((tiles - cut) % clusters == 0):
        count = -(-steps // each) if p["SHARES"] > 1 else 1
        how = Cut(count, each if p["SHARES"] > 1 else steps, cut, max(1, runs))
        most = max(sum(x[4] for x in made if x[0] == c) for c in range(clusters))
        assert busiest(how, tiles, clusters).steps >= most
