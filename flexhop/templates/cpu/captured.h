#ifndef FLEXHOP_CAPTURED
#define FLEXHOP_CAPTURED
// Gradients of captured tensors: what the scores of a tile add to them.
#include <mutex>

namespace flexhop {

constexpr int64_t MOST_OWN = 1 << 16;  // entries up to which every thread adds to its own

// Along what of a tile the places differ at which a captured tensor is read.
enum class Along { NOTHING, KEYS, QUERIES, BOTH };

// The gradient of one captured tensor, in fp32 or fp64.
struct Target {
  float* narrow;
  double* wide;
  int64_t count;

  void add(int64_t place, double value) const {
    if (wide) atomic_add(wide + place, value);
    else atomic_add(narrow + place, static_cast<float>(value));
  }
};

struct Captured {
  std::vector<Target> targets;  // of every site
  std::mutex mutex;

  // What a thread adds.
  struct Part {
    Captured& whole;
    std::vector<std::vector<double>> own;
    Memory values_memory;
    std::unique_ptr<int64_t[]> places_memory;

    explicit Part(Captured& whole) : whole(whole) {
      const int64_t tiles = whole.targets.size() * TILE_ROWS * TILE_KEYS;
      values_memory = reserve(tiles);
      places_memory.reset(new int64_t[std::max<int64_t>(tiles, 1)]);
      for (const auto& target : whole.targets)
        own.emplace_back(target.count <= MOST_OWN ? target.count : 0, 0.0);
    }
    ~Part() {
      const std::lock_guard<std::mutex> guard(whole.mutex);
      for (size_t site = 0; site < own.size(); ++site)
        for (size_t i = 0; i < own[site].size(); ++i) whole.targets[site].add(i, own[site][i]);
    }
    float* values(int64_t site) { return values_memory.get() + site * TILE_ROWS * TILE_KEYS; }
    int64_t* places(int64_t site) { return places_memory.get() + site * TILE_ROWS * TILE_KEYS; }

    void put(int64_t site, int64_t place, double value) {
      if (value == 0) return;
      if (own[site].empty()) whole.targets[site].add(place, value);
      else own[site][place] += value;
    }

    // Values lie as scores do; places only along what they differ.
    void add(int64_t site, Along along, const Place& tile) {
      const float* value = values(site);
      const int64_t* place = places(site);
      double columns[TILE_ROWS] = {}, all = 0;
      for (int64_t j = 0; j < tile.rows; ++j, value += tile.step, place += tile.step) {
        double sum = 0;
        if (along == Along::BOTH)
          for (int64_t i = 0; i < tile.columns; ++i) put(site, place[i], value[i]);
        else if (along == Along::QUERIES)
          for (int64_t i = 0; i < tile.columns; ++i) columns[i] += value[i];
        else
          for (int64_t i = 0; i < tile.columns; ++i) sum += value[i];
        if (along == Along::KEYS) put(site, place[0], sum);
        all += sum;
      }
      if (along == Along::NOTHING) put(site, places(site)[0], all);
      if (along == Along::QUERIES)
        for (int64_t i = 0; i < tile.columns; ++i) put(site, places(site)[i], columns[i]);
    }
  };
};

}  // namespace flexhop
#endif
