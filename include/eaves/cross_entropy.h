// cross_entropy: the loss of classifying each row, with every option of training language models, and its gradient.
//
// For a row of logits z over V classes with target t, smoothing e, class weights w (1 where absent):
//
//   z'      = softcap * tanh(scale * z / softcap)            (no softcap: z' = scale * z)
//   lse     = log sum_v exp(z'_v)
//   nll     = w_t * (lse - z'_t)
//   smooth  = sum_v w_v * (lse - z'_v) / V
//   loss    = (1 - e) * nll + e * smooth + z_loss_weight * lse^2
//   mean    = sum(r * loss) / sum(r * w_t over the rows that are not ignored), with the weights r of the rows (1 where
//             absent), which sum and the losses of Reduction::none are multiplied by too
//   dz_v    = r * g * (p_v * (m + 2 * z_loss_weight * lse) - (1 - e) * w_t * [v == t] - e * w_v / V) * dz'_v/dz_v
//             with p = exp(z' - lse) and m = (1 - e) * w_t + e * sum_v w_v / V
//
// With soft targets q, a distribution for each row: loss = sum_v w_v * q'_v * (lse - z'_v) + z_loss_weight * lse^2 with
// q' = (1 - e) * q + e / V, and the mean divides by the number of rows, as PyTorch does, or by the sum of their weights
// r.
//
// Everything is computed in float32, or float64 for float64 logits, and rounded once. The statistics of a row take one
// pass (M. Milakov, N. Gimelshein, arXiv:1805.02867). Over the edges:
//   a target equal to ignore_index    loss, z-loss and gradient of the row are 0; it counts in no mean
//   a row of weight r = 0             its loss and gradient are 0, whatever its logits, the weight of its class and
//                                     dL/d(loss) are; lse and the other outputs per row are computed from its logits
//   dL/d(loss) infinite or NaN        in a row that counts no gradient is finite, but zeros may stay 0; in the other
//                                     rows gradients are 0
//   no rows, all of them ignored, or  the mean is 0 and so are the gradients (PyTorch: NaN)
//   weights that add up to 0
//   weights that add up to infinity   the mean and the gradients of the rows that count are NaN
//   a target out of range             on the CPU InvalidArgument, before anything is written, in a row of weight 0 too;
//                                     on a GPU the row's loss and gradient are NaN (of weight 0: 0), or with
//                                     EAVES_CHECK_TARGETS=1 in the environment the same InvalidArgument (a check that
//                                     waits for the device)
//   some logits of a row are -inf     p is 0 there; all of them: loss and gradient are NaN
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

enum class Reduction : std::uint8_t { none, sum, mean };

struct CrossEntropyOptions {
  /// Rows with this target do not count; may be a class.
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0.0;  ///< e, in [0, 1]
  double scale = 1.0;            ///< of the logits, positive; before the softcap
  double softcap = 0.0;          ///< 0: absent; otherwise positive; c / T for a temperature T after a cap of c
  double z_loss_weight = 0.0;    ///< not negative
};

// `= {}` after each member: a call may leave out any of them without a compiler's warning.
//
// "Per row" means the shape of logits without the class axis. Per-row outputs, and what the backward takes of them, are
// contiguous; "result dtype" is float32, or float64 where logits is float64.

struct CrossEntropyForwardArgs {
  /// z; any shape with a class axis, any strides; float16, bfloat16, float32 or float64. At least one class where rows
  /// have classes as targets.
  TensorView logits = {};

  /// Per row, any strides: int32 or int64 classes. Or soft targets: shape of logits, any strides, dtype of logits or
  /// float32.
  TensorView targets = {};

  /// w, optional; [classes], contiguous; dtype of logits, or float32. Never read at ignore_index.
  TensorView class_weight = {};

  /// r, optional; per row, contiguous, result dtype. Of ignored rows any numbers.
  TensorView row_weight = {};

  /// optional, with Reduction::mean: one element of the result dtype, which the sum is divided by instead of the
  /// weights of the rows (tokens over all micro-batches and ranks, say). Not negative: on the CPU InvalidArgument; on a
  /// GPU it is not looked at.
  TensorView normalizer = {};

  /// In [-rank, rank).
  int class_axis = -1;

  CrossEntropyOptions options = {};

  /// True: ignored rows need not be read, and their lse, argmax, entropy, sum_sq and mean_logit are 0.
  bool skips_ignored = false;

  /// out, result dtype: per row with Reduction::none, otherwise one element.
  TensorView loss = {};

  /// out, optional, result dtype, which the backward needs. Per row; or with one more axis of 2 behind the rows', lse
  /// and the rest that its rounding lost. Gradients from one number have an error of that rounding: beside a target
  /// that is almost certain (a float32 lse of 18 hides a loss of 7e-7, and its gradient is 0), and far from 0 (at 1e4
  /// 5e-4 of each gradient). Gradients from two numbers have none.
  TensorView lse = {};

  /// out, optional, int64, per row: the class of the largest logit that is not NaN, the first of equal ones.
  TensorView argmax = {};

  /// out, optional, result dtype, per row: -sum_v p_v log p_v, in nats.
  TensorView entropy = {};

  /// out, optional, result dtype, per row: sum_v p_v^2.
  TensorView sum_sq = {};

  /// out, optional, result dtype, per row: sum_v z'_v / V. Not with soft targets, nor where weights and smoothing meet.
  TensorView mean_logit = {};

  /// out, optional, result dtype, shape of loss: the part z_loss_weight * lse^2 of the loss, reduced as it is.
  TensorView z_loss = {};

  /// out, optional, result dtype, per row: m of the formula above, sum_v w_v * q'_v for soft targets. The backward
  /// needs it with soft targets, where weights and smoothing meet, and of a shard with weights.
  TensorView target_mass = {};

  /// out, optional, result dtype, one element, with Reduction::mean: what the sum was divided by. The backward needs
  /// it.
  TensorView divisor = {};
};

struct CrossEntropyBackwardArgs {
  /// dL/d(loss); shape of loss, any strides, 0 among them; result dtype, or that of logits.
  TensorView grad_loss = {};

  /// dL/d(lse) and dL/d(entropy), optional; result dtype, per row. They reach ignored rows too.
  TensorView grad_lse = {};
  TensorView grad_entropy = {};

  /// As in the forward.
  TensorView logits = {};
  TensorView targets = {};
  TensorView class_weight = {};
  TensorView row_weight = {};
  int class_axis = -1;
  CrossEntropyOptions options = {};

  /// As the forward wrote them: lse always, entropy with grad_entropy, target_mass with soft targets, where weights and
  /// smoothing meet, or of a shard with weights, divisor with Reduction::mean.
  TensorView lse = {};
  TensorView entropy = {};
  TensorView target_mass = {};
  TensorView divisor = {};

  /// Of a vocabulary that is sharded: the first class of `logits`, and how many there are in all (0: as many as logits
  /// has). Targets count over all of them, `class_weight` has those of `logits`. Both as in the shard's forward: others
  /// that are possible are not noticed, and the gradient is wrong.
  std::int64_t first_class = 0;
  std::int64_t classes = 0;

  /// out; dL/d(logits), shape and dtype of logits, any strides that give every element its own place; may be the view
  /// `logits` itself, which is then overwritten. Outside of the view nothing is written: what is stored beside it, a
  /// shard's padding say, is no gradient. Of float32 logits also narrower, over them: see
  /// CrossEntropyForwardBackwardArgs.
  TensorView grad_logits = {};
};

struct CrossEntropyForwardBackwardArgs {
  /// As in cross_entropy_forward, but `logits` is out: it is overwritten with dL/d(logits). skips_ignored is
  /// true.
  CrossEntropyForwardArgs forward = {};

  /// dL/d(loss), optional: as in the backward; absent: 1.
  TensorView grad_loss = {};

  /// out, optional: a narrower gradient, float16 or bfloat16, over float32 logits: the data and the shape of `logits`,
  /// and each row in the first half of its place, so that strides are twice as many elements. The classes are the last
  /// axis, with unit stride, and every row starts on 16 bytes. What is behind a row's first half is undefined. On a GPU
  /// fewer than 2^31 rows.
  TensorView grad_logits = {};
};

struct CrossEntropyRescaleArgs {
  /// inout; the gradient that cross_entropy_forward_backward wrote over `logits`.
  TensorView grad_logits = {};

  /// dL/d(loss), as grad_loss of the backward: one element, or per row.
  TensorView grad_loss = {};

  /// As in the forward.
  int class_axis = -1;
};

/// The numbers that the statistics of a row in a shard have, in this order.
enum class CrossEntropyStatistic : std::uint8_t {
  largest,        ///< z'
  sum,            ///< sum_v exp(z'_v - largest)
  target_logit,   ///< z'_t; 0 where the target is another shard's
  target_weight,  ///< w_t; likewise
  logit_sum,      ///< sum_v u_v z'_v: u_v is w_v q'_v with soft targets, else w_v with smoothing, else 1 where
                  ///< is_for_mean_logit is set
  factor_sum,     ///< sum_v u_v, with soft targets or smoothing
  moment,         ///< sum_v exp(z'_v - largest) * (z'_v - largest)
  best_value,     ///< the largest z
  best,           ///< its class, which float32 knows up to 2^24 classes
  square,         ///< sum_v exp(2 * (z'_v - largest))
};
inline constexpr int kCrossEntropyStatistics = 10;

struct CrossEntropyShardArgs {
  /// As in the forward; logits has the classes [first_class, first_class + its size) of `classes`, and class_weight
  /// those alone, and soft targets too.
  TensorView logits = {};
  TensorView targets = {};
  TensorView class_weight = {};
  int class_axis = -1;
  CrossEntropyOptions options = {};
  std::int64_t first_class = 0;
  std::int64_t classes = 0;        ///< of all shards; 0: logits has them all
  bool is_for_mean_logit = false;  ///< the merge is asked for mean_logit

  /// out, contiguous: per row and kCrossEntropyStatistics as the last axis. Result dtype; on the CPU also float64,
  /// which keeps the loss of a class that is almost certain.
  TensorView statistics = {};
};

struct CrossEntropyMergeArgs {
  /// Those of all shards in the order of their classes, contiguous: [shards, per row..., kCrossEntropyStatistics]. In
  /// the dtype of the loss; on the CPU also float64 for a loss in float32.
  TensorView statistics = {};

  /// As in the forward; without soft targets, which the shards have read.
  TensorView targets = {};
  TensorView row_weight = {};
  TensorView normalizer = {};
  CrossEntropyOptions options = {};
  std::int64_t classes = 0;       ///< of all shards
  bool has_class_weight = false;  ///< the shards were computed with weights
  bool has_soft_targets = false;  ///< and with targets that are distributions

  /// As in the forward; the shards have read them.
  bool skips_ignored = false;

  /// As the outputs of the forward.
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

/// All throw InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA), DeviceError (the launch failed).
void cross_entropy_forward(const CrossEntropyForwardArgs& args, const ExecutionContext& context = {});
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecutionContext& context = {});

/// Both at once, in place: no second tensor of the logits' size. On a GPU, rows whose classes have unit stride are read
/// once and written once if they have at most 32 KiB, from compute capability 9.0 on about 8 times a block's shared
/// memory: 1.6 MB on 9.0 and 10.0 (819,200 classes of 16 bits). Others are read twice, and so are float64 and some rows
/// with options that need more than their lse: below 9.0 or 16 KiB, with sum_sq, or with a softcap beside soft targets
/// or smoothing over weighted classes. In float16 give the loss scale as grad_loss: what is rounded to 0
/// without it, cross_entropy_rescale cannot bring back. Where the scale is not known yet, cross_entropy_forward now and
/// cross_entropy_backward over the logits later take the same memory.
void cross_entropy_forward_backward(const CrossEntropyForwardBackwardArgs& args, const ExecutionContext& context = {});

/// grad_logits *= grad_loss, for a dL/d(loss) that is known only after cross_entropy_forward_backward. Zeros stay 0, by
/// an infinite factor too. Rows whose factor is 1 are neither read nor written; on a GPU that is found out there, and
/// nothing waits.
void cross_entropy_rescale(const CrossEntropyRescaleArgs& args, const ExecutionContext& context = {});

/// A vocabulary cut into shards, on one device or many: each shard's statistics, then (wherever they were gathered) the
/// loss, then cross_entropy_backward with the global lse for each shard.
void cross_entropy_shard_forward(const CrossEntropyShardArgs& args, const ExecutionContext& context = {});
void cross_entropy_merge(const CrossEntropyMergeArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch that the call needs: 12 for each row where losses are reduced, 12 more in place where rows are read
/// twice (for float64 24 and 16), and up to 1 MiB.
std::size_t cross_entropy_forward_workspace_bytes(const CrossEntropyForwardArgs& args,
                                                  const ExecutionContext& context = {});
std::size_t cross_entropy_backward_workspace_bytes(const CrossEntropyBackwardArgs& args,
                                                   const ExecutionContext& context = {});
std::size_t cross_entropy_forward_backward_workspace_bytes(const CrossEntropyForwardBackwardArgs& args,
                                                           const ExecutionContext& context = {});
std::size_t cross_entropy_rescale_workspace_bytes(const CrossEntropyRescaleArgs& args,
                                                  const ExecutionContext& context = {});
std::size_t cross_entropy_shard_forward_workspace_bytes(const CrossEntropyShardArgs& args,
                                                        const ExecutionContext& context = {});
std::size_t cross_entropy_merge_workspace_bytes(const CrossEntropyMergeArgs& args,
                                                const ExecutionContext& context = {});

}  // namespace eaves
#pragma GCC visibility pop
