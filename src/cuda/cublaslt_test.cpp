// Compares the declarations of cublaslt.h with NVIDIA's header, if the compiler finds it (from the toolkit's cuBLAS
// package or the wheel nvidia-cublas).
#include "cuda/cublaslt.h"

#include <gtest/gtest.h>

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define EAVES_HAS_CUBLASLT_HEADER 1
#else
#define EAVES_HAS_CUBLASLT_HEADER 0
#endif

namespace eaves::cuda::cublaslt {
namespace {

#if EAVES_HAS_CUBLASLT_HEADER
TEST(Cublaslt, NumbersAreThoseOfTheLibrarysHeader) {
  EXPECT_EQ(kSuccess, CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(kFloat32, int{CUDA_R_32F});
  EXPECT_EQ(kFloat64, int{CUDA_R_64F});
  EXPECT_EQ(kFloat16, int{CUDA_R_16F});
  EXPECT_EQ(kBfloat16, int{CUDA_R_16BF});
  EXPECT_EQ(kCompute32, int{CUBLAS_COMPUTE_32F});
  EXPECT_EQ(kCompute64, int{CUBLAS_COMPUTE_64F});
  EXPECT_EQ(kAsItIs, int{CUBLAS_OP_N});
  EXPECT_EQ(kTransposed, int{CUBLAS_OP_T});
  EXPECT_EQ(kDevicePointers, int{CUBLASLT_POINTER_MODE_DEVICE});
  EXPECT_EQ(kAddBias, unsigned{CUBLASLT_EPILOGUE_BIAS});
  EXPECT_EQ(kPointerMode, int{CUBLASLT_MATMUL_DESC_POINTER_MODE});
  EXPECT_EQ(kTransposeA, int{CUBLASLT_MATMUL_DESC_TRANSA});
  EXPECT_EQ(kTransposeB, int{CUBLASLT_MATMUL_DESC_TRANSB});
  EXPECT_EQ(kEpilogue, int{CUBLASLT_MATMUL_DESC_EPILOGUE});
  EXPECT_EQ(kBiasPointer, int{CUBLASLT_MATMUL_DESC_BIAS_POINTER});
  EXPECT_EQ(kBiasDataType, int{CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE});
  EXPECT_EQ(kMaxWorkspaceBytes, int{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES});
  EXPECT_EQ(kReductionSchemes, int{CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK});
  EXPECT_EQ(kNoReduction, unsigned{CUBLASLT_REDUCTION_SCHEME_NONE});
  EXPECT_EQ(kAccumulatorsOnly, unsigned{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  EXPECT_EQ(kMinAlignmentA, int{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES});
  EXPECT_EQ(kMinAlignmentB, int{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES});
  EXPECT_EQ(kMinAlignmentC, int{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES});
  EXPECT_EQ(kMinAlignmentD, int{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES});
  EXPECT_EQ(kTile, int{CUBLASLT_ALGO_CONFIG_TILE_ID});
  EXPECT_EQ(kCustomOption, int{CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION});
  EXPECT_EQ(kClusterShape, int{CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID});
  EXPECT_EQ(kTile128x160, unsigned{CUBLASLT_MATMUL_TILE_128x160});
  EXPECT_EQ(kCluster2x1x1, unsigned{CUBLASLT_CLUSTER_SHAPE_2x1x1});
}

TEST(Cublaslt, StructsAreLargeEnough) {
  EXPECT_GE(sizeof(MatrixLayout), sizeof(cublasLtMatrixLayoutOpaque_t));
  EXPECT_GE(sizeof(MatmulDescription), sizeof(cublasLtMatmulDescOpaque_t));
  EXPECT_GE(sizeof(Preference), sizeof(cublasLtMatmulPreferenceOpaque_t));
  EXPECT_EQ(sizeof(Algorithm), sizeof(cublasLtMatmulAlgo_t));
  EXPECT_EQ(sizeof(HeuristicResult), sizeof(cublasLtMatmulHeuristicResult_t));
  EXPECT_EQ(offsetof(HeuristicResult, state), offsetof(cublasLtMatmulHeuristicResult_t, state));
}
#else
TEST(Cublaslt, NumbersAreThoseOfTheLibrarysHeader) { GTEST_SKIP() << "cublasLt.h is not installed"; }
#endif

}  // namespace
}  // namespace eaves::cuda::cublaslt
