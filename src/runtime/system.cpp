// The abilities of this build on this machine: the values that CMake wrote into build_config.h, and the answers of the
// CPU and of the driver.
#include "eaves/system.h"

#include <utility>

#include "core/build_config.h"
#include "cpu/gemm.h"
#include "cpu/level.h"
#include "cpu/parallel.h"
#include "cuda/device.h"
#include "eaves/version.h"
#include "runtime/backend.h"

namespace eaves {

SystemInfo system_info() {
  SystemInfo info;
  info.version = EAVES_VERSION;
  info.compiler = EAVES_COMPILER;
  info.commit = EAVES_COMMIT;
  info.cpu_level = cpu::level_name();
  info.cpu_threads = cpu::default_threads();
  info.cpu_gemm = cpu::gemm_description();
  if constexpr (kHasCuda) {
    info.has_cuda_backend = true;
    info.cuda_build_version = EAVES_CUDA_VERSION;
    info.cuda_architectures = EAVES_CUDA_ARCHITECTURES;
    info.has_cutlass = EAVES_HAVE_CUTLASS;
    info.has_sm100 = EAVES_HAVE_SM100;
    cuda::GpuList list = cuda::gpus();
    info.cuda_driver_version = std::move(list.driver_version);
    info.gpus = std::move(list.gpus);
    info.cuda_missing = std::move(list.missing);
  } else {
    info.cuda_missing = "this build has no CUDA backend";
  }
  return info;
}

}  // namespace eaves
