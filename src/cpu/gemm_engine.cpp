// Which library computes a product, and what it is called.
#include <cstdlib>
#include <string>

#include "cpu/gemm.h"
#include "cpu/gemm_bfloat16_dot.h"
#include "cpu/level.h"
#include "cpu/onednn.h"
#include "eaves/error.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace eaves::cpu {
namespace {

constexpr const char* kVariable = "EAVES_CPU_GEMM";

/// Read once: a product must not change between two calls.
const std::string& forced_engine() {
  static const std::string kForced = [] {
    const char* value = std::getenv(kVariable);
    return std::string(value != nullptr ? value : "");
  }();
  return kForced;
}

/// Intel's matrix units with bfloat16: leaf 7 of cpuid, bit 22 of EDX.
bool has_amx_bfloat16() {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 22 & 1) != 0;
#else
  return false;
#endif
}

/// Why the environment's wish cannot be met; empty where it can.
std::string find_refusal() {
  const std::string& forced = forced_engine();
  if (forced.empty() || forced == "own") return "";
  if (forced != "onednn") return std::string(kVariable) + " is \"" + forced + "\", expected own or onednn";
  if (has_onednn_gemm(DType::float32)) return "";
  return std::string(kVariable) + " is onednn, and there is no libdnnl.so.3 or libdnnl.so.2 with OpenMP";
}

bool wants_onednn(DType dtype) {
  if (!forced_engine().empty()) return forced_engine() == "onednn";
  return dtype == DType::bfloat16 && has_amx_bfloat16();
}

std::string own_description() {
  return std::string("eaves (") + (has_bfloat16_dot() ? "AVX-512 bf16" : level_name()) + ")";
}

const std::string& refusal() {
  static const std::string kRefusal = find_refusal();
  return kRefusal;
}

}  // namespace

void require_gemm(const char* op) {
  if (!refusal().empty()) throw Unsupported(std::string(op) + ": " + refusal());
}

GemmEngine gemm_engine(DType dtype) {
  if (!refusal().empty()) throw Unsupported(refusal());
  return wants_onednn(dtype) && has_onednn_gemm(dtype) ? GemmEngine::onednn : GemmEngine::own;
}

void gemm(const Gemm& product, const ExecutionContext& context) { gemm(product, context, gemm_engine(product.dtype)); }

std::string gemm_description() {
  if (const std::string& why = refusal(); !why.empty()) return "none: " + why;
  if (gemm_engine(DType::bfloat16) == GemmEngine::own) return own_description();
  const std::string onednn = "oneDNN " + onednn_version();
  if (gemm_engine(DType::float32) == GemmEngine::onednn) return onednn;
  return onednn + " for bfloat16, else " + own_description();
}

}  // namespace eaves::cpu
