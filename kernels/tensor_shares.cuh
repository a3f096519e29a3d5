// Shares of k on tensor cores, for kernels with the parameter
//
//   SHARES  the most shares that the k of a tile is cut into; 1: the kernel cuts none, and makes C
//
// With SHARES > 1 the k of each tile is cut into shares of `each` steps, so that a C of few tiles
// occupies all multiprocessors. The sums of each share go to a matrix of its own, in float32: C is
// these matrices, one below the other, and sum_shares.cu adds them up. Exponents, alpha and beta
// are left to that. `each` is then the kernel's last argument.
#pragma once

#if SHARES > 1
#undef OUT
#define OUT 4
#define AND_EACH , int each
#else
#define AND_EACH
constexpr int each = 0;  // there is one share, of all steps
#endif

// The matrix that takes the sums of a share, where each has `rows` rows. The number of a share is
// an int or, where it comes from the grid, unsigned: converting it costs registers.
template <typename E, typename Share>
__device__ __forceinline__ E* matrix_of_share(E* C, Share share, int rows, long long ldc) {
    return SHARES > 1 ? C + static_cast<long long>(share) * rows * ldc : C;
}
