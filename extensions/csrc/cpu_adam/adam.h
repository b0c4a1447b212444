// One step of Adam over flat arrays, in one pass over memory.
#pragma once

#include <cstdint>

namespace colossalai {

// How 16-bit numbers are stored, or that there are none.
enum class Format { kFloat32, kBFloat16, kFloat16, kNone };

// What is the same for every element, worked out once a step.
struct AdamConstants {
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float inv_scale;         // the gradient is multiplied by this
  float l2_decay;          // added to the gradient, times the parameter
  float keep;              // 1 - lr * decay: what decoupled decay leaves of the parameter
  float step_size;         // lr / (1 - beta1^t)
  float inv_sqrt_bias2;    // 1 / sqrt(1 - beta2^t)
};

struct AdamArrays {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;    // in grad_format
  Format grad_format;  // kFloat32, kBFloat16 or kFloat16
  uint16_t* copy;      // in copy_format; null for kNone
  Format copy_format;  // kBFloat16, kFloat16 or kNone
};

// Instruction sets, from the plainest. Which of them exist depends on the compiler, which can run on the CPU.
enum class Isa { kBase, kAvx2, kAvx512 };

Isa best_isa();
bool can_run(Isa isa);

// Elements begin to end of the arrays.
void adam_step(const AdamArrays& arrays, const AdamConstants& constants, int64_t begin, int64_t end, Isa isa);

}  // namespace colossalai
