// A product of matrices on Hopper (compute capability 9.0) that ends in exponentials: logits are in its accumulators
// and never in memory.
//
//   z = x weight^T + bias                  [rows, classes], float32
//   t = z * factor - shift[row]            so that 2^t is what a softmax is made of; or with a soft cap
//   t = tanh(z * to_tanh) * factor - shift[row]
//
// The kernels are in src/cuda/sm90, on the headers of CUTLASS, one for each thing that is done with t. Each also writes
// the logit of each row's target: its loss has to come from the accumulators that its exponential comes from.
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
  const float* shift;          ///< [rows]; of a softmax nullptr: it finds its own
  const std::int32_t* target;  ///< [rows], a class each; none: -1
  float* target_logit;         ///< out; [rows], z of the target where there is one
};

/// Sums are of a row and a tile of classes; rows are computed in tiles too, those of a cluster together. Why so:
/// docs/design.md, "An operator of matrix products".
inline constexpr std::int64_t kExpProductRows = 128;
inline constexpr std::int64_t kExpProductClasses = 192;
inline constexpr std::int64_t kExpProductClusterRows = 2 * kExpProductRows;

/// What the kernels ask of x and weight: rows on 16 bytes, nothing transposed.
bool takes_exp_product(DType dtype, const GemmMatrix& x, const GemmMatrix& weight, std::int64_t features);

/// Is the product in this build, and does it run on `device`?
bool has_exp_product(Device device);

/// Elements of the sums of a product: [tiles of classes, rows up to a whole tile].
inline std::int64_t exp_product_sums(std::int64_t rows, std::int64_t classes) {
  return ceil_divide(classes, kExpProductClasses) * ceil_divide(rows, kExpProductRows) * kExpProductRows;
}

/// For each row and tile of classes: the sums of 2^t and of 2^t * t. Where `exps` is not nullptr also each 2^t, times
/// the derivative of tanh with a soft cap, rounded to bfloat16, whose range is that of float32; x and weight are of
/// bfloat16 then.
struct ExpProductSums {
  float* sums;           ///< [tiles, rows up to a whole tile]
  float* moments;        ///< the same
  void* exps = nullptr;  ///< [rows, classes]
  std::int64_t stride = 0;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductSums& to, const ExecutionContext& context);

/// The online softmax of each row and tile of classes: the largest z * factor, which is the shift of t (0 if it is
/// infinite), and the sums of 2^t and of 2^t * t.
struct ExpProductSoftmax {
  float* shifts;   ///< [tiles, rows up to a whole tile]
  float* sums;     ///< the same
  float* moments;  ///< the same; nullptr: not wanted
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductSoftmax& to,
                 const ExecutionContext& context);

/// For each logit 2^t * (constant[row] + slope[row] * t), times the derivative of tanh with a soft cap, rounded to the
/// dtype of the product; 0 where both are 0.
struct ExpProductGradient {
  const float* constant;
  const float* slope;
  void* to;  ///< [rows, classes]
  std::int64_t stride;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context);

}  // namespace eaves::cuda
