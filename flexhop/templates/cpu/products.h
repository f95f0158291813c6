#ifndef FLEXHOP_PRODUCTS
#define FLEXHOP_PRODUCTS
// Products of small matrices, row-major, in fp32, on one thread.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <atomic>
#include <limits>
#include <memory>
#include <vector>

namespace flexhop {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
constexpr int64_t PANEL = 64;    // keys whose columns are packed side by side
constexpr int64_t FEW_ROWS = 8;  // up to which keys and values are read where they are

// Rows of a matrix: where they start, and from one row to the next.
template <typename T>
struct Rows {
  T* at;
  int64_t step;
  T* row(int64_t i) const { return at + i * step; }
};

template <typename scalar_t>
inline Vec load(const scalar_t* from, int64_t count) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return Vec::loadu(from, count);
  } else if (count == LANES) {
    Vec wide;
    at::vec::load_to_float(from, wide);
    return wide;
  } else {
    __at_align__ float wide[LANES] = {};
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(from[i]);
    return Vec::loadu(wide);
  }
}

// into[:] = factor * from[:]
template <typename scalar_t>
inline void copy_scaled(const scalar_t* from, float* into, int64_t count, float factor = 1) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t lanes = std::min(LANES, count - i);
    (load(from + i, lanes) * Vec(factor)).store(into + i, lanes);
  }
}

// into[d, j] = from[j, d], a block of rows at a time, so that it stays in L1.
template <typename scalar_t>
inline void transpose(Rows<const scalar_t> from, int64_t rows, int64_t columns, Rows<float> into) {
  for (int64_t j = 0; j < rows; j += LANES) {
    const int64_t last = std::min(j + LANES, rows);
    for (int64_t d = 0; d < columns; ++d)
      for (int64_t i = j; i < last; ++i) into.row(d)[i] = static_cast<float>(from.row(i)[d]);
  }
}

inline float add_lanes(const Vec& lanes) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, lanes);
}

// into[rows, columns] (+)= a[rows, depth] b[depth, columns]
inline void multiply(int64_t rows, int64_t columns, int64_t depth, Rows<const float> a,
                     Rows<const float> b, Rows<float> into, bool adds) {
  at::native::cpublas::brgemm(rows, columns, depth, a.step, b.step, into.step, adds, a.at, b.at,
                              into.at, false);
}

// into[i, j] = a[i, :] . b[j, :] for a few rows: every row of b is read once.
template <int rows, typename scalar_t>
void dot_few(int64_t columns, int64_t depth, Rows<const float> a, Rows<const scalar_t> b,
             Rows<float> into) {
  for (int64_t j = 0; j < columns; ++j) {
    Vec sums[rows];
    for (int i = 0; i < rows; ++i) sums[i] = Vec(0.0f);
    for (int64_t d = 0; d < depth; d += LANES) {
      const int64_t count = std::min(LANES, depth - d);
      const Vec other = load(b.row(j) + d, count);
      for (int i = 0; i < rows; ++i)
        sums[i] = at::vec::fmadd(Vec::loadu(a.row(i) + d, count), other, sums[i]);
    }
    for (int i = 0; i < rows; ++i) into.row(i)[j] = add_lanes(sums[i]);
  }
}

// into[i, :] += weights[i, j] * b[j, :], likewise.
template <int rows, typename scalar_t>
void combine_few(int64_t columns, int64_t depth, Rows<const float> weights,
                 Rows<const scalar_t> b, Rows<float> into) {
  for (int64_t d = 0; d < columns; d += LANES) {
    const int64_t count = std::min(LANES, columns - d);
    Vec sums[rows];
    for (int i = 0; i < rows; ++i) sums[i] = Vec::loadu(into.row(i) + d, count);
    for (int64_t j = 0; j < depth; ++j) {
      const Vec other = load(b.row(j) + d, count);
      for (int i = 0; i < rows; ++i)
        sums[i] = at::vec::fmadd(Vec(weights.row(i)[j]), other, sums[i]);
    }
    for (int i = 0; i < rows; ++i) sums[i].store(into.row(i) + d, count);
  }
}

// Calls run(constant) with the number of rows as a constant, 1 to FEW_ROWS.
template <int most = FEW_ROWS, typename Run>
void with_rows(int64_t rows, Run&& run) {
  if constexpr (most > 1) {
    if (rows < most) return with_rows<most - 1>(rows, run);
  }
  run(std::integral_constant<int, most>());
}

}  // namespace flexhop
#endif
