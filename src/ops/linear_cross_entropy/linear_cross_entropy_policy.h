// The numbers that linear_cross_entropy is cut by: how much memory a call takes where the caller sets no limit, and
// what a cut costs. Rates of the CPU are those of an AMD EPYC; those of a GPU are estimates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "eaves/tensor.h"

namespace eaves {

struct LinearCrossEntropyPolicy {
  // Limits without a caller's, in bytes, beside what a call needs for every row.
  std::size_t forward_bytes;        ///< the loss alone
  std::size_t fused_forward_bytes;  ///< the same on the fused path
  std::size_t backward_bytes;       ///< that computes logits again
  std::size_t wide_backward_bytes;  ///< the same of `wide_classes` or more
  std::int64_t wide_classes;
  // Both at once: room for `enough_rows`, within these.
  std::size_t least_bytes;
  std::size_t most_bytes;
  std::size_t fused_most_bytes;  ///< on the fused path
  std::int64_t enough_rows;      ///< of a chunk, whose products are nearly as fast as whole ones
  std::int64_t few_rows;         ///< of a chunk: with less, computing logits again is as fast as both at once
  std::int64_t usual_rows;       ///< for blocks of classes that must not depend on the number of rows

  // The smallest block, whatever the limit: with less, the launches of the others alone would take minutes.
  std::int64_t least_rows;
  std::int64_t least_classes;

  std::int64_t row_tile;  ///< what products lose nothing by: whole tiles
  std::int64_t class_tile;
  std::int64_t tiles_at_once;  ///< a product has whole waves of them

  double seconds_per_block;      ///< of kernels that start and end
  double seconds_per_part;       ///< of a row of a block: what is there once for each, however many classes
  double operations_per_second;  ///< of a product
  double bytes_per_second;       ///< of passes over sums; on a GPU twice the memory's: products hide about half of them
};

/// H200, [12288, 4096] in bfloat16: `wide_backward_bytes` make a step with recompute 2 to 3 % faster than
/// `backward_bytes` from 65,536 classes on. Both at once, in times of the three products, with MiB of workspace: 16,384
/// classes 1.05 in chunks of 2048 rows (138) and 1.08 of 6144 (394). On the fused path: 32,768 classes 1.03 of 2048
/// rows (173) and 1.02 of 3072 (255), 65,536 classes 1.01 of either (304, 451), 131,072 classes 1.00 of 1024 (288) and
/// 0.99 of 2048 (566). `least_bytes` are 4096 rows of 8192 classes. `fused_forward_bytes` are sums and samples of about
/// 3000 rows. `forward_bytes` are 66 MiB of logits, of which its L2 holds most, beside the workspace of a product.
/// Tiles are as in cuBLASLt's products on Hopper, one for each of 132 multiprocessors.
inline constexpr LinearCrossEntropyPolicy kLinearCrossEntropyOnGpu = {
    .forward_bytes = std::size_t{78} << 20,
    .fused_forward_bytes = std::size_t{38} << 20,
    .backward_bytes = std::size_t{100} << 20,
    .wide_backward_bytes = std::size_t{300} << 20,
    .wide_classes = 65536,
    .least_bytes = std::size_t{140} << 20,
    .most_bytes = std::size_t{1064} << 20,
    .fused_most_bytes = std::size_t{576} << 20,
    .enough_rows = 2048,
    .few_rows = 384,
    .usual_rows = 1024,
    .least_rows = 16,
    .least_classes = 256,
    .row_tile = 128,
    .class_tile = 256,
    .tiles_at_once = 132,
    .seconds_per_block = 1e-5,
    .seconds_per_part = 1.2e-9,
    .operations_per_second = 7e14,
    .bytes_per_second = 8e12,
};

/// AMD EPYC (Zen 4), 2 threads, [512, 1024] in bfloat16: products lose little by chunks of 256 rows, whose logits are
/// 32 MiB for 32,768 classes, with 1 MiB of gathered rows and their gradient. The loss alone takes blocks of classes
/// whose logits stay in half of the L3 cache.
inline constexpr LinearCrossEntropyPolicy kLinearCrossEntropyOnCpu = {
    .forward_bytes = std::size_t{16} << 20,
    .fused_forward_bytes = 0,
    .backward_bytes = std::size_t{34} << 20,
    .wide_backward_bytes = std::size_t{34} << 20,
    .wide_classes = 65536,
    .least_bytes = std::size_t{34} << 20,
    .most_bytes = std::size_t{34} << 20,
    .fused_most_bytes = 0,
    .enough_rows = 1,
    .few_rows = 1,
    .usual_rows = 256,
    .least_rows = 1,
    .least_classes = 256,
    .row_tile = 32,
    .class_tile = 256,
    .tiles_at_once = 1,
    .seconds_per_block = 0.0,
    .seconds_per_part = 0.0,
    .operations_per_second = 3.5e11,
    .bytes_per_second = 5e10,
};

// The calls that take the fused path.
inline constexpr std::int64_t kLeastFusedClasses = 4096;    ///< kept exps; with EAVES_FUSED_PRODUCT=1 all
inline constexpr std::int64_t kFasterFusedClasses = 16384;  ///< the backward, shards, any number of rows
/// The loss alone takes it from so many logits on, of rows of a whole cluster. H200, 4096 features, time over that of
/// logits in memory: 512 rows of 32,768 classes (16 Mi) 1.10, of 50,257 (24.5 Mi) 0.88; 2048 rows of 8192 (16 Mi) 1.05,
/// of 16,384 (32 Mi) 0.91; 12288 rows of 4096 (48 Mi) 0.89; 128 rows, half a cluster, of 131,072 (16 Mi) 1.44.
inline constexpr std::int64_t kLeastFusedLogits = std::int64_t{24} << 20;
/// Both at once make three products in any case. H200, [12288, 4096] in chunks of 2048 rows: 16,384 classes take 8.0 ms
/// on the fused path and 7.6 beside their logits, 32,768 classes 14.9 and 15.8.
inline constexpr std::int64_t kFasterFusedClassesAtOnce = 32768;
/// Of so many features and more, the loss alone takes an online softmax. H200, [12288, 4096], time of the forward over
/// that of its product, with an online softmax and beside a guess: 4096 classes 1.10 and 1.21, 32,768 0.98 and 1.03,
/// 131,072 1.00 and 1.02; with an entropy 3 % more. With 1024 features its product takes 1.10 to 1.2 of that beside a
/// guess, because the epilogue takes longer than the multiplications.
inline constexpr std::int64_t kLeastOnlineFeatures = 1536;
/// The most: which tiles of a row are computed again is kept as bits in shared memory.
inline constexpr std::int64_t kMostFusedClasses = std::int64_t{1} << 20;
inline constexpr std::int64_t kMostFusedRows = (std::int64_t{1} << 31) - 1;  ///< numbers of rows have 32 bits

inline const LinearCrossEntropyPolicy& policy_of(Device device) {
  return device.type == DeviceType::cpu ? kLinearCrossEntropyOnCpu : kLinearCrossEntropyOnGpu;
}

}  // namespace eaves
