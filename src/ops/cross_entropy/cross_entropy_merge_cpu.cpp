// The loss of a vocabulary in shards, from the statistics of all shards.
#include "core/dispatch.h"
#include "cpu/parallel.h"
#include "ops/cross_entropy/cross_entropy_results.h"

namespace eaves::cpu {
namespace {

/// Results are of type A, statistics of type S.
template <typename A, typename S>
void merge_of(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.inputs;
  Terms terms(inputs);
  terms.has_weight = problem.has_weight;
  const std::int64_t row_count = inputs.view.row_count;
  Results results(inputs, problem.outputs);
  std::vector<double> weights(static_cast<std::size_t>(row_count));
  parallel_for(context, row_count, grain_for(problem.shards * 64), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto at = inputs.view.rows.offsets(row);
      const std::int64_t index = at.of[kPerRow];
      ClassStatistics<double> statistics;
      TargetClass<double> target;
      for (std::int64_t shard = 0; shard < problem.shards; ++shard) {
        const S* from =
            static_cast<const S*>(problem.statistics) + (shard * row_count + index) * kCrossEntropyStatistics;
        statistics = merged(statistics, stored_statistics<double>(from));
        target.logit += from[int(CrossEntropyStatistic::target_logit)];
        target.weight += from[int(CrossEntropyStatistic::target_weight)];
      }
      const bool is_ignored = !terms.is_soft && terms.is_ignored(integer_at(inputs.targets, at.of[kTargets]));
      const double row_weight = is_ignored ? 0.0 : row_weight_at(inputs, index);
      weights[static_cast<std::size_t>(index)] = weigh(terms.is_soft ? 1.0 : target.weight, row_weight);
      if (is_ignored && problem.skips_ignored) {
        results.store(index, {}, {});
        continue;
      }
      results.store(index, weighted(row_loss(statistics, target, !is_ignored, terms), row_weight), statistics);
    }
  });
  double divisor = 1.0;
  if (inputs.options.reduction == Reduction::mean) {
    divisor = problem.normalizer == nullptr ? divisor_of_sum(sum_in_order(weights))
                                            : number_at({problem.normalizer, kDTypeOf<A>}, 0);
  }
  results.finish(divisor, problem.normalizer != nullptr);
}

}  // namespace

void cross_entropy(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  if (problem.inputs.logits_dtype == DType::float64) return merge_of<double, double>(problem, context);
  if (problem.statistics_dtype == DType::float64) return merge_of<float, double>(problem, context);
  merge_of<float, float>(problem, context);
}

}  // namespace eaves::cpu
