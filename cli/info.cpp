// `eaves info`: what this build has, what this machine has, what is missing and what that costs.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "eaves/system.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

// One sentence each: what is not here, and what follows from it.
std::vector<std::string> missing_parts(const SystemInfo& system) {
  std::vector<std::string> missing;
  if (!system.has_cuda_backend) {
    missing.push_back(
        "CUDA was not built in: tensors on a GPU are refused, everything runs on the CPU; install a CUDA toolkit and "
        "build again.");
  } else if (system.gpus.empty()) {
    missing.push_back(
        fmt::format("No usable GPU ({}): the CUDA backend is idle, everything runs on the CPU.", system.cuda_missing));
  }
  for (const GpuInfo& gpu : system.gpus) {
    if (gpu.memory_bandwidth <= 0.0) {
      missing.push_back(
          fmt::format("The driver does not state the memory bandwidth of GPU {}: compare with the limit "
                      "column of eaves bench instead.",
                      gpu.index));
    }
  }
  // The levels below AVX2 and NEON, by Highway's names.
  for (const char* narrow : {"SSE2", "SSSE3", "SSE4", "EMU128", "SCALAR"}) {
    if (system.cpu_level == narrow) {
      missing.push_back(
          fmt::format("The CPU offers no vectors wider than 16 bytes ({}): CPU operators are bound by "
                      "instructions, not by memory.",
                      narrow));
    }
  }
  return missing;
}

std::string gpu_line(const GpuInfo& gpu) {
  const std::string bandwidth = gpu.memory_bandwidth > 0.0 ? fmt::format("{:.2f} TB/s", gpu.memory_bandwidth * 1e-12)
                                                           : std::string("bandwidth not stated");
  return fmt::format("{}, compute capability {}.{}, {} multiprocessors, {} memory, {}, {} L2", gpu.name,
                     gpu.compute_capability_major, gpu.compute_capability_minor, gpu.multiprocessors,
                     format_bytes(gpu.memory_bytes), bandwidth, format_bytes(gpu.l2_bytes));
}

void print_text(const SystemInfo& system) {
  fmt::print("eaves     {} (commit {}, {})\n", system.version, system.commit, system.compiler);
  fmt::print("backends  cpu{}\n", system.has_cuda_backend ? ", cuda" : "");
  fmt::print("CPU       {}, vectors {}\n", runtime::device_name(kCpu), system.cpu_level);
  if (system.has_cuda_backend) {
    fmt::print("CUDA      {} for {}, driver {}\n", system.cuda_build_version, system.cuda_architectures,
               system.cuda_driver_version.empty() ? "none" : "up to " + system.cuda_driver_version);
  }
  for (const GpuInfo& gpu : system.gpus) fmt::print("{:<8}  {}\n", fmt::format("GPU {}", gpu.index), gpu_line(gpu));
  const auto missing = missing_parts(system);
  fmt::print("missing   {}\n", missing.empty() ? "nothing" : missing.front());
  for (std::size_t i = 1; i < missing.size(); ++i) fmt::print("          {}\n", missing[i]);
}

void print_json(const SystemInfo& system) {
  nlohmann::ordered_json json = {{"version", system.version}, {"commit", system.commit}, {"compiler", system.compiler}};
  json["backends"] = {"cpu"};
  if (system.has_cuda_backend) json["backends"].push_back("cuda");
  json["cpu"] = {{"name", runtime::device_name(kCpu)}, {"level", system.cpu_level}, {"threads", system.cpu_threads}};
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
  fmt::print("{}\n", json.dump(2));
}

}  // namespace

void add_info_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand("info", "What this build and this machine can do, and what is missing.");
  command->footer("Example:\n  eaves info --json");
  const auto is_json = std::make_shared<bool>(false);
  command->add_flag("--json", *is_json, "Print JSON instead of text");
  command->callback([is_json] { *is_json ? print_json(system_info()) : print_text(system_info()); });
}

}  // namespace eaves::cli
