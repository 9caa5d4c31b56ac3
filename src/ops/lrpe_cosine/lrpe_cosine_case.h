// One call of lrpe_cosine in a test or a self-test: its inputs, its buffers between canaries, and the comparison of
// forward and backward with the oracle.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "eaves/lrpe_cosine.h"
#include "ops/lrpe_cosine/lrpe_cosine_reference.h"
#include "testing/runs.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

struct LrpeCosineCase {
  Device device = device_of_test();
  DType dtype = DType::float32;
  Dims shape = {};                        ///< of x: [B, H, N, D]
  Dims theta_shape = {};                  ///< [H or 1, E]
  std::optional<DType> theta_dtype = {};  ///< the dtype of x unless given
  Dims grid = {};
  std::int64_t extra_tokens = 0;
  std::int64_t offset = 0;
  std::vector<std::int64_t> offsets = {};    ///< empty: not given; the next two likewise
  std::vector<std::int64_t> positions = {};  ///< [N], or [B, N] if it has B * N numbers and B is not 1
  std::vector<std::int64_t> cu_seqlens = {};
  DType integers = DType::int64;  ///< the dtype of these three
  Activation activation = Activation::none;
  int activation_dim = -1;
  bool has_lse = true;  ///< for a softmax over the sequence; without lse no backward runs
  bool has_grad_x = true;
  bool has_grad_theta = true;
  bool has_x_in_backward = true;
  bool is_plain = false;  ///< grad_x of a softmax may err only relative to the largest of its row or column
  Placement x_placement = {};
  Placement theta_placement = {};
  Placement offsets_placement = {};
  Placement positions_placement = {};
  Placement out_placement = {};
  Placement grad_out_placement = {};
  Placement grad_x_placement = {};
  Placement grad_theta_placement = {};
  std::function<double(std::int64_t)> value = {};     ///< of element i of x; absent: normal
  std::function<double(std::int64_t)> angle = {};     ///< of element i of theta; absent: normal
  std::function<double(std::int64_t)> upstream = {};  ///< of element i of grad_out; absent: normal
};

/// An activation, and the axis of a softmax.
struct LrpeCosineActivation {
  Activation activation;
  int dim;
  const char* name;
};

inline const std::vector<LrpeCosineActivation>& every_activation() {
  static const std::vector<LrpeCosineActivation> all = {
      {Activation::none, -1, "none"},       {Activation::relu, -1, "relu"},
      {Activation::sigmoid, -1, "sigmoid"}, {Activation::silu, -1, "silu"},
      {Activation::softmax, -1, "softmax"}, {Activation::softmax, -2, "softmax over the sequence"},
  };
  return all;
}

inline LrpeCosineCase with_activation(LrpeCosineCase test_case, const LrpeCosineActivation& activation) {
  test_case.activation = activation.activation;
  test_case.activation_dim = activation.dim;
  return test_case;
}

/// `count` entries of an axis, from `first` on.
inline TensorView slice(TensorView view, int axis, std::int64_t first, std::int64_t count = 1) {
  if (!view.is_present) return view;
  const std::int64_t bytes = first * view.strides[axis] * static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<char*>(view.data) + bytes;
  view.shape[axis] = count;
  return view;
}

/// The buffers of one call, forward and backward.
class LrpeCosineRun : public CallsOf<LrpeCosineRun> {
 public:
  using Where = TensorView (TestTensor::*)() const;  ///< &TestTensor::view or &TestTensor::host

  explicit LrpeCosineRun(const LrpeCosineCase& test_case)
      : case_(test_case),
        x(case_.device, case_.dtype, case_.shape, case_.x_placement),
        theta(case_.device, theta_dtype(), case_.theta_shape, case_.theta_placement),
        offsets(case_.device, case_.integers, list_shape(case_.offsets), case_.offsets_placement),
        positions(case_.device, case_.integers, positions_shape(), case_.positions_placement),
        cu_seqlens(case_.device, case_.integers, list_shape(case_.cu_seqlens)),
        grad_out(case_.device, case_.dtype, out_shape(), case_.grad_out_placement),
        out(case_.device, case_.dtype, out_shape(), case_.out_placement),
        lse(case_.device, accumulator_dtype(case_.dtype), {case_.shape[0], case_.shape[1], 2, case_.shape[3]}),
        grad_x(case_.device, case_.dtype, case_.shape, case_.grad_x_placement),
        grad_theta(case_.device, theta_dtype(), case_.theta_shape, case_.grad_theta_placement) {
    const auto normal_unless = [](const std::function<double(std::int64_t)>& given, std::uint64_t seed) {
      if (given) return given;
      return std::function<double(std::int64_t)>(
          [seed](std::int64_t i) { return random_normal(seed, static_cast<std::uint64_t>(i)); });
    };
    x.fill(normal_unless(case_.value, 61));
    theta.fill(normal_unless(case_.angle, 62));
    grad_out.fill(normal_unless(case_.upstream, 63));
    const auto fill = [](TestTensor& tensor, const std::vector<std::int64_t>& list) {
      tensor.fill([&](std::int64_t i) { return static_cast<double>(list[static_cast<std::size_t>(i)]); });
    };
    fill(offsets, case_.offsets);
    fill(positions, case_.positions);
    fill(cu_seqlens, case_.cu_seqlens);
    out_before_ = out.bytes();
    lse_before_ = lse.bytes();
    grad_x_before_ = grad_x.bytes();
    grad_theta_before_ = grad_theta.bytes();
  }

  LrpeAngles angles(Where where = &TestTensor::view) const {
    return {.theta = (theta.*where)(),
            .grid = case_.grid,
            .extra_tokens = case_.extra_tokens,
            .offset = case_.offset,
            .offsets = case_.offsets.empty() ? TensorView{} : (offsets.*where)(),
            .positions = case_.positions.empty() ? TensorView{} : (positions.*where)(),
            .cu_seqlens = case_.cu_seqlens.empty() ? TensorView{} : (cu_seqlens.*where)()};
  }
  LrpeCosineForwardArgs forward_args() const {
    return {.x = x.view(),
            .angles = angles(),
            .activation = case_.activation,
            .activation_dim = case_.activation_dim,
            .out = out.view(),
            .lse = has_lse() ? lse.view() : TensorView{}};
  }
  LrpeCosineBackwardArgs backward_args() const {
    return {.grad_out = grad_out.view(),
            .x = case_.has_x_in_backward ? x.view() : TensorView{},
            .angles = angles(),
            .activation = case_.activation,
            .activation_dim = case_.activation_dim,
            .lse = has_lse() ? lse.view() : TensorView{},
            .grad_x = case_.has_grad_x ? grad_x.view() : TensorView{},
            .grad_theta = case_.has_grad_theta ? grad_theta.view() : TensorView{}};
  }

  void launch(const ExecutionContext& context = {}) {
    lrpe_cosine_forward(forward_args(), context);
    if (has_backward()) lrpe_cosine_backward(backward_args(), context);
  }

  /// Has every wanted output changed? Without this check an operator that does nothing would agree with itself.
  bool has_written() const {
    return has_written_elementwise() &&
           (!has_backward() || !case_.has_grad_theta || is_changed(grad_theta, grad_theta_before_));
  }

  /// Are all results equal bit by bit?
  bool results_equal(const LrpeCosineRun& other) const {
    return has_written() && elementwise_results_equal(other) && grad_theta.bytes() == other.grad_theta.bytes();
  }
  /// Are the results without sums over batches, heads or positions, and the lse, equal bit by bit?
  bool elementwise_results_equal(const LrpeCosineRun& other) const {
    return has_written_elementwise() && out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes() &&
           grad_x.bytes() == other.grad_x.bytes();
  }

  std::vector<TestTensor*> inputs() { return {&x, &theta, &offsets, &positions, &cu_seqlens, &grad_out}; }
  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    return {{"out", &out}, {"lse", &lse}, {"grad_x", &grad_x}, {"grad_theta", &grad_theta}};
  }

  const LrpeCosineCase& test_case() const { return case_; }
  bool is_over_sequence() const { return case_.activation == Activation::softmax && case_.activation_dim == -2; }
  bool has_lse() const { return is_over_sequence() && case_.has_lse; }
  bool has_backward() const { return (has_lse() || !is_over_sequence()) && (case_.has_grad_x || case_.has_grad_theta); }
  Dims out_shape() const { return {case_.shape[0], case_.shape[1], case_.shape[2], 2 * case_.shape[3]}; }

 private:
  DType theta_dtype() const { return case_.theta_dtype.value_or(case_.dtype); }
  static bool is_changed(const TestTensor& tensor, const std::vector<unsigned char>& before) {
    return tensor.host().element_count() == 0 || tensor.bytes() != before;
  }
  bool has_written_elementwise() const {
    return is_changed(out, out_before_) && (!has_lse() || is_changed(lse, lse_before_)) &&
           (!has_backward() || !case_.has_grad_x || is_changed(grad_x, grad_x_before_));
  }
  static Dims list_shape(const std::vector<std::int64_t>& list) { return {static_cast<std::int64_t>(list.size())}; }
  Dims positions_shape() const {
    const Dims list = list_shape(case_.positions);
    return list[0] == 0 || list[0] == case_.shape[2] ? list : Dims{case_.shape[0], case_.shape[2]};
  }

  LrpeCosineCase case_;
  std::vector<unsigned char> out_before_, lse_before_, grad_x_before_, grad_theta_before_;

 public:
  TestTensor x, theta, offsets, positions, cu_seqlens, grad_out, out, lse, grad_x, grad_theta;
};

/// The worst errors of one call, as shares of the errors that testing/tolerance.h allows.
struct LrpeCosineShares {
  std::string failure = {};  ///< on the first result outside of the contract; empty: all are within it
  double out = 0.0;
  double lse = 0.0;
  double grad_x = 0.0;
  double grad_theta = 0.0;
  double grad_theta_error = 0.0;  ///< the error of grad_theta divided by its scale, the sum of its terms' sizes

  void raise(const LrpeCosineShares& other) {
    if (failure.empty()) failure = other.failure;
    out = std::max(out, other.out);
    lse = std::max(lse, other.lse);
    grad_x = std::max(grad_x, other.grad_x);
    grad_theta = std::max(grad_theta, other.grad_theta);
    grad_theta_error = std::max(grad_theta_error, other.grad_theta_error);
  }
  double worst() const { return std::max({out, lse, grad_x, grad_theta}); }
};

/// Compares the downloaded results of a run with the oracle.
class LrpeCosineComparison {
 public:
  explicit LrpeCosineComparison(const LrpeCosineRun& run)
      : run_(run),
        case_(run.test_case()),
        dtype_(case_.dtype),
        exact_(run.x.host(), run.angles(&TestTensor::host), case_.activation, case_.activation_dim) {}

  /// Empty, or a sentence on the first result outside of the contract; then it compares no more.
  [[nodiscard]] std::string compare() {
    if (!compare_out() || (run_.has_lse() && !compare_lse()) || !run_.has_backward()) return shares.failure;
    const reference::LrpeCosine::Gradients gradients = exact_.gradients(run_.grad_out.host());
    if (case_.has_grad_x && !compare_grad_x(gradients)) return shares.failure;
    if (case_.has_grad_theta) compare_grad_theta(gradients);
    return shares.failure;
  }

  LrpeCosineShares shares;

 private:
  /// Is `actual` within the contract? Raises `share` to the error divided by the bound, within the contract or not.
  template <typename What>
  bool expect(DType dtype, double actual, double exact, double allowed, double& share, What what) {
    const double error = std::abs(actual - exact);
    if (error == 0.0) return true;
    const std::string text = error <= allowed ? "" : difference_beyond(allowed, dtype, actual, exact);
    // A result that overflows in the oracle too has no share.
    if (std::isfinite(error) || !text.empty()) share = std::fmax(share, error / allowed);
    if (!text.empty()) shares.failure = what() + ": " + text + ", allowed " + short_text(allowed);
    return text.empty();
  }

  /// Calls body(i, b, h, n, d) for the elements of x, in row-major order, until it returns false.
  template <typename Body>
  bool for_each(Body body) const {
    const Dims& shape = case_.shape;
    std::int64_t i = 0;
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t h = 0; h < shape[1]; ++h) {
        for (std::int64_t n = 0; n < shape[2]; ++n) {
          for (std::int64_t d = 0; d < shape[3]; ++d) {
            if (!body(i++, b, h, n, d)) return false;
          }
        }
      }
    }
    return true;
  }

  /// The activation is a sigmoid or an exponential times at most this factor.
  double beside(double x) const { return case_.activation == Activation::silu ? std::abs(x) + 1.0 : 1.0; }

  static std::string place(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
    return check::to_string(Dims{b, h, n, d});
  }

  bool compare_out() {
    const std::int64_t features = case_.shape[3];
    return for_each([&](std::int64_t i, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      const double activated = exact_.activated(b, h, n, d);
      const bool has_factor = case_.activation == Activation::sigmoid || case_.activation == Activation::silu;
      const double scale = case_.activation == Activation::softmax
                               ? softmax_scale(activated, exact_.largest_activated(b, h, n, d))
                               : activation_scale(dtype_, activated, has_factor ? beside(exact_.x(b, h, n, d)) : 0.0);
      const double phi = exact_.phi(b, h, n, d);
      const std::int64_t first = i / std::max<std::int64_t>(features, 1) * 2 * features + d;
      const auto half = [&](double exact, std::int64_t at, const char* name) {
        return expect(dtype_, run_.out.get(at), exact, allowed_elementwise_error(dtype_, exact, scale), shares.out,
                      [&] { return name + place(b, h, n, d); });
      };
      return half(activated * std::cos(phi), first, "cosine half of out") &&
             half(activated * std::sin(phi), first + features, "sine half of out");
    });
  }

  bool compare_lse() {
    const Dims& shape = case_.shape;
    const DType dtype = accumulator_dtype(dtype_);
    for (std::int64_t i = 0; i < shape[0] * shape[1] * shape[3]; ++i) {
      const std::int64_t b = i / (shape[1] * shape[3]), h = i / shape[3] % shape[1], d = i % shape[3];
      const std::int64_t at = i / shape[3] * 2 * shape[3] + d;
      double max = -std::numeric_limits<double>::infinity();
      for (std::int64_t n = 0; n < shape[2]; ++n) max = std::fmax(max, exact_.x(b, h, n, d));
      const double lse = exact_.lse(b, h, 0, d);
      const double high = run_.lse.get(at), low = run_.lse.get(at + shape[3]);
      if (!expect(dtype, high, lse, allowed_error(dtype, lse, logsumexp_scale(lse, max)), shares.lse,
                  [&] { return "lse of column " + std::to_string(i); })) {
        return false;
      }
      // Together both numbers have the precision of an lse with the largest element at 0, which a softmax needs.
      const bool is_finite = std::isfinite(high) && std::isfinite(lse);
      const double lost = is_finite ? exact_.lse_beyond(high, b, h, 0, d) : std::numeric_limits<double>::quiet_NaN();
      const double above_max = is_finite ? exact_.lse_beyond(max, b, h, 0, d) : 0.0;
      if (!expect(dtype, low, lost, allowed_error(dtype, lse, logsumexp_scale(above_max, 0.0)), shares.lse,
                  [&] { return "what is lost of the lse of column " + std::to_string(i); })) {
        return false;
      }
    }
    return true;
  }

  bool compare_grad_x(const reference::LrpeCosine::Gradients& gradients) {
    return for_each([&](std::int64_t i, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      const double exact = gradients.x[static_cast<std::size_t>(i)];
      double scale = gradients.x_scale[static_cast<std::size_t>(i)];
      if (case_.activation == Activation::softmax) {
        const std::size_t row = exact_.softmax_of(b, h, n, d);
        const double terms = softmax_scale(scale, gradients.scale_largest[row]);
        // The scale is the largest gradient of the row or column, or the size of the element's terms if they cancel in
        // every element: in a softmax of few elements with equal upstream gradients, or with one element that has
        // nearly all of the sum.
        scale = std::fmax(gradients.x_largest[row], case_.is_plain ? 0.0 : terms);
      } else if (case_.activation == Activation::sigmoid || case_.activation == Activation::silu) {
        const double g = std::abs(run_.grad_out.get(cosine_element(i))) +
                         std::abs(run_.grad_out.get(cosine_element(i) + case_.shape[3]));
        scale = activation_scale(dtype_, scale, g * beside(exact_.x(b, h, n, d)));
      }
      return expect(dtype_, run_.grad_x.get(i), exact, allowed_elementwise_error(dtype_, exact, scale), shares.grad_x,
                    [&] { return "grad_x" + place(b, h, n, d); });
    });
  }

  void compare_grad_theta(const reference::LrpeCosine::Gradients& gradients) {
    const DType dtype = run_.grad_theta.view().dtype;
    for (std::size_t i = 0; i < gradients.theta.size(); ++i) {
      const double exact = gradients.theta[i];
      const double actual = run_.grad_theta.get(static_cast<std::int64_t>(i));
      const double allowed = allowed_sum_error(dtype, exact, gradients.theta_scale[i]);
      if (!expect(dtype, actual, exact, allowed, shares.grad_theta,
                  [&] { return "grad_theta of element " + std::to_string(i); })) {
        return;
      }
      const double error = std::abs(actual - exact);
      if (error > 0.0) shares.grad_theta_error = std::max(shares.grad_theta_error, error / gradients.theta_scale[i]);
    }
  }

  /// The element of out that holds the cosine half of element i of x.
  std::int64_t cosine_element(std::int64_t i) const {
    const std::int64_t features = case_.shape[3];
    return i / features * 2 * features + i % features;
  }

  const LrpeCosineRun& run_;
  const LrpeCosineCase& case_;
  DType dtype_;
  reference::LrpeCosine exact_;
};

inline std::string description_of(const LrpeCosineCase& c) {
  std::string text = std::string(name_of(c.dtype)) + " " + check::to_string(c.shape) + ", theta " +
                     name_of(c.theta_dtype.value_or(c.dtype)) + " " + check::to_string(c.theta_shape);
  for (const LrpeCosineActivation& activation : every_activation()) {
    if (c.activation == activation.activation && c.activation_dim == activation.dim) {
      text += std::string(", activation ") + activation.name;
    }
  }
  if (!c.grid.empty()) text += ", grid " + check::to_string(c.grid);
  if (c.extra_tokens != 0) text += ", extra_tokens " + std::to_string(c.extra_tokens);
  if (c.offset != 0) text += ", offset " + std::to_string(c.offset);
  if (!c.offsets.empty()) text += ", offsets";
  if (!c.positions.empty()) text += ", positions";
  if (!c.cu_seqlens.empty()) text += ", cu_seqlens";
  return text;
}

/// Runs forward and backward, and compares every element with the oracle and every byte around the elements with its
/// canary.
inline LrpeCosineShares compare_lrpe_cosine(const LrpeCosineCase& test_case) {
  LrpeCosineRun run(test_case);
  return shares_of_run<LrpeCosineComparison>(run, description_of(test_case));
}

}  // namespace eaves::testing
