#include "cpu/onednn.h"

#include <array>
#include <cstddef>

#if defined(__linux__)
#define EAVES_CAN_LOAD_ONEDNN 1
#include <dlfcn.h>
#else
#define EAVES_CAN_LOAD_ONEDNN 0
#endif

namespace eaves::cpu {

#if EAVES_CAN_LOAD_ONEDNN

namespace {

// Declarations of oneDNN's C interface. Sizes and strides are dnnl_dim_t; a status of 0 is success.
using Sgemm = int(char, char, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t, const float*,
                  std::int64_t, float, float*, std::int64_t);
using Bfloat16Gemm = int(char, char, std::int64_t, std::int64_t, std::int64_t, float, const std::uint16_t*,
                         std::int64_t, const std::uint16_t*, std::int64_t, float, float*, std::int64_t);
struct Version {  // the first members of dnnl_version_t; newer versions only append others
  int major, minor, patch;
};
using GetVersion = const Version*();
using GetInstructions = int();  // of dnnl_cpu_isa_t: a bit for each set of them, in 2.6 and in 3
constexpr int kBfloat16Instructions = 0x80;

/// The functions of an OpenMP runtime that read and set the number of threads of this thread's next parallel region.
struct ThreadLimit {
  int (*get)() = nullptr;
  void (*set)(int) = nullptr;
};

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

ThreadLimit thread_limit_in(void* library) {
  const ThreadLimit limit{find<int()>(library, "omp_get_max_threads"), find<void(int)>(library, "omp_set_num_threads")};
  return limit.get != nullptr && limit.set != nullptr ? limit : ThreadLimit{};
}

/// oneDNN's products on one thread. The library's handle finds the OpenMP runtime that it was linked with. If another
/// runtime was loaded globally before (PyTorch brings its own), the library calls that one instead. So the limit of one
/// thread is set in both.
class Library {
 public:
  Library() {
    // Try the full path first: a bare name may find the library of another package, with other threads than OpenMP's.
    Dl_info here{};
    if (dladdr(reinterpret_cast<const void*>(&onednn_version), &here) != 0 && here.dli_fname != nullptr) {
      const std::string file = here.dli_fname;
      const std::string folder = file.substr(0, file.rfind('/') + 1);
      if (!folder.empty() && open((folder + "libdnnl.so.3").c_str())) return;
    }
    for (const char* name : {"libdnnl.so.3", "libdnnl.so.2"}) {
      if (open(name)) return;
    }
  }

  const std::string& version() const { return version_; }
  bool has(DType dtype) const {
    return dtype == DType::bfloat16 ? has_bfloat16_ : dtype == DType::float32 && has_float_;
  }

  bool multiply(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const GemmMatrix& a, const GemmMatrix& b,
                float* c, std::int64_t c_stride) const {
    const OneThread one_thread(limits_);
    const char turn_a = a.is_transposed ? 'T' : 'N';
    const char turn_b = b.is_transposed ? 'T' : 'N';
    if (dtype == DType::bfloat16) {
      return bfloat16_gemm_(turn_a, turn_b, m, n, k, 1.0f, static_cast<const std::uint16_t*>(a.data), a.stride,
                            static_cast<const std::uint16_t*>(b.data), b.stride, 0.0f, c, c_stride) == 0;
    }
    return sgemm_(turn_a, turn_b, m, n, k, 1.0f, static_cast<const float*>(a.data), a.stride,
                  static_cast<const float*>(b.data), b.stride, 0.0f, c, c_stride) == 0;
  }

 private:
  using Limits = std::array<ThreadLimit, 2>;

  /// During its lifetime this thread's parallel regions have one thread.
  class OneThread {
   public:
    explicit OneThread(const Limits& limits) : limits_(limits) {
      for (std::size_t i = 0; i < limits.size(); ++i) {
        if (limits[i].get == nullptr) continue;
        before_[i] = limits[i].get();
        limits[i].set(1);
      }
    }
    ~OneThread() {
      for (std::size_t i = 0; i < limits_.size(); ++i) {
        if (limits_[i].get != nullptr) limits_[i].set(before_[i]);
      }
    }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

   private:
    const Limits& limits_;
    std::array<int, 2> before_{};
  };

  // Refuses a library with other threads than OpenMP's, because nothing could limit it to one.
  bool open(const char* name) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    auto* const get_version = find<GetVersion>(library, "dnnl_version");
    sgemm_ = find<Sgemm>(library, "dnnl_sgemm");
    bfloat16_gemm_ = find<Bfloat16Gemm>(library, "dnnl_gemm_bf16bf16f32");
    limits_ = {thread_limit_in(library), thread_limit_in(RTLD_DEFAULT)};
    if (limits_[0].set == limits_[1].set) limits_[1] = {};
    if (get_version == nullptr || limits_[0].get == nullptr) {
      dlclose(library);
      return false;
    }
    const Version* version = get_version();
    version_ =
        std::to_string(version->major) + "." + std::to_string(version->minor) + "." + std::to_string(version->patch);
    has_float_ = sgemm_ != nullptr && can_multiply(DType::float32);
    auto* const get_instructions = find<GetInstructions>(library, "dnnl_get_effective_cpu_isa");
    const bool has_instructions = get_instructions != nullptr && (get_instructions() & kBfloat16Instructions) != 0;
    has_bfloat16_ = bfloat16_gemm_ != nullptr && has_instructions && can_multiply(DType::bfloat16);
    return true;
  }

  /// Tries a product of two numbers, because only the library knows which instructions it needs.
  bool can_multiply(DType dtype) const {
    const float one = 1.0f;
    const std::uint16_t one_in_bfloat16 = 0x3f80;
    const void* factor = dtype == DType::bfloat16 ? static_cast<const void*>(&one_in_bfloat16) : &one;
    float c = 0.0f;
    return multiply(dtype, 1, 1, 1, {factor, 1}, {factor, 1}, &c, 1) && c == 1.0f;
  }

  std::string version_;
  Sgemm* sgemm_ = nullptr;
  Bfloat16Gemm* bfloat16_gemm_ = nullptr;
  Limits limits_;
  bool has_float_ = false;
  bool has_bfloat16_ = false;
};

// Never closed, because the memory of its threads outlives any call.
const Library& library() {
  static const auto* const kLibrary = new Library;
  return *kLibrary;
}

}  // namespace

const std::string& onednn_version() { return library().version(); }

bool has_onednn_gemm(DType dtype) { return library().has(dtype); }

bool onednn_gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const GemmMatrix& a, const GemmMatrix& b,
                 float* c, std::int64_t c_stride) {
  return library().multiply(dtype, m, n, k, a, b, c, c_stride);
}

#else

const std::string& onednn_version() {
  static const std::string kNone;
  return kNone;
}
bool has_onednn_gemm(DType) { return false; }
bool onednn_gemm(DType, std::int64_t, std::int64_t, std::int64_t, const GemmMatrix&, const GemmMatrix&, float*,
                 std::int64_t) {
  return false;
}

#endif

}  // namespace eaves::cpu
