// linear_cross_entropy, whatever the device: chunk by chunk the logits by a matrix product, their loss and gradient by
// cross_entropy, and two more products with that. What is left, a backend brings as `Steps`:
//
//   struct Steps {
//     static constexpr bool kHasExpProduct;  // are the last functions there?
//     // Finds the rows that are computed, the divisor and the scale; fills memory.row_indices, targets and grad_loss,
//     // where they are there, and numbers. Returns how many rows are computed.
//     std::int64_t select_rows();
//     // The following take rows in the order of the selection, or where `gathers` is false in the order of the view.
//     void gather_x(std::int64_t first, std::int64_t count);             // to memory.x
//     // To memory.soft_targets, of these rows and classes; `stride` is its distance between rows.
//     void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class, std::int64_t classes,
//                              std::int64_t stride);
//     void scatter_grad_x(std::int64_t first, std::int64_t count, DType dtype);  // from memory.grad_x
//     void clear_grad_x();                                               // of rows that are not computed
//     void gather_numbers<N>(const N* from, N* to, std::int64_t count, bool gathers);      // 0 for those not counted
//     template <typename N> scatter_numbers(const N* from, N* to, std::int64_t count);     // 0 for the others
//     void widen(TypedNumbers from, std::int64_t count, void* to);       // to accumulators
//     void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
//                          const float* row_factor, const void* scale, bool is_first, double* to);
//     void write_grad_bias();                                            // from memory.grad_bias
//     void clear_parameters();                                           // grad_weight and grad_bias become 0
//     void reduce_losses(const void* losses, void* to);                  // of the rows that are computed
//     void product(const Gemm& gemm);
//     // With kHasExpProduct, where the problem ends_in_product: linear_cross_entropy_fused.h.
//     void guess_shifts(const cuda::FusedRows& rows);
//     void sum_exponentials(const cuda::FusedRows& rows, float* statistics);
//     void write_gradient(const cuda::FusedRows& rows, const cuda::FusedGradient& gradient);
//     void write_powers(const cuda::FusedRows& rows, const cuda::FusedGradient& gradient, float* statistics);
//     void write_grad_x(const cuda::FusedRows& rows, std::int64_t first);       // from memory.grad_x
//     void finish_powers_of_shard(const cuda::FusedRows& rows, const cuda::FusedGradient& gradient,
//                                 const float* statistics, const float* gathered);
//     void scale_x(const cuda::FusedRows& rows, void* to);
//     void add_targets(const cuda::FusedRows& rows);               // to grad_weight and memory.grad_bias
//   };
#pragma once

#include <algorithm>

#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_fused.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"

namespace eaves {

template <typename Steps>
class LinearCrossEntropyChunks {
 public:
  LinearCrossEntropyChunks(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                           const LinearCrossEntropyMemory& memory, const ExecutionContext& context, Steps& steps)
      : problem_(problem), block_(block), memory_(memory), loss_context_(context), steps_(steps) {
    loss_context_.workspace = memory.loss;
    // Scaled in the factor that the products take, and not by the products: cuBLASLt adds to grad_weight more slowly
    // with an alpha that it reads on the device. But in float16 the factor may underflow, unless dL/d(lse) and
    // dL/d(entropy) are part of it anyway: the scale then has to be, too.
    is_scale_in_factor_ =
        problem.dtype != DType::float16 || problem.grad_lse != nullptr || problem.grad_entropy != nullptr;
  }

  void run() {
    count_ = steps_.select_rows();
    const bool leaves_out = count_ != problem_.rows();
    // With batch invariance x is copied even where no row is left out: cuBLASLt's algorithm follows the address and the
    // stride of x, and must not follow whether another row is ignored.
    gathers_ = memory_.row_indices != nullptr &&
               (leaves_out || !is_matrix(problem_) || is_batch_invariant() || problem_.has_soft_targets());
    if (problem_.bias.data != nullptr) steps_.widen(problem_.bias, problem_.classes, memory_.bias);
    if (problem_.class_weight.data != nullptr) {
      steps_.widen(problem_.class_weight, problem_.classes, memory_.class_weight);
    }
    choose_per_row();
    if (problem_.grad_x != nullptr && leaves_out) steps_.clear_grad_x();
    if (count_ == 0 && problem_.wants_gradients() && !problem_.accumulates) steps_.clear_parameters();
    for (std::int64_t first = 0; first < count_; first += block_.rows) {
      const std::int64_t rows = std::min(block_.rows, count_ - first);
      if (gathers_) steps_.gather_x(first, rows);
      if (problem_.mode == LinearCrossEntropyMode::backward) {
        backward(first, rows);
      } else {
        forward(first, rows);
      }
    }
    if (count_ != 0 && problem_.grad_bias != nullptr) steps_.write_grad_bias();
    finish_per_row();
  }

 private:
  // ---- one number for each row -------------------------------------------------------------------------------------

  /// Where the chunks write them: to the caller's memory, or where rows are gathered or summed to the workspace. In the
  /// backward where they are read.
  void choose_per_row() {
    const LossOutputs& given = problem_.outputs;
    per_row_ = gathers_ ? memory_.per_row : given;
    grad_lse_ = memory_.grad_lse;
    grad_entropy_ = memory_.grad_entropy;
    row_weight_ = problem_.row_weight;
    if (gathers_ && row_weight_ != nullptr) {
      gather(row_weight_, memory_.row_weight, true);
      row_weight_ = memory_.row_weight;
    }
    if (problem_.mode != LinearCrossEntropyMode::backward) {
      if (problem_.is_reduced()) {
        per_row_.loss = memory_.per_row.loss;
        per_row_.z_loss = memory_.per_row.z_loss;
      }
      return;
    }
    if (gathers_) {
      for (const auto output : kRowOutputs) gather(given.*output, memory_.per_row.*output, true);
      gather(given.lse.data, memory_.per_row.lse.data, true, given.lse.is_split);
    }
    gather(problem_.grad_lse, grad_lse_, gathers_);
    gather(problem_.grad_entropy, grad_entropy_, gathers_);
  }

  /// Calls `body` with the type of a row's number: an accumulator, or two if it is split.
  template <typename Body>
  void for_row_type(bool is_split, Body body) const {
    if (problem_.accumulator() == DType::float64) {
      is_split ? body.template operator()<SplitLse<double>>() : body.template operator()<double>();
    } else {
      is_split ? body.template operator()<SplitLse<float>>() : body.template operator()<float>();
    }
  }

  void gather(const void* from, void* to, bool gathers, bool is_split = false) {
    if (from == nullptr) return;
    for_row_type(is_split, [&]<typename N>() {
      steps_.gather_numbers(static_cast<const N*>(from), static_cast<N*>(to), count_, gathers);
    });
  }

  void finish_per_row() {
    const bool has_statistics_alone = problem_.shard != nullptr && problem_.mode == LinearCrossEntropyMode::forward;
    if (problem_.mode == LinearCrossEntropyMode::backward || has_statistics_alone) return;
    const LossOutputs& to = problem_.outputs;
    const auto scatter = [&](const void* from, void* into, bool is_split = false) {
      if (!gathers_ || into == nullptr) return;
      for_row_type(is_split, [&]<typename N>() {
        steps_.scatter_numbers(static_cast<const N*>(from), static_cast<N*>(into), count_);
      });
    };
    for (const auto output : kRowOutputs) scatter(per_row_.*output, to.*output);
    scatter(per_row_.lse.data, to.lse.data, to.lse.is_split);
    if (gathers_ && to.argmax != nullptr) steps_.scatter_numbers(per_row_.argmax, to.argmax, count_);
    if (problem_.is_reduced()) {
      steps_.reduce_losses(per_row_.loss, to.loss);
      if (to.z_loss != nullptr) steps_.reduce_losses(per_row_.z_loss, to.z_loss);
    } else {
      scatter(per_row_.loss, to.loss);
      scatter(per_row_.z_loss, to.z_loss);
    }
  }

  /// Elements [first, first + rows) of a tensor with one number for each row; absent where `data` is nullptr.
  TensorView numbers_at(const void* data, DType dtype, std::int64_t first, std::int64_t rows) const {
    if (data == nullptr) return {};
    const auto* at = static_cast<const char*>(data) + static_cast<std::size_t>(first) * size_of(dtype);
    return TensorView::contiguous(static_cast<const void*>(at), dtype, {rows}, problem_.device);
  }
  TensorView numbers_at(const void* data, std::int64_t first, std::int64_t rows) const {
    return numbers_at(data, problem_.accumulator(), first, rows);
  }

  /// The lse of rows, as per_row_ has it.
  KeptLse kept_lse(std::int64_t first) const {
    const KeptLse& lse = per_row_.lse;
    if (lse.data == nullptr) return {};
    return {element(lse.data, problem_.accumulator(), lse.row(first)), lse.is_split};
  }
  TensorView lse_at(std::int64_t first, std::int64_t rows) const {
    const KeptLse lse = kept_lse(first);
    if (lse.data == nullptr) return {};
    Dims shape = {rows};
    if (lse.is_split) shape.push_back(2);
    return TensorView::contiguous(lse.data, problem_.accumulator(), shape, problem_.device);
  }

  const void* number(LinearCrossEntropyNumber which) const {
    return static_cast<const char*>(memory_.numbers) + which * size_of(problem_.accumulator());
  }

  // ---- what cross_entropy gets -------------------------------------------------------------------------------------

  TensorView targets_at(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) const {
    using namespace linear_cross_entropy_tensors;
    const TypedNumbers& targets = problem_.targets;
    const auto at = [&](std::int64_t element) {
      return static_cast<const void*>(static_cast<const char*>(targets.data) +
                                      element * static_cast<std::int64_t>(size_of(targets.dtype)));
    };
    if (memory_.soft_targets != nullptr) {
      return TensorView::strided(memory_.soft_targets, targets.dtype, {rows, classes}, {logits_stride(classes), 1},
                                 problem_.device);
    }
    if (problem_.has_soft_targets()) {
      const std::int64_t stride = problem_.soft_target_stride;
      return TensorView::strided(at(first * stride + first_class), targets.dtype, {rows, classes}, {stride, 1},
                                 problem_.device);
    }
    if (gathers_ || row_weight_ != nullptr) return numbers_at(memory_.targets, DType::int64, first, rows);
    const auto& loop = problem_.view.rows;
    const std::int64_t stride = loop.rank == 0 ? 0 : loop.strides[kTargets][0];
    return TensorView::strided(at(first * stride), targets.dtype, {rows}, {stride}, problem_.device);
  }

  TensorView class_weight_at(std::int64_t first_class, std::int64_t classes) const {
    return numbers_at(memory_.class_weight, first_class, classes);
  }

  /// dL/d(loss) of rows, without the scale, or with it where that is part of the factor; absent where it is 1.
  TensorView grad_loss_at(std::int64_t first, std::int64_t rows) const {
    using namespace linear_cross_entropy_tensors;
    if (problem_.is_reduced()) {
      const void* same = number(is_scale_in_factor_ ? kScale : kRest);
      return TensorView::strided(same, problem_.accumulator(), {rows}, {0}, problem_.device);
    }
    const TypedNumbers& given = problem_.grad_loss;
    if (given.data == nullptr) {
      return TensorView::strided(number(kRest), problem_.accumulator(), {rows}, {0}, problem_.device);
    }
    return numbers_at(memory_.grad_loss, first, rows);
  }

  CrossEntropyOptions row_options() const {
    CrossEntropyOptions options = problem_.options;
    options.reduction = Reduction::none;
    return options;
  }

  TensorView logits_view(std::int64_t rows, std::int64_t classes) const {
    return TensorView::strided(memory_.logits, problem_.accumulator(), {rows, classes}, {logits_stride(classes), 1},
                               problem_.device);
  }
  /// Of 16 bits, in the first half of each row.
  bool is_gradient_narrow() const { return size_of(problem_.dtype) == 2; }
  std::int64_t gradient_stride(std::int64_t classes) const {
    return logits_stride(classes) * (is_gradient_narrow() && !problem_.ends_in_product ? 2 : 1);
  }
  TensorView gradient_view(std::int64_t rows, std::int64_t classes) const {
    return TensorView::strided(memory_.logits, problem_.dtype, {rows, classes}, {gradient_stride(classes), 1},
                               problem_.device);
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  GemmMatrix x_at(std::int64_t first) const {
    using namespace linear_cross_entropy_tensors;
    if (gathers_) return {memory_.x, problem_.features()};
    const auto& loop = problem_.view.rows;
    const std::int64_t stride = loop.rank == 0 ? problem_.features() : loop.strides[kX][0];
    return {element(problem_.x, problem_.dtype, first * stride), stride};
  }

  /// Rows of the weight, and whether they lie as columns.
  GemmMatrix weight_at(std::int64_t first_class) const {
    const GemmMatrix& weight = problem_.weight;
    const std::int64_t offset = weight.is_transposed ? first_class : first_class * weight.stride;
    return {element(weight.data, problem_.dtype, offset), weight.stride, weight.is_transposed};
  }

  static const void* element(const void* data, DType dtype, std::int64_t offset) {
    return static_cast<const char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
  }
  static void* element(void* data, DType dtype, std::int64_t offset) {
    return static_cast<char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
  }

  /// Of a block, beside which its soft targets are gathered.
  void multiply_logits(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    if (memory_.soft_targets != nullptr) {
      steps_.gather_soft_targets(first, rows, first_class, classes, logits_stride(classes));
    }
    GemmMatrix weight = weight_at(first_class);
    weight.is_transposed = !weight.is_transposed;
    const TensorView bias = numbers_at(memory_.bias, first_class, classes);
    steps_.product({.m = rows,
                    .n = classes,
                    .k = problem_.features(),
                    .dtype = problem_.dtype,
                    .a = x_at(first),
                    .b = weight,
                    .c_dtype = problem_.accumulator(),
                    .c = memory_.logits,
                    .c_stride = logits_stride(classes),
                    .bias = bias.data});
  }

  /// Of the gradient of the logits of these rows and classes, which lies where the logits lay.
  void multiply_gradients(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    const void* alpha = problem_.is_reduced() && !is_scale_in_factor_ ? number(kAlpha) : nullptr;
    if (problem_.grad_x != nullptr) {
      multiply_grad_x(first, rows, first_class, classes, alpha);
      if (first_class + classes == problem_.classes) finish_grad_x(first, rows);
    }
    if (problem_.grad_weight != nullptr) {
      multiply_grad_weight(first, rows, first_class, classes, x_at(first), alpha);
    }
    if (problem_.grad_bias != nullptr) add_bias_gradient(first, rows, first_class, classes, nullptr, alpha);
  }

  void add_bias_gradient(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                         const float* row_factor, const void* alpha) {
    steps_.add_bias_gradient(memory_.logits, rows, classes, gradient_stride(classes), row_factor, alpha, first == 0,
                             memory_.grad_bias + first_class);
  }

  /// To memory.grad_x, or where nothing else is to be done with it to its place.
  void multiply_grad_x(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                       const void* alpha) {
    using namespace linear_cross_entropy_tensors;
    const bool is_wide = is_grad_x_wide(problem_, block_);
    Gemm product{.m = rows,
                 .n = problem_.features(),
                 .k = classes,
                 .dtype = problem_.dtype,
                 .a = {memory_.logits, gradient_stride(classes)},
                 .b = weight_at(first_class),
                 .c_dtype = is_wide ? problem_.accumulator() : problem_.grad_x_dtype,
                 .c = memory_.grad_x,
                 .c_stride = problem_.features(),
                 .alpha = alpha,
                 .accumulates = first_class != 0};
    if (!is_wide && !gathers_) {
      const auto& loop = problem_.view.rows;
      product.c_stride = loop.rank == 0 ? problem_.features() : loop.strides[kGradX][0];
      product.c = element(problem_.grad_x, problem_.grad_x_dtype, first * product.c_stride);
    }
    steps_.product(product);
  }

  void multiply_grad_weight(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                            const GemmMatrix& x, const void* alpha) {
    steps_.product(
        {.m = classes,
         .n = problem_.features(),
         .k = rows,
         .dtype = problem_.dtype,
         .a = {memory_.logits, gradient_stride(classes), true},
         .b = x,
         .c_dtype = problem_.grad_weight_dtype,
         .c = element(problem_.grad_weight, problem_.grad_weight_dtype, first_class * problem_.grad_weight_stride),
         .c_stride = problem_.grad_weight_stride,
         .alpha = alpha,
         .accumulates = first != 0 || problem_.accumulates});
  }

  // ---- chunks ------------------------------------------------------------------------------------------------------

  /// Of rows, into the arguments of a forward or a merge.
  template <typename Args>
  void put_outputs(Args& args, std::int64_t first, std::int64_t rows) const {
    args.loss = numbers_at(per_row_.loss, first, rows);
    args.lse = lse_at(first, rows);
    args.argmax = numbers_at(per_row_.argmax, DType::int64, first, rows);
    args.entropy = numbers_at(per_row_.entropy, first, rows);
    args.sum_sq = numbers_at(per_row_.sum_sq, first, rows);
    args.mean_logit = numbers_at(per_row_.mean_logit, first, rows);
    args.z_loss = numbers_at(per_row_.z_loss, first, rows);
    args.target_mass = numbers_at(per_row_.target_mass, first, rows);
  }

  static const float* floats(const void* numbers) { return static_cast<const float*>(numbers); }

  cuda::FusedRows fused_rows(std::int64_t first, std::int64_t rows, std::int64_t first_class,
                             std::int64_t classes) const {
    const TensorView targets = targets_at(first, rows, 0, classes);
    return {.device = problem_.device,
            .dtype = problem_.dtype,
            .rows = rows,
            .features = problem_.features(),
            .x = x_at(first),
            .weight = weight_at(first_class),
            .bias = floats(numbers_at(memory_.bias, first_class, classes).data),
            .first_class = problem_.first_class() + first_class,
            .classes = classes,
            .all_classes = problem_.all_classes(),
            .targets = {targets.data, targets.dtype},
            .target_stride = targets.strides[0],
            .class_weight = floats(memory_.class_weight),
            .options = problem_.options,
            .memory = memory_.exp_product};
  }

  cuda::FusedGradient fused_gradient(std::int64_t first, std::int64_t rows, std::int64_t classes) const {
    const TensorView grad_loss = grad_loss_at(first, rows);
    return {.grad_loss = floats(grad_loss.data),
            .grad_loss_stride = grad_loss.strides[0],
            .row_weight = floats(numbers_at(row_weight_, first, rows).data),
            .grad_lse = floats(numbers_at(grad_lse_, first, rows).data),
            .grad_entropy = floats(numbers_at(grad_entropy_, first, rows).data),
            .lse = kept_lse(first),
            .entropy = floats(numbers_at(per_row_.entropy, first, rows).data),
            .target_weight = problem_.shard == nullptr || memory_.class_weight == nullptr
                                 ? nullptr
                                 : floats(numbers_at(per_row_.target_mass, first, rows).data),
            .to = memory_.logits,
            .stride = gradient_stride(classes)};
  }

  /// The loss alone, or both at once, of logits that end in their product.
  void forward_in_product(std::int64_t first, std::int64_t rows) {
    const std::int64_t classes = problem_.classes;
    const cuda::FusedRows fused = fused_rows(first, rows, 0, classes);
    const bool is_shard = problem_.shard != nullptr;
    auto* statistics = static_cast<float*>(is_shard ? shard_statistics(first) : memory_.statistics);
    steps_.guess_shifts(fused);
    if (!problem_.has_powers()) {
      steps_.sum_exponentials(fused, statistics);
      if (!is_shard) merge_statistics(first, rows, 1);
      return;
    }
    const cuda::FusedGradient gradient = fused_gradient(first, rows, classes);
    steps_.write_powers(fused, gradient, statistics);
    if (is_shard) problem_.shard->gather(first, rows);
    if (problem_.grad_x != nullptr) multiply_grad_x(first, rows, 0, classes, nullptr);
    if (is_shard) {
      merge_gathered_statistics(first, rows);
      steps_.finish_powers_of_shard(fused, gradient, statistics, static_cast<const float*>(gathered_statistics(first)));
    } else {
      merge_statistics(first, rows, 1);
    }
    if (problem_.grad_x != nullptr) {
      steps_.write_grad_x(fused, first);
      tell_grad_x(first, rows);
    }
    if (problem_.grad_weight != nullptr) {
      void* scaled_x = memory_.exp_product.scaled_x;
      steps_.scale_x(fused, scaled_x);
      multiply_grad_weight(first, rows, 0, classes, {scaled_x, problem_.features()}, nullptr);
    }
    if (problem_.grad_bias != nullptr) {
      add_bias_gradient(first, rows, 0, classes, memory_.exp_product.row_factor, nullptr);
    }
    if (problem_.grad_weight != nullptr || problem_.grad_bias != nullptr) steps_.add_targets(fused);
  }

  TensorView statistics_view(const Dims& shape, std::int64_t offset = 0) const {
    void* at = element(memory_.statistics, problem_.statistics_dtype(), offset);
    return TensorView::contiguous(at, problem_.statistics_dtype(), shape, problem_.device);
  }

  void merge_statistics(std::int64_t first, std::int64_t rows, std::int64_t blocks) {
    merge_statistics(first, rows, statistics_view({blocks, rows, kCrossEntropyStatistics}));
  }
  void merge_statistics(std::int64_t first, std::int64_t rows, const TensorView& statistics) {
    const bool is_soft = problem_.has_soft_targets();
    CrossEntropyMergeArgs merge{.statistics = statistics,
                                .targets = is_soft ? TensorView{} : targets_at(first, rows, 0, problem_.classes),
                                .row_weight = numbers_at(row_weight_, first, rows),
                                .options = row_options(),
                                .classes = problem_.all_classes(),
                                .has_weight = memory_.class_weight != nullptr,
                                .has_soft_targets = is_soft,
                                .reads_ignored_rows = false};
    put_outputs(merge, first, rows);
    cross_entropy_merge(merge, loss_context_);
  }

  /// The loss alone, of blocks of classes whose statistics are merged.
  void forward_in_blocks(std::int64_t first, std::int64_t rows) {
    const std::int64_t blocks = ceil_divide(problem_.classes, block_.classes);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t first_class = block * block_.classes;
      const std::int64_t classes = std::min(block_.classes, problem_.classes - first_class);
      multiply_logits(first, rows, first_class, classes);
      cross_entropy_shard_forward(
          {.logits = logits_view(rows, classes),
           .targets = targets_at(first, rows, first_class, classes),
           .weight = class_weight_at(first_class, classes),
           .options = row_options(),
           .first_class = first_class,
           .classes = problem_.classes,
           .is_for_mean_logit = per_row_.mean_logit != nullptr,
           .statistics = statistics_view({rows, kCrossEntropyStatistics}, block * rows * kCrossEntropyStatistics)},
          loss_context_);
    }
    merge_statistics(first, rows, blocks);
  }

  void forward(std::int64_t first, std::int64_t rows) {
    const std::int64_t classes = problem_.classes;
    if constexpr (Steps::kHasExpProduct) {
      if (problem_.ends_in_product) return forward_in_product(first, rows);
    }
    if (problem_.shard != nullptr) return forward_of_shard(first, rows);
    if (block_.classes < classes) return forward_in_blocks(first, rows);
    multiply_logits(first, rows, 0, classes);
    CrossEntropyForwardArgs loss{.logits = logits_view(rows, classes),
                                 .targets = targets_at(first, rows, 0, classes),
                                 .weight = class_weight_at(0, classes),
                                 .row_weight = numbers_at(row_weight_, first, rows),
                                 .options = row_options(),
                                 .reads_ignored_rows = false};
    put_outputs(loss, first, rows);
    if (!problem_.wants_gradients()) return cross_entropy_forward(loss, loss_context_);
    CrossEntropyForwardBackwardArgs args{.forward = loss};
    if (problem_.is_reduced() || problem_.grad_loss.data != nullptr) args.grad_loss = grad_loss_at(first, rows);
    if (is_gradient_narrow()) args.grad_logits = gradient_view(rows, classes);
    cross_entropy_forward_backward(args, loss_context_);
    multiply_gradients(first, rows, 0, classes);
  }

  /// From where multiply_grad_x put it to its place.
  void finish_grad_x(std::int64_t first, std::int64_t rows) {
    const bool is_wide = is_grad_x_wide(problem_, block_);
    if (is_wide || gathers_) {
      steps_.scatter_grad_x(first, rows, is_wide ? problem_.accumulator() : problem_.grad_x_dtype);
    }
    tell_grad_x(first, rows);
  }

  /// The loss alone of a shard, which is its statistics; or both at once, with those of all shards in between.
  void forward_of_shard(std::int64_t first, std::int64_t rows) {
    const std::int64_t classes = problem_.classes;
    const LinearCrossEntropyShard& shard = *problem_.shard;
    if (classes != 0) multiply_logits(first, rows, 0, classes);
    cross_entropy_shard_forward(
        {.logits = logits_view(rows, classes),
         .targets = targets_at(first, rows, 0, classes),
         .weight = class_weight_at(0, classes),
         .options = row_options(),
         .first_class = shard.first_class,
         .classes = shard.classes,
         .is_for_mean_logit = shard.is_for_mean_logit,
         .statistics = TensorView::contiguous(shard_statistics(first), problem_.accumulator(),
                                              {rows, kCrossEntropyStatistics}, problem_.device)},
        loss_context_);
    if (problem_.mode == LinearCrossEntropyMode::forward) return;
    shard.gather(first, rows);
    merge_gathered_statistics(first, rows);
    if (problem_.wants_gradients()) backward(first, rows);
  }

  /// Where a shard's own statistics of the rows from `first` on are, and those of all shards.
  void* shard_statistics(std::int64_t first) const {
    return element(problem_.statistics, problem_.accumulator(), first * kCrossEntropyStatistics);
  }
  const void* gathered_statistics(std::int64_t first) const {
    const LinearCrossEntropyShard& shard = *problem_.shard;
    return element(static_cast<const void*>(shard.gathered.data), problem_.accumulator(),
                   shard.shards * first * kCrossEntropyStatistics);
  }

  void merge_gathered_statistics(std::int64_t first, std::int64_t rows) {
    const LinearCrossEntropyShard& shard = *problem_.shard;
    if (shard.finish_gather != nullptr) shard.finish_gather(first, rows);
    merge_statistics(first, rows,
                     TensorView::contiguous(gathered_statistics(first), problem_.accumulator(),
                                            {shard.shards, rows, kCrossEntropyStatistics}, problem_.device));
  }

  void tell_grad_x(std::int64_t first, std::int64_t rows) const {
    const bool is_wanted = problem_.shard != nullptr && problem_.shard->grad_x_is_complete != nullptr;
    if (is_wanted && problem_.grad_x != nullptr) problem_.shard->grad_x_is_complete(first, rows);
  }

  void backward(std::int64_t first, std::int64_t rows) {
    for (std::int64_t first_class = 0; first_class < problem_.classes; first_class += block_.classes) {
      const std::int64_t classes = std::min(block_.classes, problem_.classes - first_class);
      if constexpr (Steps::kHasExpProduct) {
        if (problem_.ends_in_product) {
          steps_.write_gradient(fused_rows(first, rows, first_class, classes), fused_gradient(first, rows, classes));
          multiply_gradients(first, rows, first_class, classes);
          continue;
        }
      }
      // Those of a shard, of which both are computed at once, are there.
      if (problem_.mode == LinearCrossEntropyMode::backward) multiply_logits(first, rows, first_class, classes);
      cross_entropy_backward({.grad_loss = grad_loss_at(first, rows),
                              .grad_lse = numbers_at(grad_lse_, first, rows),
                              .grad_entropy = numbers_at(grad_entropy_, first, rows),
                              .logits = logits_view(rows, classes),
                              .targets = targets_at(first, rows, first_class, classes),
                              .weight = class_weight_at(first_class, classes),
                              .row_weight = numbers_at(row_weight_, first, rows),
                              .options = row_options(),
                              .lse = lse_at(first, rows),
                              .entropy = numbers_at(per_row_.entropy, first, rows),
                              .target_mass = numbers_at(per_row_.target_mass, first, rows),
                              .first_class = problem_.first_class() + first_class,
                              .classes = problem_.all_classes(),
                              .grad_logits = gradient_view(rows, classes)},
                             loss_context_);
      multiply_gradients(first, rows, first_class, classes);
    }
    if (problem_.classes == 0) tell_grad_x(first, rows);
  }

  const LinearCrossEntropyProblem& problem_;
  const LinearCrossEntropyBlock block_;
  const LinearCrossEntropyMemory& memory_;
  ExecutionContext loss_context_;
  Steps& steps_;
  bool is_scale_in_factor_ = false;
  std::int64_t count_ = 0;  ///< rows that are computed
  bool gathers_ = false;
  LossOutputs per_row_{};
  const void* row_weight_ = nullptr;
  void* grad_lse_ = nullptr;
  void* grad_entropy_ = nullptr;
};

}  // namespace eaves
