#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include "core/build_config.h"

namespace eaves::cuda::cublaslt {
namespace {

/// The library's names in the CUDA versions that have the interface declared here; the newest first.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr const char* kFolders[] = {"", "/usr/local/cuda/lib64/", "/usr/local/cuda/targets/x86_64-linux/lib/",
                                    "/usr/local/cuda/targets/sbsa-linux/lib/"};

void* open_library() {
  // A library that the process has loaded (PyTorch brings its own) comes before the system's.
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : kNames) {
      for (const char* folder : kFolders) {
        if (void* found = dlopen((std::string(folder) + name).c_str(), mode)) return found;
      }
    }
  }
  return nullptr;
}

Library load() {
  Library result{};
  void* const handle = open_library();
  if (handle == nullptr) {
    result.missing = std::string("cuBLASLt was not found (") + kNames[0] +
                     ", part of the CUDA toolkit and of PyTorch): install it, or add its folder to LD_LIBRARY_PATH";
    return result;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) result.missing = std::string("cuBLASLt has no function ") + name;
  };
  find(result.create, "cublasLtCreate");
  find(result.status_string, "cublasLtGetStatusString");
  find(result.init_layout, "cublasLtMatrixLayoutInit_internal");
  find(result.init_description, "cublasLtMatmulDescInit_internal");
  find(result.set_description, "cublasLtMatmulDescSetAttribute");
  find(result.init_preference, "cublasLtMatmulPreferenceInit_internal");
  find(result.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(result.get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(result.get_algorithm, "cublasLtMatmulAlgoConfigGetAttribute");
  find(result.matmul, "cublasLtMatmul");
  return result;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace eaves::cuda::cublaslt
