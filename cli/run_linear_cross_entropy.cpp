// `eaves run linear_cross_entropy`: rows, a head and targets from a file to the loss, and to the gradients of rows and
// head.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/run.h"
#include "core/dispatch.h"
#include "core/rows.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"

namespace eaves::cli {
namespace {

struct LinearCrossEntropyArguments {
  RunArguments common;
  std::string tensor;
  std::string weight;
  std::string bias;
  std::string target;
  std::string class_weight;
  std::string normalizer;
  std::string grad;
  std::string reduction = "mean";
  std::string algorithm = "auto";
  std::vector<std::string> gradients;
  CrossEntropyOptions options;
  std::int64_t workspace_limit_mib = 0;
  bool skips_ignored_rows = false;
  bool has_argmax = false;
  bool has_entropy = false;
  bool has_backward = false;

  bool wants_gradients() const { return has_backward || !grad.empty() || !gradients.empty(); }

  /// Without a list: of everything that the file has.
  bool wants_gradient_of(const char* name) const {
    return gradients.empty() || std::find(gradients.begin(), gradients.end(), name) != gradients.end();
  }
};

void check_arguments(const LinearCrossEntropyArguments& arguments) {
  if (!arguments.gradients.empty() && arguments.wants_gradient_of("bias") && arguments.bias.empty()) {
    throw InvalidArgument("--gradients: has bias, but --bias is not given");
  }
}

LinearCrossEntropyForwardArgs forward_args(Run& run, const LinearCrossEntropyArguments& arguments) {
  const auto optional_input = [&](const char* argument, const std::string& name) {
    return name.empty() ? TensorView{} : run.input(argument, name);
  };
  LinearCrossEntropyForwardArgs args;
  LinearCrossEntropyInputs& inputs = args.inputs;
  inputs.x = run.input("--tensor", arguments.tensor);
  inputs.weight = run.input("--weight", arguments.weight);
  inputs.bias = optional_input("--bias", arguments.bias);
  inputs.targets = run.input("--target", arguments.target);
  inputs.class_weight = optional_input("--class-weight", arguments.class_weight);
  inputs.options = arguments.options;
  inputs.skips_ignored_rows = arguments.skips_ignored_rows;
  inputs.workspace_limit = static_cast<std::size_t>(arguments.workspace_limit_mib) << 20;
  args.normalizer = optional_input("--normalizer", arguments.normalizer);

  const DType result_dtype = accumulator_dtype(inputs.x.dtype);
  Dims row_shape;
  for (int axis = 0; axis + 1 < inputs.x.shape.size(); ++axis) row_shape.push_back(inputs.x.shape[axis]);
  const Dims loss_shape = arguments.options.reduction == Reduction::none ? row_shape : Dims{};
  LinearCrossEntropyOutputs& outputs = args.outputs;
  outputs.loss = run.output("loss", result_dtype, loss_shape);
  outputs.lse = run.output("lse", result_dtype, row_shape);
  if (arguments.has_argmax) outputs.argmax = run.output("argmax", DType::int64, row_shape);
  if (arguments.has_entropy) outputs.entropy = run.output("entropy", result_dtype, row_shape);
  if (arguments.options.z_loss_weight > 0.0) outputs.z_loss = run.output("z_loss", result_dtype, loss_shape);
  return args;
}

LinearCrossEntropyGradients gradients_of(Run& run, const LinearCrossEntropyArguments& arguments,
                                         const LinearCrossEntropyInputs& inputs) {
  const DType dtype = inputs.x.dtype;
  const TensorView& bias = inputs.bias;
  LinearCrossEntropyGradients gradients;
  if (arguments.wants_gradient_of("x")) gradients.grad_x = run.output("grad_x", dtype, inputs.x.shape);
  if (arguments.wants_gradient_of("weight")) {
    gradients.grad_weight = run.output("grad_weight", dtype, inputs.weight.shape);
  }
  if (bias.is_present && arguments.wants_gradient_of("bias")) {
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
  if (!arguments.grad.empty()) args.grad_loss = run.input("--grad", arguments.grad);
  args.gradients = gradients_of(run, arguments, forward.inputs);
  linear_cross_entropy_forward_backward(args, run.context());
}

void run_in_little_memory(Run& run, const LinearCrossEntropyArguments& arguments,
                          LinearCrossEntropyForwardArgs forward) {
  LinearCrossEntropyOutputs& outputs = forward.outputs;
  const DType result_dtype = outputs.loss.dtype;
  outputs.target_mass = run.filled(result_dtype, outputs.lse.shape, 0.0);
  if (arguments.options.reduction == Reduction::mean) outputs.divisor = run.filled(result_dtype, {}, 0.0);
  linear_cross_entropy_forward(forward, run.context());

  LinearCrossEntropyBackwardArgs backward;
  backward.grad_loss =
      arguments.grad.empty() ? run.filled(result_dtype, outputs.loss.shape, 1.0) : run.input("--grad", arguments.grad);
  backward.inputs = forward.inputs;
  backward.lse = outputs.lse;
  backward.target_mass = outputs.target_mass;
  backward.divisor = outputs.divisor;
  backward.gradients = gradients_of(run, arguments, forward.inputs);
  linear_cross_entropy_backward(backward, run.context());
}

void run_linear_cross_entropy(const LinearCrossEntropyArguments& arguments) {
  check_arguments(arguments);
  Run run(arguments.common);
  const LinearCrossEntropyForwardArgs forward = forward_args(run, arguments);
  if (!arguments.wants_gradients()) {
    linear_cross_entropy_forward(forward, run.context());
  } else if (is_speedy(arguments, forward, run.context())) {
    run_speedy(run, arguments, forward);
  } else {
    run_in_little_memory(run, arguments, forward);
  }
  run.finish();
}

void add_inputs(CLI::App& command, LinearCrossEntropyArguments& arguments) {
  command.add_option("--tensor", arguments.tensor, "Name of the rows x: any shape, features last")->required();
  command
      .add_option("--weight", arguments.weight, "Name of the head, [classes, features]: logits are x weight^T + bias")
      ->required();
  command.add_option("--bias", arguments.bias, "Name of the bias, one number per class")->check(is_not_empty());
  command
      .add_option("--target", arguments.target,
                  "Name of the targets: int32 or int64 classes, one per row; or a distribution for each row")
      ->required();
  command.add_option("--class-weight", arguments.class_weight, "Name of the weights of the classes")
      ->check(is_not_empty());
  command
      .add_option("--normalizer", arguments.normalizer,
                  "Name of one number that the mean divides by, instead of the rows that count")
      ->check(is_not_empty());
}

void add_loss_options(CLI::App& command, LinearCrossEntropyArguments& arguments) {
  CrossEntropyOptions& options = arguments.options;
  command.add_option("--ignore-index", options.ignore_index, "Rows with this target do not count")
      ->capture_default_str();
  command
      .add_option("--reduction", arguments.reduction,
                  "none: a loss for each row; sum: of them; mean: over the rows that count")
      ->check(CLI::IsMember({"none", "sum", "mean"}))
      ->capture_default_str();
  command.add_option("--label-smoothing", options.label_smoothing, "0 to 1: how much of each target is spread evenly")
      ->capture_default_str();
  command.add_option("--softcap", options.softcap, "The logits are softcap * tanh(logits / softcap); 0: they are not")
      ->capture_default_str();
  command.add_option("--scale", options.scale, "The logits are multiplied with it first")->capture_default_str();
  command.add_option("--z-loss", options.z_loss_weight, "Weight of lse^2 in the loss; above 0 z_loss is written too")
      ->capture_default_str();
  command.add_flag("--argmax", arguments.has_argmax, "Also write argmax, the class with the largest logit");
  command.add_flag("--entropy", arguments.has_entropy, "Also write entropy, in nats");
}

void add_gradients(CLI::App& command, LinearCrossEntropyArguments& arguments) {
  CLI::Option* backward = command.add_flag("--backward", arguments.has_backward,
                                           "Also write grad_x, grad_weight and, with --bias, grad_bias");
  command
      .add_option("--grad", arguments.grad,
                  "The same for an upstream gradient that is not 1: its name, in the shape of the loss")
      ->check(is_not_empty())
      ->excludes(backward);
  command.add_option("--gradients", arguments.gradients, "Write only these: some of x,weight,bias")
      ->delimiter(',')
      ->check(CLI::IsMember({"x", "weight", "bias"}));
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
      "Example:\n  eaves run linear_cross_entropy --input in.safetensors --tensor x --weight head --target targets "
      "--backward --output out.safetensors");
  const auto arguments = std::make_shared<LinearCrossEntropyArguments>();
  arguments->common.add_to(*command);
  add_inputs(*command, *arguments);
  add_loss_options(*command, *arguments);
  add_gradients(*command, *arguments);
  command->add_flag("--skip-ignored", arguments->skips_ignored_rows,
                    "Leave out rows that are ignored before anything is multiplied. A CPU always does");
  constexpr std::int64_t kMostMib = std::int64_t{1} << 30;  // a PiB, as bytes still a number
  command
      ->add_option("--workspace-limit", arguments->workspace_limit_mib,
                   "The most scratch memory to take, in MiB; 0: what suits the device")
      ->check(CLI::Range(std::int64_t{0}, kMostMib))
      ->capture_default_str();
  command->callback([arguments] {
    arguments->options.reduction = arguments->reduction == "none"  ? Reduction::none
                                   : arguments->reduction == "sum" ? Reduction::sum
                                                                   : Reduction::mean;
    run_linear_cross_entropy(*arguments);
  });
}

}  // namespace eaves::cli
