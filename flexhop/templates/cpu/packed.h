#ifndef FLEXHOP_PACKED
#define FLEXHOP_PACKED
// Keys and values as products take them: fp32, keys also with their columns side by side.

namespace flexhop {

template <typename scalar_t>
struct Packed {
  int64_t kv_batch, heads, keys, width, panels;
  bool copies_keys, copies_values;
  Memory columns, key_rows, value_rows;
  Tensor<const scalar_t> key, value;
  int64_t value_width;

  // has_rows: whether rows of keys are needed, too.
  Packed(const Sizes& sizes, Tensor<const scalar_t> key, Tensor<const scalar_t> value,
         bool has_rows)
      : kv_batch(sizes.kv_batch), heads(sizes.kv_heads), keys(sizes.keys), width(sizes.width),
        panels((sizes.keys + PANEL - 1) / PANEL),
        copies_keys(has_rows && !std::is_same_v<scalar_t, float>),
        copies_values(!std::is_same_v<scalar_t, float>), key(key), value(value),
        value_width(sizes.value_width) {
    const int64_t all = sizes.kv_batch * heads;
    columns = reserve(all * panels * width * PANEL);
    if (copies_keys) key_rows = reserve(all * keys * width);
    if (copies_values) value_rows = reserve(all * keys * value_width);
    at::parallel_for(0, all * panels, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) pack(i / panels, i % panels * PANEL);
    });
  }

  void pack(int64_t head, int64_t k) {
    const int64_t count = std::min(PANEL, keys - k), b = head / heads, h = head % heads;
    const auto from = key.rows(b, h, k), values = value.rows(b, h, k);
    transpose(from, count, width, panel(b, h, k));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = head * keys + k + i;
      if (copies_keys) copy_scaled(from.row(i), key_rows.get() + row * width, width);
      if (copies_values)
        copy_scaled(values.row(i), value_rows.get() + row * value_width, value_width);
    }
  }

  // Strides do not tell: key may be expanded to all batches, and value not.
  int64_t head_of(int64_t b, int64_t h) const { return (kv_batch == 1 ? 0 : b * heads) + h; }

  // [D, PANEL]: the panel of key k, from key k on.
  Rows<float> panel(int64_t b, int64_t h, int64_t k) const {
    float* at = columns.get() + (head_of(b, h) * panels + k / PANEL) * width * PANEL;
    return {at + k % PANEL, PANEL};
  }
  Rows<const float> rows_of_keys(int64_t b, int64_t h, int64_t k) const {
    return rows(key, key_rows, width, b, h, k);
  }
  Rows<const float> rows_of_values(int64_t b, int64_t h, int64_t k) const {
    return rows(value, value_rows, value_width, b, h, k);
  }
  Rows<const float> rows(const Tensor<const scalar_t>& plain, const Memory& copied,
                         int64_t columns, int64_t b, int64_t h, int64_t k) const {
    if constexpr (std::is_same_v<scalar_t, float>) return plain.rows(b, h, k);
    else return {copied.get() + (head_of(b, h) * keys + k) * columns, columns};
  }
};

// Calls visit(from, to) for the parts of keys first..last that lie in one panel.
template <typename Visit>
void over_panels(int64_t first, int64_t last, Visit&& visit) {
  for (int64_t k = first, end; k < last; k = end) {
    end = std::min((k / PANEL + 1) * PANEL, last);
    visit(k, end);
  }
}

}  // namespace flexhop
#endif
