// What `eaves run` takes and writes for every loss of classifying rows. A command adds its own part: cross_entropy the
// axis of its logits, linear_cross_entropy the head that makes them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/run.h"
#include "eaves/cross_entropy.h"

namespace eaves::cli {

struct LossOptions {
  std::string target;
  std::string weight;
  std::string normalizer;
  std::string grad;
  CrossEntropyOptions options;
  bool has_argmax = false;
  bool has_entropy = false;
  bool has_backward = false;

  /// `gradients` is what the help says that a backward writes. The struct has to stay where it is.
  void add_to(CLI::App& command, const std::string& gradients);

  bool wants_gradients() const { return has_backward || !grad.empty(); }

  /// Everything that a forward writes, put into `views`, which has a member for each: lse, and what was asked for.
  template <typename Views>
  void make_outputs(Run& run, Views& views, const Dims& row_shape, DType dtype) const {
    const Dims loss_shape = options.reduction == Reduction::none ? row_shape : Dims{};
    views.loss = run.output("loss", dtype, loss_shape);
    views.lse = run.output("lse", dtype, row_shape);
    if (has_argmax) views.argmax = run.output("argmax", DType::int64, row_shape);
    if (has_entropy) views.entropy = run.output("entropy", dtype, row_shape);
    if (options.z_loss_weight > 0.0) views.z_loss = run.output("z_loss", dtype, loss_shape);
  }

  /// What a forward writes for the backward alone, and no file gets.
  template <typename Views>
  void make_outputs_for_backward(Run& run, Views& views) const {
    const DType dtype = views.lse.dtype;
    views.target_mass = run.filled(dtype, views.lse.shape, 0.0);
    if (options.reduction == Reduction::mean) views.divisor = run.filled(dtype, {}, 0.0);
  }

  /// What a backward reads of its forward, and the gradient of the loss: 1 unless the file has one.
  template <typename Args, typename Views>
  void set_upstream(Run& run, Args& backward, const Views& forward) const {
    backward.grad_loss =
        grad.empty() ? run.filled(forward.loss.dtype, forward.loss.shape, 1.0) : run.input("--grad", grad);
    backward.lse = forward.lse;
    backward.target_mass = forward.target_mass;
    backward.divisor = forward.divisor;
  }
};

}  // namespace eaves::cli
