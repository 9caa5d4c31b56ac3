// `eaves run lrpe_cosine`: x and theta from a file to the encoding, and with an upstream gradient to grad_x and
// grad_theta.
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "cli/options.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "eaves/lrpe_cosine.h"

namespace eaves::cli {
namespace {

struct LrpeCosineArguments {
  RunArguments common;
  std::string tensor;
  std::string theta;
  std::string grid;
  std::string offsets;
  std::string positions;
  std::string cu_seqlens;
  std::string activation = "none";
  std::string layout = "bnhd";
  std::string grad_out;
  std::int64_t extra_tokens = 0;
  std::int64_t offset = 0;
  int activation_dim = -1;
};

const std::map<std::string, Activation>& activations() {
  static const std::map<std::string, Activation> by_name = {{"none", Activation::none},
                                                            {"relu", Activation::relu},
                                                            {"sigmoid", Activation::sigmoid},
                                                            {"silu", Activation::silu},
                                                            {"softmax", Activation::softmax}};
  return by_name;
}

// A tensor of the file as the operator takes it, [B, H, N, ...].
TensorView as_heads_first(const TensorView& view, const std::string& layout) {
  if (layout == "bhnd") return view;
  const Dims& shape = view.shape;
  const Dims& strides = view.strides;
  return TensorView::strided(view.data, view.dtype, {shape[0], shape[2], shape[1], shape[3]},
                             {strides[0], strides[2], strides[1], strides[3]}, view.device);
}

// The core, which checks everything else, speaks of [B, H, N, D]: the file's axes are checked here.
TensorView input_with_heads(Run& run, const std::string& argument, const std::string& name, const char* called,
                            const std::string& layout) {
  const TensorView view = run.input(argument, name);
  if (view.shape.size() != 4) {
    check::fail({"lrpe_cosine", called, view},
                "has shape " + check::to_string(view.shape) + ", expected four axes (" +
                    (layout == "bhnd" ? "batch, heads, positions, features)" : "batch, positions, heads, features)"));
  }
  return view;
}

void run_lrpe_cosine(const LrpeCosineArguments& arguments) {
  LrpeAngles angles;
  if (!arguments.grid.empty()) angles.grid = parse_sizes("--grid", arguments.grid);
  angles.extra_tokens = arguments.extra_tokens;
  angles.offset = arguments.offset;

  Run run(arguments.common);
  const std::string& layout = arguments.layout;
  const TensorView x = input_with_heads(run, "--tensor", arguments.tensor, "x", layout);
  angles.theta = run.input("--theta", arguments.theta);
  angles.offsets = run.optional_input("--offsets", arguments.offsets);
  angles.positions = run.optional_input("--positions", arguments.positions);
  angles.cu_seqlens = run.optional_input("--cu-seqlens", arguments.cu_seqlens);
  Dims out_shape = x.shape;
  out_shape[3] *= 2;

  LrpeCosineForwardArgs forward;
  forward.x = as_heads_first(x, layout);
  forward.angles = angles;
  forward.activation = activations().at(arguments.activation);
  forward.activation_dim = arguments.activation_dim;
  forward.out = as_heads_first(run.output("out", x.dtype, out_shape), layout);
  if (forward.activation == Activation::softmax && forward.activation_dim == -2) {
    const Dims& shape = forward.x.shape;
    forward.lse = run.output("lse", accumulator_dtype(x.dtype), {shape[0], shape[1], 2, shape[3]});
  }
  lrpe_cosine_forward(forward, run.context());

  if (!arguments.grad_out.empty()) {
    LrpeCosineBackwardArgs backward;
    const TensorView grad_out = input_with_heads(run, "--grad", arguments.grad_out, "grad_out", layout);
    // In the axes of the file, which the core does not know.
    check::has_shape({"lrpe_cosine", "grad_out", grad_out}, out_shape, "that of out");
    backward.grad_out = as_heads_first(grad_out, layout);
    backward.x = forward.x;
    backward.angles = angles;
    backward.activation = forward.activation;
    backward.activation_dim = forward.activation_dim;
    backward.lse = forward.lse;
    backward.grad_x = as_heads_first(run.output("grad_x", x.dtype, x.shape), layout);
    backward.grad_theta = run.output("grad_theta", angles.theta.dtype, angles.theta.shape);
    lrpe_cosine_backward(backward, run.context());
  }
  run.finish();
}

}  // namespace

void add_run_lrpe_cosine(CLI::App& run) {
  CLI::App* command = run.add_subcommand("lrpe_cosine",
                                         "The relative positional encoding of a sequence or a grid, by cosines and "
                                         "sines. Writes out, with --grad grad_x and grad_theta, and of a softmax over "
                                         "the sequence lse, [batch, heads, 2, features]: the logsumexp of each column, "
                                         "and what its rounding has lost.");
  command->footer(
      "Example:\n  eaves run lrpe_cosine --input in.safetensors --tensor q --theta theta --activation silu "
      "--output out.safetensors");
  const auto arguments = std::make_shared<LrpeCosineArguments>();
  arguments->common.add_to(*command);
  command->add_option("--tensor", arguments->tensor, "Name of the input x: four axes, see --layout")->required();
  command
      ->add_option("--theta", arguments->theta,
                   "Name of the angles per position, [heads or 1, E]: E features for each axis of the grid in turn; "
                   "the features behind them have no position")
      ->required();
  command
      ->add_option("--layout", arguments->layout,
                   "bnhd: batch, positions, heads, features; bhnd: batch, heads, positions, features")
      ->check(CLI::IsMember({"bnhd", "bhnd"}))
      ->capture_default_str();
  command
      ->add_option("--grid", arguments->grid,
                   "Sizes such as 4,8,8, the last axis fastest; without: one axis, a sequence")
      ->check(is_not_empty());
  command->add_option("--extra-tokens", arguments->extra_tokens, "How many positions before the grid have angle 0")
      ->capture_default_str();
  command->add_option("--offset", arguments->offset, "Added to every coordinate of the grid")->capture_default_str();
  command->add_option("--offsets", arguments->offsets, "Name of more offsets: int32 or int64, one per batch entry")
      ->check(is_not_empty());
  command
      ->add_option("--positions", arguments->positions,
                   "Name of the positions, instead of 0, 1, 2: int32 or int64, one per token, of each batch entry too")
      ->check(is_not_empty());
  command
      ->add_option("--cu-seqlens", arguments->cu_seqlens,
                   "Name of the starts of packed sequences, and the end: int32 or int64; each counts from 0")
      ->check(is_not_empty());
  command->add_option("--activation", arguments->activation, "Of x, first")
      ->check(CLI::IsMember({"none", "relu", "sigmoid", "silu", "softmax"}))
      ->capture_default_str();
  command
      ->add_option("--activation-dim", arguments->activation_dim,
                   "Of a softmax: -1 over the features, -2 over the sequence, in either layout")
      ->capture_default_str();
  command->add_option("--grad", arguments->grad_out, "Name of the upstream gradient, in the shape of out")
      ->check(is_not_empty());
  command->callback([arguments] { run_lrpe_cosine(*arguments); });
}

}  // namespace eaves::cli
