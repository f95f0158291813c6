#ifndef FLEXHOP_FORWARD
#define FLEXHOP_FORWARD
// Attention of a tile of queries, keys in stretches: Dao 2023, FlashAttention-2, algorithm 1.

namespace flexhop {

template <typename scalar_t>
struct Forward {
  Sizes sizes;
  Tensor<const scalar_t> query, key, value;
  Tensor<scalar_t> out;
  float* lse;              // [B, H, M]; one of both is absent
  double* wide_lse;
  float* largest;          // [B, H, M]; may be absent
  const int32_t* lengths;  // [B], keys that exist; may be absent
  Blocks blocks;
  Dropout dropout;
};

// What a thread keeps of a tile of queries.
struct Running {
  Memory query, scores, out;
  float sums[TILE_ROWS], largest[TILE_ROWS];

  explicit Running(const Sizes& sizes)
      : query(reserve(TILE_ROWS * sizes.width)), scores(reserve(TILE_ROWS * TILE_KEYS)),
        out(reserve(TILE_ROWS * sizes.value_width)) {}
};

// Scores of row i become weights up to a factor; its sum and its output are brought along.
template <typename scalar_t>
bool soften(Running& run, int64_t i, int64_t columns, int64_t value_width) {
  float* row = run.scores.get() + i * TILE_KEYS;
  Vec most(NO_SCORE);
  for (int64_t j = 0; j < columns; j += LANES) {
    const int64_t count = std::min(LANES, columns - j);
    most = Vec::set(most, at::vec::maximum(most, Vec::loadu(row + j, count)), count);
  }
  const float found = at::vec::vec_reduce_all<float>(
      [](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, most);
  if (found == NO_SCORE) {
    std::fill_n(row, columns, 0.0f);
    return false;
  }
  const float before = run.largest[i];
  const float now = found > before || std::isnan(found) ? found : before;  // NaN stays
  Vec sum(0.0f);
  for (int64_t j = 0; j < columns; j += LANES) {
    const int64_t count = std::min(LANES, columns - j);
    const Vec weight = exponential<scalar_t>(Vec::loadu(row + j, count) - Vec(now));
    weight.store(row + j, count);
    sum = Vec::set(sum, sum + weight, count);
  }
  const float factor = before == now ? 1.0f : std::exp(before - now);
  run.sums[i] = run.sums[i] * factor + add_lanes(sum);
  run.largest[i] = now;
  float* out = run.out.get() + i * value_width;
  if (factor != 1.0f) copy_scaled(out, out, value_width, factor);
  return true;
}

// Some queries of `fold` heads that share their keys, one head after the other.
template <typename scalar_t, typename Full, typename Partial>
struct Tile {
  const Forward<scalar_t>& call;
  const Packed<scalar_t>* packed;  // absent for a few rows
  const Full& full;
  const Partial& partial;
  int64_t fold;

  void attend(Running& run, Place tile) const {
    const Sizes& sizes = call.sizes;
    const int64_t rows = fold * tile.rows;
    for (int64_t i = 0; i < rows; ++i) {
      const auto from = call.query.rows(tile.b, tile.h + i / tile.rows, tile.q + i % tile.rows);
      copy_scaled(from.at, run.query.get() + i * sizes.width, sizes.width, sizes.scale);
    }
    std::fill_n(run.sums, rows, 0.0f);
    std::fill_n(run.largest, rows, NO_SCORE);
    std::fill_n(run.out.get(), rows * sizes.value_width, 0.0f);
    int64_t keys = sizes.keys;
    if (call.lengths) keys = std::min<int64_t>(call.lengths[tile.b], keys);
    over_keys(call.blocks, tile.b, tile.h, tile.q, keys,
              [&](int64_t k, int64_t end, uint8_t state) { step(run, tile, k, end, state); });
    finish(run, tile);
  }

  void step(Running& run, Place tile, int64_t k, int64_t end, uint8_t state) const {
    const Sizes& sizes = call.sizes;
    const int64_t rows = fold * tile.rows, kv_head = tile.h / sizes.group(), columns = end - k;
    const Rows<const float> query{run.query.get(), sizes.width};
    const Rows<float> scores{run.scores.get(), TILE_KEYS}, out{run.out.get(), sizes.value_width};
    if (packed == nullptr)
      with_rows(rows, [&](auto few) {
        dot_few<few()>(columns, sizes.width, query, call.key.rows(tile.b, kv_head, k), scores);
      });
    else
      over_panels(k, end, [&](int64_t from, int64_t to) {
        const auto panel = packed->panel(tile.b, kv_head, from);
        multiply(rows, to - from, sizes.width, query, {panel.at, panel.step},
                 {scores.at + from - k, scores.step}, false);
      });
    if (state == PARTIAL) modify(partial, scores, tile, k, columns);
    else modify(full, scores, tile, k, columns);
    bool sees = false;
    for (int64_t i = 0; i < rows; ++i)
      sees |= soften<scalar_t>(run, i, columns, sizes.value_width);
    if (!sees) return;
    for (int64_t g = 0; g < fold; ++g)
      drop<false>(call.dropout, scores.row(g * tile.rows),
                  Place{tile.b, tile.h + g, tile.q, k, tile.rows, columns, scores.step});
    if (packed == nullptr)
      with_rows(rows, [&](auto few) {
        combine_few<few()>(sizes.value_width, columns, {scores.at, scores.step},
                           call.value.rows(tile.b, kv_head, k), out);
      });
    else
      multiply(rows, sizes.value_width, columns, {scores.at, scores.step},
               packed->rows_of_values(tile.b, kv_head, k), out, true);
  }

  template <typename Change>
  void modify(const Change& change, Rows<float> scores, Place tile, int64_t k,
              int64_t columns) const {
    if constexpr (is_given<Change>)
      for (int64_t g = 0; g < fold; ++g) {
        float* at = scores.row(g * tile.rows);
        change(at, at, Place{tile.b, tile.h + g, tile.q, k, tile.rows, columns, scores.step});
      }
  }

  void finish(const Running& run, Place tile) const {
    const Sizes& sizes = call.sizes;
    for (int64_t i = 0; i < fold * tile.rows; ++i) {
      const int64_t h = tile.h + i / tile.rows, q = tile.q + i % tile.rows;
      const int64_t place = (tile.b * sizes.heads + h) * sizes.queries + q;
      const float sum = run.sums[i], total = sum == 0 ? 1 : sum;
      scalar_t* into = call.out.rows(tile.b, h, q).at;
      const float* from = run.out.get() + i * sizes.value_width;
      for (int64_t d = 0; d < sizes.value_width; ++d)
        into[d] = static_cast<scalar_t>(from[d] / total);
      const double lse = join_lse(run.largest[i], sum == 0 ? 0.0f : std::log(sum));
      if (call.wide_lse) call.wide_lse[place] = lse;
      else call.lse[place] = static_cast<float>(lse);
      if (call.largest) call.largest[place] = run.largest[i];
    }
  }
};

template <typename scalar_t, typename Full, typename Partial>
void attend(const Forward<scalar_t>& call, const Full& full, const Partial& partial) {
  const Sizes& sizes = call.sizes;
  const QueryTiles tiles(sizes.queries, call.blocks.q_size);
  const int64_t count = tiles.count(), folded = sizes.group() * sizes.queries;
  const bool folds = call.blocks.heads == 1 && count == 1 && folded <= TILE_ROWS;
  const int64_t fold = folds ? sizes.group() : 1, heads = sizes.heads / fold;
  std::unique_ptr<Packed<scalar_t>> packed;
  if (fold * tiles.rows > FEW_ROWS)
    packed = std::make_unique<Packed<scalar_t>>(sizes, call.key, call.value, false);
  const Tile<scalar_t, Full, Partial> work{call, packed.get(), full, partial, fold};
  in_parallel(sizes.batch * heads * count, false, [&] {
    return [&, run = Running(sizes)](int64_t item) mutable {
      // The last queries first: under causal masks they see most.
      const int64_t tile = count - 1 - item % count, head = item / count;
      work.attend(run, Place{head / heads, head % heads * fold, tiles.first(tile), 0,
                             tiles.size(tile), 0, 0});
    };
  });
}

}  // namespace flexhop
#endif
