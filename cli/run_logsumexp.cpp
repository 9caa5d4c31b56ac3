// `eaves run logsumexp`: x from a file to out and lse, and with an upstream gradient to grad_x.
#include <memory>
#include <string>

#include "cli/options.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "eaves/logsumexp.h"

namespace eaves::cli {
namespace {

struct LogsumexpArguments {
  RunArguments common;
  std::string tensor;
  std::string dims;
  std::string dtype;
  std::string grad;
  bool keepdim = false;
};

void run_logsumexp(const LogsumexpArguments& arguments) {
  Dims dims;  // empty: all axes
  if (!arguments.dims.empty()) dims = parse_axes("--dims", arguments.dims);
  DType out_dtype = DType::float32;
  if (!arguments.dtype.empty()) out_dtype = parse_dtype("--dtype", arguments.dtype);

  Run run(arguments.common);
  const TensorView x = run.input("--tensor", arguments.tensor);
  if (arguments.dtype.empty() && is_floating_point(x.dtype)) out_dtype = x.dtype;
  const Dims shape = reduced_shape(x.shape, check::axes({"logsumexp", "x", x}, dims), arguments.keepdim);

  LogsumexpForwardArgs forward;
  forward.x = x;
  forward.axes = dims;
  forward.keepdim = arguments.keepdim;
  forward.out = run.output("out", out_dtype, shape);
  forward.lse = run.output("lse", accumulator_dtype(x.dtype), shape);
  logsumexp_forward(forward, run.context());

  if (!arguments.grad.empty()) {
    LogsumexpBackwardArgs backward;
    backward.grad_out = run.input("--grad", arguments.grad);
    backward.x = x;
    backward.lse = forward.lse;
    backward.axes = dims;
    backward.keepdim = arguments.keepdim;
    backward.grad_x = run.output("grad_x", x.dtype, x.shape);
    logsumexp_backward(backward, run.context());
  }
  run.finish();
}

}  // namespace

void add_run_logsumexp(CLI::App& run) {
  CLI::App* command = run.add_subcommand(
      "logsumexp", "log(sum(exp(x))) over axes. Writes out, lse (float32) and, with --grad, grad_x.");
  command->footer(
      "Example:\n  eaves run logsumexp --input in.safetensors --tensor x --dims -1 --grad g --output out.safetensors");
  const auto arguments = std::make_shared<LogsumexpArguments>();
  arguments->common.add_to(*command);
  command->add_option("--tensor", arguments->tensor, "Name of the input x: any number of axes, any dtype")->required();
  // Not an empty text, which an unset variable of a shell would be: it is not what its user meant by all axes.
  command->add_option("--dims", arguments->dims, "Axes to sum over, such as -1 or 0,2; without: all")
      ->check(is_not_empty());
  command->add_flag("--keepdim", arguments->keepdim, "Keep the summed axes with size 1");
  command->add_option("--dtype", arguments->dtype, "Of out: float32, or that of x; without: that of x")
      ->check(is_not_empty());
  command->add_option("--grad", arguments->grad, "Name of the upstream gradient, in the shape of out")
      ->check(is_not_empty());
  command->callback([arguments] { run_logsumexp(*arguments); });
}

}  // namespace eaves::cli
