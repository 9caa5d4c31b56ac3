// A product of matrices on Hopper (compute capability 9.0) that ends in exponentials: logits are in its accumulators
// and never in memory.
//
//   z = x weight^T                       [rows, classes], float32
//   t = z * factor - shift[row]          so that 2^t is what a softmax is made of
//
// One kernel for each thing that is done with t, in src/cuda/sm90, on the headers of CUTLASS. Beside it a product
// writes the logit of one class of each row, because what is computed of a target has to come from the same
// accumulators.
#pragma once

#include <bit>
#include <cstdint>

#include "core/gemm.h"
#include "core/numeric.h"
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
  float factor;                ///< of logits: a scale times log2(e)
  const float* shift;          ///< [rows]; these and the following start on 16 bytes
  const std::int32_t* target;  ///< [rows], a class each; none: -1
  float* target_logit;         ///< out; [rows], z of the target where there is one
};

/// Tiles of the result, which the sums are of.
inline constexpr std::int64_t kExpProductRows = 128;
inline constexpr std::int64_t kExpProductClasses = 256;

/// What the kernels ask of x and weight: rows on 16 bytes, and rows of the weight as rows.
bool takes_exp_product(DType dtype, const GemmMatrix& x, const GemmMatrix& weight, std::int64_t features);

/// Is the product in this build, and does it run on `device`? Never throws.
bool has_exp_product(Device device);

/// For each row and tile of classes: the sums of 2^t and of 2^t * t.
struct ExpProductSums {
  float* sums;     ///< [tiles, rows up to a whole tile]
  float* moments;  ///< the same
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductSums& to, const ExecutionContext& context);

/// 2^t in 16 bits, none of them for a sign: float32's exponent and 8 bits of its fraction. What is rounded to bfloat16
/// later has hardly more than that one rounding.
struct PackedPower {
  std::uint16_t bits;

  /// Of a number that is not negative, nor NaN with a sign. Half a unit is added for the nearest.
  static EAVES_HOST_DEVICE PackedPower of(float power) {
    return {static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(power) + 0x4000u) >> 15)};
  }
  EAVES_HOST_DEVICE float value() const { return std::bit_cast<float>(std::uint32_t{bits} << 15); }
};

/// The sums, and the powers that they are of.
struct ExpProductPowers {
  ExpProductSums sums;
  PackedPower* to;  ///< [rows, classes]
  std::int64_t stride;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductPowers& to,
                 const ExecutionContext& context);

/// For each logit 2^t * (constant[row] + slope[row] * t), rounded to the dtype of the product; 0 where both are 0.
struct ExpProductGradient {
  const float* constant;
  const float* slope;
  void* to;  ///< [rows, classes]
  std::int64_t stride;
};

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context);

}  // namespace eaves::cuda
