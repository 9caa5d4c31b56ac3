// A matrix product on Hopper (compute capability 9.0) and on Blackwell (10.0, 10.3) that ends in exponentials. The
// logits exist in its accumulators alone, never in memory.
//
//   z = x weight^T + bias                  [rows, classes], float32
//   t = z * factor - shift[row]            a softmax is made of 2^t; or with a soft cap
//   t = tanh(z * to_tanh) * factor - shift[row]
//
// The kernels are in src/cuda/cutlass, on the headers of CUTLASS; there is one kernel for each use of t. Each kernel
// also writes the logit of each row's target: loss and exponential have to come from the same accumulators.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/gemm.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves::cuda {

struct ExpProduct {
  Device device;
  std::int64_t rows;
  std::int64_t classes;
  std::int64_t features;
  DType dtype;                 ///< of x and weight: bfloat16 or float16
  GemmMatrix x;                ///< [rows, features]
  GemmMatrix weight;           ///< [classes, features]
  const float* bias;           ///< [classes]; nullptr: 0
  float to_tanh;               ///< a scale over a soft cap; 0: no soft cap
  float factor;                ///< a scale times log2(e), or a soft cap times log2(e)
  const float* shift;          ///< [rows]; nullptr for ExpProductSoftmax, which finds its own
  const std::int32_t* target;  ///< [rows], a class each; -1: none
  float* target_logit;         ///< out; [rows], z of the target; not written for a row without one
};

/// Sums are taken over a row and a tile of classes. Rows are computed in tiles too, and a cluster computes two of them
/// together. The reason: docs/design.md, "An operator of matrix products".
inline constexpr std::int64_t kExpProductRows = 128;
inline constexpr std::int64_t kExpProductClasses = 192;
inline constexpr std::int64_t kExpProductClusterRows = 2 * kExpProductRows;

/// The kernels need x and weight with rows that start on 16 bytes, and not transposed.
bool takes_exp_product(DType dtype, const GemmMatrix& x, const GemmMatrix& weight, std::int64_t features);

/// True if this build has the product and `device` can run it. The kernels for Blackwell are untested on hardware:
/// there EAVES_FUSED_PRODUCT also has to be auto or 1.
bool has_exp_product(Device device);

/// The number of elements of a product's sums: [tiles of classes, rows up to a whole tile].
inline std::int64_t exp_product_sums(std::int64_t rows, std::int64_t classes) {
  return ceil_divide(classes, kExpProductClasses) * ceil_divide(rows, kExpProductRows) * kExpProductRows;
}

/// For each row and tile of classes, the sums of 2^t and of 2^t * t. If `exps` is not nullptr, x and weight are
/// bfloat16, and each 2^t is written too: times the derivative of tanh with a soft cap, rounded to bfloat16, which has
/// the range of float32.
struct ExpProductSums {
  float* sums;           ///< [tiles, rows up to a whole tile]
  float* moments;        ///< the same
  void* exps = nullptr;  ///< [rows, classes]
  std::int64_t stride = 0;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductSums& to, const ExecutionContext& context);

/// The online softmax of each row and tile of classes: the largest z * factor, which is the shift of t (0 if infinite),
/// and the sums of 2^t and of 2^t * t.
struct ExpProductSoftmax {
  float* shifts;   ///< [tiles, rows up to a whole tile]
  float* sums;     ///< the same
  float* moments;  ///< the same; nullptr: not wanted
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductSoftmax& to,
                 const ExecutionContext& context);

/// For each logit 2^t * (constant[row] + slope[row] * t), times the derivative of tanh with a soft cap, rounded to the
/// product's dtype, which is bfloat16; 0 if constant and slope are both 0.
struct ExpProductGradient {
  const float* constant;
  const float* slope;
  void* to;  ///< [rows, classes]
  std::int64_t stride;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context);

}  // namespace eaves::cuda
