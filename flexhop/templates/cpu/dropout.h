#ifndef FLEXHOP_DROPOUT
#define FLEXHOP_DROPOUT
// Which weights dropout keeps: ops/dropout.py says it.

namespace flexhop {

constexpr int64_t GROUP = 16;  // a square of so many queries and keys shares its random words

struct Dropout {
  const int64_t* seed;     // two words; then, if placed, the first batch and head, and groups of the
                           // mask: of each 16 queries, of each 16 keys; absent without dropout
  int64_t placed;          // groups of queries in a placed seed; 0: positions are those of the mask
  uint32_t least;          // weights whose 16 bits are below this are dropped
  float kept;              // what the others are multiplied by
};

// Factors of the weights of a square: 0 or `kept`. Each lane is one call of Philox 4x32-10
// (Salmon et al. 2011), for queries r and r + 8, and keys 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
inline void draw_square(const Dropout& dropout, int64_t b, int64_t h, int64_t queries, int64_t keys,
                        float (&factors)[GROUP][GROUP]) {
  constexpr int LANES_OF_SQUARE = 32;
  uint32_t words[4][LANES_OF_SQUARE];
  for (int i = 0; i < LANES_OF_SQUARE; ++i) {
    words[0][i] = static_cast<uint32_t>(queries * 8 + i / 4), words[1][i] = static_cast<uint32_t>(b);
    words[2][i] = static_cast<uint32_t>(keys * 4 + i % 4), words[3][i] = static_cast<uint32_t>(h);
  }
  uint32_t k0 = static_cast<uint32_t>(dropout.seed[0]), k1 = static_cast<uint32_t>(dropout.seed[1]);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
    for (int i = 0; i < LANES_OF_SQUARE; ++i) {
      const uint64_t first = uint64_t(words[0][i]) * 0xD2511F53;
      const uint64_t second = uint64_t(words[2][i]) * 0xCD9E8D57;
      words[0][i] = static_cast<uint32_t>(second >> 32) ^ words[1][i] ^ k0;
      words[2][i] = static_cast<uint32_t>(first >> 32) ^ words[3][i] ^ k1;
      words[1][i] = static_cast<uint32_t>(second), words[3][i] = static_cast<uint32_t>(first);
    }
  for (int word = 0; word < 4; ++word)
    for (int i = 0; i < LANES_OF_SQUARE; ++i)
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t bits = odd ? words[word][i] >> 16 : words[word][i] & 0xFFFF;
        factors[word / 2 * 8 + i / 4][word % 2 * 8 + i % 4 * 2 + odd] =
            bits >= dropout.least ? dropout.kept : 0;
      }
}

// Drops weights of a rectangle, or their gradients: 0, or divided by the probability to be kept.
// by_key: whether rows are keys, and columns queries.
template <bool by_key>
void drop(const Dropout& dropout, float* weights, const Place& tile) {
  if (dropout.seed == nullptr) return;
  const int64_t* groups = dropout.placed ? dropout.seed + 4 : nullptr;
  const int64_t b = tile.b + (groups ? dropout.seed[2] : 0);
  const int64_t h = tile.h + (groups ? dropout.seed[3] : 0);
  const int64_t last_q = tile.q + (by_key ? tile.columns : tile.rows);
  const int64_t last_k = tile.k + (by_key ? tile.rows : tile.columns);
  float factors[GROUP][GROUP];
  for (int64_t rows = tile.q / GROUP; rows * GROUP < last_q; ++rows)
    for (int64_t columns = tile.k / GROUP; columns * GROUP < last_k; ++columns) {
      draw_square(dropout, b, h, groups ? groups[rows] : rows,
                  groups ? groups[dropout.placed + columns] : columns, factors);
      const int64_t end_q = std::min(rows * GROUP + GROUP, last_q);
      const int64_t end_k = std::min(columns * GROUP + GROUP, last_k);
      for (int64_t q = std::max(rows * GROUP, tile.q); q < end_q; ++q)
        for (int64_t k = std::max(columns * GROUP, tile.k); k < end_k; ++k) {
          const int64_t i = by_key ? k - tile.k : q - tile.q, j = by_key ? q - tile.q : k - tile.k;
          const float factor = factors[q % GROUP][k % GROUP];
          float& weight = weights[i * tile.step + j];
          weight = factor == 0 ? 0 : weight * factor;  // also if it is NaN
        }
    }
}

}  // namespace flexhop
#endif
