// Environment variables that switch behaviour. Each call reads them, so a test or a debugger may change them, but not
// while another thread is inside a call. (cpu/gemm.cpp reads EAVES_CPU_GEMM, once.)
#pragma once

namespace eaves {

/// EAVES_CHECK_TARGETS=1: a call copies its targets from the GPU, checks them, and waits for the copy.
bool checks_targets_on_gpu();

/// EAVES_BATCH_INVARIANT=1: the results of a row do not depend, bit for bit, on the other rows of the call. Scope:
/// docs/design.md, "Batch invariance".
bool is_batch_invariant();

/// EAVES_FUSED_PRODUCT selects the fused path of linear_cross_entropy (docs/design.md). 0: never. 1: always if the path
/// supports the call, from 4096 classes on, with an online softmax for any number of features. auto: if it is faster.
/// Unset: likewise, on GPUs whose kernels have been run.
enum class FusedProduct { never, where_tried, where_faster, wherever_possible };
FusedProduct fused_product();

}  // namespace eaves
