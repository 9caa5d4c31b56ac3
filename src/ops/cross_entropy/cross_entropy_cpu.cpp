// cross_entropy on the CPU. A plain row (classes as targets, no option that touches every logit) costs as much as
// logsumexp: it takes the loops of cpu/row_softmax.h and a load of its target. Any other row goes through L1 block by
// block, as accumulators in the order of the classes; each option adds a pass over the block (cpu/weighted_softmax.h).
// Numbers of a whole row are computed in float64, by cross_entropy_math.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy/cross_entropy_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include <vector>

#include "core/dispatch.h"
#include "ops/cross_entropy/cross_entropy_gradient_cpu.h"
#include "ops/cross_entropy/cross_entropy_rows_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
void forward_of(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  const Rows<T> rows(problem.inputs);
  const bool skips_ignored = problem.skips_ignored;
  Results results(problem.inputs, problem.outputs);
  reduce_rows(rows, skips_ignored, context, [&](std::int64_t index, const RowStatistics& statistics) {
    const auto row = rows.row(index);
    const bool is_skipped = skips_ignored && row.is_ignored;
    results.store(row.at.of[kPerRow], loss_of(rows, row, statistics, skips_ignored),
                  is_skipped ? RowStatistics{} : statistics);
  });
  results.finish(divisor_if_mean(problem.inputs, problem.normalizer), problem.normalizer != nullptr);
}

template <typename T>
void backward_of(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const Rows<T> rows(problem.inputs);
  const DType result_dtype = kDTypeOf<Accumulator<T>>;
  const double divisor = problem.divisor == nullptr ? 1.0 : number_at({problem.divisor, result_dtype}, 0);
  const auto per_row = [&](const void* data, std::int64_t index) {
    return data == nullptr ? 0.0 : static_cast<double>(static_cast<const Accumulator<T>*>(data)[index]);
  };
  write_gradients<T>(rows, {problem.grad_logits, problem.grad_dtype},
                     has_options(rows.inputs().plan, problem.grad_entropy != nullptr), context,
                     [&](std::int64_t index, const ColumnPiece& piece) {
                       const auto row = rows.row(index);
                       const std::int64_t at = row.at.of[kPerRow];
                       const auto lse = problem.lse.load<Accumulator<T>>(problem.lse.row(at));
                       return map_of(rows, row,
                                     {.grad_loss = grad_of_row(problem.inputs, problem.grad_loss, row.at, divisor),
                                      .grad_lse = per_row(problem.grad_lse, at),
                                      .grad_entropy = per_row(problem.grad_entropy, at),
                                      .lse = split_lse<double>(lse.high, lse.low),
                                      .entropy = per_row(problem.entropy, at),
                                      .target_mass = per_row(problem.target_mass, at),
                                      .target = row.target,
                                      .target_weight = 0.0},
                                     piece);
                     });
}

// --------------------------------------------------------------------------------------------- forward and backward

template <typename T>
void in_place_of(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const CrossEntropyForwardProblem& forward = problem.forward;
  const Rows<T> rows(forward.inputs);
  const CrossEntropyView& view = rows.view();
  const Gradient grad_logits{const_cast<void*>(forward.inputs.logits), problem.grad_dtype};
  const bool with_options = has_options(rows.inputs().plan, false);
  const double divisor = divisor_if_mean(forward.inputs, forward.normalizer);
  Results results(forward.inputs, forward.outputs);

  const auto finish_forward = [&](std::int64_t index, const RowStatistics& statistics) {
    const auto row = rows.row(index);
    const RowLoss<double> loss = loss_of(rows, row, statistics, true);
    results.store(row.at.of[kPerRow], loss, row.is_ignored ? RowStatistics{} : statistics);
    return loss;
  };
  const auto map = [&](std::int64_t index, const RowLoss<double>& loss, const ColumnPiece& piece) {
    const auto row = rows.row(index);
    return map_of(rows, row,
                  {.grad_loss = grad_of_row(forward.inputs, problem.grad_loss, row.at, divisor),
                   .grad_lse = 0.0,
                   .grad_entropy = 0.0,
                   .lse = loss.lse,
                   .entropy = 0.0,
                   .target_mass = loss.target_mass,
                   .target = row.target,
                   .target_weight = 0.0},
                  piece);
  };

  if (view.row_count == 0) return results.finish(divisor, forward.normalizer != nullptr);
  const bool has_tiles = !with_options && Tiles<T>::fit(view);  // with options gradients are not written by tiles
  const ColumnPieces pieces(view.column_count, view.row_count, 1);
  if (has_tiles || pieces.count > 1) {
    std::vector<RowLoss<double>> losses(static_cast<std::size_t>(view.row_count));
    reduce_rows(rows, true, context, [&](std::int64_t row, const RowStatistics& statistics) {
      losses[static_cast<std::size_t>(row)] = finish_forward(row, statistics);
    });
    write_gradients<T>(rows, grad_logits, with_options, context, [&](std::int64_t row, const ColumnPiece& piece) {
      return map(row, losses[static_cast<std::size_t>(row)], piece);
    });
  } else {
    // A row is read from memory once: its gradient finds the logits in the caches.
    for_each_row_piece(view, context, false, [&](const ColumnPiece& piece) {
      RowStatistics statistics;
      if (!rows.row(piece.group).is_ignored) {
        if (!rows.inputs().plan.needs_only_softmax()) {
          statistics = reduce_with_options(rows, piece);
        } else {
          statistics.softmax = reduce_piece(view, rows.logits(), piece);
        }
      }
      const RowMap gradient = map(piece.group, finish_forward(piece.group, statistics), piece);
      write_in_place(rows, grad_logits, with_options, piece, gradient);
    });
  }
  results.finish(divisor, forward.normalizer != nullptr);
}

template <typename T>
void rescale_of(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const CrossEntropyView& view = problem.view;
  for_each_row_piece(view, context, false, [&](const ColumnPiece& piece) {
    const auto at = view.rows.offsets(piece.group);
    const A factor = static_cast<A>(number_at(problem.grad_loss, at.of[kGradLoss]));
    if (factor == A(1)) return;
    T* row = static_cast<T*>(problem.grad_logits) + at.of[kGradLogits];
    if (view.layout == RowLayout::contiguous) {
      const auto factors = hn::Set(Tag<T>(), factor);
      transform(row + piece.begin, row + piece.begin, static_cast<std::size_t>(piece.end - piece.begin),
                // A 0 stays 0 even if the factor is infinite or NaN: rows that do not count hold zeros. A NaN stays
                // NaN; Highway's Ne is false for it.
                [&](VectorOf<T> v)
                    HWY_ATTR { return hn::IfThenZeroElse(hn::Eq(v, hn::Zero(Tag<T>())), hn::Mul(v, factors)); });
    } else {
      for_each_run(view.columns, kGradLogits, piece.begin, piece.end - piece.begin,
                   [&](std::int64_t, std::int64_t count, std::int64_t offset, std::int64_t stride) {
                     for (std::int64_t i = 0; i < count; ++i) {
                       T& element = row[offset + i * stride];
                       element = round_to<T>(weigh(factor, load_as_accumulator(element)));
                     }
                   });
    }
  });
}

// ----------------------------------------------------------------------------------------------------------- shards

template <typename T, typename S>
void shard_forward_of(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  const Rows<T> rows(problem.inputs);
  reduce_rows(rows, false, context, [&](std::int64_t index, const RowStatistics& statistics) {
    const auto row = rows.row(index);
    // Merging with an empty set that has the largest z' makes it the anchor.
    ClassStatistics<double> largest;
    largest.softmax.max = statistics.largest;
    store_statistics(merged(statistics, largest), rows.target_class(row), rows.terms(),
                     static_cast<S*>(problem.statistics) + row.at.of[kPerRow] * kCrossEntropyStatistics);
  });
}

}  // namespace

void forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { forward_of<T>(problem, context); });
}

void backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { backward_of<T>(problem, context); });
}

void in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.forward.inputs.logits_dtype, [&]<typename T>() { in_place_of<T>(problem, context); });
}

void rescale(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { rescale_of<T>(problem, context); });
}

void shard_forward(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() {
    if (problem.statistics_dtype == DType::float64) return shard_forward_of<T, double>(problem, context);
    shard_forward_of<T, Accumulator<T>>(problem, context);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(in_place);
HWY_EXPORT(rescale);
HWY_EXPORT(shard_forward);

}  // namespace

void cross_entropy(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}
void cross_entropy(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}
void cross_entropy(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(in_place)(problem, context);
}
void cross_entropy(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(rescale)(problem, context);
}
void cross_entropy(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(shard_forward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
