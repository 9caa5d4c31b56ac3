// linear_cross_entropy: a language model's head and its loss in one operator, which never holds all logits.
//
//   z     = hidden head^T + bias       [rows, classes], by blocks of rows and classes, never all of it
//   loss  = cross_entropy(z, targets)  with the options, formulas and edge cases of cross_entropy.h
//
// Three algorithms compute the gradients. Their results agree up to rounding:
//
//   speed      linear_cross_entropy_forward_backward. For each chunk of rows it computes the logits, writes their
//              gradient over them, and multiplies that gradient by head and by hidden. Three matrix products; the
//              workspace holds the logits of a chunk. With linear_cross_entropy_small_workspace() as its limit it takes
//              little memory and more time.
//   recompute  linear_cross_entropy_forward, which keeps lse alone, then linear_cross_entropy_backward, which computes
//              the logits again, a block of rows and classes at a time. Four matrix products in a small workspace.
//   keep       the same two calls with a `kept` tensor. The forward writes one number for each logit, for as many rows
//              as `kept` has; the backward multiplies by these numbers. Three matrix products for any dL/d(loss).
//              grad_head of kept exponentials is one product over all kept rows if grad_hidden is wanted in the dtype
//              of hidden.
//
// The operator computes and reads logits in float32 (float64 for float64): probabilities come from the accumulators of
// the product, not from logits rounded to the type of hidden. The gradient of the logits is a factor of both products
// that follow, with head and with hidden, and is rounded once to the type of hidden. Both products sum in float32.
// grad_hidden is rounded once, grad_head once for each chunk of rows. On a GPU a 16-bit grad_head has more roundings:
// the product of each chunk before it is added; and on the fused path (docs/numerics.md) the targets' part, and each
// row of hidden times its factor. A float32 grad_head is never rounded to 16 bits.
//
// The scale is dL/d(loss) over the mean's divisor. Without a reduction a call has a scale if dL/d(loss) is one number
// in all rows, zeros apart. With float32 and float64 inputs the factor includes the scale. With 16-bit inputs the scale
// multiplies the results of the products: the factor would round it the same way in every row. If lse or entropy have
// gradients, the power of two of the scale stays in the factor. A dL/d(loss) that differs between rows is always in the
// factor, and so are row weights: in float16, numbers below 1e-4 lose digits there, and numbers beyond 1e4 overflow.
//
// Edge cases beside the list of cross_entropy.h: a row does not count if it is ignored or has weight 0. Its gradients
// and all its outputs are 0. If the call skips such rows (skips_ignored), their hidden may hold anything. Otherwise a
// hidden that is not finite in such a row may make grad_head NaN, and a head that is not finite may make grad_hidden of
// such a row NaN, as 0 * NaN is NaN.
#pragma once

#include <functional>

#include "eaves/context.h"
#include "eaves/cross_entropy.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

// "Per row" means the shape of hidden without its last axis. Outputs per row are contiguous, in the forward that writes
// them and in the backward that reads them. "Result dtype" means float32, or float64 for a float64 hidden.

struct LinearCrossEntropyInputs {
  /// [..., features], any strides; float16, bfloat16, float32 or float64. A call copies hidden chunk by chunk unless
  /// its rows lie at a constant distance and its features have unit stride.
  TensorView hidden = {};

  /// [classes, features], unit stride along one of the axes; dtype of hidden.
  TensorView head = {};

  /// optional; [classes], contiguous; dtype of hidden, or float32.
  TensorView bias = {};

  /// Per row, any strides: int32 or int64 classes. Or soft targets: [..., classes], rows at a constant distance,
  /// classes with unit stride; float32, or float64 for a float64 hidden.
  TensorView targets = {};

  /// w of cross_entropy.h, optional; [classes], contiguous; dtype of hidden, or float32.
  TensorView class_weight = {};

  /// r of cross_entropy.h, optional; per row, contiguous, result dtype. Ignored rows may have any number. Rows of
  /// weight 0 do not count either.
  TensorView row_weight = {};

  CrossEntropyOptions options = {};

  /// Leaves out the rows that do not count before any product; the call then gathers the soft targets of the other
  /// rows. The CPU always does so. On a GPU, true: the call waits once, for the number of rows; false: these rows cost
  /// as much as the others. During the capture of a CUDA graph nothing can wait, so the call computes all rows. A
  /// backward with Reduction::none, without `kept` and without shards, also leaves out rows with upstream gradients
  /// that are all 0.
  bool skips_ignored = false;

  /// The most scratch memory that the call should take, in bytes. It decides how many rows (and classes) a call
  /// computes at once. 0: the operator chooses for the device. A workspace of the context replaces this limit by its
  /// size. A limit below the smallest chunk is raised to that chunk. With EAVES_BATCH_INVARIANT=1 in the environment,
  /// workspace_limit alone decides the classes of a block, and a workspace of the context needs at least the bytes that
  /// ..._workspace_bytes() returns; with shards likewise.
  std::size_t workspace_limit = 0;
};

/// A head with its classes cut into shards, one for each rank. The head, bias, class_weight and soft targets of a call
/// belong to one shard; the ranks pass the same values of everything else. Hard targets are classes of the whole head.
///
/// All ranks compute the rows in the same chunks, in their order. As always the call leaves out rows that do not count;
/// `first` and `rows` count the other rows. The call runs the functions below on the host. The work that they enqueue
/// on the call's stream comes after everything that the call has enqueued before, and ahead of everything that it
/// enqueues later.
struct LinearCrossEntropyShard {
  /// The first class of the head. A shard may have no classes: the call then does not write grad_hidden, which the
  /// caller has to set to 0 before.
  std::int64_t first_class = 0;
  std::int64_t classes = 0;       ///< of all shards; 0: there are no shards
  std::int64_t most_classes = 0;  ///< of the largest shard; it decides the rows of a chunk

  /// Outside of the backward: the outputs that the merge will write. With both false, calls with many classes are
  /// faster.
  bool is_for_mean_logit = false;
  bool is_for_argmax_or_sum_sq = true;

  // For forward and backward at once:
  std::int64_t shards = 1;

  /// out, result dtype, contiguous: at least rows * kCrossEntropyStatistics elements.
  TensorView statistics = {};

  /// Likewise, with `shards` times as many elements.
  TensorView gathered = {};

  /// Gathers the statistics of a chunk from all ranks: from statistics + first * kCrossEntropyStatistics to
  /// gathered + shards * first * kCrossEntropyStatistics, as [shards, rows, kCrossEntropyStatistics] in the order of
  /// the classes.
  std::function<void(std::int64_t first, std::int64_t rows)> gather = {};

  /// optional: `gather` may then only begin the exchange, and this function has to end it. Between the two the call
  /// enqueues other work, the product for grad_hidden if it can, which hides the exchange.
  std::function<void(std::int64_t first, std::int64_t rows)> finish_gather = {};

  /// optional; for forward and backward at once, and for the backward. Called when the chunk's rows of grad_hidden are
  /// complete: this shard's part of a sum over the ranks.
  std::function<void(std::int64_t first, std::int64_t rows)> grad_hidden_is_complete = {};
};

struct LinearCrossEntropyOutputs {
  /// As in CrossEntropyForwardArgs. The backward needs lse, best as two numbers for each row; target_mass with soft
  /// targets or class weights; divisor with Reduction::mean.
  TensorView loss = {};
  TensorView lse = {};
  TensorView argmax = {};
  TensorView entropy = {};
  TensorView sum_sq = {};
  TensorView mean_logit = {};
  TensorView z_loss = {};
  TensorView target_mass = {};
  TensorView divisor = {};
};

/// Each is optional: the call does not compute an absent gradient.
struct LinearCrossEntropyGradients {
  /// out; shape and dtype of hidden, any strides that give each element an address of its own. For a shard the result
  /// dtype is allowed too: its part of the sum over the ranks is then not rounded to 16 bits.
  TensorView grad_hidden = {};

  /// out; [classes, features], features with unit stride; dtype of head, or the result dtype.
  TensorView grad_head = {};

  /// out; [classes], contiguous; dtype of hidden, or the result dtype.
  TensorView grad_bias = {};

  /// Adds the gradients to grad_head and grad_bias instead of overwriting them.
  bool accumulates = false;
};

struct LinearCrossEntropyForwardArgs {
  LinearCrossEntropyInputs inputs = {};

  /// optional, with Reduction::mean: one element of the result dtype that replaces the sum of the weights as the
  /// divisor (the tokens of all micro-batches and ranks, say). Not negative, as in CrossEntropyForwardArgs.
  TensorView normalizer = {};

  LinearCrossEntropyOutputs outputs = {};

  /// out, optional; contiguous, of the dtype and size that linear_cross_entropy_kept() returns: the numbers that the
  /// backward needs of the first computed rows.
  TensorView kept = {};
};

struct LinearCrossEntropyForwardBackwardArgs {
  /// Any reduction; Reduction::none if grad_loss is known before the loss. `kept` is absent.
  LinearCrossEntropyForwardArgs forward = {};

  /// dL/d(loss), optional: one element, or with Reduction::none per row with any strides; result dtype, or the dtype of
  /// hidden; absent: 1.
  TensorView grad_loss = {};

  LinearCrossEntropyGradients gradients = {};

  /// With shards the call needs outputs.lse; with class weights or soft targets also target_mass; for a mean over hard
  /// targets with class weights also a normalizer.
  LinearCrossEntropyShard shard = {};
};

struct LinearCrossEntropyBackwardArgs {
  /// dL/d(loss), as in LinearCrossEntropyForwardBackwardArgs, but not optional.
  TensorView grad_loss = {};

  /// dL/d(lse) and dL/d(entropy), optional; result dtype, per row. They do not reach rows that do not count.
  TensorView grad_lse = {};
  TensorView grad_entropy = {};

  /// As in the forward.
  LinearCrossEntropyInputs inputs = {};

  /// As the forward wrote them: lse always; entropy with grad_entropy; target_mass with soft targets or class weights;
  /// divisor with Reduction::mean.
  TensorView lse = {};
  TensorView entropy = {};
  TensorView target_mass = {};
  TensorView divisor = {};

  /// inout, optional; as a forward with the same inputs wrote it. If rows are left out, forward and backward must both
  /// be captured in a CUDA graph, or neither. A backward writes over a bfloat16 `kept`. With grad_entropy it overwrites
  /// all of `kept`, so no other backward may read it; without, it overwrites the rows that have a gradient of 0 and an
  /// lse that is not finite. The backward ignores `kept` if the rows of its tensors do not lie in the order of their
  /// shape. Not with shards.
  TensorView kept = {};

  LinearCrossEntropyGradients gradients = {};

  LinearCrossEntropyShard shard = {};
};

/// The `kept` tensor of a forward: [rows, columns].
struct LinearCrossEntropyKept {
  /// bfloat16: exponentials of the logits, in 16 bits, and two more numbers for each row. Otherwise the logits, in the
  /// result dtype.
  DType dtype = DType::float32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;  ///< at least the number of classes
};

struct LinearCrossEntropyShardForwardArgs {
  LinearCrossEntropyInputs inputs = {};
  LinearCrossEntropyShard shard = {};

  /// out, result dtype, contiguous: kCrossEntropyStatistics numbers for each computed row, in the order of the rows.
  /// The call writes nothing for rows that it leaves out. cross_entropy_merge computes the loss from the statistics of
  /// all shards. It gives a row of weight 0 the loss 0; the caller has to zero lse, argmax, entropy, sum_sq, mean_logit
  /// and target_mass of that row.
  TensorView statistics = {};
};

struct LinearCrossEntropyRescaleArgs {
  /// inout; as linear_cross_entropy_forward_backward wrote them. A set `accumulates` is refused.
  LinearCrossEntropyGradients gradients = {};

  /// One element; float32, or float64 for float64 gradients.
  TensorView grad_loss = {};
};

/// All throw InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA, or no cuBLASLt), DeviceError (a launch failed).
///
/// The forward computes the loss alone, with one matrix product.
void linear_cross_entropy_forward(const LinearCrossEntropyForwardArgs& args, const ExecutionContext& context = {});
void linear_cross_entropy_backward(const LinearCrossEntropyBackwardArgs& args, const ExecutionContext& context = {});
void linear_cross_entropy_forward_backward(const LinearCrossEntropyForwardBackwardArgs& args,
                                           const ExecutionContext& context = {});

/// The statistics of the rows in one shard, with one matrix product.
void linear_cross_entropy_shard_forward(const LinearCrossEntropyShardForwardArgs& args,
                                        const ExecutionContext& context = {});

/// gradients *= grad_loss, for a dL/d(loss) that is known only after linear_cross_entropy_forward_backward. Zeros stay
/// 0, even times an infinite factor. A factor of 1 costs nothing; on a GPU the kernel finds it, and the host waits for
/// nothing.
void linear_cross_entropy_rescale(const LinearCrossEntropyRescaleArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch memory that the call takes under its limit; at least the bytes of the smallest chunk. These
/// functions ignore the context's workspace. linear_cross_entropy_rescale needs no scratch memory.
std::size_t linear_cross_entropy_forward_workspace_bytes(const LinearCrossEntropyForwardArgs& args,
                                                         const ExecutionContext& context = {});
std::size_t linear_cross_entropy_backward_workspace_bytes(const LinearCrossEntropyBackwardArgs& args,
                                                          const ExecutionContext& context = {});
std::size_t linear_cross_entropy_forward_backward_workspace_bytes(const LinearCrossEntropyForwardBackwardArgs& args,
                                                                  const ExecutionContext& context = {});
std::size_t linear_cross_entropy_shard_forward_workspace_bytes(const LinearCrossEntropyShardForwardArgs& args,
                                                               const ExecutionContext& context = {});

/// The largest `kept` tensor of this call within `most_bytes`. It holds exponentials if all of these hold: a GPU of
/// compute capability 9.0; a bfloat16 `hidden` with at least 128 rows; a head of 4096 to 2^20 classes; contiguous
/// features, a multiple of 8; no soft targets, no label smoothing, no argmax, sum_sq or mean_logit; no soft cap beyond
/// 50, and none together with an entropy. Otherwise it holds logits, in at least twice the memory. On a GPU the number
/// of rows is a multiple of 128 unless it is all rows. It is 0 if the rows of hidden do not lie in the order of their
/// shape, as in a transposed [T, B, features].
LinearCrossEntropyKept linear_cross_entropy_kept(const LinearCrossEntropyForwardArgs& args, std::size_t most_bytes);

/// A workspace limit for linear_cross_entropy_forward_backward on a GPU that saves memory and keeps three products
/// faster than four: room for 512 rows of 16-bit numbers, but at least 160 MiB, which is 1024 rows of 65,536 classes.
/// If the logits are in memory, in float32, half as many rows fit.
inline constexpr std::size_t linear_cross_entropy_small_workspace(std::int64_t classes) {
  constexpr std::size_t kLeast = std::size_t{160} << 20;
  const std::size_t of_512_rows = static_cast<std::size_t>(classes) * 1024 + (std::size_t{24} << 20);
  return of_512_rows > kLeast ? of_512_rows : kLeast;
}

enum class LinearCrossEntropyAlgorithm : std::uint8_t { speed, recompute };

/// The facts of a call that decide its algorithm. The decision assumes a hidden that is a matrix with aligned rows.
struct LinearCrossEntropyAlgorithmArgs {
  std::int64_t rows = 0;  ///< of hidden; negative: unknown sizes, as in a graph that is traced for any size
  std::int64_t features = 1;
  std::int64_t classes = 1;
  DType dtype = DType::float32;  ///< of hidden and head
  Device device = kCpu;
  Reduction reduction = Reduction::mean;
  bool is_head_transposed = false;  ///< the classes have unit stride
  bool has_soft_targets = false;
  bool has_grad_hidden_alone =
      false;  ///< head and bias get no gradient, and the backward can multiply the rows of grad_hidden
  bool has_output_gradients = false;  ///< lse or entropy may get a gradient
  bool accumulates = false;           ///< the backward adds grad_head to the caller's tensor
  bool is_shard = false;
  std::size_t workspace_limit = 0;  ///< 0: the operator's own limit
};

/// The algorithm for a call whose dL/d(loss) is not known in the forward.
///
///   speed      if the workspace holds a chunk of enough rows for three products to be faster than four: 384 rows on a
///              GPU, or all rows. For a shard (no rank knows the largest one) and for unknown sizes: if there is no
///              limit.
///   recompute  in float16, because a loss scale would multiply gradients that are already rounded; for a loss per row,
///              unless grad_hidden is the only gradient; if lse or entropy may get a gradient; if the backward
///              accumulates.
///
/// Throws InvalidArgument for sizes and types that no call has.
LinearCrossEntropyAlgorithm linear_cross_entropy_algorithm(const LinearCrossEntropyAlgorithmArgs& args);

}  // namespace eaves
#pragma GCC visibility pop
