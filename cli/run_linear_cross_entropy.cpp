// `eaves run linear_cross_entropy`: rows, a head and targets from a file to the loss, and to the gradients of rows and
// head.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/loss_options.h"
#include "cli/options.h"
#include "cli/run.h"
#include "core/dispatch.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"

namespace eaves::cli {
namespace {

struct LinearCrossEntropyArguments {
  RunArguments common;
  LossOptions loss;
  std::string tensor;
  std::string linear_weight;
  std::string linear_bias;
  std::vector<std::string> gradients;
  std::string algorithm = "auto";
  std::string workspace_limit = "0";
  bool skips_ignored_rows = false;

  bool wants_gradients() const { return loss.wants_gradients() || !gradients.empty(); }

  /// Without a list: of everything that the file has.
  bool wants_gradient_of(const char* name) const {
    return gradients.empty() || std::find(gradients.begin(), gradients.end(), name) != gradients.end();
  }
};

void check_arguments(const LinearCrossEntropyArguments& arguments) {
  if (!arguments.gradients.empty() && arguments.wants_gradient_of("linear_bias") && arguments.linear_bias.empty()) {
    throw InvalidArgument("--gradients: has linear_bias, but --linear-bias is not given");
  }
}

LinearCrossEntropyForwardArgs forward_args(Run& run, const LinearCrossEntropyArguments& arguments,
                                           std::size_t workspace_limit) {
  const LossOptions& loss = arguments.loss;
  LinearCrossEntropyForwardArgs args;
  LinearCrossEntropyInputs& inputs = args.inputs;
  inputs.x = run.input("--tensor", arguments.tensor);
  inputs.weight = run.input("--linear-weight", arguments.linear_weight);
  inputs.bias = run.optional_input("--linear-bias", arguments.linear_bias);
  inputs.targets = run.input("--target", loss.target);
  inputs.class_weight = run.optional_input("--weight", loss.weight);
  inputs.options = loss.options;
  inputs.skips_ignored_rows = arguments.skips_ignored_rows;
  inputs.workspace_limit = workspace_limit;
  args.normalizer = run.optional_input("--normalizer", loss.normalizer);

  Dims row_shape;
  for (int axis = 0; axis + 1 < inputs.x.shape.size(); ++axis) row_shape.push_back(inputs.x.shape[axis]);
  loss.make_outputs(run, args.outputs, row_shape, accumulator_dtype(inputs.x.dtype));
  return args;
}

LinearCrossEntropyGradients gradients_of(Run& run, const LinearCrossEntropyArguments& arguments,
                                         const LinearCrossEntropyInputs& inputs) {
  const DType dtype = inputs.x.dtype;
  const TensorView& bias = inputs.bias;
  LinearCrossEntropyGradients gradients;
  if (arguments.wants_gradient_of("x")) gradients.grad_x = run.output("grad_x", dtype, inputs.x.shape);
  if (arguments.wants_gradient_of("linear_weight")) {
    gradients.grad_weight = run.output("grad_weight", dtype, inputs.weight.shape);
  }
  if (bias.is_present && arguments.wants_gradient_of("linear_bias")) {
    // A bias may be float32 beside any x.
    const DType bias_dtype = bias.dtype == dtype ? dtype : accumulator_dtype(dtype);
    gradients.grad_bias = run.output("grad_bias", bias_dtype, bias.shape);
  }
  return gradients;
}

// Here the upstream gradient is known before the loss, whatever the reduction.
bool is_speedy(const LinearCrossEntropyArguments& arguments, const LinearCrossEntropyForwardArgs& forward,
               const ExecutionContext& context) {
  if (arguments.algorithm != "auto") return arguments.algorithm == "speed";
  return linear_cross_entropy_algorithm(forward, context) == LinearCrossEntropyAlgorithm::speed;
}

void run_speedy(Run& run, const LinearCrossEntropyArguments& arguments, const LinearCrossEntropyForwardArgs& forward) {
  LinearCrossEntropyForwardBackwardArgs args{.forward = forward};
  args.grad_loss = run.optional_input("--grad", arguments.loss.grad);
  args.gradients = gradients_of(run, arguments, forward.inputs);
  linear_cross_entropy_forward_backward(args, run.context());
}

void run_in_little_memory(Run& run, const LinearCrossEntropyArguments& arguments,
                          LinearCrossEntropyForwardArgs forward) {
  arguments.loss.make_outputs_for_backward(run, forward.outputs);
  linear_cross_entropy_forward(forward, run.context());

  LinearCrossEntropyBackwardArgs backward;
  arguments.loss.set_upstream(run, backward, forward.outputs);
  backward.inputs = forward.inputs;
  backward.gradients = gradients_of(run, arguments, forward.inputs);
  linear_cross_entropy_backward(backward, run.context());
}

void run_linear_cross_entropy(const LinearCrossEntropyArguments& arguments) {
  check_arguments(arguments);
  const std::int64_t workspace_limit = parse_bytes("--workspace-limit", arguments.workspace_limit);
  Run run(arguments.common);
  const LinearCrossEntropyForwardArgs forward = forward_args(run, arguments, static_cast<std::size_t>(workspace_limit));
  if (!arguments.wants_gradients()) {
    linear_cross_entropy_forward(forward, run.context());
  } else if (is_speedy(arguments, forward, run.context())) {
    run_speedy(run, arguments, forward);
  } else {
    run_in_little_memory(run, arguments, forward);
  }
  run.finish();
}

void add_gradients(CLI::App& command, LinearCrossEntropyArguments& arguments) {
  command
      .add_option("--gradients", arguments.gradients,
                  "Write only the gradients of these: some of x,linear_weight,linear_bias")
      ->delimiter(',')
      ->check(CLI::IsMember({"x", "linear_weight", "linear_bias"}));
  command
      .add_option("--algorithm", arguments.algorithm,
                  "Of the gradients. speed: with the loss, logits computed once; memory: logits computed again, in "
                  "little memory; auto: speed where its workspace is allowed")
      ->check(CLI::IsMember({"auto", "speed", "memory"}))
      ->capture_default_str();
}

}  // namespace

void add_run_linear_cross_entropy(CLI::App& run) {
  CLI::App* command = run.add_subcommand("linear_cross_entropy",
                                         "The loss of classifying each row by a linear head, without all of its "
                                         "logits. Writes loss, lse (float32) and, with --backward or --grad, the "
                                         "gradients.");
  command->footer(
      "Example:\n  eaves run linear_cross_entropy --input in.safetensors --tensor x --linear-weight head "
      "--target targets --backward --output out.safetensors");
  const auto arguments = std::make_shared<LinearCrossEntropyArguments>();
  arguments->common.add_to(*command);
  command->add_option("--tensor", arguments->tensor, "Name of the rows x: any shape, features last")->required();
  command
      ->add_option("--linear-weight", arguments->linear_weight,
                   "Name of the head, [classes, features]: the logits are x linear_weight^T + linear_bias")
      ->required();
  command->add_option("--linear-bias", arguments->linear_bias, "Name of the head's bias, one number per class")
      ->check(is_not_empty());
  arguments->loss.add_to(*command, "grad_x, grad_weight (of the head) and, with --linear-bias, grad_bias");
  add_gradients(*command, *arguments);
  command->add_flag("--skip-ignored", arguments->skips_ignored_rows,
                    "Leave out rows that are ignored before anything is multiplied. A CPU always does");
  command
      ->add_option("--workspace-limit", arguments->workspace_limit,
                   "The most scratch memory to take, in bytes, such as 64M or 2G; 0: what suits the device")
      ->capture_default_str();
  command->callback([arguments] { run_linear_cross_entropy(*arguments); });
}

}  // namespace eaves::cli
