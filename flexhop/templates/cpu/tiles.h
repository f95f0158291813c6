#ifndef FLEXHOP_TILES
#define FLEXHOP_TILES
// What a call is made of, and the walk over the keys that a tile of queries sees.

namespace flexhop {

constexpr int64_t TILE_ROWS = 64;   // queries
constexpr int64_t TILE_KEYS = 512;  // so that scores, keys and values of a tile stay in L2
enum State : uint8_t { HIDDEN = 0, PARTIAL = 1, FULL = 2 };
constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

// A function that the call does not have.
struct Nothing {};
template <typename F>
constexpr bool is_given = !std::is_same_v<std::decay_t<F>, Nothing>;

// [B, H, L, D], the last dimension dense; batch is 0 if all batches share one.
template <typename T>
struct Tensor {
  T* at;
  int64_t batch, head, step;
  Rows<T> rows(int64_t b, int64_t h, int64_t i) const {
    return {at + b * batch + h * head + i * step, step};
  }
};

// The scores of a rectangle: which, and how far apart their rows lie in memory.
struct Place {
  int64_t b, h, q, k, rows, columns, step;
};

struct Sizes {
  int64_t batch, heads, kv_batch, kv_heads, queries, keys, width, value_width;
  float scale;
  int64_t group() const { return heads / kv_heads; }
};

// States of blocks, [batches, heads, rows, columns]; none: every key is seen, or partial.
struct Blocks {
  const uint8_t* states;
  int64_t batches, heads, rows, columns, q_size, kv_size;
  uint8_t otherwise;

  const uint8_t* row(int64_t b, int64_t h, int64_t q) const {
    if (batches == 1) b = 0;
    if (heads == 1) h = 0;
    return states + ((b * heads + h) * rows + q / q_size) * columns;
  }
};

// Calls visit(first, last, state) for stretches of keys of one state, up to TILE_KEYS long.
template <typename Visit>
void over_keys(const Blocks& blocks, int64_t b, int64_t h, int64_t q, int64_t keys,
               Visit&& visit) {
  auto cut = [&](int64_t first, int64_t last, uint8_t state) {
    for (int64_t k = first; k < std::min(last, keys); k += TILE_KEYS)
      visit(k, std::min({k + TILE_KEYS, last, keys}), state);
  };
  if (blocks.states == nullptr) return cut(0, keys, blocks.otherwise);
  const uint8_t* row = blocks.row(b, h, q);
  for (int64_t first = 0, last; first < blocks.columns; first = last) {
    for (last = first + 1; last < blocks.columns && row[last] == row[first];) ++last;
    if (row[first] != HIDDEN) cut(first * blocks.kv_size, last * blocks.kv_size, row[first]);
  }
}

// Tiles of queries; none crosses the border of two blocks.
struct QueryTiles {
  int64_t queries, block, rows, per_block;

  QueryTiles(int64_t queries, int64_t q_size)
      : queries(queries), block(std::max<int64_t>(std::min(q_size, queries), 1)),
        rows(std::min(block, TILE_ROWS)), per_block((block + rows - 1) / rows) {}
  int64_t count() const {
    return queries / block * per_block + (queries % block + rows - 1) / rows;
  }
  int64_t first(int64_t tile) const {
    return tile / per_block * block + tile % per_block * rows;
  }
  int64_t size(int64_t tile) const {
    const int64_t end = std::min((tile / per_block + 1) * block, queries);
    return std::min(rows, end - first(tile));
  }
};

// Calls make()(item) for every item, each on some thread; make gives a thread its memory.
template <typename Make>
void in_parallel(int64_t items, bool is_ordered, Make&& make) {
  const int64_t threads = is_ordered ? 1 : std::min<int64_t>(at::get_num_threads(), items);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      auto work = make();
      for (int64_t item; (item = next++) < items;) work(item);
    }
  });
}

// Memory that is not filled first.
using Memory = std::unique_ptr<float[]>;
inline Memory reserve(int64_t count) { return Memory(new float[std::max<int64_t>(count, 1)]); }

// exp, less exact if numbers of 16 bits become of it.
template <typename scalar_t>
inline Vec exponential(const Vec& x) {
  if constexpr (sizeof(scalar_t) == 2) return x.exp_u20();
  else return x.exp();
}

}  // namespace flexhop
#endif
