// divergence: checks that a call is legal and that there is a GPU for it.
#include "ops/divergence/divergence.h"

#include "core/check.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using check::Argument;

constexpr const char* kForward = "divergence_forward";
constexpr const char* kBackward = "divergence_backward";

void check_rows(const Argument& matrix, const Dims& shape) {
  check::is_valid(matrix);
  check::has_shape(matrix, shape, "as the student's values");
  if (matrix.view.strides[1] != 1 && shape[1] > 1) {
    check::fail(matrix,
                "has strides " + check::to_string(matrix.view.strides) + ", expected unit stride along the classes");
  }
}

void check_bias(const Argument& bias, const Dims& shape, Device device) {
  if (!check::is_given(bias)) return;
  check::is_on(bias, device, "student");
  check::has_shape(bias, {shape[1]}, "one per class");
  check::has_dtype(bias, {DType::float32}, "sums are float32");
  check::is_contiguous(bias);
}

void check_row_number(const Argument& number, const Dims& shape, Device device) {
  if (!check::is_given(number)) return;
  check::is_on(number, device, "student");
  check::has_shape(number, {shape[0]}, "one per row");
  check::has_dtype(number, {DType::float32}, "sums are float32");
}

void check_inputs(const char* op, const DivergenceInputs& inputs) {
  const Argument student{op, "student", inputs.student.values};
  const Argument teacher{op, "teacher", inputs.teacher.values};
  const Dims& shape = inputs.student.values.shape;
  const Device device = inputs.student.values.device;
  check::is_valid(student);
  if (shape.size() != 2) check::fail(student, "has shape " + check::to_string(shape) + ", expected [rows, classes]");
  check_rows(student, shape);
  check_rows(teacher, shape);
  check::is_on(teacher, device, "student");
  check::has_dtype(student, {DType::float32}, "sums are float32");
  check::has_dtype(teacher, {DType::float32, DType::float16, DType::bfloat16}, "types of a teacher");
  check_bias({op, "bias", inputs.student.bias}, shape, device);
  check_bias({op, "teacher_bias", inputs.teacher.bias}, shape, device);
  check_row_number({op, "temperature", inputs.temperature.values}, shape, device);
  const Argument targets{op, "targets", inputs.targets};
  if (check::is_given(targets)) {
    check::is_on(targets, device, "student");
    check::has_shape(targets, {shape[0]}, "one per row");
    check::has_dtype(targets, {DType::int64}, "classes");
  }
  if (device.type == DeviceType::cpu) throw Unsupported(op, "has no kernel for the CPU");
  require_cuda(op, device);
}

}  // namespace

std::size_t divergence_forward_workspace_bytes(const DivergenceForwardArgs& args, const ExecutionContext&) {
  check_inputs(kForward, args.inputs);
  const Dims& shape = args.inputs.student.values.shape;
  if constexpr (kHasCuda) return cuda::divergence_workspace_bytes(shape[0], shape[1]);
  return 0;
}

void divergence_forward(const DivergenceForwardArgs& args, const ExecutionContext& context) {
  const std::size_t bytes = divergence_forward_workspace_bytes(args, context);
  const TensorView& values = args.inputs.student.values;
  const Argument statistics{kForward, "statistics", args.statistics};
  check::is_valid(statistics);
  check::is_on(statistics, values.device, "student");
  check::has_shape(statistics, {values.shape[0], kDivergenceStatistics}, "the statistics of each row");
  check::has_dtype(statistics, {DType::float32}, "sums are float32");
  check::is_contiguous(statistics);
  if (values.shape[0] == 0) return;
  const Scratch scratch(kForward, values.device, bytes, context);
  if constexpr (kHasCuda) cuda::divergence_forward(args, scratch.context());
}

void divergence_backward(const DivergenceBackwardArgs& args, const ExecutionContext& context) {
  check_inputs(kBackward, args.inputs);
  const TensorView& values = args.inputs.student.values;
  const auto check_lse = [&](const Argument& lse) {
    check::is_valid(lse);
    check::is_on(lse, values.device, "student");
    check::has_shape(lse, {values.shape[0], 2}, "two numbers for each row");
    check::has_dtype(lse, {DType::float32}, "sums are float32");
    if (lse.view.strides[1] != 1) {
      check::fail(lse,
                  "has strides " + check::to_string(lse.view.strides) + ", expected unit stride along its last axis");
    }
  };
  check_lse({kBackward, "lse", args.lse});
  check_lse({kBackward, "teacher_lse", args.teacher_lse});
  if (args.inputs.targets.is_present) check_lse({kBackward, "hard_lse", args.hard_lse});
  for (const auto& [name, number] :
       {std::pair{"centre", &args.centre}, std::pair{"entropy", &args.entropy}, std::pair{"hard_loss", &args.hard_loss},
        std::pair{"grad_divergence", &args.grad_divergence}, std::pair{"grad_lse", &args.grad_lse},
        std::pair{"grad_entropy", &args.grad_entropy}, std::pair{"grad_hard_loss", &args.grad_hard_loss}}) {
    check_row_number({kBackward, name, number->values}, values.shape, values.device);
  }
  const Argument grad_values{kBackward, "grad_values", args.grad_values};
  check_rows(grad_values, values.shape);
  check::is_on(grad_values, values.device, "student");
  check::has_dtype(grad_values, {DType::float32, DType::float16, DType::bfloat16}, "types of hidden states");
  check::is_writable(grad_values);
  const TensorView& teacher = args.inputs.teacher.values;
  if (teacher.data != values.data) check::do_not_overlap(grad_values, {kBackward, "teacher", teacher});
  const bool is_in_place = args.grad_values.data == values.data && args.grad_values.dtype == values.dtype &&
                           args.grad_values.strides == values.strides;
  if (!is_in_place) check::do_not_overlap(grad_values, {kBackward, "student", values});
  if (values.element_count() == 0) return;
  if constexpr (kHasCuda) cuda::divergence_backward(args, context);
}

}  // namespace eaves
