#include "cuda/gemm.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "core/build_config.h"
#include "core/dispatch.h"
#include "core/environment.h"
#include "cuda/cublaslt.h"
#include "cuda/cutlass/weight_gradient.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "eaves/error.h"

namespace eaves::cuda {
namespace {

using namespace cublaslt;

/// 0 and 1 on the device: if alpha lies there, beta has to lie there too.
template <typename A>
__device__ const A kFactors[2] = {A(0), A(1)};

template <typename A>
const void* device_factor(bool is_one) {
  void* address = nullptr;
  check_status(cudaGetSymbolAddress(&address, kFactors<A>), "gemm");
  return static_cast<const A*>(address) + (is_one ? 1 : 0);
}

template <typename A>
__global__ void fill_rows(A* to, std::int64_t rows, std::int64_t columns, std::int64_t stride, const A* row) {
  const std::int64_t column = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const A value = row[column];
  for (std::int64_t i = blockIdx.y; i < rows; i += gridDim.y) to[i * stride + column] = value;
}

DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return kFloat64;
    case DType::float16:
      return kFloat16;
    case DType::bfloat16:
      return kBfloat16;
    default:
      return kFloat32;
  }
}

/// The largest power of two, up to 256, that divides all addresses of a matrix's rows.
std::uint32_t alignment_of(const void* data, std::int64_t stride, DType dtype) {
  const auto bits = reinterpret_cast<std::uintptr_t>(data) | (static_cast<std::uintptr_t>(stride) * size_of(dtype)) |
                    std::uintptr_t{256};
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

void check(const char* op, Status status, const char* call) {
  if (status == kSuccess) return;
  throw DeviceError(std::string(op) + ": " + call + " of cuBLASLt: " + library().status_string(status));
}

/// A handle for each device; they live as long as the process.
Handle handle_of(const char* op, int device) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::lock_guard lock(mutex);
  Handle& handle = handles[device];
  if (handle == nullptr) check(op, library().create(&handle), "cublasLtCreate");
  return handle;
}

/// cuBLAS counts columns first: our rows are its columns, c^T = b^T a^T.
struct Description {
  MatmulDescription matmul{};
  MatrixLayout a{};  ///< our b
  MatrixLayout b{};  ///< our a
  MatrixLayout c{};

  Description(const char* op, const Gemm& gemm, bool has_bias) {
    const Library& lt = library();
    const bool is_double = gemm.dtype == DType::float64;
    const DataType scale = is_double ? kFloat64 : kFloat32;
    const DataType type = data_type(gemm.dtype);
    check(op, lt.init_description(&matmul, sizeof(matmul), is_double ? kCompute64 : kCompute32, scale), "description");
    const auto set = [&](MatmulAttribute attribute, auto value) {
      check(op, lt.set_description(&matmul, attribute, &value, sizeof(value)), "attribute");
    };
    set(kTransposeA, gemm.b.is_transposed ? kTransposed : kAsItIs);
    set(kTransposeB, gemm.a.is_transposed ? kTransposed : kAsItIs);
    if (gemm.alpha != nullptr) set(kPointerMode, kDevicePointers);
    if (has_bias) {
      set(kEpilogue, kAddBias);
      set(kBiasDataType, static_cast<std::int32_t>(scale));
      set(kBiasPointer, gemm.bias);
    }
    const auto layout = [&](MatrixLayout& to, DataType of, std::int64_t rows, std::int64_t columns,
                            std::int64_t stride) {
      check(op,
            lt.init_layout(&to, sizeof(to), of, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                           stride),
            "layout");
    };
    gemm.b.is_transposed ? layout(a, type, gemm.k, gemm.n, gemm.b.stride)
                         : layout(a, type, gemm.n, gemm.k, gemm.b.stride);
    gemm.a.is_transposed ? layout(b, type, gemm.m, gemm.k, gemm.a.stride)
                         : layout(b, type, gemm.k, gemm.m, gemm.a.stride);
    layout(c, data_type(gemm.c_dtype), gemm.n, gemm.m, gemm.c_stride);
  }
};

/// Everything that the choice of an algorithm may depend on.
using AlgorithmKey = std::array<std::int64_t, 18>;

AlgorithmKey key_of(const Gemm& gemm, bool has_bias, int device, const std::array<std::uint32_t, 3>& alignments,
                    bool splits_sums) {
  return {gemm.m,
          gemm.n,
          gemm.k,
          static_cast<std::int64_t>(gemm.dtype),
          static_cast<std::int64_t>(gemm.c_dtype),
          gemm.a.stride,
          gemm.b.stride,
          gemm.c_stride,
          gemm.a.is_transposed,
          gemm.b.is_transposed,
          gemm.alpha != nullptr,
          has_bias,
          static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(gemm.bias) % 256),
          device,
          alignments[0],
          alignments[1],
          alignments[2],
          splits_sums};
}

/// True for the algorithm that is the fastest for a sum over rows (a is transposed: the gradient of a weight) whenever
/// the library proposes it: tiles of 128 x 160, clusters of two, and the library's custom option 1. The library puts it
/// sixth or seventh, and none of the first eight was faster (H200, cuBLASLt 13.1, bfloat16, 512 to 3072 rows, gradients
/// of [32768 to 151936, 2048 to 8192]). Why eaves does not measure instead: docs/design.md, "An operator of matrix
/// products".
bool is_fastest_sum_over_rows(const Algorithm& algorithm) {
  const auto has = [&](AlgorithmAttribute attribute, auto expected) {
    decltype(expected) value{};
    std::size_t written = 0;
    return library().get_algorithm(&algorithm, attribute, &value, sizeof(value), &written) == kSuccess &&
           value == expected;
  };
  return has(kTile, std::uint32_t{kTile128x160}) && has(kCustomOption, std::uint32_t{1}) &&
         has(kClusterShape, std::uint16_t{kCluster2x1x1});
}

/// The algorithm that is known to be the fastest, else the one that the library expects to be; nullopt if it has none.
std::optional<Algorithm> find_algorithm(const char* op, Handle handle, const Description& description,
                                        const std::array<std::uint32_t, 3>& alignments, bool splits_sums,
                                        bool sums_rows) {
  const Library& lt = library();
  Preference preference{};
  check(op, lt.init_preference(&preference, sizeof(preference)), "preference");
  const auto set = [&](PreferenceAttribute attribute, auto value) {
    check(op, lt.set_preference(&preference, attribute, &value, sizeof(value)), "preference");
  };
  set(kMaxWorkspaceBytes, static_cast<std::uint64_t>(kGemmWorkspaceBytes));
  set(kReductionSchemes, static_cast<std::uint32_t>(splits_sums ? kAccumulatorsOnly : kNoReduction));
  set(kMinAlignmentA, alignments[0]);
  set(kMinAlignmentB, alignments[1]);
  set(kMinAlignmentC, alignments[2]);
  set(kMinAlignmentD, alignments[2]);
  std::array<HeuristicResult, 8> proposals{};
  int found = 0;
  const Status status =
      lt.get_heuristic(handle, &description.matmul, &description.a, &description.b, &description.c, &description.c,
                       &preference, sums_rows ? static_cast<int>(proposals.size()) : 1, proposals.data(), &found);
  if (status == kNotSupported) return std::nullopt;
  check(op, status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 1; i < found; ++i) {
    if (proposals[i].state == kSuccess && is_fastest_sum_over_rows(proposals[i].algorithm)) {
      return proposals[i].algorithm;
    }
  }
  if (found == 0 || proposals[0].state != kSuccess) return std::nullopt;
  return proposals[0].algorithm;
}

/// Asks once for each shape, so that the same product always takes the same algorithm. With EAVES_BATCH_INVARIANT a row
/// of c must not depend on the number of rows, and another algorithm may add up an element in another order: every
/// number of rows takes the algorithm of kRowsAskedFor rows, for the alignment that every row has. That algorithm
/// splits no sum, or its workspace would grow with the rows. H200, cuBLASLt 13.1, bfloat16, [m, 4096] with 32,768 to
/// 151,936 classes: no time lost at 1024, 2048 and 4096 rows, up to a third at 1536 and 2176; the gradient of x
/// takes 1.2 ms for up to 512 rows, instead of 0.25 to 0.7.
std::optional<Algorithm> algorithm_for(const char* op, Handle handle, const Gemm& gemm, bool has_bias, int device) {
  static std::mutex mutex;
  static std::map<AlgorithmKey, Algorithm> known;
  constexpr std::size_t kMostKnown = 4096;
  constexpr std::int64_t kRowsAskedFor = 4096;
  const bool keeps_rows_apart = is_batch_invariant() && !gemm.a.is_transposed;  // transposed: dW, a sum over rows
  const std::uint32_t most_alignment = keeps_rows_apart ? 16 : 256;             // of any row; the first may have more
  const std::array<std::uint32_t, 3> alignments = {
      alignment_of(gemm.b.data, gemm.b.stride, gemm.dtype),
      std::min(most_alignment, alignment_of(gemm.a.data, gemm.a.stride, gemm.dtype)),
      std::min(most_alignment, alignment_of(gemm.c, gemm.c_stride, gemm.c_dtype))};
  Gemm asked = gemm;
  if (keeps_rows_apart) asked.m = kRowsAskedFor;
  const AlgorithmKey key = key_of(asked, has_bias, device, alignments, !keeps_rows_apart);
  const std::lock_guard lock(mutex);
  const auto at = known.find(key);
  if (at != known.end()) return at->second;
  const auto found =
      find_algorithm(op, handle, Description(op, asked, has_bias), alignments, !keeps_rows_apart, gemm.a.is_transposed);
  if (!found) return found;                       // the next call asks again
  if (known.size() >= kMostKnown) known.clear();  // the number of rows changes with each call
  known.emplace(key, *found);
  return found;
}

template <typename A>
void multiply(const char* op, const Gemm& gemm, const Description& description, const Algorithm& algorithm,
              Handle handle, const ExecutionContext& context) {
  static const A kHostFactors[2] = {A(0), A(1)};
  const bool is_on_device = gemm.alpha != nullptr;
  const void* alpha = is_on_device ? gemm.alpha : &kHostFactors[1];
  const void* beta = is_on_device ? device_factor<A>(gemm.accumulates) : &kHostFactors[gemm.accumulates ? 1 : 0];
  check(op,
        library().matmul(handle, &description.matmul, alpha, gemm.b.data, &description.a, gemm.a.data, &description.b,
                         beta, gemm.c, &description.c, gemm.c, &description.c, &algorithm, context.workspace.data,
                         std::min(context.workspace.bytes, kGemmWorkspaceBytes), context.stream),
        "cublasLtMatmul");
}

/// A product that is computed as two.
struct Parts {
  Gemm whole;  ///< made of whole vectors
  Gemm rest;
};

const void* advance(const void* data, DType dtype, std::int64_t elements) {
  return static_cast<const char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}
void* advance(void* data, DType dtype, std::int64_t elements) {
  return static_cast<char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

/// Cuts a product of aligned 16-bit factors if an axis is no multiple of 16 bytes: cuBLASLt (13.1, on Hopper) proposes
/// only kernels of older GPUs for it, and with 50,257 classes products took several times as long. The elements behind
/// the last whole vector become a product of their own. core/gemm.h says when a sum is cut.
std::optional<Parts> cut_to_vectors(const Gemm& product) {
  constexpr std::uint32_t kVectorBytes = 16;
  const bool lies_well = alignment_of(product.a.data, product.a.stride, product.dtype) >= kVectorBytes &&
                         alignment_of(product.b.data, product.b.stride, product.dtype) >= kVectorBytes &&
                         alignment_of(product.c, product.c_stride, product.c_dtype) >= kVectorBytes;
  if (size_of(product.dtype) != 2 || !lies_well) return std::nullopt;
  Parts parts{product, product};
  auto& [whole, rest] = parts;
  const auto cut = [&](std::int64_t Gemm::*size) {
    const std::int64_t all = product.*size;
    if (all <= kGemmVector || all % kGemmVector == 0) return false;
    rest.*size = all % kGemmVector;
    whole.*size = all - rest.*size;
    return true;
  };
  if (cut(&Gemm::n)) {
    rest.b.data = advance(product.b.data, product.dtype, whole.n * (product.b.is_transposed ? product.b.stride : 1));
    rest.c = advance(product.c, product.c_dtype, whole.n);
    if (product.bias != nullptr) rest.bias = advance(product.bias, product.c_dtype, whole.n);
    return parts;
  }
  if (product.a.is_transposed && cut(&Gemm::m)) {
    rest.a.data = advance(product.a.data, product.dtype, whole.m);
    rest.c = advance(product.c, product.c_dtype, whole.m * product.c_stride);
    return parts;
  }
  const bool lies_along_sum = !product.a.is_transposed || product.b.is_transposed;
  const bool is_sum_cut = lies_along_sum && size_of(product.c_dtype) != 2;
  if (is_sum_cut && is_sum_of_two_products(product.dtype, product.k) && cut(&Gemm::k)) {
    rest.a.data = advance(product.a.data, product.dtype, whole.k * (product.a.is_transposed ? product.a.stride : 1));
    rest.b.data = advance(product.b.data, product.dtype, whole.k * (product.b.is_transposed ? 1 : product.b.stride));
    rest.bias = nullptr;
    rest.accumulates = true;
    return parts;
  }
  return std::nullopt;
}

/// c = bias, or 0.
void fill(const char* op, const Gemm& gemm, const ExecutionContext& context) {
  if (gemm.bias == nullptr) {
    const std::size_t element = size_of(gemm.c_dtype);
    check_status(cudaMemset2DAsync(gemm.c, static_cast<std::size_t>(gemm.c_stride) * element, 0,
                                   static_cast<std::size_t>(gemm.n) * element, static_cast<std::size_t>(gemm.m),
                                   static_cast<cudaStream_t>(context.stream)),
                 op);
    return;
  }
  dispatch_floating_point(gemm.c_dtype, [&]<typename T>() {
    if constexpr (std::is_same_v<T, Accumulator<T>>) {
      constexpr int kThreads = 256;
      launch(op, fill_rows<T>,
             {.blocks = ceil_divide(gemm.n, kThreads),
              .blocks_y = std::min<std::int64_t>(gemm.m, 1024),
              .threads = kThreads,
              .stream = context.stream},
             static_cast<T*>(gemm.c), gemm.m, gemm.n, gemm.c_stride, static_cast<const T*>(gemm.bias));
    } else {
      throw Unsupported(op, "a bias is added to accumulators alone");
    }
  });
}

}  // namespace

bool takes_weight_gradient(const Gemm& product, int device) {
  constexpr std::int64_t kLeastRows = 1024;
  constexpr std::int64_t kLeastFeatures = 2048;
  constexpr std::int64_t kLeastTiles = 2000;
  constexpr std::uint32_t kVectorBytes = 16;
  if (!EAVES_HAVE_CUTLASS || product.alpha == nullptr || !product.accumulates || product.dtype != DType::bfloat16 ||
      product.c_dtype != DType::bfloat16 || !product.a.is_transposed || product.b.is_transposed ||
      product.k < kLeastRows || product.n < kLeastFeatures || product.n % kGemmVector != 0) {
    return false;
  }
  const std::uint32_t alignment = std::min({alignment_of(product.a.data, product.a.stride, product.dtype),
                                            alignment_of(product.b.data, product.b.stride, product.dtype),
                                            alignment_of(product.c, product.c_stride, product.c_dtype)});
  const std::int64_t tiles =
      ceil_divide(product.m, kWeightGradientClasses) * ceil_divide(product.n, kWeightGradientFeatures);
  return alignment >= kVectorBytes && tiles >= kLeastTiles &&
         std::max({product.m, product.n, product.k}) <= std::numeric_limits<std::int32_t>::max() &&
         properties({DeviceType::cuda, device}).compute_capability == 90;
}

void require_gemm(const char* op) {
  if (!library().missing.empty()) throw Unsupported(op, library().missing);
}

void gemm(const char* op, const Gemm& product, const ExecutionContext& context) {
  require_gemm(op);
  if (product.k == 0) {
    if (!product.accumulates) fill(op, product, context);
    return;
  }
  int device = 0;
  check_status(cudaGetDevice(&device), op);
  if constexpr (EAVES_HAVE_CUTLASS) {
    if (takes_weight_gradient(product, device)) {
      const int multiprocessors = properties({DeviceType::cuda, device}).multiprocessors;
      return weight_gradient(op, product, multiprocessors, context.stream);
    }
  }
  if (const auto parts = cut_to_vectors(product)) {
    gemm(op, parts->whole, context);
    return gemm(op, parts->rest, context);
  }
  const Handle handle = handle_of(op, device);
  const auto run = [&](const Gemm& gemm, bool has_bias) {
    const Description description(op, gemm, has_bias);
    const auto algorithm = algorithm_for(op, handle, gemm, has_bias, device);
    if (!algorithm) return false;
    gemm.dtype == DType::float64 ? multiply<double>(op, gemm, description, *algorithm, handle, context)
                                 : multiply<float>(op, gemm, description, *algorithm, handle, context);
    return true;
  };
  // cuBLASLt chooses an algorithm without the bias's alignment, and its kernels load vectors of the bias.
  constexpr std::uintptr_t kBiasAlignment = 16;
  const bool is_bias_aligned = reinterpret_cast<std::uintptr_t>(product.bias) % kBiasAlignment == 0;
  if (is_bias_aligned && run(product, product.bias != nullptr)) return;
  if (product.bias != nullptr) {
    // cuBLASLt adds a bias for some dtypes only: here c starts as the bias, and the product is added to it.
    fill(op, product, context);
    Gemm rest = product;
    rest.bias = nullptr;
    rest.accumulates = true;
    if (run(rest, false)) return;
  }
  throw Unsupported(op, "cuBLASLt has no algorithm for a product of [" + std::to_string(product.m) + ", " +
                            std::to_string(product.k) + "] and [" + std::to_string(product.k) + ", " +
                            std::to_string(product.n) + "] of " + name_of(product.dtype));
}

}  // namespace eaves::cuda
