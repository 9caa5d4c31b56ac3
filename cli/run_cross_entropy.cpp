// `eaves run cross_entropy`: logits and targets from a file to the loss, and to the gradient of the logits.
#include <cstdint>
#include <memory>
#include <string>

#include "cli/options.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "eaves/cross_entropy.h"

namespace eaves::cli {
namespace {

struct CrossEntropyArguments {
  RunArguments common;
  std::string tensor;
  std::string target;
  std::string weight;
  std::string normalizer;
  std::string grad;
  int class_axis = -1;
  std::string reduction = "mean";
  CrossEntropyOptions options;
  bool has_argmax = false;
  bool has_entropy = false;
  bool has_backward = false;
  bool is_in_place = false;
};

CrossEntropyForwardArgs forward_args(Run& run, const CrossEntropyArguments& arguments, const TensorView& logits) {
  const DType result_dtype = accumulator_dtype(logits.dtype);
  AxisSet axes;
  axes.contains[check::axis({"cross_entropy", "logits", logits}, "class_axis", arguments.class_axis)] = true;
  const Dims row_shape = reduced_shape(logits.shape, axes, false);
  const Dims loss_shape = arguments.options.reduction == Reduction::none ? row_shape : Dims{};
  CrossEntropyForwardArgs args;
  args.logits = logits;
  args.targets = run.input("--target", arguments.target);
  if (!arguments.weight.empty()) args.weight = run.input("--weight", arguments.weight);
  if (!arguments.normalizer.empty()) args.normalizer = run.input("--normalizer", arguments.normalizer);
  args.class_axis = arguments.class_axis;
  args.options = arguments.options;
  args.loss = run.output("loss", result_dtype, loss_shape);
  args.lse = run.output("lse", result_dtype, row_shape);
  if (arguments.has_argmax) args.argmax = run.output("argmax", DType::int64, row_shape);
  if (arguments.has_entropy) args.entropy = run.output("entropy", result_dtype, row_shape);
  if (arguments.options.z_loss_weight > 0.0) args.z_loss = run.output("z_loss", result_dtype, loss_shape);
  return args;
}

// The forward, then the backward: the logits stay what they are.
void run_forward(Run& run, const CrossEntropyArguments& arguments) {
  const TensorView logits = run.input("--tensor", arguments.tensor);
  const DType result_dtype = accumulator_dtype(logits.dtype);
  CrossEntropyForwardArgs forward = forward_args(run, arguments, logits);
  const bool has_backward = arguments.has_backward || !arguments.grad.empty();
  if (has_backward) {
    forward.target_mass = run.filled(result_dtype, forward.lse.shape, 0.0);
    if (forward.options.reduction == Reduction::mean) forward.divisor = run.filled(result_dtype, {}, 0.0);
  }
  cross_entropy_forward(forward, run.context());
  if (!has_backward) return;

  CrossEntropyBackwardArgs backward;
  backward.grad_loss =
      arguments.grad.empty() ? run.filled(result_dtype, forward.loss.shape, 1.0) : run.input("--grad", arguments.grad);
  backward.logits = logits;
  backward.targets = forward.targets;
  backward.weight = forward.weight;
  backward.class_axis = forward.class_axis;
  backward.options = forward.options;
  backward.lse = forward.lse;
  backward.target_mass = forward.target_mass;
  backward.divisor = forward.divisor;
  backward.grad_logits = run.output("grad_logits", logits.dtype, logits.shape);
  cross_entropy_backward(backward, run.context());
}

// Both at once: the logits are loaded to where their gradient will be.
void run_in_place(Run& run, const CrossEntropyArguments& arguments) {
  const TensorView logits = run.output_over_input("grad_logits", "--tensor", arguments.tensor);
  CrossEntropyForwardBackwardArgs args;
  args.forward = forward_args(run, arguments, logits);
  if (!arguments.grad.empty()) args.grad_loss = run.input("--grad", arguments.grad);
  cross_entropy_forward_backward(args, run.context());
}

void run_cross_entropy(const CrossEntropyArguments& arguments) {
  Run run(arguments.common);
  arguments.is_in_place ? run_in_place(run, arguments) : run_forward(run, arguments);
  run.finish();
}

}  // namespace

void add_run_cross_entropy(CLI::App& run) {
  CLI::App* command = run.add_subcommand("cross_entropy",
                                         "The loss of classifying each row. Writes loss, lse (float32) and, with "
                                         "--backward, --grad or --in-place, grad_logits.");
  command->footer(
      "Example:\n  eaves run cross_entropy --input in.safetensors --tensor logits --target targets --backward "
      "--output out.safetensors");
  const auto arguments = std::make_shared<CrossEntropyArguments>();
  CrossEntropyOptions& options = arguments->options;
  arguments->common.add_to(*command);
  command->add_option("--tensor", arguments->tensor, "Name of the logits: any shape with an axis of classes")
      ->required();
  command
      ->add_option("--target", arguments->target,
                   "Name of the targets: int32 or int64 classes, one per row; or a distribution for each row, in the "
                   "shape of the logits")
      ->required();
  command->add_option("--weight", arguments->weight, "Name of the weights of the classes")->check(is_not_empty());
  command->add_option("--class-axis", arguments->class_axis, "The axis of the classes")->capture_default_str();
  command->add_option("--ignore-index", options.ignore_index, "Rows with this target do not count")
      ->capture_default_str();
  command
      ->add_option("--reduction", arguments->reduction,
                   "none: a loss for each row; sum: of them; mean: over the rows that count")
      ->check(CLI::IsMember({"none", "sum", "mean"}))
      ->capture_default_str();
  command->add_option("--label-smoothing", options.label_smoothing, "0 to 1: how much of each target is spread evenly")
      ->capture_default_str();
  command->add_option("--softcap", options.softcap, "The logits are softcap * tanh(logits / softcap); 0: they are not")
      ->capture_default_str();
  command->add_option("--scale", options.scale, "The logits are multiplied with it first")->capture_default_str();
  command->add_option("--z-loss", options.z_loss_weight, "Weight of lse^2 in the loss; above 0 z_loss is written too")
      ->capture_default_str();
  command
      ->add_option("--normalizer", arguments->normalizer,
                   "Name of one number that the mean divides by, instead of the rows that count")
      ->check(is_not_empty());
  command->add_flag("--argmax", arguments->has_argmax, "Also write argmax, the class with the largest logit");
  command->add_flag("--entropy", arguments->has_entropy, "Also write entropy, in nats");
  CLI::Option* backward =
      command->add_flag("--backward", arguments->has_backward, "Also write grad_logits, the gradient of the loss");
  command
      ->add_option("--grad", arguments->grad,
                   "The same for an upstream gradient that is not 1: its name, in the shape of the loss")
      ->check(is_not_empty())
      ->excludes(backward);
  command->add_flag("--in-place", arguments->is_in_place,
                    "Loss and gradient at once, over the logits in memory: one tensor less. lse and entropy of rows "
                    "that are ignored are 0");
  command->callback([arguments] {
    arguments->options.reduction = arguments->reduction == "none"  ? Reduction::none
                                   : arguments->reduction == "sum" ? Reduction::sum
                                                                   : Reduction::mean;
    run_cross_entropy(*arguments);
  });
}

}  // namespace eaves::cli
