// The operators of `eaves run`: their arguments, in the order of --help, and the call that they make.
#include <algorithm>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "core/loss_options.h"
#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "eaves/logsumexp.h"
#include "eaves/lrpe_cosine.h"

namespace eaves::cli {
namespace {

using Words = std::vector<std::string>;
constexpr bool kRequired = true;

/// An argument that names a tensor; the core calls the tensor `member`.
Argument tensor(const std::string& flag, const std::string& member, const std::string& help, bool is_required = false) {
  return {flag, "", help, is_required, {}, member};
}

/// A text that has to be one of `words`.
Argument choice(const std::string& flag, const Words& words, const std::string& help, const std::string& fallback) {
  return {flag, fallback, help, false, words};
}

template <typename Enum>
Enum chosen(const Run& run, const std::string& flag, const Words& words) {
  return static_cast<Enum>(std::find(words.begin(), words.end(), run.text(flag)) - words.begin());
}

// ------------------------------------------------------------------------------------------------------- logsumexp

void run_logsumexp(Run& run) {
  Dims dims;  // empty: all axes
  if (!run.text("--dims").empty()) dims = parse_list("--dims", run.text("--dims"), "axes such as -1 or 0,2");
  const bool keepdim = run.is_set("--keepdim");
  const TensorView x = run.input("--tensor");
  DType out_dtype = x.dtype;
  if (!run.text("--dtype").empty()) out_dtype = parse_dtype("--dtype", run.text("--dtype"));
  const AxisSet axes = check::axes({"logsumexp", "x", x}, dims);
  const Dims shape = reduced_shape(x.shape, axes, keepdim);

  LogsumexpForwardArgs forward{.x = x, .axes = dims, .keepdim = keepdim};
  forward.out = run.output("out", out_dtype, shape);
  forward.lse = run.lse_output(accumulator_dtype(x.dtype), reduced_shape(x.shape, axes, false), shape);
  logsumexp_forward(forward, run.context());
  const TensorView grad_out = run.input("--grad");
  if (!grad_out.is_present) return;
  LogsumexpBackwardArgs backward{.grad_out = grad_out, .x = x, .lse = forward.lse, .axes = dims, .keepdim = keepdim};
  backward.grad_x = run.output("grad_x", x.dtype, x.shape);
  logsumexp_backward(backward, run.context());
}

// ------------------------------------------------------------------------------------------------------ the losses

const Words kReductions = {"none", "sum", "mean"};
static_assert(static_cast<int>(Reduction::none) == 0 && static_cast<int>(Reduction::sum) == 1 &&
              static_cast<int>(Reduction::mean) == 2);

/// The arguments of every loss that classifies rows, behind the loss's own.
std::vector<Argument> with_loss_arguments(std::vector<Argument> arguments, const std::string& gradients,
                                          const std::vector<Argument>& last) {
  const CrossEntropyOptions defaults;
  const auto add = [&](const Argument& argument) { arguments.push_back(argument); };
  add({"--targets", "",
       "Name of the targets: one int32 or int64 class for each row, or the probabilities of all classes for each row, "
       "in "
       "the shape of the logits",
       kRequired});
  add({"--class-weight", "", "Name of the class weights, one for each class"});
  add({"--row-weight", "", "Name of the row weights, one for each row, in the dtype of the loss"});
  add({"--normalizer", "",
       "Name of a tensor of one number; the mean divides by it, not by the number of rows that count"});
  add({"--ignore-index", defaults.ignore_index, "Rows with this target have loss 0 and do not count"});
  add(choice(
      "--reduction", kReductions,
      "Result. none: a loss for each row; sum: the sum of these losses; mean: their mean over the rows that count",
      "mean"));
  for (const LossOption& option : kLossOptions) {
    add({option.flag, defaults.*option.value, option.help, false, {}, option.name});
  }
  add({"--argmax", false, "Also write argmax, the class of the largest logit of each row"});
  add({"--entropy", false, "Also write entropy, the entropy of each row in nats"});
  add({"--sum-sq", false, "Also write sum_sq, the sum of the squared probabilities of each row"});
  add({"--mean-logit", false, "Also write mean_logit, the mean of each row's logits after scale and softcap"});
  add({"--backward", false, "Also write " + gradients});
  add(tensor("--grad", "grad_loss",
             "Name of the upstream gradient, in the shape of the loss; replaces --backward, which takes ones"));
  arguments.insert(arguments.end(), last.begin(), last.end());
  return arguments;
}

CrossEntropyOptions loss_options(const Run& run) {
  CrossEntropyOptions options;
  options.ignore_index = run.get<std::int64_t>("--ignore-index");
  options.reduction = chosen<Reduction>(run, "--reduction", kReductions);
  for (const LossOption& option : kLossOptions) options.*option.value = run.get<double>(option.flag);
  return options;
}

bool wants_gradients(const Run& run) {
  if (run.is_set("--backward") && !run.text("--grad").empty())
    throw InvalidArgument("--backward: is given beside --grad, expected one of them");
  return run.is_set("--backward") || !run.text("--grad").empty();
}

/// The outputs of a forward, put into the members of `views`: the loss, lse, and the outputs that flags ask for.
template <typename Views>
void make_outputs(Run& run, Views& views, const CrossEntropyOptions& options, const Dims& row_shape, DType dtype) {
  const Dims loss_shape = options.reduction == Reduction::none ? row_shape : Dims{};
  views.loss = run.output("loss", dtype, loss_shape);
  views.lse = run.lse_output(dtype, row_shape, row_shape);
  if (run.is_set("--argmax")) views.argmax = run.output("argmax", DType::int64, row_shape);
  if (run.is_set("--entropy")) views.entropy = run.output("entropy", dtype, row_shape);
  if (run.is_set("--sum-sq")) views.sum_sq = run.output("sum_sq", dtype, row_shape);
  if (run.is_set("--mean-logit")) views.mean_logit = run.output("mean_logit", dtype, row_shape);
  if (options.z_loss_weight > 0.0) views.z_loss = run.output("z_loss", dtype, loss_shape);
}

/// The outputs that a forward writes for its backward alone; they are in no file.
template <typename Views>
void make_outputs_for_backward(Run& run, Views& views, const CrossEntropyOptions& options, const Dims& row_shape) {
  const DType dtype = views.lse.dtype;
  views.target_mass = run.filled(dtype, row_shape, 0.0);
  if (options.reduction == Reduction::mean) views.divisor = run.filled(dtype, {}, 0.0);
}

/// The forward's results that a backward reads, and the upstream gradient: 1 unless the file has one.
template <typename Args, typename Views>
void set_upstream(Run& run, Args& backward, const Views& forward) {
  backward.grad_loss = run.input("--grad");
  if (!backward.grad_loss.is_present) {
    backward.grad_loss = run.filled(forward.loss.dtype, forward.loss.shape, 1.0);
  }
  backward.lse = forward.lse;
  backward.target_mass = forward.target_mass;
  backward.divisor = forward.divisor;
}

void run_cross_entropy(Run& run) {
  // In place, the logits are loaded into the memory of their gradient.
  const bool is_in_place = run.is_set("--in-place");
  const bool has_backward = wants_gradients(run) && !is_in_place;
  const TensorView logits = is_in_place ? run.output_over_input("grad_logits", "--logits") : run.input("--logits");
  const int class_axis = run.get<int>("--class-axis");
  AxisSet axes;
  axes.contains[check::axis({"cross_entropy", "logits", logits}, "class_axis", class_axis)] = true;

  CrossEntropyForwardArgs forward{.logits = logits,
                                  .targets = run.input("--targets"),
                                  .class_weight = run.input("--class-weight"),
                                  .row_weight = run.input("--row-weight"),
                                  .normalizer = run.input("--normalizer"),
                                  .class_axis = class_axis,
                                  .options = loss_options(run)};
  const Dims row_shape = reduced_shape(logits.shape, axes, false);
  make_outputs(run, forward, forward.options, row_shape, accumulator_dtype(logits.dtype));
  if (has_backward) make_outputs_for_backward(run, forward, forward.options, row_shape);
  if (is_in_place) {
    cross_entropy_forward_backward({.forward = forward, .grad_loss = run.input("--grad")}, run.context());
    return;
  }
  cross_entropy_forward(forward, run.context());
  if (!has_backward) return;
  CrossEntropyBackwardArgs backward{.logits = logits,
                                    .targets = forward.targets,
                                    .class_weight = forward.class_weight,
                                    .row_weight = forward.row_weight,
                                    .class_axis = class_axis,
                                    .options = forward.options};
  set_upstream(run, backward, forward);
  backward.grad_logits = run.output("grad_logits", logits.dtype, logits.shape);
  cross_entropy_backward(backward, run.context());
}

const Words kHeadInputs = {"hidden", "head", "bias"};

LinearCrossEntropyGradients head_gradients(Run& run, const LinearCrossEntropyInputs& inputs) {
  const auto& named = run.get<Words>("--gradients");
  // Without a list: the gradients of all inputs that the file has.
  const auto output = [&](const std::string& input, const std::string& name, DType dtype, const TensorView& like) {
    const bool is_wanted = named.empty() || std::find(named.begin(), named.end(), input) != named.end();
    return is_wanted && like.is_present ? run.output(name, dtype, like.shape) : TensorView{};
  };
  const DType dtype = inputs.hidden.dtype;
  // A bias may be float32 beside any hidden.
  const DType bias_dtype = inputs.bias.dtype == dtype ? dtype : accumulator_dtype(dtype);
  return {.grad_hidden = output("hidden", "grad_hidden", dtype, inputs.hidden),
          .grad_head = output("head", "grad_head", dtype, inputs.head),
          .grad_bias = output("bias", "grad_bias", bias_dtype, inputs.bias)};
}

void run_linear_cross_entropy(Run& run) {
  const auto& named = run.get<Words>("--gradients");
  const bool has_gradients = wants_gradients(run) || !named.empty();
  LinearCrossEntropyForwardArgs forward;
  LinearCrossEntropyInputs& inputs = forward.inputs;
  inputs.hidden = run.input("--hidden");
  inputs.head = run.input("--head");
  inputs.bias = run.input("--bias");
  inputs.targets = run.input("--targets");
  inputs.class_weight = run.input("--class-weight");
  inputs.row_weight = run.input("--row-weight");
  inputs.options = loss_options(run);
  inputs.skips_ignored = run.is_set("--skip-ignored");
  inputs.workspace_limit = static_cast<std::size_t>(parse_bytes("--workspace-limit", run.text("--workspace-limit")));
  forward.normalizer = run.input("--normalizer");
  if (!inputs.bias.is_present && std::find(named.begin(), named.end(), "bias") != named.end()) {
    throw InvalidArgument("--gradients: has bias, but the head has none; pass --bias or leave bias out");
  }
  Dims row_shape;
  for (int axis = 0; axis + 1 < inputs.hidden.shape.size(); ++axis) row_shape.push_back(inputs.hidden.shape[axis]);
  make_outputs(run, forward.outputs, inputs.options, row_shape, accumulator_dtype(inputs.hidden.dtype));
  if (!has_gradients) return linear_cross_entropy_forward(forward, run.context());

  // For "auto", the upstream gradient is known here before the loss, whatever the reduction.
  const std::string& algorithm = run.text("--algorithm");
  const bool saves_memory = algorithm == "memory" && inputs.hidden.device.type == DeviceType::cuda;
  if (saves_memory && inputs.workspace_limit == 0 && inputs.head.shape.size() == 2) {
    inputs.workspace_limit = linear_cross_entropy_small_workspace(inputs.head.shape[0]);
  }
  const auto suits_speed = [&] {
    linear_cross_entropy_forward_workspace_bytes(forward);  // refuses arguments whose sizes cannot be read below
    const std::int64_t features = inputs.head.shape[1];
    return linear_cross_entropy_algorithm({.rows = inputs.hidden.element_count() / features,
                                           .features = features,
                                           .classes = inputs.head.shape[0],
                                           .dtype = inputs.hidden.dtype,
                                           .device = inputs.hidden.device,
                                           .reduction = inputs.options.reduction,
                                           .is_head_transposed = inputs.head.strides[1] != 1,
                                           .has_soft_targets = is_floating_point(inputs.targets.dtype),
                                           .workspace_limit = inputs.workspace_limit}) ==
           LinearCrossEntropyAlgorithm::speed;
  };
  const bool is_speedy = algorithm == "speed" || (algorithm != "recompute" && suits_speed());
  if (is_speedy) {
    LinearCrossEntropyForwardBackwardArgs both{.forward = forward, .grad_loss = run.input("--grad")};
    both.gradients = head_gradients(run, inputs);
    return linear_cross_entropy_forward_backward(both, run.context());
  }
  make_outputs_for_backward(run, forward.outputs, inputs.options, row_shape);
  linear_cross_entropy_forward(forward, run.context());
  LinearCrossEntropyBackwardArgs backward{.inputs = inputs};
  set_upstream(run, backward, forward.outputs);
  backward.gradients = head_gradients(run, inputs);
  linear_cross_entropy_backward(backward, run.context());
}

// ----------------------------------------------------------------------------------------------------- lrpe_cosine

const Words kActivations = {"none", "relu", "sigmoid", "silu", "softmax"};
static_assert(static_cast<int>(Activation::none) == 0 && static_cast<int>(Activation::relu) == 1 &&
              static_cast<int>(Activation::sigmoid) == 2 && static_cast<int>(Activation::silu) == 3 &&
              static_cast<int>(Activation::softmax) == 4);

/// A tensor of the file in the operator's axes, [B, H, N, ...]. The core checks everything else in these axes; the
/// number of axes of the file's tensor is checked here.
TensorView as_heads_first(const TensorView& view, const char* called, const std::string& layout) {
  if (view.shape.size() != 4) {
    check::fail({"lrpe_cosine", called, view},
                "has shape " + check::to_string(view.shape) + ", expected four axes (" +
                    (layout == "bhnd" ? "batch, heads, positions, features)" : "batch, positions, heads, features)"));
  }
  if (layout == "bhnd") return view;
  const Dims& shape = view.shape;
  const Dims& strides = view.strides;
  return TensorView::strided(view.data, view.dtype, {shape[0], shape[2], shape[1], shape[3]},
                             {strides[0], strides[2], strides[1], strides[3]}, view.device);
}

void run_lrpe_cosine(Run& run) {
  const std::string& layout = run.text("--layout");
  LrpeAngles angles{.theta = run.input("--theta"),
                    .offsets = run.input("--offsets"),
                    .positions = run.input("--positions"),
                    .cu_seqlens = run.input("--cu-seqlens")};
  if (!run.text("--grid").empty()) angles.grid = parse_list("--grid", run.text("--grid"), "sizes such as 8 or 4,8,8");
  angles.extra_tokens = run.get<std::int64_t>("--extra-tokens");
  angles.offset = run.get<std::int64_t>("--offset");

  const TensorView x = run.input("--tensor");
  LrpeCosineForwardArgs forward{.x = as_heads_first(x, "x", layout), .angles = angles};
  forward.activation = chosen<Activation>(run, "--activation", kActivations);
  forward.activation_dim = run.get<int>("--activation-dim");
  Dims out_shape = x.shape;
  out_shape[3] *= 2;
  forward.out = as_heads_first(run.output("out", x.dtype, out_shape), "out", layout);
  if (forward.activation == Activation::softmax && forward.activation_dim == -2) {
    const Dims& shape = forward.x.shape;
    forward.lse = run.output("lse", accumulator_dtype(x.dtype), {shape[0], shape[1], 2, shape[3]});
  }
  lrpe_cosine_forward(forward, run.context());

  const TensorView grad_out = run.input("--grad");
  if (!grad_out.is_present) return;
  LrpeCosineBackwardArgs backward{.grad_out = as_heads_first(grad_out, "grad_out", layout),
                                  .x = forward.x,
                                  .angles = angles,
                                  .activation = forward.activation,
                                  .activation_dim = forward.activation_dim,
                                  .lse = forward.lse};
  // Checked in the file's axes, which the core does not know.
  check::has_shape({"lrpe_cosine", "grad_out", grad_out}, out_shape, "as out");
  backward.grad_x = as_heads_first(run.output("grad_x", x.dtype, x.shape), "grad_x", layout);
  backward.grad_theta = run.output("grad_theta", angles.theta.dtype, angles.theta.shape);
  lrpe_cosine_backward(backward, run.context());
}

// ------------------------------------------------------------------------------------------------------- the table

const RunOperator kOperators[] = {
    {"logsumexp",
     "Compute log(sum(exp(x))) over axes of x. Writes out and lse; with --grad also grad_x.",
     "--tensor x --dims -1 --grad g",
     {tensor("--tensor", "x", "Name of the input x, of a floating-point type, with any number of axes", kRequired),
      {"--dims", "", "Axes to sum over, for example -1 or 0,2; default: all", false, {}, "axes"},
      {"--keepdim", false, "Keep the summed axes, with size 1"},
      {"--dtype", "", "Type of out: float32 or the type of x; default: the type of x"},
      tensor("--grad", "grad_out", "Name of the upstream gradient, in the shape of out")},
     run_logsumexp},
    {"cross_entropy",
     "Compute the cross entropy of logits. Writes loss and lse; with --backward, --grad or --in-place also "
     "grad_logits.",
     "--logits logits --targets targets --backward",
     with_loss_arguments({{"--logits", "", "Name of the logits, of any shape with an axis of classes", kRequired},
                          {"--class-axis", -1, "Axis of the classes"}},
                         "grad_logits, the gradient of the loss",
                         {{"--in-place", false,
                           "Compute loss and gradient in one pass, and write the gradient over the logits in memory. "
                           "Ignored rows get lse and entropy 0"}}),
     run_cross_entropy},
    {"linear_cross_entropy",
     "Compute the cross entropy of a linear head, without storing all of its logits. Writes loss and lse; with "
     "--backward or --grad also the gradients.",
     "--hidden x --head head --targets targets --backward",
     with_loss_arguments(
         {{"--hidden", "", "Name of the hidden states, of any shape whose last axis is the features", kRequired},
          {"--head", "", "Name of the head, [classes, features]; the logits are hidden head^T + bias", kRequired},
          {"--bias", "", "Name of the head's bias, one number for each class"}},
         "grad_hidden, grad_head and, with --bias, grad_bias",
         {{"--gradients", Words{}, "Gradients to write with --backward or --grad, from hidden,head,bias; default: all",
           false, kHeadInputs},
          choice(
              "--algorithm", {"auto", "speed", "memory", "recompute"},
              "How the gradients are computed. speed: together with the loss, from logits computed once; memory: the "
              "same, with a small workspace; recompute: in a pass of its own that computes the logits again; auto: "
              "speed if its workspace is allowed, else recompute",
              "auto"),
          {"--skip-ignored", false,
           "Skip the matrix products of rows that are ignored or have weight 0. A CPU always skips them"},
          {"--workspace-limit", "0",
           "Largest size of the workspace in bytes, for example 64M or 2G; 0 lets eaves choose"}}),
     run_linear_cross_entropy},
    {"lrpe_cosine",
     "Encode relative positions of a sequence or a grid by cosines and sines. Writes out; with --grad also grad_x and "
     "grad_theta; with a softmax over the sequence also lse, [batch, heads, 2, features]: the logsumexp of each "
     "column and its rounding error.",
     "--tensor q --theta theta --activation silu",
     {tensor("--tensor", "x", "Name of the input x, which has four axes (see --layout)", kRequired),
      {"--theta", "",
       "Name of the angles per position, [heads or 1, E]. The first E features turn with the first axis of the grid, "
       "the "
       "next E with the second, and so on; further features have no position",
       kRequired},
      choice("--layout", {"bnhd", "bhnd"},
             "Order of the axes. bnhd: batch, positions, heads, features; bhnd: batch, heads, positions, features",
             "bnhd"),
      {"--grid", "", "Sizes of the grid, for example 4,8,8, the last axis fastest; default: one axis, a sequence"},
      {"--extra-tokens", std::int64_t{0}, "Number of positions before the grid; their angle is 0"},
      {"--offset", std::int64_t{0}, "Number that is added to every coordinate of the grid"},
      {"--offsets", "", "Name of further offsets, int32 or int64, one for each batch entry"},
      {"--positions", "",
       "Name of the positions, int32 or int64, one for each token, or for each token of each batch entry; default: 0, "
       "1, 2"},
      {"--cu-seqlens", "",
       "Name of the first positions of packed sequences and the end of the last, int32 or int64; each sequence counts "
       "from 0"},
      choice("--activation", kActivations, "Function that is applied to x first", "none"),
      {"--activation-dim", -1, "Axis of a softmax, in either layout: -1 the features, -2 the sequence"},
      tensor("--grad", "grad_out", "Name of the upstream gradient, in the shape of out")},
     run_lrpe_cosine},
};

}  // namespace

std::span<const RunOperator> run_operators() { return kOperators; }

}  // namespace eaves::cli
