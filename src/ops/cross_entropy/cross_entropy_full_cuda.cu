// The launches of FullLoss, the reduction of rows with every option of cross_entropy.
#include "ops/cross_entropy/cross_entropy_full.cuh"

namespace eaves::cuda {

namespace {

ReductionPlan plan_of(const CrossEntropyInputs& inputs) {
  return plan_reduction(inputs.view, inputs.logits, inputs.logits_dtype, inputs.logits_dtype != DType::float64,
                        inputs.device, true);
}

}  // namespace

std::size_t full_workspace_bytes(const CrossEntropyInputs& inputs) {
  const bool is_double = inputs.logits_dtype == DType::float64;
  return plan_of(inputs).workspace_bytes(inputs.view.row_count,
                                         is_double ? sizeof(ClassStatistics<double>) : sizeof(ClassStatistics<float>));
}

template <typename T>
void reduce_full(const char* op, const CrossEntropyInputs& inputs, bool skips_ignored,
                 const RowOutputs<Accumulator<T>>& outputs, void* statistics, void* workspace, void* stream) {
  const ReductionPlan reduction = plan_of(inputs);
  if constexpr (!std::is_same_v<T, double>) {
    const bool has_whole_rows = reduction.layout == RowLayout::contiguous && reduction.split.pieces == 1;
    if (has_whole_rows && statistics == nullptr && share_weights(inputs)) {
      return reduce_weighted<T>(op, inputs, skips_ignored, outputs, stream);
    }
  }
  const auto reduce = [&]<bool kHasSquare>() {
    reduce_rows<T>(op, reduction, inputs.view, inputs.device, workspace, stream, [&]<typename View>(const View& view) {
      constexpr bool kIsStrided = std::is_same_v<View, CrossEntropyView>;
      constexpr bool kTakesSquare = kHasSquare || kIsStrided;  // strided rows have one kernel, with squares
      return FullLoss<T, View, kTakesSquare>{{LossInputs<T, View>(view, inputs), outputs, !skips_ignored},
                                             inputs.plan,
                                             static_cast<Accumulator<T>*>(statistics)};
    });
  };
  inputs.plan.has_square ? reduce.template operator()<true>() : reduce.template operator()<false>();
}

template void reduce_full<float>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*, void*,
                                 void*);
template void reduce_full<double>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<double>&, void*, void*,
                                  void*);
template void reduce_full<float16>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*, void*,
                                   void*);
template void reduce_full<bfloat16>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*,
                                    void*, void*);

}  // namespace eaves::cuda
