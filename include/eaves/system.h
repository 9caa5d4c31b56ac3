// What this build of eaves can do on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
  /// Peak of the memory bus as the driver states it (bus width times clock), bytes per second; 0 where it does not.
  double memory_bandwidth = 0.0;
};

struct SystemInfo {
  std::string version;
  std::string compiler;
  std::string commit;  ///< of the source tree that was built, "unknown" outside of git

  std::string cpu_level;  ///< the vector instructions chosen at run time, as Highway names them: "AVX3_ZEN4"
  int cpu_threads = 0;
  std::string cpu_gemm;  ///< what computes matrix products: "oneDNN 2.6.3 for float32, else eaves (AVX2)"

  bool has_cuda_backend = false;    ///< was CUDA compiled in
  std::string cuda_build_version;   ///< of the toolkit, "13.0"; empty without
  std::string cuda_architectures;   ///< compiled for, "80;90a;90+" (+: PTX); empty without
  bool has_cutlass = false;         ///< was it compiled for 90a with the headers of CUTLASS
  std::string cuda_driver_version;  ///< the newest CUDA that the driver runs; empty without a driver
  std::vector<GpuInfo> gpus;
  std::string cuda_missing;  ///< why there is no usable GPU, in one sentence; empty where there is one
};

SystemInfo system_info();

}  // namespace eaves
#pragma GCC visibility pop
