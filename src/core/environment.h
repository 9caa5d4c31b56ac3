// Switches in the environment. They are read on each call, so that a test or a debugger can change them, but not while
// another thread is in one. (EAVES_CPU_GEMM, which is read once, is in cpu/gemm.cpp.)
#pragma once

namespace eaves {

/// EAVES_CHECK_TARGETS=1: targets on a GPU are copied and checked, and the call waits for that.
bool checks_targets_on_gpu();

/// EAVES_BATCH_INVARIANT=1: what a call gives for a row does not depend, bit for bit, on which other rows are in it.
/// What that covers: docs/design.md, "Batch invariance".
bool is_batch_invariant();

/// EAVES_FUSED_PRODUCT: does linear_cross_entropy take the fused path (docs/design.md)? 0: never;
/// 1: wherever it can, from 4096 classes on, and an online softmax for any number of features; unset: the faster way.
enum class FusedProduct { never, where_faster, wherever_possible };
FusedProduct fused_product();

}  // namespace eaves
