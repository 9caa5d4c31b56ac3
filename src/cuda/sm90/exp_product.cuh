// What the kernels of exp_product.h share: CUTLASS' product for Hopper (TMA, warp-specialised, two consumer warpgroups
// with 64 of a tile's 128 rows each), and a tree of visitors that its accumulators pass on their way out. What differs
// is the tree.
#pragma once

#include <cuda_runtime.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <string>
#include <type_traits>

#include "cuda/exp_product.h"
#include "cuda/math.cuh"
#include "eaves/error.h"

namespace eaves::cuda::sm90 {

namespace fusion = cutlass::epilogue::fusion;

using Tile = cute::Shape<cute::Int<kExpProductRows>, cute::Int<kExpProductClasses>, cute::_64>;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;  // two tiles of rows share what is loaded of the weight
inline constexpr auto kRounding = cutlass::FloatRoundStyle::round_to_nearest;

// ---- functions of fragments: CUTLASS' arrays of numbers ---------------------------------------------------------

template <typename Fragment, typename Function>
CUTLASS_DEVICE Fragment for_each_element(Function function) {
  Fragment result;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Fragment::kElements; ++i) result[i] = function(i);
  return result;
}

/// function(x) of each x = z * to_tanh, or of_small(x) where no x is too large for that.
template <typename Fragment, typename Small, typename Function>
CUTLASS_DEVICE Fragment for_each_inner(const Fragment& z, const Fragment& to_tanh, Small of_small, Function function) {
  const Fragment x = for_each_element<Fragment>([&](int i) { return z[i] * to_tanh[i]; });
  bool is_small = true;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Fragment::kElements; ++i) is_small = is_small && fabsf(x[i]) <= kSmallTanh;
  if (is_small) return for_each_element<Fragment>([&](int i) { return of_small(x[i]); });
  return for_each_element<Fragment>([&](int i) { return function(x[i]); });
}

/// t from a logit, with a soft cap where `to_tanh` is not 0.
template <typename Fragment>
struct Exponent {
  CUTLASS_DEVICE Fragment operator()(const Fragment& z, const Fragment& factor, const Fragment& shift,
                                     const Fragment& to_tanh) const {
    Fragment inner = z;
    if (to_tanh[0] != 0.0f) {
      inner = for_each_inner(z, to_tanh, small_tanh, [](float x) { return tanh_and_derivative(x).tanh; });
    }
    return for_each_element<Fragment>([&](int i) { return fmaf(inner[i], factor[i], -shift[i]); });
  }
};
template <typename Fragment>
struct Power {
  CUTLASS_DEVICE Fragment operator()(const Fragment& t) const {
    return for_each_element<Fragment>([&](int i) { return exp2_approximate(t[i]); });
  }
};
/// Below it, 2^t is 0: 0 * -infinity would be NaN.
inline constexpr float kLeastExponent = -1024.0f;
template <typename Fragment>
struct Moment {
  CUTLASS_DEVICE Fragment operator()(const Fragment& power, const Fragment& t) const {
    return for_each_element<Fragment>([&](int i) { return power[i] * fmaxf(t[i], kLeastExponent); });
  }
};
/// Times the derivative of the soft cap.
template <typename Fragment>
struct TimesDerivative {
  CUTLASS_DEVICE Fragment operator()(const Fragment& value, const Fragment& z, const Fragment& to_tanh) const {
    if (to_tanh[0] == 0.0f) return value;
    const Fragment derivative =
        for_each_inner(z, to_tanh, small_tanh_derivative, [](float x) { return tanh_and_derivative(x).derivative; });
    return for_each_element<Fragment>([&](int i) { return value[i] * derivative[i]; });
  }
};
template <typename Fragment>
struct Gradient {
  CUTLASS_DEVICE Fragment operator()(const Fragment& t, const Fragment& constant, const Fragment& slope,
                                     const Fragment& z, const Fragment& to_tanh) const {
    const Fragment of_softmax = for_each_element<Fragment>(
        [&](int i) { return exp2_approximate(t[i]) * fmaf(slope[i], fmaxf(t[i], kLeastExponent), constant[i]); });
    const Fragment gradient = TimesDerivative<Fragment>{}(of_softmax, z, to_tanh);
    // A row that counts for nothing has the gradient 0, whatever its logits.
    return for_each_element<Fragment>(
        [&](int i) { return constant[i] == 0.0f && slope[i] == 0.0f ? 0.0f : gradient[i]; });
  }
};

// ---- visitors ------------------------------------------------------------------------------------------------------

/// Adds the bias, and writes the logit of each row's target. Children: the products, the targets. A row broadcast of
/// CUTLASS would take all calls 0.7 % of their time, those without a bias too.
struct FinishLogits : fusion::Sm90VisitorImpl<> {
  struct SharedStorage {};
  struct Arguments {
    const float* bias = nullptr;
    float* to = nullptr;
  };
  using Params = Arguments;

  template <typename Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <typename Problem>
  static bool can_implement(const Problem&, const Arguments&) {
    return true;
  }
  template <typename Problem>
  static std::size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <typename Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE FinishLogits() {}
  CUTLASS_HOST_DEVICE FinishLogits(const Params& params, const SharedStorage&) : params_(params) {}

  template <typename Coordinates>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    Coordinates coordinates;  ///< of the thread's logits, from its first one
    int rows;                 ///< from the first one to the end, as `classes`
    int classes;
    int first_class;
    const float* bias;
    float* to;  ///< of the first row

    CUTLASS_DEVICE Callbacks(const Coordinates& of_thread, int rows_left, int classes_left, int first,
                             const float* of_classes, float* first_row)
        : coordinates(of_thread),
          rows(rows_left),
          classes(classes_left),
          first_class(first),
          bias(of_classes),
          to(first_row) {}

    template <typename Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(const cutlass::Array<Accumulator, kSize>&, int part, int of_rows, int of_columns,
                              const cutlass::Array<float, kSize>& products,
                              const cutlass::Array<std::int32_t, kSize>& targets) {
      const auto at = coordinates(cute::_, cute::_, cute::_, of_rows, of_columns);
      cutlass::Array<float, kSize> logits = products;
      if (bias != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; ++i) {
          const int column = cute::get<1>(at(part * kSize + i));
          if (column < classes) logits[i] += bias[first_class + column];
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const auto place = at(part * kSize + i);
        // Behind the last class and the last row, targets have not been loaded.
        const bool is_inside = cute::get<0>(place) < rows && cute::get<1>(place) < classes;
        if (is_inside && cute::get<1>(place) == targets[i] - first_class) {
          to[cute::get<0>(place)] = logits[i];
        }
      }
      return logits;
    }
  };

  template <bool kReferenceSource, typename... Types>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Types...>& args) {
    const int rows = cute::get<0>(args.residue_tCcD);
    const int classes = cute::get<1>(args.residue_tCcD);
    const int all_rows = cute::get<0>(args.problem_shape_mnkl);
    const int all_classes = cute::get<1>(args.problem_shape_mnkl);
    return Callbacks<decltype(args.tCcD)>(args.tCcD, rows, classes, all_classes - classes, params_.bias,
                                          params_.to + (all_rows - rows));
  }

 private:
  Params params_;
};

using OneStride = cute::Stride<cute::_1, cute::_0, cute::_0>;
using Rows = fusion::Sm90ColBroadcast<0, Tile, float, float, OneStride>;
using Targets = fusion::Sm90ColBroadcast<0, Tile, std::int32_t, std::int32_t, OneStride>;
using Number = fusion::Sm90ScalarBroadcast<float>;
template <template <typename> typename Function, typename To = float>
using Compute = fusion::Sm90Compute<Function, To, float, kRounding>;
using Logits = fusion::Sm90EVT<FinishLogits, fusion::Sm90AccFetch, Targets>;
/// Over the classes of a tile, in float32: of four rows at once, never nullptr, one sum for each tile (not added up
/// over tiles), without the classes behind the last one.
using Sum = fusion::Sm90ColReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, Tile, float, float, kRounding,
                                     OneStride, 4, false, false, true>;

/// A tree whose first nodes are the logits, what they are multiplied with, the soft cap, and as number kExponents t.
/// `Others` follow, with the nodes that they take as `Inputs`.
inline constexpr int kLogits = 0;
inline constexpr int kToTanh = 1;
inline constexpr int kExponents = 4;
template <typename... Inputs>
struct TreeWith {
  template <typename... Others>
  using Nodes = fusion::Sm90TopologicalVisitor<
      float,
      cute::tuple<cute::seq<>, cute::seq<>, cute::seq<>, cute::seq<>, cute::seq<kLogits, 2, 3, kToTanh>, Inputs...>,
      Logits, Number, Number, Rows, Compute<Exponent>, Others...>;
};

// ---- kernels -------------------------------------------------------------------------------------------------------

/// No matrix is written: sums and the targets' logits are, by visitors.
template <typename Element, typename Tree>
struct WithoutResult : Tree {
  using Tree::Tree;
  using ElementAux = Element;  // says what a tile of the epilogue is made of
};

/// `Result` is the element of what is written, or void.
template <typename Element, typename Result, typename Tree>
class Kernel {
  static constexpr int kAlignment = 16 / sizeof(Element);
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, kAlignment, Result, Row, kAlignment,
      cutlass::epilogue::TmaWarpSpecializedCooperative, Tree>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, kAlignment, Element, Column, kAlignment, float,
      Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>>;

 public:
  using TreeArguments = typename Tree::Arguments;

  static void run(const char* op, const ExpProduct& product, const TreeArguments& tree, void* to, std::int64_t stride,
                  int multiprocessors, void* stream) {
    typename Gemm::GemmKernel::StrideA x_stride{};
    typename Gemm::GemmKernel::StrideB weight_stride{};
    typename Gemm::GemmKernel::StrideD to_stride{};
    cute::get<0>(x_stride) = product.x.stride;
    cute::get<0>(weight_stride) = product.weight.stride;
    cute::get<0>(to_stride) = stride;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(product.rows), static_cast<int>(product.classes), static_cast<int>(product.features), 1},
        {static_cast<const Element*>(product.x.data), x_stride, static_cast<const Element*>(product.weight.data),
         weight_stride},
        {tree, nullptr, {}, static_cast<std::conditional_t<std::is_void_v<Result>, Element, Result>*>(to), to_stride}};
    arguments.hw_info = {0, multiprocessors};
    // The order of tiles. All rows of a tile of classes first: the weight is read once, and x stays in L2; another
    // order makes few rows wait for the weight. More rows than L2 holds are taken with eight tiles of classes in turn.
    constexpr std::int64_t kRowsInL2 = 4096;
    using Order = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params::RasterOrderOptions;
    arguments.scheduler.raster_order = Order::AlongM;
    arguments.scheduler.max_swizzle_size = product.rows <= kRowsInL2 ? 1 : 8;
    Gemm gemm;
    cutlass::Status status = gemm.initialize(arguments, nullptr, static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess) status = gemm.run(static_cast<cudaStream_t>(stream));
    if (status != cutlass::Status::kSuccess) {
      throw DeviceError(std::string(op) + ": CUTLASS: " + cutlass::cutlassGetStatusString(status));
    }
  }
};

template <typename Tree, typename... Others>
typename Tree::Arguments arguments_of(const ExpProduct& product, const Others&... others) {
  const typename Logits::Arguments logits{{}, {product.target, -1, {}}, {product.bias, product.target_logit}};
  return {logits, {{product.to_tanh}, {}, {}}, {{product.factor}, {}, {}}, {product.shift, 0.0f, {}}, {}, others...};
}

}  // namespace eaves::cuda::sm90
