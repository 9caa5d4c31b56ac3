// The steps of linear_cross_entropy on the CPU (linear_cross_entropy_steps.h). All but the products move less memory
// than those and the loss, by the number of features or classes.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/dispatch.h"
#include "core/mean_loss.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_logits.h"

namespace eaves::cpu {
namespace {

using namespace linear_cross_entropy_tensors;

/// A is the accumulator of the problem's type T.
template <typename T>
class Steps final : public LinearCrossEntropySteps {
 public:
  using A = Accumulator<T>;

  Steps(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyMemory& memory,
        const ExecutionContext& context)
      : problem_(problem),
        memory_(memory),
        context_(context),
        leaves_out_zeros_(leaves_out_rows_without_upstream(problem)) {}

  std::int64_t select_rows() override {
    std::int64_t count = 0;
    double weight = 0.0;
    UpstreamRange<A> upstream;
    for (std::int64_t row = 0; row < problem_.rows(); ++row) {
      const auto at = problem_.view.rows.offsets(row);
      if (!counts(at)) continue;
      double counted_weight = 1.0;
      if (!problem_.has_soft_targets()) {
        const std::int64_t target = integer_at(problem_.targets, at.of[kTargets]);
        memory_.targets[count] = target;
        const bool has_all_weights = problem_.class_weight.data != nullptr && problem_.shard == nullptr;
        if (has_all_weights) counted_weight = number_at(problem_.class_weight, target);
      }
      if (problem_.row_weight != nullptr) counted_weight *= static_cast<const A*>(problem_.row_weight)[at.of[kPerRow]];
      weight += counted_weight;
      // Soft targets that are not gathered are read in the order of the per-row tensors, which need not be the view's.
      const bool is_in_place = problem_.has_soft_targets() && memory_.soft_targets == nullptr;
      const std::int64_t place = is_in_place ? at.of[kPerRow] : count;
      if (memory_.row_indices != nullptr) memory_.row_indices[place] = row;
      if (memory_.grad_loss != nullptr) {
        const auto gradient = static_cast<A>(number_at(problem_.grad_loss, at.of[kGradLoss]));
        static_cast<A*>(memory_.grad_loss)[place] = gradient;
        upstream.add(gradient);
      }
      ++count;
    }
    write_numbers(weight, upstream);
    for (std::int64_t i = 0; memory_.grad_loss != nullptr && i < count; ++i) {
      static_cast<A*>(memory_.grad_loss)[i] /= numbers()[kAlpha];
    }
    count_ = count;
    return count;
  }

  void gather_hidden(std::int64_t first, std::int64_t count) override {
    const T* from = static_cast<const T*>(problem_.hidden);
    T* to = static_cast<T*>(memory_.hidden);
    for_each_feature_row(first, count, [&](std::int64_t i, const auto& at) {
      copy_features(from + at.of[kHidden], kHidden, to + i * problem_.features());
    });
  }

  void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class, std::int64_t classes,
                           std::int64_t stride) override {
    const auto size = static_cast<std::int64_t>(size_of(problem_.targets.dtype));
    const auto* from = static_cast<const char*>(problem_.targets.data);
    auto* to = static_cast<char*>(memory_.soft_targets);
    parallel_for(context_, count, grain_for(classes), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t element = per_row_index(first + i) * problem_.soft_target_stride + first_class;
        std::memcpy(to + i * stride * size, from + element * size, static_cast<std::size_t>(classes * size));
      }
    });
  }

  void scatter_grad_hidden(std::int64_t first, std::int64_t count, DType dtype, const void* scale) override {
    const A factor = scale == nullptr ? A(1) : *static_cast<const A*>(scale);
    with_grad_hidden([&](auto* to) {
      if (dtype == kDTypeOf<T>) {
        scatter_features(static_cast<const T*>(memory_.grad_hidden), first, count, factor, to);
      } else {
        scatter_features(static_cast<const A*>(memory_.grad_hidden), first, count, factor, to);
      }
    });
  }

  void clear_grad_hidden() override {
    with_grad_hidden([&](auto* to) {
      using D = std::remove_pointer_t<decltype(to)>;
      parallel_for(context_, problem_.rows(), grain_for(problem_.features()),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) {
                       const auto at = problem_.view.rows.offsets(row);
                       if (counts(at)) continue;
                       for (std::int64_t i = 0; i < problem_.features(); ++i) {
                         to[at.of[kGradHidden] + problem_.view.columns.offsets(i).of[kGradHidden]] = D{};
                       }
                     }
                   });
    });
  }

  /// Rows that do not count are always left out here.
  void gather_numbers(const void* from, void* to, std::int64_t count, bool is_split, bool gathers,
                      const void* divisor) override {
    const auto gather = [&]<typename N>() {
      const auto* numbers = static_cast<const N*>(from);
      for (std::int64_t i = 0; i < count; ++i) {
        N number = numbers[gathers ? per_row_index(i) : i];
        if constexpr (std::is_same_v<N, A>) {
          if (divisor != nullptr) number /= *static_cast<const A*>(divisor);
        }
        static_cast<N*>(to)[i] = number;
      }
    };
    is_split ? gather.template operator()<SplitLse<A>>() : gather.template operator()<A>();
  }

  void scatter_numbers(const void* from, void* to, std::int64_t count, bool is_split) override {
    is_split ? scatter(static_cast<const SplitLse<A>*>(from), static_cast<SplitLse<A>*>(to), count)
             : scatter(static_cast<const A*>(from), static_cast<A*>(to), count);
  }

  void scatter_argmax(const std::int64_t* from, std::int64_t* to, std::int64_t count) override {
    scatter(from, to, count);
  }

  void widen(TypedNumbers from, std::int64_t count, void* to) override {
    for (std::int64_t i = 0; i < count; ++i) static_cast<A*>(to)[i] = static_cast<A>(number_at(from, i));
  }

  void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                         const void* scale, bool is_first, double* to) override {
    const double factor = scale == nullptr ? 1.0 : static_cast<double>(*static_cast<const A*>(scale));
    constexpr std::int64_t kColumns = 1024;  // of a piece, whose sums stay in L1
    parallel_for(context_, ceil_divide(columns, kColumns), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        const std::int64_t column = piece * kColumns;
        add_sums(static_cast<const T*>(from) + column, rows, std::min(kColumns, columns - column), stride, factor,
                 is_first, to + column);
      }
    });
  }

  void write_grad_bias() override {
    const double* sums = memory_.grad_bias;
    const auto write = [&](auto* to) {
      using N = std::remove_pointer_t<decltype(to)>;
      for (std::int64_t i = 0; i < problem_.classes; ++i) {
        const double before = problem_.accumulates ? static_cast<double>(load_as_accumulator(to[i])) : 0.0;
        to[i] = round_to<N>(static_cast<A>(before + sums[i]));
      }
    };
    if (problem_.grad_bias_dtype == kDTypeOf<T>) {
      write(static_cast<T*>(problem_.grad_bias));
    } else {
      write(static_cast<A*>(problem_.grad_bias));
    }
  }

  void clear_parameters() override {
    const std::size_t row_bytes = static_cast<std::size_t>(problem_.features()) * size_of(problem_.grad_head_dtype);
    for (std::int64_t v = 0; problem_.grad_head != nullptr && v < problem_.classes; ++v) {
      const std::size_t offset =
          static_cast<std::size_t>(v * problem_.grad_head_stride) * size_of(problem_.grad_head_dtype);
      std::memset(static_cast<char*>(problem_.grad_head) + offset, 0, row_bytes);
    }
    if (problem_.grad_bias != nullptr) {
      std::memset(problem_.grad_bias, 0,
                  static_cast<std::size_t>(problem_.classes) * size_of(problem_.grad_bias_dtype));
    }
  }

  void reduce_losses(const void* losses, void* to) override {
    double sum = 0.0;
    for (std::int64_t i = 0; i < count_; ++i) sum += static_cast<double>(static_cast<const A*>(losses)[i]);
    if (problem_.options.reduction == Reduction::mean) {
      const double divisor = numbers()[kDivisor];
      sum = mean_of(sum, divisor, problem_.normalizer != nullptr);
    }
    *static_cast<A*>(to) = static_cast<A>(sum);
  }

  void copy_logits(const void* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride) override {
    parallel_for(context_, rows, grain_for(columns), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::copy_n(static_cast<const A*>(from) + i * from_stride, columns,
                    static_cast<A*>(memory_.logits) + i * stride);
      }
    });
  }

  void product(const Gemm& product) override { gemm(product, context_); }

 private:
  template <typename Offsets>
  bool has_upstream(const Offsets& at) const {
    const auto is_zero = [&](const void* numbers) {
      return numbers == nullptr || static_cast<const A*>(numbers)[at.of[kPerRow]] == A(0);
    };
    return number_at(problem_.grad_loss, at.of[kGradLoss]) != 0.0 || !is_zero(problem_.grad_lse) ||
           !is_zero(problem_.grad_entropy);
  }

  /// False for a row that is left out: an ignored one, one of weight 0, and in a backward one without an upstream
  /// gradient. `at` are its offsets.
  template <typename Offsets>
  bool counts(const Offsets& at) const {
    if (leaves_out_zeros_ && !has_upstream(at)) return false;
    if (problem_.row_weight != nullptr && static_cast<const A*>(problem_.row_weight)[at.of[kPerRow]] == A(0)) {
      return false;
    }
    return problem_.has_soft_targets() ||
           integer_at(problem_.targets, at.of[kTargets]) != problem_.options.ignore_index;
  }

  template <typename N>
  void scatter(const N* from, N* to, std::int64_t count) const {
    std::fill_n(to, problem_.rows(), N{});
    for (std::int64_t i = 0; i < count; ++i) to[per_row_index(i)] = from[i];
  }

  A* numbers() const { return static_cast<A*>(memory_.numbers); }

  /// Of the rows that are computed: the weight of all, and their upstream gradients.
  void write_numbers(double weight, const UpstreamRange<A>& upstream) {
    const bool is_mean = problem_.options.reduction == Reduction::mean;
    A* to = numbers();
    to[kDivisor] = static_cast<A>(divisor_of_sum(weight));
    if (problem_.normalizer != nullptr) to[kDivisor] = *static_cast<const A*>(problem_.normalizer);
    const bool is_backward = problem_.mode == LinearCrossEntropyMode::backward;
    if (is_backward && is_mean) to[kDivisor] = *static_cast<const A*>(problem_.outputs.divisor);
    if (!is_backward && problem_.outputs.divisor != nullptr) *static_cast<A*>(problem_.outputs.divisor) = to[kDivisor];
    double scale = upstream.scale();
    if (problem_.is_reduced()) {
      if (problem_.grad_loss.data != nullptr) scale = number_at(problem_.grad_loss, 0);
      if (is_mean) scale = mean_gradient(scale, static_cast<double>(to[kDivisor]));
    }
    put_scale(scale, problem_.scale_in_products(), to);
  }

  /// Of the view, of the i-th row that is computed.
  std::int64_t row_index(std::int64_t i) const { return memory_.row_indices[i]; }
  std::int64_t per_row_index(std::int64_t i) const { return problem_.view.rows.offsets(row_index(i)).of[kPerRow]; }

  template <typename Body>
  void for_each_feature_row(std::int64_t first, std::int64_t count, Body&& body) {
    parallel_for(context_, count, grain_for(problem_.features()), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        // Rows of a problem without a selection are those of the view.
        const std::int64_t row = memory_.row_indices == nullptr ? first + i : row_index(first + i);
        body(i, problem_.view.rows.offsets(row));
      }
    });
  }

  bool has_unit_stride(int tensor) const {
    const auto& columns = problem_.view.columns;
    return columns.rank == 0 || (columns.rank == 1 && columns.strides[tensor][0] == 1);
  }

  void copy_features(const T* from, int tensor, T* to) const {
    if (has_unit_stride(tensor)) {
      std::copy_n(from, problem_.features(), to);
      return;
    }
    for (std::int64_t i = 0; i < problem_.features(); ++i) to[i] = from[problem_.view.columns.offsets(i).of[tensor]];
  }

  /// Calls it with grad_hidden in its type: T, or of a shard accumulators.
  template <typename Body>
  void with_grad_hidden(Body&& body) {
    if (problem_.grad_hidden_dtype == kDTypeOf<T>) return body(static_cast<T*>(problem_.grad_hidden));
    body(static_cast<A*>(problem_.grad_hidden));
  }

  template <typename S, typename D>
  void scatter_features(const S* from, std::int64_t first, std::int64_t count, A factor, D* to) {
    const std::int64_t features = problem_.features();
    const bool is_contiguous = has_unit_stride(kGradHidden);
    for_each_feature_row(first, count, [&](std::int64_t i, const auto& at) {
      for (std::int64_t f = 0; f < features; ++f) {
        const std::int64_t offset = is_contiguous ? f : problem_.view.columns.offsets(f).of[kGradHidden];
        to[at.of[kGradHidden] + offset] = round_to<D>(factor * load_as_accumulator(from[i * features + f]));
      }
    });
  }

  static void add_sums(const T* from, std::int64_t rows, std::int64_t columns, std::int64_t stride, double factor,
                       bool is_first, double* to) {
    if (is_first) std::fill_n(to, columns, 0.0);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t v = 0; v < columns; ++v) {
        to[v] += factor * static_cast<double>(load_as_accumulator(from[row * stride + v]));
      }
    }
  }

  const LinearCrossEntropyProblem& problem_;
  const LinearCrossEntropyMemory& memory_;
  const ExecutionContext& context_;
  const bool leaves_out_zeros_;
  std::int64_t count_ = 0;  ///< rows that are computed
};

}  // namespace

void linear_cross_entropy(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context) {
  require_gemm(problem.op);
  LinearCrossEntropyMemory memory;
  lay_out(problem, block, context.workspace.data, memory);
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    Steps<T> steps(problem, memory, context);
    LinearCrossEntropyOfLogits(problem, block, memory, context, steps).run();
  });
}

}  // namespace eaves::cpu
