// The loop is written once, in plain C++, and compiled once for each instruction set; the CPU decides at run time which
// one is called. The step reads and writes 28 to 32 bytes an element, so memory sets its pace, not arithmetic.
#include "adam.h"

#include <bit>
#include <cmath>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define COLOSSALAI_X86 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace colossalai {
namespace {

// All conversions are free of branches, so that compilers vectorise them.

ALWAYS_INLINE float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// To nearest, ties to even; every NaN becomes the quiet one.
ALWAYS_INLINE uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

ALWAYS_INLINE float from_float16(uint16_t bits) {
  const uint32_t sign = (uint32_t{bits} & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t{bits} & 0x7fffu) << 13;
  // Read as a float32 it is 2^112 too small, subnormals included; infinity and NaN need the exponent filled up.
  const float scaled = std::bit_cast<float>(magnitude) * std::bit_cast<float>(uint32_t{0x77800000u});
  const uint32_t special = (uint32_t{bits} & 0x7c00u) == 0x7c00u ? 0x7f800000u | magnitude : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(sign | special);
}

// To nearest, ties to even. Below the smallest normal number the rounding is done by a float32 addition whose last bit
// has the value of float16's last bit.
ALWAYS_INLINE uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // rounds to infinity
  result = magnitude > 0x7f800000u ? 0x7e00u : result;   // NaN
  return static_cast<uint16_t>(sign | result);
}

template <Format format>
ALWAYS_INLINE float read(const void* array, int64_t i) {
  if constexpr (format == Format::kFloat32) return static_cast<const float*>(array)[i];
  const uint16_t bits = static_cast<const uint16_t*>(array)[i];
  return format == Format::kBFloat16 ? from_bfloat16(bits) : from_float16(bits);
}

template <Format grad_format, Format copy_format>
ALWAYS_INLINE void loop(const AdamArrays& arrays, const AdamConstants& given, int64_t begin, int64_t end) {
  const AdamConstants c = given;  // a copy, which the stores below cannot alias
  float* __restrict param = arrays.param;
  float* __restrict exp_avg = arrays.exp_avg;
  float* __restrict exp_avg_sq = arrays.exp_avg_sq;
  const void* __restrict grad = arrays.grad;
  uint16_t* __restrict copy = arrays.copy;
  for (int64_t i = begin; i < end; ++i) {
    float p = param[i];
    const float g = read<grad_format>(grad, i) * c.inv_scale + c.l2_decay * p;
    const float m = exp_avg[i] + c.one_minus_beta1 * (g - exp_avg[i]);
    const float v = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * g * g;
    p = p * c.keep - c.step_size * m / (std::sqrt(v) * c.inv_sqrt_bias2 + c.eps);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = p;
    if constexpr (copy_format == Format::kBFloat16) copy[i] = to_bfloat16(p);
    if constexpr (copy_format == Format::kFloat16) copy[i] = to_float16(p);
  }
}

template <Format grad_format>
ALWAYS_INLINE void by_copy(const AdamArrays& arrays, const AdamConstants& c, int64_t begin, int64_t end) {
  switch (arrays.copy_format) {
    case Format::kBFloat16: return loop<grad_format, Format::kBFloat16>(arrays, c, begin, end);
    case Format::kFloat16: return loop<grad_format, Format::kFloat16>(arrays, c, begin, end);
    default: return loop<grad_format, Format::kNone>(arrays, c, begin, end);
  }
}

ALWAYS_INLINE void by_grad(const AdamArrays& arrays, const AdamConstants& c, int64_t begin, int64_t end) {
  switch (arrays.grad_format) {
    case Format::kBFloat16: return by_copy<Format::kBFloat16>(arrays, c, begin, end);
    case Format::kFloat16: return by_copy<Format::kFloat16>(arrays, c, begin, end);
    default: return by_copy<Format::kFloat32>(arrays, c, begin, end);
  }
}

void step_base(const AdamArrays& arrays, const AdamConstants& c, int64_t begin, int64_t end) {
  by_grad(arrays, c, begin, end);
}

#ifdef COLOSSALAI_X86
__attribute__((target("avx2,fma"))) void step_avx2(
    const AdamArrays& arrays, const AdamConstants& c, int64_t begin, int64_t end) {
  by_grad(arrays, c, begin, end);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) void step_avx512(
    const AdamArrays& arrays, const AdamConstants& c, int64_t begin, int64_t end) {
  by_grad(arrays, c, begin, end);
}
#endif

}  // namespace

bool can_run(Isa isa) {
#ifdef COLOSSALAI_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return isa == Isa::kBase;
}

Isa best_isa() {
  static const Isa best = can_run(Isa::kAvx512) ? Isa::kAvx512 : can_run(Isa::kAvx2) ? Isa::kAvx2 : Isa::kBase;
  return best;
}

void adam_step(const AdamArrays& arrays, const AdamConstants& constants, int64_t begin, int64_t end, Isa isa) {
#ifdef COLOSSALAI_X86
  if (isa == Isa::kAvx512) return step_avx512(arrays, constants, begin, end);
  if (isa == Isa::kAvx2) return step_avx2(arrays, constants, begin, end);
#endif
  step_base(arrays, constants, begin, end);
}

}  // namespace colossalai
