// `eaves run cross_entropy`: logits and targets from a file to the loss, and to the gradient of the logits.
#include <memory>
#include <string>

#include "cli/loss_options.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "eaves/cross_entropy.h"

namespace eaves::cli {
namespace {

struct CrossEntropyArguments {
  RunArguments common;
  LossOptions loss;
  std::string tensor;
  int class_axis = -1;
  bool is_in_place = false;
};

CrossEntropyForwardArgs forward_args(Run& run, const CrossEntropyArguments& arguments, const TensorView& logits) {
  const LossOptions& loss = arguments.loss;
  AxisSet axes;
  axes.contains[check::axis({"cross_entropy", "logits", logits}, "class_axis", arguments.class_axis)] = true;
  CrossEntropyForwardArgs args;
  args.logits = logits;
  args.targets = run.input("--target", loss.target);
  args.weight = run.optional_input("--weight", loss.weight);
  args.normalizer = run.optional_input("--normalizer", loss.normalizer);
  args.class_axis = arguments.class_axis;
  args.options = loss.options;
  loss.make_outputs(run, args, reduced_shape(logits.shape, axes, false), accumulator_dtype(logits.dtype));
  return args;
}

// The forward, then the backward: the logits stay what they are.
void run_forward(Run& run, const CrossEntropyArguments& arguments) {
  const LossOptions& loss = arguments.loss;
  const TensorView logits = run.input("--tensor", arguments.tensor);
  CrossEntropyForwardArgs forward = forward_args(run, arguments, logits);
  if (loss.wants_gradients()) loss.make_outputs_for_backward(run, forward);
  cross_entropy_forward(forward, run.context());
  if (!loss.wants_gradients()) return;

  CrossEntropyBackwardArgs backward;
  loss.set_upstream(run, backward, forward);
  backward.logits = logits;
  backward.targets = forward.targets;
  backward.weight = forward.weight;
  backward.class_axis = forward.class_axis;
  backward.options = forward.options;
  backward.grad_logits = run.output("grad_logits", logits.dtype, logits.shape);
  cross_entropy_backward(backward, run.context());
}

// Both at once: the logits are loaded to where their gradient will be.
void run_in_place(Run& run, const CrossEntropyArguments& arguments) {
  const TensorView logits = run.output_over_input("grad_logits", "--tensor", arguments.tensor);
  CrossEntropyForwardBackwardArgs args;
  args.forward = forward_args(run, arguments, logits);
  args.grad_loss = run.optional_input("--grad", arguments.loss.grad);
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
  arguments->common.add_to(*command);
  command->add_option("--tensor", arguments->tensor, "Name of the logits: any shape with an axis of classes")
      ->required();
  command->add_option("--class-axis", arguments->class_axis, "The axis of the classes")->capture_default_str();
  arguments->loss.add_to(*command, "grad_logits, the gradient of the loss");
  command->add_flag("--in-place", arguments->is_in_place,
                    "Loss and gradient at once, over the logits in memory: one tensor less. lse and entropy of rows "
                    "that are ignored are 0");
  command->callback([arguments] { run_cross_entropy(*arguments); });
}

}  // namespace eaves::cli
