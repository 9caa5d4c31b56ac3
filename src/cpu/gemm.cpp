// Chooses oneDNN or our own loops for a product, and reads EAVES_CPU_GEMM.
#include <cstdlib>
#include <string>

#include "core/environment.h"
#include "cpu/gemm.h"
#include "cpu/gemm_onednn.h"
#include "cpu/gemm_own.h"
#include "cpu/level.h"
#include "cpu/onednn.h"
#include "eaves/error.h"

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

/// Why the environment's wish cannot be met; empty where it can.
std::string find_refusal() {
  const std::string& forced = forced_engine();
  if (forced.empty() || forced == "own") return "";
  if (forced != "onednn") return std::string(kVariable) + " is \"" + forced + "\", expected own or onednn";
  if (has_onednn_gemm(DType::float32)) return "";
  return std::string(kVariable) +
         " is onednn, but neither libdnnl.so.3 nor libdnnl.so.2 with OpenMP was found; install oneDNN or leave the "
         "variable "
         "out";
}

std::string own_description() { return std::string("eaves (") + level_name() + ")"; }

const std::string& refusal() {
  static const std::string kRefusal = find_refusal();
  return kRefusal;
}

}  // namespace

void require_gemm(const char* op) {
  if (!refusal().empty()) throw Unsupported(op, refusal());
}

GemmEngine gemm_engine(DType dtype) {
  if (!refusal().empty()) throw Unsupported(refusal());
  // oneDNN adds up an element of float32 in an order that depends on the tile, and promises nothing of the others.
  if (forced_engine() == "own" || is_batch_invariant()) return GemmEngine::own;
  return has_onednn_gemm(dtype) ? GemmEngine::onednn : GemmEngine::own;
}

void gemm(const Gemm& product, const ExecutionContext& context) { gemm(product, context, gemm_engine(product.dtype)); }

void gemm(const Gemm& product, const ExecutionContext& context, GemmEngine engine) {
  if (engine == GemmEngine::onednn && can_multiply_by_onednn(product)) return multiply_by_onednn(product, context);
  own_gemm(product, context);
}

std::string gemm_description() {
  if (const std::string& why = refusal(); !why.empty()) return "none: " + why;
  if (gemm_engine(DType::float32) == GemmEngine::own) return own_description();
  const bool has_bfloat16 = gemm_engine(DType::bfloat16) == GemmEngine::onednn;
  return "oneDNN " + onednn_version() + " for float32" + (has_bfloat16 ? " and bfloat16" : "") + ", else " +
         own_description();
}

}  // namespace eaves::cpu
