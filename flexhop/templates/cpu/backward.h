#ifndef FLEXHOP_BACKWARD
#define FLEXHOP_BACKWARD
// Gradients: Dao 2023, FlashAttention-2, algorithm 2. Tiles of scores have a row for each key, so
// that every product reads its matrices as they lie.

namespace flexhop {

template <typename scalar_t>
struct Backward {
  Sizes sizes;
  Tensor<const scalar_t> query, key, value, out, grad_out;
  const float* lse;                  // [B, H, M]; one of both is absent
  const double* wide_lse;
  const float* grad_lse;             // [B, H, M]; may be absent
  Tensor<scalar_t> grad_query;
  float *grad_key, *grad_value;      // [parts, Bk, Hk, N, D or Dv]
  int64_t parts;                     // divide the tiles of queries of a head among threads
  bool is_ordered;                   // one thread does everything
  Blocks blocks;
  Dropout dropout;
};

// What a thread keeps of a tile of queries.
struct Differentiated {
  Memory query, grad_out, query_columns, grad_out_columns, grad_query_columns;
  Memory scores, weights, grads;
  float shift[TILE_ROWS], rest[TILE_ROWS], delta[TILE_ROWS];  // lse is shift + rest

  explicit Differentiated(const Sizes& sizes)
      : query(reserve(TILE_ROWS * sizes.width)), grad_out(reserve(TILE_ROWS * sizes.value_width)),
        query_columns(reserve(TILE_ROWS * sizes.width)),
        grad_out_columns(reserve(TILE_ROWS * sizes.value_width)),
        grad_query_columns(reserve(TILE_ROWS * sizes.width)),
        scores(reserve(TILE_ROWS * TILE_KEYS)), weights(reserve(TILE_ROWS * TILE_KEYS)),
        grads(reserve(TILE_ROWS * TILE_KEYS)) {}
};

// What the score functions of a call are; Sites adds to gradients of captured tensors.
template <typename Full, typename Partial, typename JointFull, typename JointPartial>
struct Functions {
  const Full& full;
  const Partial& partial;
  const JointFull& joint_full;
  const JointPartial& joint_partial;
};

template <typename scalar_t, typename F, typename Sums>
struct Gradients {
  const Backward<scalar_t>& call;
  const Packed<scalar_t>& packed;
  const F& mods;

  void load(Differentiated& run, Place tile) const {
    const Sizes& sizes = call.sizes;
    const int64_t first = (tile.b * sizes.heads + tile.h) * sizes.queries + tile.q;
    const auto query = call.query.rows(tile.b, tile.h, tile.q);
    const auto out = call.out.rows(tile.b, tile.h, tile.q);
    const auto grad = call.grad_out.rows(tile.b, tile.h, tile.q);
    for (int64_t i = 0; i < tile.columns; ++i) {
      float* row = run.grad_out.get() + i * sizes.value_width;
      copy_scaled(query.row(i), run.query.get() + i * sizes.width, sizes.width, sizes.scale);
      copy_scaled(grad.row(i), row, sizes.value_width);
      Vec sum(0.0f);
      for (int64_t d = 0; d < sizes.value_width; d += LANES) {
        const int64_t count = std::min(LANES, sizes.value_width - d);
        const Vec product = Vec::loadu(row + d, count) * flexhop::load(out.row(i) + d, count);
        sum = Vec::set(sum, sum + product, count);
      }
      const double lse = call.wide_lse ? call.wide_lse[first + i] : call.lse[first + i];
      const bool sees = lse != NO_SCORE;  // hidden scores have weight 0 all the same
      run.shift[i] = sees ? static_cast<float>(lse) : 0;
      run.rest[i] = rest_of_lse(lse);
      run.delta[i] = add_lanes(sum) - (call.grad_lse ? call.grad_lse[first + i] : 0);
    }
    const Rows<const float> rows{run.query.get(), sizes.width};
    transpose(rows, tile.columns, sizes.width, {run.query_columns.get(), TILE_ROWS});
    const Rows<const float> grads{run.grad_out.get(), sizes.value_width};
    transpose(grads, tile.columns, sizes.value_width, {run.grad_out_columns.get(), TILE_ROWS});
    std::fill_n(run.grad_query_columns.get(), TILE_ROWS * sizes.width, 0.0f);
  }

  // weights = exp(scores - lse), and gradients of modified scores.
  void weigh(Differentiated& run, Place tile) const {
    for (int64_t j = 0; j < tile.rows; ++j) {
      const int64_t row = j * TILE_ROWS;
      for (int64_t i = 0; i < tile.columns; i += LANES) {
        const int64_t count = std::min(LANES, tile.columns - i);
        const Vec score = Vec::loadu(run.weights.get() + row + i, count);
        const Vec exponent = score - Vec::loadu(run.shift + i, count);
        const Vec weight = exponential<scalar_t>(exponent - Vec::loadu(run.rest + i, count));
        const Vec grad = Vec::loadu(run.grads.get() + row + i, count);
        weight.store(run.weights.get() + row + i, count);
        (weight * (grad - Vec::loadu(run.delta + i, count)))
            .store(run.grads.get() + row + i, count);
      }
    }
  }

  void step(Differentiated& run, Sums& sums, Place tile, uint8_t state, float* grad_key,
            float* grad_value) const {
    const Sizes& sizes = call.sizes;
    const int64_t kv_head = tile.h / sizes.group(), width = sizes.width;
    const int64_t value_width = sizes.value_width, rows = tile.rows, columns = tile.columns;
    const Rows<float> weights{run.weights.get(), TILE_ROWS}, grads{run.grads.get(), TILE_ROWS};
    const Rows<const float> constant_weights{weights.at, TILE_ROWS}, constant{grads.at, TILE_ROWS};
    constexpr bool changes = is_given<decltype(mods.full)>;
    constexpr bool keeps = is_given<decltype(mods.joint_full)> && changes;
    float* scores = keeps ? run.scores.get() : weights.at;
    multiply(rows, columns, width, packed.rows_of_keys(tile.b, kv_head, tile.k),
             {run.query_columns.get(), TILE_ROWS}, {scores, TILE_ROWS}, false);
    if (state == PARTIAL) call_on(mods.partial, scores, weights.at, tile);
    else call_on(mods.full, scores, weights.at, tile);
    multiply(rows, columns, value_width, packed.rows_of_values(tile.b, kv_head, tile.k),
             {run.grad_out_columns.get(), TILE_ROWS}, grads, false);
    drop<true>(call.dropout, grads.at, tile);
    weigh(run, tile);
    drop<true>(call.dropout, weights.at, tile);
    if (state == PARTIAL) join(mods.joint_partial, scores, grads.at, tile, sums);
    else join(mods.joint_full, scores, grads.at, tile, sums);
    multiply(rows, value_width, columns, constant_weights, {run.grad_out.get(), value_width},
             {grad_value + tile.k * value_width, value_width}, true);
    multiply(rows, width, columns, constant, {run.query.get(), width},
             {grad_key + tile.k * width, width}, true);
    over_panels(tile.k, tile.k + rows, [&](int64_t from, int64_t to) {
      const auto panel = packed.panel(tile.b, kv_head, from);
      multiply(width, columns, to - from, {panel.at, panel.step},
               {grads.row(from - tile.k), TILE_ROWS}, {run.grad_query_columns.get(), TILE_ROWS},
               true);
    });
  }

  template <typename Change>
  void call_on(const Change& change, const float* from, float* into, const Place& tile) const {
    if constexpr (is_given<Change>) change(from, into, tile);
  }

  template <typename Joint>
  void join(const Joint& joint, const float* scores, float* grads, const Place& tile,
            Sums& sums) const {
    if constexpr (is_given<Joint>) joint(scores, grads, tile, sums);
  }

  // One tile of queries against all keys that it sees.
  void differentiate(Differentiated& run, Sums& sums, Place tile, float* grad_key,
                     float* grad_value) const {
    const Sizes& sizes = call.sizes;
    load(run, tile);
    over_keys(call.blocks, tile.b, tile.h, tile.q, sizes.keys,
              [&](int64_t k, int64_t end, uint8_t state) {
                Place part = tile;
                part.k = k, part.rows = end - k, part.step = TILE_ROWS;
                step(run, sums, part, state, grad_key, grad_value);
              });
    const auto into = call.grad_query.rows(tile.b, tile.h, tile.q);
    for (int64_t i = 0; i < tile.columns; ++i)
      for (int64_t d = 0; d < sizes.width; ++d)
        into.row(i)[d] = static_cast<scalar_t>(run.grad_query_columns[d * TILE_ROWS + i] *
                                               sizes.scale);
  }

  // A part of all queries that share one head of keys.
  void work(Differentiated& run, Sums& sums, int64_t item) const {
    const Sizes& sizes = call.sizes;
    const int64_t all = sizes.kv_batch * sizes.kv_heads, head = item % all, part = item / all;
    const int64_t kv_head = head % sizes.kv_heads, kv_b = head / sizes.kv_heads;
    float* grad_key = call.grad_key + item * sizes.keys * sizes.width;
    float* grad_value = call.grad_value + item * sizes.keys * sizes.value_width;
    std::fill_n(grad_key, sizes.keys * sizes.width, 0.0f);
    std::fill_n(grad_value, sizes.keys * sizes.value_width, 0.0f);
    const bool is_shared = sizes.kv_batch < sizes.batch;
    const QueryTiles tiles(sizes.queries, call.blocks.q_size);
    for (int64_t b = is_shared ? 0 : kv_b; b < (is_shared ? sizes.batch : kv_b + 1); ++b)
      for (int64_t g = 0; g < sizes.group(); ++g)
        for (int64_t tile = part; tile < tiles.count(); tile += call.parts)
          differentiate(run, sums,
                        Place{b, kv_head * sizes.group() + g, tiles.first(tile), 0, 0,
                              tiles.size(tile), TILE_ROWS},
                        grad_key, grad_value);
  }
};

// Sums: gradients of captured tensors; each thread has one, made of `shared`.
template <typename scalar_t, typename F, typename Shared>
void differentiate(const Backward<scalar_t>& call, const F& mods, Shared& shared) {
  using Sums = typename Shared::Part;
  const Packed<scalar_t> packed(call.sizes, call.key, call.value, true);
  const Gradients<scalar_t, F, Sums> gradients{call, packed, mods};
  const int64_t items = call.parts * call.sizes.kv_batch * call.sizes.kv_heads;
  in_parallel(items, call.is_ordered, [&] {
    return [&, run = Differentiated(call.sizes), sums = std::make_shared<Sums>(shared)](
               int64_t item) mutable { gradients.work(run, *sums, item); };
  });
}

}  // namespace flexhop
#endif
