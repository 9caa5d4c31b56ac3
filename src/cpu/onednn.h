// oneDNN's matrix products on one thread. The first call loads oneDNN's shared library, if there is one, from the
// folder of the PyTorch extension (the wheel contains it) or from the system. eaves never links it.
#pragma once

#include <cstdint>
#include <string>

#include "core/gemm.h"

namespace eaves::cpu {

/// The library's version, "2.6.3"; empty without the library.
const std::string& onednn_version();

/// True if oneDNN can multiply factors of this type on this machine: float32, and bfloat16 where the CPU has instructions
/// for it (AVX-512 BF16, AMX). Without them oneDNN emulates bfloat16, which takes 2.4 times as long as our own loops
/// (EPYC, Zen 4, 2 threads, ONEDNN_MAX_CPU_ISA=AVX512_CORE, [512, 1024] x 4096: 57 and 22 ms).
bool has_onednn_gemm(DType dtype);

/// c[i * c_stride + j] = sum over p of a[i, p] * b[p, j], in float32 on this thread alone. Returns false, and writes
/// nothing, if the library refuses.
bool onednn_gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const GemmMatrix& a, const GemmMatrix& b,
                 float* c, std::int64_t c_stride);

}  // namespace eaves::cpu
