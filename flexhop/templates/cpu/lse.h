#ifndef FLEXHOP_LSE
#define FLEXHOP_LSE
// lse in fp64 for a backward pass; ops/wide_lse.py says of which form.

namespace flexhop {

inline double unit_of_rest(float first) {
  const double power = first == 0 ? 0 : std::ldexp(1.0, std::ilogb(first));
  return std::max(power, 1e-30) * 0x1p-31;
}

// shift + log: the fp32 number next to it, and behind it what is left.
inline double join_lse(float shift, float log) {
  const float first = shift + log;
  if (!std::isfinite(first)) return first;
  return first + ((double(shift) - first) + log) * unit_of_rest(first);
}

// What is left of an fp64 lse, but not of one in fp32.
inline float rest_of_lse(double lse) {
  const float first = static_cast<float>(lse);
  return std::isfinite(first) ? static_cast<float>((lse - first) / unit_of_rest(first)) : 0;
}

}  // namespace flexhop
#endif
