// oneDNN's matrix products on one thread, from its shared library where there is one: it is loaded at the first call,
// from the folder of the PyTorch extension (the wheel brings one) or from the system, and never linked.
#pragma once

#include <cstdint>
#include <string>

#include "core/gemm.h"

namespace eaves::cpu {

/// The library's version, "2.6.3"; empty where there is none.
const std::string& onednn_version();

/// Can it multiply factors of this type here? float32, and bfloat16 where the CPU has instructions for it (AVX-512
/// BF16, AMX). Without them oneDNN emulates bfloat16, which takes 2.4 times as long as our own loops (EPYC, Zen 4, 2
/// threads, ONEDNN_MAX_CPU_ISA=AVX512_CORE, [512, 1024] x 4096: 57 and 22 ms).
bool has_onednn_gemm(DType dtype);

/// c[i * c_stride + j] = the sum over p of a[i, p] * b[p, j], summed in float32 on this thread alone. False where the
/// library refuses; then nothing is written.
bool onednn_gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const GemmMatrix& a, const GemmMatrix& b,
                 float* c, std::int64_t c_stride);

}  // namespace eaves::cpu
