#include "cli/system_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/runtime.h"

namespace eaves::cli {

std::vector<std::string> missing_parts(const SystemInfo& system) {
  std::vector<std::string> missing;
  if (!system.has_cuda_backend) {
    missing.push_back(
        "This build has no CUDA backend, so it accepts only tensors on the CPU. For a GPU install a CUDA toolkit and "
        "build "
        "again without CUDA=OFF.");
  } else if (system.gpus.empty()) {
    missing.push_back(fmt::format("eaves finds no GPU that it can use ({}), so it accepts only tensors on the CPU.",
                                  system.cuda_missing));
  }
  for (const GpuInfo& gpu : system.gpus) {
    if (gpu.compute_capability_major == 9 && gpu.compute_capability_minor == 0 && !system.has_cutlass) {
      missing.push_back(fmt::format(
          "This build has no CUTLASS, so linear_cross_entropy keeps its logits in memory on GPU {}. Run tools/setup "
          "and build again.",
          gpu.index));
    }
    if (gpu.compute_capability_major == 10 && !system.has_sm100) {
      missing.push_back(fmt::format(
          "This build has no products that end in exponentials for GPU {}. Run tools/setup and build again with CUDA "
          "12.9 or newer.",
          gpu.index));
    }
    if (gpu.memory_bandwidth <= 0.0) {
      missing.push_back(fmt::format(
          "The driver does not report the memory bandwidth of GPU {}. Compare times with the column limit of eaves "
          "bench instead.",
          gpu.index));
    }
  }
  // The levels below AVX2 and NEON, by Highway's names.
  for (const char* narrow : {"SSE2", "SSSE3", "SSE4", "EMU128", "SCALAR"}) {
    if (system.cpu_level == narrow) {
      missing.push_back(fmt::format(
          "The CPU has no vectors wider than 16 bytes ({}), so operators on the CPU are slower than its memory allows.",
          narrow));
    }
  }
  return missing;
}

std::string system_json(const SystemInfo& system) {
  nlohmann::ordered_json json = {{"version", system.version}, {"commit", system.commit}, {"compiler", system.compiler}};
  json["backends"] = {"cpu"};
  if (system.has_cuda_backend) json["backends"].push_back("cuda");
  json["cpu"] = {{"name", runtime::device_name(kCpu)},
                 {"level", system.cpu_level},
                 {"threads", system.cpu_threads},
                 {"matrix_products", system.cpu_gemm}};
  json["cuda"] = nullptr;
  if (system.has_cuda_backend) {
    json["cuda"] = {{"version", system.cuda_build_version},
                    {"architectures", system.cuda_architectures},
                    {"driver", system.cuda_driver_version}};
  }
  json["gpus"] = nlohmann::ordered_json::array();
  for (const GpuInfo& gpu : system.gpus) {
    json["gpus"].push_back(
        {{"index", gpu.index},
         {"name", gpu.name},
         {"compute_capability", fmt::format("{}.{}", gpu.compute_capability_major, gpu.compute_capability_minor)},
         {"multiprocessors", gpu.multiprocessors},
         {"memory_bytes", gpu.memory_bytes},
         {"l2_bytes", gpu.l2_bytes},
         {"memory_bandwidth", gpu.memory_bandwidth}});
  }
  json["missing"] = missing_parts(system);
  return json.dump(2);
}

}  // namespace eaves::cli
