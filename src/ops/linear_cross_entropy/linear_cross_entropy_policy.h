// The numbers that decide how linear_cross_entropy cuts its work: the memory of a call without the caller's limit, and
// the cost of a cut. The rates of the CPU were measured on an AMD EPYC; the rates of the GPU are estimates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "eaves/tensor.h"

namespace eaves {

struct LinearCrossEntropyPolicy {
  // Limits without the caller's, in bytes, on top of the bytes that a call needs for every row.
  std::size_t forward_bytes;        ///< the loss alone
  std::size_t fused_forward_bytes;  ///< the loss alone, on the fused path
  std::size_t backward_bytes;       ///< a backward that computes logits again
  std::size_t wide_backward_bytes;  ///< likewise, with `wide_classes` or more
  std::int64_t wide_classes;
  // Loss and gradients at once: room for `enough_rows`, within these bounds.
  std::size_t least_bytes;
  std::size_t most_bytes;
  std::size_t fused_most_bytes;  ///< on the fused path
  std::size_t most_share;        ///< of a GPU's memory: 1 / most_share of it is a bound too
  std::int64_t enough_rows;      ///< in a chunk: its products are nearly as fast as whole ones
  std::int64_t few_rows;    ///< in a chunk: with fewer, computing logits again is as fast as loss and gradients at once
  std::int64_t usual_rows;  ///< for blocks of classes that must not depend on the number of rows

  // The smallest block under any limit: with smaller ones, the launches for all blocks would take minutes.
  std::int64_t least_rows;
  std::int64_t least_classes;

  std::int64_t row_tile;  ///< tiles of a product: a chunk of whole tiles wastes nothing
  std::int64_t class_tile;
  std::int64_t tiles_at_once;  ///< tiles in a wave of a product

  double seconds_per_block;      ///< start and end of a block's kernels
  double seconds_per_part;       ///< of one row in one block, for any number of classes
  double operations_per_second;  ///< in a product
  double bytes_per_second;  ///< in passes over sums; on a GPU twice the memory's rate, because products hide about half
                            ///< of them
};

/// H200, [12288, 4096] in bfloat16. `wide_backward_bytes` make a step with recompute 2 to 3 % faster than
/// `backward_bytes` from 65,536 classes on. Loss and gradients at once, in times of the three products, for two sizes
/// of chunks (MiB of workspace):
///
///   16,384 classes, logits in memory   2048 rows 1.05 (138)   6144 rows 1.08 (394)
///   32,768 classes, fused path         2048 rows 1.03 (173)   3072 rows 1.02 (255)
///   65,536 classes, fused path         2048 rows 1.01 (304)   3072 rows 1.01 (451)
///   131,072 classes, fused path        1024 rows 1.00 (288)   2048 rows 0.99 (566)
///
/// `least_bytes` hold 4096 rows of 8192 classes. `fused_forward_bytes` hold the sums and samples of about 3000 rows.
/// `forward_bytes` hold 66 MiB of logits, most of which stay in L2, and the workspace of a product. Tiles are as in
/// cuBLASLt's products on Hopper, one for each of 132 multiprocessors.
inline constexpr LinearCrossEntropyPolicy kLinearCrossEntropyOnGpu = {
    .forward_bytes = std::size_t{78} << 20,
    .fused_forward_bytes = std::size_t{38} << 20,
    .backward_bytes = std::size_t{100} << 20,
    .wide_backward_bytes = std::size_t{300} << 20,
    .wide_classes = 65536,
    .least_bytes = std::size_t{140} << 20,
    .most_bytes = std::size_t{1064} << 20,
    .fused_most_bytes = std::size_t{576} << 20,
    .most_share = 32,
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

/// AMD EPYC (Zen 4), 2 threads, [512, 1024] in bfloat16. Products lose little in chunks of 256 rows; the logits of a
/// chunk are 32 MiB for 32,768 classes, and the gathered rows with their gradient 1 MiB. The loss alone takes blocks of
/// classes with logits that stay in half of the L3 cache.
inline constexpr LinearCrossEntropyPolicy kLinearCrossEntropyOnCpu = {
    .forward_bytes = std::size_t{16} << 20,
    .fused_forward_bytes = 0,
    .backward_bytes = std::size_t{34} << 20,
    .wide_backward_bytes = std::size_t{34} << 20,
    .wide_classes = 65536,
    .least_bytes = std::size_t{34} << 20,
    .most_bytes = std::size_t{34} << 20,
    .fused_most_bytes = 0,
    .most_share = 1,
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

// The calls that take the fused path, by their sizes.
inline constexpr std::int64_t kLeastFusedClasses = 4096;  ///< for kept exps; with EAVES_FUSED_PRODUCT=1 for all calls
/// For the backward and for shards, with batch invariance also for the loss alone; for any number of rows.
inline constexpr std::int64_t kFasterFusedClasses = 16384;
/// The loss alone takes the fused path from this many logits on, with at least a whole cluster of rows. H200, 4096
/// features, time over the time with logits in memory:
///
///     512 rows of  32,768 classes (16 Mi)     1.10
///     512 rows of  50,257 classes (24.5 Mi)   0.88
///    2048 rows of    8192 classes (16 Mi)     1.05
///    2048 rows of  16,384 classes (32 Mi)     0.91
///   12288 rows of    4096 classes (48 Mi)     0.89
///     128 rows of 131,072 classes (16 Mi)     1.44   half a cluster
inline constexpr std::int64_t kLeastFusedLogits = std::int64_t{24} << 20;
/// Loss and gradients at once take three products on either path. H200, [12288, 4096] in chunks of 2048 rows: 16,384
/// classes take 8.0 ms on the fused path and 7.6 ms with logits in memory, 32,768 classes 14.9 ms and 15.8 ms.
inline constexpr std::int64_t kFasterFusedClassesAtOnce = 32768;
/// From this many features on, the loss alone takes an online softmax; with fewer, it guesses the shift. H200,
/// [12288, 4096], time of the forward over the time of its product, with an online softmax and with a guess: 4096
/// classes 1.10 and 1.21, 32,768 0.98 and 1.03, 131,072 1.00 and 1.02; an entropy adds 3 %. With 1024 features the
/// online softmax's product takes 1.10 to 1.2 times as long as the guess' product, because the epilogue takes longer
/// than the multiplications.
inline constexpr std::int64_t kLeastOnlineFeatures = 1536;
/// The most classes: shared memory has a bit for each tile of a row that is computed again.
inline constexpr std::int64_t kMostFusedClasses = std::int64_t{1} << 20;
inline constexpr std::int64_t kMostFusedRows = (std::int64_t{1} << 31) - 1;  ///< row numbers have 32 bits

inline const LinearCrossEntropyPolicy& policy_of(Device device) {
  return device.type == DeviceType::cpu ? kLinearCrossEntropyOnCpu : kLinearCrossEntropyOnGpu;
}

}  // namespace eaves
