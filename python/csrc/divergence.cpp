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

NewTensor empty_statistics(const TensorView& values) {
  if (values.shape.size() != 2) throw InvalidArgument("student: expected two axes");
  return empty_output({values.shape[0], kDivergenceStatistics}, DType::float32, values.device);
}

Tensor forward(Rows rows) {
  DivergenceForwardArgs args{.inputs = rows.views()};
  const TensorView& values = args.inputs.student.values;
  NewTensor statistics = empty_statistics(values);
  args.statistics = statistics.view;
  run<divergence_forward, &divergence_forward_workspace_bytes>(args, values.device);
  return std::move(statistics.tensor);
}

#define EAVES_UPSTREAM \
  "Tensor? grad_divergence, Tensor? grad_lse, Tensor? grad_entropy, Tensor? grad_hard_loss, float[] upstream"

/// `constants`: the upstream gradients of divergence, lse, entropy and hard loss for which no tensor is given.
struct Upstream {
  OptionalTensor divergence, lse, entropy, hard_loss;
  std::vector<double> constants;

  static Upstream read(Arguments& arguments) {
    return {arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>(), arguments.read<std::vector<double>>()};
  }

  void write_to(DivergenceBackwardArgs& args) const {
    if (constants.size() != 4) throw InvalidArgument("upstream: expected four");
    args.grad_divergence = {optional_input(divergence, {kOp, "grad_divergence"}), constants[0]};
    args.grad_lse = {optional_input(lse, {kOp, "grad_lse"}), constants[1]};
    args.grad_entropy = {optional_input(entropy, {kOp, "grad_entropy"}), constants[2]};
    args.grad_hard_loss = {optional_input(hard_loss, {kOp, "grad_hard_loss"}), constants[3]};
  }
};

#define EAVES_OF_ROWS \
  "Tensor lse, Tensor teacher_lse, Tensor centre, Tensor? entropy, Tensor? hard_lse, Tensor? hard_loss"

struct OfRows {
  Tensor lse, teacher_lse, centre;
  OptionalTensor entropy, hard_lse, hard_loss;

  static OfRows read(Arguments& arguments) {
    return {arguments.read<Tensor>(),         arguments.read<Tensor>(),         arguments.read<Tensor>(),
            arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>()};
  }
};

void backward(Tensor grad_values, Rows rows, OfRows of, Upstream upstream) {
  DivergenceBackwardArgs args{.inputs = rows.views(),
                              .lse = input(of.lse, {kOp, "lse"}),
                              .teacher_lse = input(of.teacher_lse, {kOp, "teacher_lse"}),
                              .hard_lse = optional_input(of.hard_lse, {kOp, "hard_lse"}),
                              .centre = {input(of.centre, {kOp, "centre"})},
                              .entropy = {optional_input(of.entropy, {kOp, "entropy"})},
                              .hard_loss = {optional_input(of.hard_loss, {kOp, "hard_loss"})},
                              .grad_values = output(grad_values)};
  upstream.write_to(args);
  run<divergence_backward, &divergence_backward_workspace_bytes>(args, args.inputs.student.values.device);
}

Tensor forward_backward(Tensor grad_values, Rows rows, Upstream upstream) {
  DivergenceBackwardArgs args{.inputs = rows.views(), .grad_values = output(grad_values)};
  const TensorView& values = args.inputs.student.values;
  NewTensor statistics = empty_statistics(values);
  args.statistics = statistics.view;
  const auto columns = [&](DivergenceStatistic first, const Dims& shape, const Dims& strides) {
    return TensorView::strided(static_cast<float*>(statistics.view.data) + int(first), DType::float32, shape, strides,
                               values.device);
  };
  const auto lse = [&](DivergenceStatistic first) {
    return columns(first, {values.shape[0], 2}, {kDivergenceStatistics, 1});
  };
  const auto number = [&](DivergenceStatistic which) {
    return RowNumber{columns(which, {values.shape[0]}, {kDivergenceStatistics})};
  };
  args.lse = lse(DivergenceStatistic::lse);
  args.teacher_lse = lse(DivergenceStatistic::teacher_lse);
  args.hard_lse = lse(DivergenceStatistic::hard_lse);
  args.centre = number(DivergenceStatistic::centre);
  args.entropy = number(DivergenceStatistic::entropy);
  args.hard_loss = number(DivergenceStatistic::hard_loss);
  upstream.write_to(args);
  run<divergence_backward, &divergence_backward_workspace_bytes>(args, values.device);
  return std::move(statistics.tensor);
}

void implement(Library& library) {
  library.impl("divergence_forward", EAVES_BOX(forward));
  library.impl("divergence_backward", EAVES_BOX(backward));
  library.impl("divergence_forward_backward", EAVES_BOX(forward_backward));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("divergence_forward(" EAVES_ROWS ") -> Tensor");
  library.def("divergence_backward(Tensor(a!) grad_values, " EAVES_ROWS ", " EAVES_OF_ROWS ", " EAVES_UPSTREAM
              ") -> ()");
  library.def("divergence_forward_backward(Tensor(a!) grad_values, " EAVES_ROWS ", " EAVES_UPSTREAM ") -> Tensor");
}
EAVES_IMPLEMENT(eaves::binding::implement)
