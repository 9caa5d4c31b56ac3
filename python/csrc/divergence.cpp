// The passes over a chunk's logits on a GPU, for python/eaves/_chunked/divergence.py. The fake implementations are in
// _torch/chunked_rules.py.
#include "ops/divergence/divergence.h"

#include <iterator>
#include <string>
#include <vector>

#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr const char* kOp = "linear_kl_div";

#define EAVES_ROWS                                                                                                 \
  "Tensor student, Tensor? bias, Tensor teacher, Tensor? teacher_bias, Tensor? temperature, Tensor? targets, int " \
  "divergence, bool teacher_holds_probabilities, float[] numbers"

/// `numbers`: scale and soft cap of the student, scale and soft cap of the teacher, temperature, beta.
struct Rows {
  Tensor student;
  OptionalTensor bias;
  Tensor teacher;
  OptionalTensor teacher_bias, temperature, targets;
  std::int64_t divergence;
  bool teacher_holds_probabilities;
  std::vector<double> numbers;

  static Rows read(Arguments& arguments) {
    return {arguments.read<Tensor>(),         arguments.read<OptionalTensor>(), arguments.read<Tensor>(),
            arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(),
            arguments.read<std::int64_t>(),   arguments.read<bool>(),           arguments.read<std::vector<double>>()};
  }

  DivergenceInputs views() const {
    if (numbers.size() != 6) throw InvalidArgument("numbers: expected six");
    if (divergence < 0 || divergence > 3) throw InvalidArgument("divergence: expected 0 to 3");
    return {.student = {.values = input(student, {kOp, "student"}),
                        .bias = optional_input(bias, {kOp, "bias"}),
                        .scale = numbers[0],
                        .softcap = numbers[1]},
            .teacher = {.values = input(teacher, {kOp, "teacher"}),
                        .bias = optional_input(teacher_bias, {kOp, "teacher_bias"}),
                        .scale = numbers[2],
                        .softcap = numbers[3],
                        .holds_probabilities = teacher_holds_probabilities},
            .temperature = {optional_input(temperature, {kOp, "temperature"}), numbers[4]},
            .divergence = static_cast<Divergence>(divergence),
            .beta = numbers[5],
            .targets = optional_input(targets, {kOp, "targets"})};
  }
};

Tensor forward(Rows rows) {
  DivergenceForwardArgs args{.inputs = rows.views()};
  const TensorView& values = args.inputs.student.values;
  if (values.shape.size() != 2) throw InvalidArgument("student: expected two axes");
  NewTensor statistics = empty_output({values.shape[0], kDivergenceStatistics}, DType::float32, values.device);
  args.statistics = statistics.view;
  run<divergence_forward, &divergence_forward_workspace_bytes>(args, values.device);
  return std::move(statistics.tensor);
}

#define EAVES_OF_ROWS                                                                                             \
  "Tensor lse, Tensor teacher_lse, Tensor centre, Tensor? entropy, Tensor? hard_lse, Tensor? hard_loss, Tensor? " \
  "grad_divergence, Tensor? grad_lse, Tensor? grad_entropy, Tensor? grad_hard_loss, float[] upstream"

/// `upstream`: the gradients of divergence, lse, entropy and hard loss, each used if its tensor is absent.
struct OfRows {
  Tensor lse, teacher_lse, centre;
  OptionalTensor entropy, hard_lse, hard_loss;
  OptionalTensor grad_divergence, grad_lse, grad_entropy, grad_hard_loss;
  std::vector<double> upstream;

  static OfRows read(Arguments& arguments) {
    return {arguments.read<Tensor>(),
            arguments.read<Tensor>(),
            arguments.read<Tensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(),
            arguments.read<std::vector<double>>()};
  }
};

void backward(Tensor grad_values, Rows rows, OfRows of_rows) {
  const OfRows& of = of_rows;
  if (of.upstream.size() != 4) throw InvalidArgument("upstream: expected four");
  DivergenceBackwardArgs args{
      .inputs = rows.views(),
      .lse = input(of.lse, {kOp, "lse"}),
      .teacher_lse = input(of.teacher_lse, {kOp, "teacher_lse"}),
      .hard_lse = optional_input(of.hard_lse, {kOp, "hard_lse"}),
      .centre = {input(of.centre, {kOp, "centre"})},
      .entropy = {optional_input(of.entropy, {kOp, "entropy"})},
      .hard_loss = {optional_input(of.hard_loss, {kOp, "hard_loss"})},
      .grad_divergence = {optional_input(of.grad_divergence, {kOp, "grad_divergence"}), of.upstream[0]},
      .grad_lse = {optional_input(of.grad_lse, {kOp, "grad_lse"}), of.upstream[1]},
      .grad_entropy = {optional_input(of.grad_entropy, {kOp, "grad_entropy"}), of.upstream[2]},
      .grad_hard_loss = {optional_input(of.grad_hard_loss, {kOp, "grad_hard_loss"}), of.upstream[3]},
      .grad_values = output(grad_values)};
  run<divergence_backward>(args, args.inputs.student.values.device);  // needs no workspace
}

void implement(Library& library) {
  library.impl("divergence_forward", EAVES_BOX(forward));
  library.impl("divergence_backward", EAVES_BOX(backward));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("divergence_forward(" EAVES_ROWS ") -> Tensor");
  library.def("divergence_backward(Tensor(a!) grad_values, " EAVES_ROWS ", " EAVES_OF_ROWS ") -> ()");
}
EAVES_IMPLEMENT(eaves::binding::implement)
