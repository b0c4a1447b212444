// colossalai::cpu_adam_step, an operator of torch, over torch's stable interface (2.10 and later): a library built
// against one release works with the next. The Python module holds only which instruction set is used.
#define TORCH_TARGET_VERSION 0x020a000000000000

#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <string_view>

#include "adam.h"

namespace {

using colossalai::AdamArrays;
using colossalai::AdamConstants;
using colossalai::Format;
using colossalai::Isa;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Threads take whole blocks, so that no two of them write into one cache line.
constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocksPerThread = 8;

constexpr std::array<std::string_view, 3> kNames = {"base", "avx2", "avx512"};
std::atomic<int> forced{-1};

Isa isa_in_use() {
  const int chosen = forced.load();
  return chosen < 0 ? colossalai::best_isa() : static_cast<Isa>(chosen);
}

Format format_of(const Tensor& tensor, bool with_float32, const char* name) {
  const auto dtype = tensor.scalar_type();
  if (dtype == ScalarType::BFloat16) return Format::kBFloat16;
  if (dtype == ScalarType::Half) return Format::kFloat16;
  STD_TORCH_CHECK(with_float32 && dtype == ScalarType::Float, "cpu_adam_step: ", name, " must be ",
                  with_float32 ? "float32, " : "", "bfloat16 or float16");
  return Format::kFloat32;
}

void check(const Tensor& tensor, int64_t numel, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), "cpu_adam_step: ", name, " must be in host memory");
  STD_TORCH_CHECK(tensor.is_contiguous(), "cpu_adam_step: ", name, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == numel, "cpu_adam_step: ", name, " has ", tensor.numel(), " elements, param ", numel);
}

float* float32(const Tensor& tensor, int64_t numel, const char* name) {
  check(tensor, numel, name);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "cpu_adam_step: ", name, " must be float32");
  return static_cast<float*>(tensor.mutable_data_ptr());
}

void cpu_adam_step(
    Tensor param, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, std::optional<Tensor> copy, int64_t step, double lr,
    double beta1, double beta2, double eps, double weight_decay, double inv_scale, bool decoupled,
    bool bias_correction) {
  const int64_t numel = param.numel();
  STD_TORCH_CHECK(step >= 1, "cpu_adam_step: step=", step, " counts from 1");
  check(grad, numel, "grad");
  AdamArrays arrays{
      float32(param, numel, "param"),     float32(exp_avg, numel, "exp_avg"), float32(exp_avg_sq, numel, "exp_avg_sq"),
      grad.const_data_ptr(),              format_of(grad, true, "grad"),      nullptr,
      Format::kNone,
  };
  if (copy.has_value()) {
    check(*copy, numel, "low_precision_copy");
    arrays.copy_format = format_of(*copy, false, "low_precision_copy");
    arrays.copy = static_cast<uint16_t*>(copy->mutable_data_ptr());
  }
  const double bias1 = bias_correction ? 1.0 - std::pow(beta1, static_cast<double>(step)) : 1.0;
  const double bias2 = bias_correction ? 1.0 - std::pow(beta2, static_cast<double>(step)) : 1.0;
  const AdamConstants constants{
      static_cast<float>(1.0 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2),
      static_cast<float>(eps),
      static_cast<float>(inv_scale),
      decoupled ? 0.0f : static_cast<float>(weight_decay),
      decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f,
      static_cast<float>(lr / bias1),
      static_cast<float>(1.0 / std::sqrt(bias2)),
  };
  const Isa isa = isa_in_use();
  torch::stable::parallel_for(
      0, (numel + kBlock - 1) / kBlock, kBlocksPerThread, [&](int64_t first, int64_t last) {
        colossalai::adam_step(arrays, constants, first * kBlock, std::min(last * kBlock, numel), isa);
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(colossalai, library) {
  library.def(
      "cpu_adam_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor(d!)? copy, "
      "int step, float lr, float beta1, float beta2, float eps, float weight_decay, float inv_scale, bool decoupled, "
      "bool bias_correction) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(colossalai, CPU, library) { library.impl("cpu_adam_step", TORCH_BOX(&cpu_adam_step)); }

// isa() -> str: the instruction set in use. force_isa(name or None): use another, for tests.
static PyObject* isa(PyObject*, PyObject*) {
  const std::string_view name = kNames[static_cast<int>(isa_in_use())];
  return PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
}

static PyObject* force_isa(PyObject*, PyObject* wanted) {
  if (wanted == Py_None) {
    forced = -1;
    Py_RETURN_NONE;
  }
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(wanted, &length);
  if (text == nullptr) return nullptr;
  for (int i = 0; i < static_cast<int>(kNames.size()); ++i) {
    if (kNames[i] == std::string_view(text, static_cast<size_t>(length)) && colossalai::can_run(static_cast<Isa>(i))) {
      forced = i;
      Py_RETURN_NONE;
    }
  }
  return PyErr_Format(PyExc_ValueError, "this CPU does not run the instruction set %R", wanted);
}

static PyMethodDef methods[] = {
    {"isa", isa, METH_NOARGS, "The instruction set in use."},
    {"force_isa", force_isa, METH_O, "Use this instruction set; None means the best."},
    {nullptr, nullptr, 0, nullptr},
};

#define STRINGIZE_(x) #x
#define STRINGIZE(x) STRINGIZE_(x)
#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, STRINGIZE(TORCH_EXTENSION_NAME), "Adam on the CPU in one pass over memory.", -1, methods,
    nullptr,               nullptr,                         nullptr,                                    nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* CONCATENATE(PyInit_, TORCH_EXTENSION_NAME)() {
  return PyModule_Create(&definition);
}
