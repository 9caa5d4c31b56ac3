// The part of cuBLASLt that eaves uses, declared here and loaded on first use: the library is large, many machines with
// a GPU lack it, and most operators do not need it. Types and numbers are the library's. A test compares them with
// cublasLt.h if that header is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace eaves::cuda::cublaslt {

using Status = int;
using Handle = void*;

inline constexpr Status kSuccess = 0;
inline constexpr Status kNotSupported = 15;

enum DataType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBfloat16 = 14 };
enum ComputeType : int { kCompute32 = 68, kCompute64 = 70 };
enum Operation : std::int32_t { kAsItIs = 0, kTransposed = 1 };
enum PointerMode : std::int32_t { kDevicePointers = 1 };
enum Epilogue : std::uint32_t { kAddBias = 4 };

/// How the parts of a long sum are added: the mask for kReductionSchemes. The other schemes add them in the type of c.
enum ReductionScheme : std::uint32_t { kNoReduction = 0, kAccumulatorsOnly = 2 };

enum MatmulAttribute : int {
  kPointerMode = 2,
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBiasDataType = 26
};
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8
};

enum AlgorithmAttribute : int { kTile = 1, kCustomOption = 5, kClusterShape = 8 };
enum TileName : std::uint32_t { kTile128x160 = 29 };
enum ClusterName : std::uint16_t { kCluster2x1x1 = 3 };

// The library fills these in. The first three are at least as large as in any of its versions; Algorithm and
// HeuristicResult have exactly its size.
struct MatrixLayout {
  std::uint64_t data[8];
};
struct MatmulDescription {
  std::uint64_t data[32];
};
struct Preference {
  std::uint64_t data[8];
};
struct Algorithm {
  std::uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

struct Library {
  Status (*create)(Handle* handle);
  const char* (*status_string)(Status status);
  Status (*init_layout)(MatrixLayout* layout, std::size_t size, DataType type, std::uint64_t rows,
                        std::uint64_t columns, std::int64_t stride);
  Status (*init_description)(MatmulDescription* description, std::size_t size, ComputeType compute, DataType scale);
  Status (*set_description)(MatmulDescription* description, MatmulAttribute attribute, const void* value,
                            std::size_t size);
  Status (*init_preference)(Preference* preference, std::size_t size);
  Status (*set_preference)(Preference* preference, PreferenceAttribute attribute, const void* value, std::size_t size);
  Status (*get_heuristic)(Handle handle, const MatmulDescription* description, const MatrixLayout* a,
                          const MatrixLayout* b, const MatrixLayout* c, const MatrixLayout* d,
                          const Preference* preference, int requested, HeuristicResult* results, int* found);
  Status (*get_algorithm)(const Algorithm* algorithm, AlgorithmAttribute attribute, void* value, std::size_t size,
                          std::size_t* written);
  Status (*matmul)(Handle handle, const MatmulDescription* description, const void* alpha, const void* a,
                   const MatrixLayout* a_layout, const void* b, const MatrixLayout* b_layout, const void* beta,
                   const void* c, const MatrixLayout* c_layout, void* d, const MatrixLayout* d_layout,
                   const Algorithm* algorithm, void* workspace, std::size_t workspace_bytes, void* stream);
  std::string missing;  ///< why the library cannot be used, in one sentence; else empty
};

/// Loaded by the first call. Never throws.
const Library& library();

}  // namespace eaves::cuda::cublaslt
