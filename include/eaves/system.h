// The abilities of this build of eaves on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
  /// Peak of the memory bus as the driver reports it (bus width times clock), in bytes per second; 0 if it reports
  /// none.
  double memory_bandwidth = 0.0;
};

struct SystemInfo {
  std::string version;
  std::string compiler;
  std::string commit;  ///< of the built source tree, "unknown" outside of git

  std::string cpu_level;  ///< the vector instructions chosen at run time, in Highway's names: "AVX3_ZEN4"
  int cpu_threads = 0;
  std::string cpu_gemm;  ///< the library of matrix products: "oneDNN 2.6.3 for float32, else eaves (AVX2)"

  bool has_cuda_backend = false;    ///< CUDA was compiled in
  std::string cuda_build_version;   ///< of the toolkit, "13.0"; empty without CUDA
  std::string cuda_architectures;   ///< the compiled targets, "80;90a;90+" (+: PTX); empty without CUDA
  bool has_cutlass = false;         ///< the kernels for 90a were compiled with CUTLASS' headers
  bool has_sm100 = false;           ///< likewise, for 10.0 and 10.3
  std::string cuda_driver_version;  ///< the newest CUDA version that the driver runs; empty without a driver
  std::vector<GpuInfo> gpus;
  std::string cuda_missing;  ///< the reason why no GPU is usable, in one sentence; empty if one is
};

SystemInfo system_info();

}  // namespace eaves
#pragma GCC visibility pop
