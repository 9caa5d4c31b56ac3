// cross_entropy: the loss of classifying each row, with the options that language models train with, and its gradient.
//
// For a row of logits z over V classes with target t, smoothing e, class weights w (1 if absent):
//
//   z'      = softcap * tanh(scale * z / softcap)            (no softcap: z' = scale * z)
//   lse     = log sum_v exp(z'_v)
//   nll     = w_t * (lse - z'_t)
//   smooth  = sum_v w_v * (lse - z'_v) / V
//   loss    = (1 - e) * nll + e * smooth + z_loss_weight * lse^2
//   dz_v    = r * g * (p_v * (m + 2 * z_loss_weight * lse) - (1 - e) * w_t * [v == t] - e * w_v / V) * dz'_v/dz_v
//             with p = exp(z' - lse) and m = (1 - e) * w_t + e * sum_v w_v / V
//
// r is the weight of the row (1 if absent). g is dL/d(r * loss); with Reduction::mean it includes the division.
//
//   none    r * loss, for each row
//   sum     sum(r * loss)
//   mean    sum(r * loss) / sum(r * w_t over the rows that are not ignored)
//
// With soft targets q, a distribution for each row: loss = sum_v w_v * q'_v * (lse - z'_v) + z_loss_weight * lse^2 with
// q' = (1 - e) * q + e / V. The mean then divides by the number of rows, as PyTorch does, or by the sum of the row
// weights r.
//
// The operator computes in float32, or in float64 for float64 logits, and rounds once. The statistics of a row take one
// pass (M. Milakov, N. Gimelshein, arXiv:1805.02867). Edge cases:
//   a target equal to ignore_index    loss, z-loss and gradient of the row are 0; the row counts in no mean
//   a row of weight r = 0             its loss and gradient are 0 for any logits, class weight and dL/d(loss); lse and
//                                     the other outputs per row are computed from its logits
//   dL/d(loss) infinite or NaN        in a row that counts no gradient is finite, but zeros may stay 0; in the other
//                                     rows gradients are 0
//   no rows, all of them ignored, or  the mean and the gradients are 0 (PyTorch: NaN)
//   weights that add up to 0
//   weights that add up to infinity   the mean and the gradients of the rows that count are NaN
//   a target out of range             CPU: InvalidArgument, before anything is written, in a row of weight 0 too.
//                                     GPU: loss and gradient of the row are NaN (0 in a row of weight 0); with
//                                     EAVES_CHECK_TARGETS=1 in the environment the same InvalidArgument, by a check
//                                     that waits for the device
//   some logits of a row are -inf     p is 0 there; if all of them are -inf, loss and gradient are NaN
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

enum class Reduction : std::uint8_t { none, sum, mean };

struct CrossEntropyOptions {
  /// Rows with this target do not count. The number may be a class.
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0.0;  ///< e, in [0, 1]
  double scale = 1.0;            ///< multiplies the logits, before the softcap; positive
  double softcap = 0.0;          ///< 0: absent, else positive; pass c / T for a temperature T after a cap of c
  double z_loss_weight = 0.0;    ///< not negative
};

// Each member has `= {}`, so that a call may leave out any of them without a compiler's warning.
//
// "Per row" means the shape of logits without the class axis. Outputs per row are contiguous, in the forward that
// writes them and in the backward that reads them. "Result dtype" means float32, or float64 for float64 logits.

struct CrossEntropyForwardArgs {
  /// z; any shape with a class axis, any strides; float16, bfloat16, float32 or float64. At least one class if the
  /// targets of the rows are classes.
  TensorView logits = {};

  /// Per row, any strides: int32 or int64 classes. Or soft targets: shape of logits, any strides, dtype of logits or
  /// float32.
  TensorView targets = {};

  /// w, optional; [classes], contiguous; dtype of logits, or float32. Never read at ignore_index.
  TensorView class_weight = {};

  /// r, optional; per row, contiguous, result dtype. Ignored rows may have any number.
  TensorView row_weight = {};

  /// optional, with Reduction::mean: one element of the result dtype that replaces the sum of the weights as the
  /// divisor (the tokens of all micro-batches and ranks, say). A negative number is an InvalidArgument on the CPU and
  /// unchecked on a GPU.
  TensorView normalizer = {};

  /// In [-rank, rank).
  int class_axis = -1;

  CrossEntropyOptions options = {};

  /// True: the call need not read ignored rows, and sets their lse, argmax, entropy, sum_sq and mean_logit to 0.
  bool skips_ignored = false;

  /// out, result dtype: per row with Reduction::none, otherwise one element.
  TensorView loss = {};

  /// out, optional, result dtype; the backward needs it. Per row: the rounded lse. Or per row with a last axis of size
  /// 2: the rounded lse and the remainder of the rounding. Gradients computed from the rounded lse alone have the error
  /// of that rounding. It matters beside a target that is almost certain (a float32 lse of 18 hides a loss of 7e-7, and
  /// its gradient is 0) and for an lse far from 0 (at 1e4: 5e-4 of each gradient). Gradients computed from both numbers
  /// do not have it.
  TensorView lse = {};

  /// out, optional, int64, per row: the class of the largest logit that is not NaN, the first of equal ones.
  TensorView argmax = {};

  /// out, optional, result dtype, per row: -sum_v p_v log p_v, in nats.
  TensorView entropy = {};

  /// out, optional, result dtype, per row: sum_v p_v^2.
  TensorView sum_sq = {};

  /// out, optional, result dtype, per row: sum_v z'_v / V. Not with soft targets, nor with class weights and smoothing
  /// together.
  TensorView mean_logit = {};

  /// out, optional, result dtype, shape of loss: the part z_loss_weight * lse^2 of the loss, with the same reduction.
  TensorView z_loss = {};

  /// out, optional, result dtype, per row: m of the formula above; with soft targets sum_v w_v * q'_v. The backward
  /// needs it with soft targets, with class weights and smoothing together, and for a shard with class weights.
  TensorView target_mass = {};

  /// out, optional, result dtype, one element, with Reduction::mean: the divisor of the mean. The backward needs it.
  TensorView divisor = {};
};

struct CrossEntropyBackwardArgs {
  /// dL/d(loss); shape of loss, any strides, including 0; result dtype, or the dtype of logits.
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

  /// As the forward wrote them: lse always; entropy with grad_entropy; target_mass with soft targets, with class
  /// weights and smoothing together, or for a shard with class weights; divisor with Reduction::mean.
  TensorView lse = {};
  TensorView entropy = {};
  TensorView target_mass = {};
  TensorView divisor = {};

  /// For a sharded vocabulary: the first class of `logits`, and the size of the vocabulary (0: the classes of
  /// `logits`). Targets count in the whole vocabulary; `class_weight` has the classes of `logits` alone. Pass the
  /// numbers of the shard's forward: the backward does not notice other legal numbers and computes a wrong gradient.
  std::int64_t first_class = 0;
  std::int64_t classes = 0;

  /// out; dL/d(logits), shape and dtype of logits, any strides that give each element an address of its own. It may be
  /// the view `logits` itself, which is then overwritten. The call writes nothing outside of the view, so memory beside
  /// it (a shard's padding, say) holds no gradient. Over float32 logits the gradient may be narrower: see
  /// CrossEntropyForwardBackwardArgs.
  TensorView grad_logits = {};
};

struct CrossEntropyForwardBackwardArgs {
  /// As in cross_entropy_forward, except that `logits` is out (the call overwrites it with dL/d(logits)) and
  /// skips_ignored is always true.
  CrossEntropyForwardArgs forward = {};

  /// dL/d(loss), optional, as in the backward; absent: 1.
  TensorView grad_loss = {};

  /// out, optional: a narrower gradient, float16 or bfloat16, over float32 logits. It has the data and the shape of
  /// `logits`, each row in the first half of the row's memory; so its strides, in elements, are twice as large. The
  /// classes are the last axis, with unit stride, and every row starts on 16 bytes. The second half of each row's
  /// memory is undefined afterwards. On a GPU fewer than 2^31 rows.
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

/// The statistics of a row in a shard, in this order.
enum class CrossEntropyStatistic : std::uint8_t {
  largest,        ///< z'
  sum,            ///< sum_v exp(z'_v - largest)
  target_logit,   ///< z'_t; 0 if the target is in another shard
  target_weight,  ///< w_t; likewise
  logit_sum,      ///< sum_v u_v z'_v: u_v is w_v q'_v with soft targets, else w_v with smoothing, else 1 if
                  ///< is_for_mean_logit is set
  factor_sum,     ///< sum_v u_v, with soft targets or smoothing
  moment,         ///< sum_v exp(z'_v - largest) * (z'_v - largest)
  best_value,     ///< the largest z
  best,           ///< its class, exact in float32 up to 2^24 classes
  square,         ///< sum_v exp(2 * (z'_v - largest))
};
inline constexpr int kCrossEntropyStatistics = 10;

struct CrossEntropyShardArgs {
  /// As in the forward, for one shard: logits, class_weight and soft targets have the classes [first_class,
  /// first_class + n) of `classes`, with n the classes of logits.
  TensorView logits = {};
  TensorView targets = {};
  TensorView class_weight = {};
  int class_axis = -1;
  CrossEntropyOptions options = {};
  std::int64_t first_class = 0;
  std::int64_t classes = 0;        ///< of all shards; 0: those of logits
  bool is_for_mean_logit = false;  ///< the merge will write mean_logit

  /// out, contiguous: per row, with a last axis of size kCrossEntropyStatistics. Result dtype; on the CPU also float64,
  /// which keeps the loss of a class that is almost certain.
  TensorView statistics = {};
};

struct CrossEntropyMergeArgs {
  /// The statistics of all shards in the order of their classes, contiguous: [shards, per row...,
  /// kCrossEntropyStatistics]. Dtype of the loss; on the CPU also float64 for a loss in float32.
  TensorView statistics = {};

  /// As in the forward. Absent for soft targets, which the shards have read.
  TensorView targets = {};
  TensorView row_weight = {};
  TensorView normalizer = {};
  CrossEntropyOptions options = {};
  std::int64_t classes = 0;       ///< of all shards
  bool has_class_weight = false;  ///< the shards had class weights
  bool has_soft_targets = false;  ///< the shards had soft targets

  /// As in the forward: the lse and the other outputs of ignored rows are 0.
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

/// Loss and gradient at once, in place: no second tensor of the logits' size.
///
/// On a GPU a call reads each row once and writes it once if the classes have unit stride and the row is short enough:
/// at most 32 KiB; from compute capability 9.0 on about 8 times a block's shared memory, 1.6 MB on 9.0 and 10.0
/// (819,200 classes of 16 bits). The other rows are read twice. So are float64 rows, and rows with options that need
/// more than the lse of the row in three cases: below compute capability 9.0 or 16 KiB; with sum_sq; with a softcap
/// beside soft targets or smoothing over weighted classes.
///
/// With float16 logits pass the loss scale as grad_loss: cross_entropy_rescale cannot bring back a gradient that was
/// rounded to 0 without it. If the scale is not known yet, cross_entropy_forward now and cross_entropy_backward over
/// the logits later take the same memory.
void cross_entropy_forward_backward(const CrossEntropyForwardBackwardArgs& args, const ExecutionContext& context = {});

/// grad_logits *= grad_loss, for a dL/d(loss) that is known only after cross_entropy_forward_backward. Zeros stay 0,
/// even times an infinite factor. Rows with a factor of 1 are neither read nor written; on a GPU the kernel finds them,
/// and the host waits for nothing.
void cross_entropy_rescale(const CrossEntropyRescaleArgs& args, const ExecutionContext& context = {});

/// A vocabulary cut into shards, on one device or many: first the statistics of each shard, then the loss (on any
/// device that has gathered them), then cross_entropy_backward for each shard with the global lse.
void cross_entropy_shard_forward(const CrossEntropyShardArgs& args, const ExecutionContext& context = {});
void cross_entropy_merge(const CrossEntropyMergeArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch memory that the call needs: 12 for each row with a reduced loss, 12 more in place for rows that are
/// read twice (float64: 24 and 16), and up to 1 MiB.
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
