// Matrix products on the CPU: by oneDNN where it is installed, has the type and a call pays (cpu/gemm_onednn.h), else
// by loops of our own.
#pragma once

#include <string>

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cpu {

enum class GemmEngine {
  own,
  onednn,  ///< of float32 and bfloat16; the rest stays with our own
};

/// oneDNN where it is installed and has instructions for the type. EAVES_CPU_GEMM in the environment is read once: with
/// =own nothing is oneDNN's, which also tells how far apart they are (`eaves bench linear_cross_entropy` with each);
/// with =onednn it is Unsupported that there is none. With EAVES_BATCH_INVARIANT=1 (core/environment.h) nothing is
/// oneDNN's either.
GemmEngine gemm_engine(DType dtype);

/// Throws that Unsupported, before anything is written, with the name of the operator in front.
void require_gemm(const char* op);

/// The number of threads changes no result. Our own loops add up an element in an order that depends on k alone, and so
/// does oneDNN in bfloat16 (tested on AVX-512, not on AMX); oneDNN's float32 sums of a row may depend on how many rows
/// there are. `alpha` is read before anything is written; `bias` must not overlap c.
void gemm(const Gemm& product, const ExecutionContext& context);

/// By an engine of the caller's choice; what oneDNN does not multiply, our own loops do.
void gemm(const Gemm& product, const ExecutionContext& context, GemmEngine engine);

/// What computes products here, in a few words: "oneDNN 3.2.0 for float32 and bfloat16, else eaves (AVX3)". Never
/// throws.
std::string gemm_description();

}  // namespace eaves::cpu
