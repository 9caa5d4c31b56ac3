// `eaves info`: the parts of this build, the machine, the missing parts and their cost; with --self-test also whether
// the kernels are right on this machine.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/self_test_cases.h"
#include "cli/stop.h"
#include "cli/system_report.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

std::string gpu_line(const GpuInfo& gpu) {
  const std::string bandwidth = gpu.memory_bandwidth > 0.0 ? fmt::format("{:.2f} TB/s", gpu.memory_bandwidth * 1e-12)
                                                           : std::string("unknown bandwidth");
  return fmt::format("{}, compute capability {}.{}, {} multiprocessors, {} memory, {}, {} L2", gpu.name,
                     gpu.compute_capability_major, gpu.compute_capability_minor, gpu.multiprocessors,
                     format_bytes(gpu.memory_bytes), bandwidth, format_bytes(gpu.l2_bytes));
}

void print_text(const SystemInfo& system) {
  fmt::print("eaves     {} (commit {}, {})\n", system.version, system.commit, system.compiler);
  fmt::print("backends  cpu{}\n", system.has_cuda_backend ? ", cuda" : "");
  // AVX3 is Highway's name.
  const std::string vectors =
      system.cpu_level.starts_with("AVX3") ? "AVX-512 (" + system.cpu_level + ")" : system.cpu_level;
  fmt::print("CPU       {}, vectors {}\n", runtime::device_name(kCpu), vectors);
  fmt::print("matmul    on the CPU: {}\n", system.cpu_gemm);
  if (system.has_cuda_backend) {
    fmt::print("CUDA      {} for {}, driver {}\n", system.cuda_build_version, system.cuda_architectures,
               system.cuda_driver_version.empty() ? "none" : "up to " + system.cuda_driver_version);
  }
  for (const GpuInfo& gpu : system.gpus) fmt::print("{:<8}  {}\n", fmt::format("GPU {}", gpu.index), gpu_line(gpu));
  const auto missing = missing_parts(system);
  fmt::print("missing   {}\n", missing.empty() ? "nothing" : missing.front());
  for (std::size_t i = 1; i < missing.size(); ++i) fmt::print("          {}\n", missing[i]);
}

}  // namespace

void print_info(bool is_json) { is_json ? fmt::print("{}\n", system_json(system_info())) : print_text(system_info()); }

void print_self_test(const std::vector<SelfTestCase>& cases) {
  print_text(system_info());
  fmt::print("\n");
  const auto say = [](const std::string& line) {
    fmt::print("{}\n", line);
    flush_output();  // a line may take seconds
  };
  if (self_test(say, cases) > 0) {
    throw DeviceError("self-test: results differ");
  }
}

}  // namespace eaves::cli
