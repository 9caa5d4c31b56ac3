// linear_cross_entropy: a language model's head and its loss in one operator, which never holds all the logits.
//
//   z     = hidden head^T + bias       [rows, classes], row by row or block by block, never all of it
//   loss  = cross_entropy(z, targets)  with every option of cross_entropy.h, whose formulas and edges hold here too
//
// Three ways to the gradients, the same numbers up to rounding:
//
//   speed      linear_cross_entropy_forward_backward: for each chunk of rows the logits, their gradient over them, and
//              both products with it. Three matrix products; the logits of a chunk are the workspace. With
//              linear_cross_entropy_small_workspace() as its limit it takes little memory and more time.
//   recompute  linear_cross_entropy_forward, which keeps lse alone, and linear_cross_entropy_backward, which computes
//              logits again, a block of rows and classes at a time. Four matrix products in little workspace.
//   keep       the same two calls with a `kept` tensor: the forward writes a number of each logit of as many rows as it
//              has, and the backward multiplies by them. Three matrix products, whatever dL/d(loss) is. grad_head of
//              kept exponentials is one product of all these rows where grad_hidden is wanted in the dtype of hidden.
//
// Logits are computed and read in float32 (float64 for float64): probabilities come from the product's own
// accumulators, not from logits rounded to the type of hidden. Their gradient is rounded once to that type, as the
// factor of the two products that it is. Each of those sums in float32 and is rounded once for each chunk of rows
// (grad_head) or once (grad_hidden). On a GPU a grad_head of 16 bits has a second rounding for each chunk, of what is
// added to it, and a third of the target's part on the fused path (docs/numerics.md), on which hidden times the
// gradient of its row is rounded too. A grad_head in float32 is never rounded to 16 bits.
//
// The scale, dL/d(loss) over the mean's divisor, is part of a factor of float32 or float64. In 16 bits it multiplies
// the products' results, because the factor would round it the same way in every row; beside gradients of lse or
// entropy its power of two stays in the factor. Without a reduction there is a scale if dL/d(loss) has the same number
// in all rows, zeros apart. Other numbers of rows are part of the factor, and so are weights of rows: in float16
// numbers below 1e-4 lose digits, and numbers beyond 1e4 overflow.
//
// Over the edges, beside those of cross_entropy: rows that do not count, which are ignored or of weight 0, have
// gradient 0 and all other outputs 0. If they are skipped (see skips_ignored), hidden may hold anything there. Else a
// hidden that is not finite there may make grad_head NaN, and a head that is not finite their grad_hidden, as 0 * NaN
// is.
#pragma once

#include <functional>

#include "eaves/context.h"
#include "eaves/cross_entropy.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

// "Per row" means the shape of hidden without its last axis. Per-row outputs, and what the backward takes of them, are
// contiguous; "result dtype" is float32, or float64 where hidden is float64.

struct LinearCrossEntropyInputs {
  /// [..., features], any strides; float16, bfloat16, float32 or float64. Rows that do not lie at one distance, with
  /// features of unit stride, are copied chunk by chunk.
  TensorView hidden = {};

  /// [classes, features], one of both axes with unit stride; dtype of hidden.
  TensorView head = {};

  /// optional; [classes], contiguous; dtype of hidden, or float32.
  TensorView bias = {};

  /// Per row, any strides: int32 or int64 classes. Or soft targets: [..., classes], rows at one distance, classes with
  /// unit stride; float32, or float64 where hidden is float64.
  TensorView targets = {};

  /// w of cross_entropy.h, optional; [classes], contiguous; dtype of hidden, or float32.
  TensorView class_weight = {};

  /// r of cross_entropy.h, optional; per row, contiguous, result dtype. Of ignored rows any numbers. Rows of weight 0
  /// do not count either.
  TensorView row_weight = {};

  CrossEntropyOptions options = {};

  /// Leaves out rows that do not count before anything is multiplied; soft targets of the others are copied together
  /// then. The CPU always does. On a GPU, true: the call waits once, for the number of rows; false: such rows cost as
  /// much as others. In a CUDA graph that is being captured nothing can wait: there all rows are computed. A backward
  /// of Reduction::none without `kept` and shards also leaves out rows whose upstream gradients are all 0.
  bool skips_ignored = false;

  /// The most scratch memory that the call should take, in bytes; how many rows (and classes) are computed at once
  /// follows from it. 0: what the operator finds best for the device. Where the context brings a workspace, its size
  /// is read instead. Where it is too little for the smallest chunk, the call takes what that needs. With
  /// EAVES_BATCH_INVARIANT=1 in the environment this limit always decides the classes, and a workspace of the context
  /// must be at least as large as ..._workspace_bytes() says; with shards likewise.
  std::size_t workspace_limit = 0;
};

/// A head whose classes are cut into shards, one for each rank: head, bias, class_weight and soft targets of a call are
/// one of them, and what else the ranks pass is the same. Hard targets are classes of all shards.
///
/// Rows are computed in chunks, the same on all ranks, in their order; rows that do not count are left out as always,
/// and `first` and `rows` count the others. The functions are called on the host. What a call has enqueued on
/// its stream comes before what they enqueue there, and what it enqueues afterwards behind.
struct LinearCrossEntropyShard {
  /// Of head, which may have no classes here: then grad_hidden is not written, and has to be 0 before.
  std::int64_t first_class = 0;
  std::int64_t classes = 0;       ///< of all shards; 0: there are no shards
  std::int64_t most_classes = 0;  ///< of the largest shard: how many rows a chunk has follows from it

  /// Outside of the backward: what the merge is asked for. Without either, calls with many classes are faster.
  bool is_for_mean_logit = false;
  bool is_for_argmax_or_sum_sq = true;

  // With both at once:
  std::int64_t shards = 1;

  /// out, result dtype, contiguous: at least as many elements as the rows have statistics.
  TensorView statistics = {};

  /// `shards` times as many.
  TensorView gathered = {};

  /// Has to gather what the chunk has at statistics + first * kCrossEntropyStatistics from all ranks, to
  /// gathered + shards * first * kCrossEntropyStatistics: [shards, rows, kCrossEntropyStatistics], in the order of the
  /// classes.
  std::function<void(std::int64_t first, std::int64_t rows)> gather = {};

  /// optional: `gather` may then only begin, and this has to end it. What the call enqueues in between, where it can
  /// the product for grad_hidden, hides the gather.
  std::function<void(std::int64_t first, std::int64_t rows)> finish_gather = {};

  /// optional; with both at once or in the backward: the chunk's rows of grad_hidden, this shard's part of a sum over
  /// the ranks, are complete.
  std::function<void(std::int64_t first, std::int64_t rows)> grad_hidden_is_complete = {};
};

struct LinearCrossEntropyOutputs {
  /// As in CrossEntropyForwardArgs. The backward needs lse, best as two numbers for each row; target_mass with soft
  /// targets or where class weights are given; divisor with Reduction::mean.
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

/// Each optional: what is absent is not computed.
struct LinearCrossEntropyGradients {
  /// out; shape and dtype of hidden, any strides that give every element its own place. Of a shard also the result
  /// dtype: a part of a sum over the ranks that is not rounded to 16 bits.
  TensorView grad_hidden = {};

  /// out; [classes, features], features with unit stride; dtype of head, or the result dtype.
  TensorView grad_head = {};

  /// out; [classes], contiguous; dtype of hidden, or the result dtype.
  TensorView grad_bias = {};

  /// Adds to what grad_head and grad_bias hold instead of overwriting it.
  bool accumulates = false;
};

struct LinearCrossEntropyForwardArgs {
  LinearCrossEntropyInputs inputs = {};

  /// optional, with Reduction::mean: one element of the result dtype, which the sum is divided by instead of the
  /// weights of the rows (tokens over all micro-batches and ranks, say). Not negative, as in CrossEntropyForwardArgs.
  TensorView normalizer = {};

  LinearCrossEntropyOutputs outputs = {};

  /// out, optional; contiguous, as linear_cross_entropy_kept() says: what the backward needs of the first rows that are
  /// computed.
  TensorView kept = {};
};

struct LinearCrossEntropyForwardBackwardArgs {
  /// Reduction::none too, where grad_loss is known before the loss. Nothing is kept.
  LinearCrossEntropyForwardArgs forward = {};

  /// dL/d(loss), optional: one element, or with Reduction::none per row with any strides; result dtype or that of
  /// hidden; absent: 1.
  TensorView grad_loss = {};

  LinearCrossEntropyGradients gradients = {};

  /// With shards, outputs.lse is needed, with class weights or soft targets target_mass, and for a mean over hard
  /// targets with class weights a normalizer.
  LinearCrossEntropyShard shard = {};
};

struct LinearCrossEntropyBackwardArgs {
  /// dL/d(loss), as in the forward and backward at once, but not optional.
  TensorView grad_loss = {};

  /// dL/d(lse) and dL/d(entropy), optional; result dtype, per row. They do not reach rows that do not count.
  TensorView grad_lse = {};
  TensorView grad_entropy = {};

  /// As in the forward.
  LinearCrossEntropyInputs inputs = {};

  /// As the forward wrote them: lse always, entropy with grad_entropy, target_mass with soft targets or class weights,
  /// divisor with Reduction::mean.
  TensorView lse = {};
  TensorView entropy = {};
  TensorView target_mass = {};
  TensorView divisor = {};

  /// inout, optional; as a forward with the same inputs wrote it, and where rows are left out, both captured in a CUDA
  /// graph or neither. A backward writes over a `kept` of bfloat16: with grad_entropy all of it, which must not be
  /// given to another backward; without, rows whose lse is not finite and whose gradient is 0. It is not read where the
  /// rows of this call do not lie in the order of their shape. Not with shards.
  TensorView kept = {};

  LinearCrossEntropyGradients gradients = {};

  LinearCrossEntropyShard shard = {};
};

/// The tensor that a forward keeps: [rows, columns].
struct LinearCrossEntropyKept {
  /// bfloat16: exponentials of the logits, in 16 bits, and two numbers for each row. Else the logits, in the result
  /// dtype.
  DType dtype = DType::float32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;  ///< at least the classes
};

struct LinearCrossEntropyShardForwardArgs {
  LinearCrossEntropyInputs inputs = {};
  LinearCrossEntropyShard shard = {};

  /// out, result dtype, contiguous: of each row that is computed, in their order, kCrossEntropyStatistics. Of rows that
  /// are left out nothing is written. cross_entropy_merge makes the loss of those of all shards. Its loss of a row of
  /// weight 0 is 0; lse, argmax, entropy, sum_sq, mean_logit and target_mass of that row are for the caller to zero.
  TensorView statistics = {};
};

struct LinearCrossEntropyRescaleArgs {
  /// inout; what linear_cross_entropy_forward_backward wrote; `accumulates` is refused.
  LinearCrossEntropyGradients gradients = {};

  /// One element; float32, or float64 where the gradients are.
  TensorView grad_loss = {};
};

/// All throw InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA, or no cuBLASLt), DeviceError (a launch failed).
///
/// The loss alone: one matrix product.
void linear_cross_entropy_forward(const LinearCrossEntropyForwardArgs& args, const ExecutionContext& context = {});
void linear_cross_entropy_backward(const LinearCrossEntropyBackwardArgs& args, const ExecutionContext& context = {});
void linear_cross_entropy_forward_backward(const LinearCrossEntropyForwardBackwardArgs& args,
                                           const ExecutionContext& context = {});

/// The statistics of the rows in a shard: one matrix product.
void linear_cross_entropy_shard_forward(const LinearCrossEntropyShardForwardArgs& args,
                                        const ExecutionContext& context = {});

/// gradients *= grad_loss, for a dL/d(loss) that is known only after linear_cross_entropy_forward_backward. Zeros stay
/// 0, by an infinite factor too. A factor of 1 costs nothing: on a GPU that is found out there, and nothing waits.
void linear_cross_entropy_rescale(const LinearCrossEntropyRescaleArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch that the call takes under its limit, or at least needs. The context's workspace is not looked at.
/// linear_cross_entropy_rescale takes none.
std::size_t linear_cross_entropy_forward_workspace_bytes(const LinearCrossEntropyForwardArgs& args,
                                                         const ExecutionContext& context = {});
std::size_t linear_cross_entropy_backward_workspace_bytes(const LinearCrossEntropyBackwardArgs& args,
                                                          const ExecutionContext& context = {});
std::size_t linear_cross_entropy_forward_backward_workspace_bytes(const LinearCrossEntropyForwardBackwardArgs& args,
                                                                  const ExecutionContext& context = {});
std::size_t linear_cross_entropy_shard_forward_workspace_bytes(const LinearCrossEntropyShardForwardArgs& args,
                                                               const ExecutionContext& context = {});

/// What a forward can keep in at most so many bytes. Exponentials on a GPU of compute capability 9.0, of a bfloat16
/// `hidden` with at least 128 rows and a head of 4096 to 2^20 classes, whose features are contiguous and a multiple of
/// 8, without soft targets, label smoothing, argmax, sum_sq, mean_logit, a soft cap beyond 50, or one together with an
/// entropy; of other calls logits, in twice the memory or more. On a GPU a part of the rows is a multiple of 128. No
/// row where the rows of hidden do not lie in the order of their shape, as in a transposed [T, B, features].
LinearCrossEntropyKept linear_cross_entropy_kept(const LinearCrossEntropyForwardArgs& args, std::size_t most_bytes);

/// A limit for the workspace of linear_cross_entropy_forward_backward on a GPU that saves memory and keeps three
/// products faster than four: room for 512 rows in 16 bits, but at least 160 MiB, which are 1024 rows of 65,536
/// classes. Where logits are kept in memory, in float32, half as many rows.
inline constexpr std::size_t linear_cross_entropy_small_workspace(std::int64_t classes) {
  constexpr std::size_t kLeast = std::size_t{160} << 20;
  const std::size_t of_512_rows = static_cast<std::size_t>(classes) * 1024 + (std::size_t{24} << 20);
  return of_512_rows > kLeast ? of_512_rows : kLeast;
}

enum class LinearCrossEntropyAlgorithm : std::uint8_t { speed, recompute };

/// The facts of a call that the choice of its algorithm reads. They count hidden as a matrix with aligned rows.
struct LinearCrossEntropyAlgorithmArgs {
  std::int64_t rows = 0;  ///< of hidden; negative: the sizes are unknown, as in a graph that is traced for any
  std::int64_t features = 1;
  std::int64_t classes = 1;
  DType dtype = DType::float32;  ///< of hidden and head
  Device device = kCpu;
  Reduction reduction = Reduction::mean;
  bool is_head_transposed = false;  ///< its classes have unit stride
  bool has_soft_targets = false;
  bool has_grad_hidden_alone =
      false;  ///< head and bias get no gradient, and the backward can multiply grad_hidden by rows
  bool has_output_gradients = false;  ///< lse or entropy may get a gradient
  bool accumulates = false;           ///< the backward adds grad_head to the caller's tensor
  bool is_shard = false;
  std::size_t workspace_limit = 0;  ///< 0: the operator's own
};

/// Which way to the gradients suits a call whose dL/d(loss) is not known in the forward.
///
///   speed      if the workspace has room for a chunk of rows with which three products are faster than four: on a GPU
///              384, or all. A shard, whose largest no rank knows, and a call of unknown sizes: if no limit is given.
///   recompute  in float16, because a loss scale would multiply gradients that are rounded already; for a loss per row,
///              unless grad_hidden is the only gradient; if lse or entropy may get a gradient; if the backward
///              accumulates.
///
/// Throws InvalidArgument for sizes and types that no call has.
LinearCrossEntropyAlgorithm linear_cross_entropy_algorithm(const LinearCrossEntropyAlgorithmArgs& args);

}  // namespace eaves
#pragma GCC visibility pop
