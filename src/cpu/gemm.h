// Matrix products on the CPU: by loops of our own, or by oneDNN where it has instructions that they do not.
#pragma once

#include <string>

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cpu {

enum class GemmEngine {
  own,
  onednn,  ///< of float32 and bfloat16; the rest stays with our own
};

/// oneDNN computes products of bfloat16 on a CPU with AMX, where it is installed. Everywhere else our own loops do, so
/// that results do not depend on what is installed. EAVES_CPU_GEMM=own or =onednn in the environment, read once, forces
/// one, which also tells how far apart they are (`eaves bench linear_cross_entropy` with each); a library that is
/// forced and not there is Unsupported.
GemmEngine gemm_engine(DType dtype);

/// Throws that Unsupported, before anything is written, with the name of the operator in front.
void require_gemm(const char* op);

/// Cut into tiles by the shape alone, each computed by one thread, so that their number changes no result. The order in
/// which an element is summed depends on k alone (our own loops; oneDNN's order is its own). `alpha` is read before
/// anything is written; `bias` must not overlap c.
void gemm(const Gemm& product, const ExecutionContext& context);

/// By an engine of the caller's choice; oneDNN must be there.
void gemm(const Gemm& product, const ExecutionContext& context, GemmEngine engine);

/// What computes products here, in a few words: "eaves (AVX-512 bf16)". Never throws.
std::string gemm_description();

}  // namespace eaves::cpu
